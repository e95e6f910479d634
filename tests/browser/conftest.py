"""Chromium over the real API. `AXE_SCRIPT` names axe.min.js; `BROWSER_SCREENSHOTS` a folder that keeps pictures."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jobs.ledger import Ledger
from jobs.live import Live
from jobs.settings import Settings
from tests.browser.stage import LIMITS, OpenPage, Problems, Stage, furnish
from tests.server import Server

CHROMIUM = next((path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None)


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """One Chromium for the session."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed; apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
    sync_api.expect.set_options(timeout=20_000)
    with sync_api.sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


@pytest.fixture
def dashboard_settings(settings: Settings, tmp_path: Path) -> Settings:
    """With a model folder that holds `tiny`."""
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
    (folder / "model.safetensors").write_bytes(bytes(4096))
    return replace(settings, model_dir=folder.parent).resolved()


@pytest.fixture
def server(dashboard_settings: Settings) -> Iterator[Server]:
    """The API on a port of its own."""
    running = Server(dashboard_settings, LIMITS)
    yield running
    running.stop()


@pytest.fixture
def stage(server: Server, ledger: Ledger, dashboard_settings: Settings) -> Iterator[Stage]:
    """An empty house."""
    live = Live.connect(dashboard_settings)
    yield Stage(ledger, live)
    live.close()


@pytest.fixture
def jobs(stage: Stage) -> dict[str, str]:
    """A furnished house: ids by name."""
    return furnish(stage)


@pytest.fixture
def problems() -> Iterator[Problems]:
    found = Problems()
    yield found
    assert found.unexpected() == []


@pytest.fixture
def open_page(browser: Any, server: Server, problems: Problems, request: pytest.FixtureRequest) -> Iterator[OpenPage]:
    """`open_page("#/jobs", width=1280, scheme="light")` → a page in a context of its own. Complaints of the browser fail the test."""
    contexts = []

    def open_one(fragment: str = "", *, width: int = 1280, scheme: str = "light", script: str = "") -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        context.set_default_timeout(20_000)
        if script:
            context.add_init_script(script)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"script: {error}"))
        page.on("console", lambda line: problems.append(f"console: {line.text}") if line.type == "error" else None)
        page.goto(f"{server.url}/{fragment}")
        return page

    yield open_one
    folder = os.environ.get("BROWSER_SCREENSHOTS")
    for number, context in enumerate(contexts):
        for page in context.pages if folder else []:
            keep_picture(page, Path(folder or "") / f"{request.node.name[:80]}-{number}.png")
        context.close()


def keep_picture(page: Any, path: Path) -> None:
    """The whole page, every chart in view so that it is drawn."""
    path.parent.mkdir(parents=True, exist_ok=True)
    height = page.evaluate("Math.min(8000, document.documentElement.scrollHeight)")
    page.set_viewport_size({"width": page.viewport_size["width"], "height": max(900, height)})
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => requestAnimationFrame(done))))")
    page.wait_for_timeout(200)
    page.screenshot(path=path, full_page=True)
