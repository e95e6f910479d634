"""Does the page of a job grow while it follows? A real server is fed steps, Chromium follows, the heap is measured after forced
garbage collections. Also: how long a job of 10,000 steps takes to open.

    python -m benchmarks.dashboard_memory --minutes 10 --steps-per-second 5
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright

from jobs.ledger import open_ledger
from jobs.live import Live
from jobs.settings import Settings
from tests.browser.stage import LIMITS, Stage
from tests.conftest import ValkeyServer, free_port
from tests.server import Server

SETTLE_S = 60.0
"""Before this the page is still filling its series; the slope is taken from later readings."""
READ_EVERY_S = 30.0
ARRIVE_MS = 180_000
"""How long a step may take to reach the page on a busy machine."""


def main() -> None:
    """Print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--steps-per-second", type=float, default=5.0)
    parser.add_argument("--past", type=int, default=10_000, help="steps there are before the page is opened")
    options = parser.parse_args()
    with house() as (stage, server), chromium() as browser:
        job = stage.job("followed", beta={"rule": "deadband", "value": 0.02, "target": 0.03}, num_steps=1_000_000)
        for first in range(1, options.past + 1, 500):
            stage.steps(job.id, first, min(options.past, first + 499))
        page = browser.new_page(viewport={"width": 1280, "height": 900})
        opened_s = [open_seconds(page, f"{server.url}/#/jobs/{job.id}") for _ in range(3)]
        readings = follow(stage, page, job.id, options.past, options.minutes * 60, options.steps_per_second)
    late = [(seconds, heap) for seconds, heap, _, _ in readings if seconds >= min(SETTLE_S, options.minutes * 20)]
    shown = [{"seconds": round(now), "heap_mb": round(heap / 1e6, 2), "nodes": nodes, "steps": fed} for now, heap, nodes, fed in readings]
    print(json.dumps({
        "past_steps": options.past, "opened_s": [round(value, 2) for value in opened_s],
        "readings": shown,
        "slope_kb_per_minute": round(slope(late) * 60 / 1e3, 1),
    }, indent=1))  # fmt: skip


def open_seconds(page: Any, address: str) -> float:
    """From going there to main curves drawn and the stream open."""
    page.goto("about:blank")
    started = time.monotonic()
    page.goto(address)
    page.locator(".live-dot.live").wait_for(timeout=60_000)
    return time.monotonic() - started


def follow(stage: Stage, page: Any, job_id: str, past: int, seconds: float, rate: float) -> list[tuple[float, int, int, int]]:
    """Feed steps and read (seconds, heap in bytes, DOM nodes, steps fed); the last step must have arrived at each reading."""
    devtools = page.context.new_cdp_session(page)
    started = time.monotonic()
    readings: list[tuple[float, int, int, int]] = []
    fed, next_reading = 0, 0.0
    while (now := time.monotonic() - started) <= seconds:
        due = int(now * rate)
        if due > fed:
            stage.steps(job_id, past + fed + 1, past + due)
            fed = due
        if now >= next_reading:
            next_reading += READ_EVERY_S
            page.get_by_text(f"step {past + fed:,} of").wait_for(timeout=ARRIVE_MS)
            readings.append((now, *heap_of(devtools), fed))
            print(f"{now:.0f} s: {readings[-1][1] / 1e6:.2f} MB, {readings[-1][2]} nodes, {fed} steps", file=sys.stderr, flush=True)
        page.wait_for_timeout(1000 / rate)
    readings.append((time.monotonic() - started, *heap_of(devtools), fed))
    return readings


def heap_of(devtools: Any) -> tuple[int, int]:
    """Bytes of live JavaScript objects after garbage collections, and DOM nodes."""
    for _ in range(3):
        devtools.send("HeapProfiler.collectGarbage")
    heap = devtools.send("Runtime.getHeapUsage")["usedSize"]
    return int(heap), int(devtools.send("Memory.getDOMCounters")["nodes"])


def slope(points: list[tuple[float, int]]) -> float:
    """Least squares, bytes per second; 0 for fewer than two points."""
    if len(points) < 2:
        return 0.0
    mean_x, mean_y = (sum(point[axis] for point in points) / len(points) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0


@contextmanager
def house() -> Iterator[tuple[Stage, Server]]:
    """A server of its own in a temporary directory."""
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        directory = Path(name)
        valkey = ValkeyServer(directory, free_port())
        valkey.start()
        stack.callback(valkey.kill)
        settings = Settings(data_dir=directory / "data", redis_url=valkey.url, min_free_bytes=0).resolved()
        ledger = open_ledger(settings)
        stack.callback(ledger.close)
        server = Server(settings, LIMITS)
        stack.callback(server.stop)
        live = Live.connect(settings)
        stack.callback(live.close)
        yield Stage(ledger, live), server


@contextmanager
def chromium() -> Iterator[Any]:
    """Debian's Chromium."""
    path = shutil.which("chromium")
    if path is None:
        raise SystemExit("no Chromium is installed; apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


if __name__ == "__main__":
    main()
