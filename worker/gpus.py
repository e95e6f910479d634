"""GPUs that are not given to the next job: those whose process could not be ended, and those that fail again and again.

A note per host lies in the data directory, so that it outlives the worker. While nothing is quarantined the engine's environment is
left as it is; otherwise `CUDA_VISIBLE_DEVICES` names the healthy ones. Where too few are left the attempt stays unclaimed, for another
worker or for the operator: `python -m worker.gpus DATA_DIR` lists, `--release DEVICE` gives one back. A device is called as
`CUDA_VISIBLE_DEVICES` calls it, and by its UUID where that is not set.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from grpo_engine.contract.event import Outcome
from grpo_engine.contract.resources import Resources
from jobs.artifacts import write_atomic

VISIBLE = "CUDA_VISIBLE_DEVICES"
MAX_FAILURES = 2
"""In a row on one device, without a job in between that ended well."""
DEVICE_FAILURE = re.compile(
    r"CUDA error|CUDA driver error|cuDNN error|NCCL error|CUBLAS_STATUS_(?!ALLOC)|uncorrectable ECC|fallen off the bus", re.IGNORECASE
)
LISTING_TIMEOUT_S = 20.0


class NoHealthyGpu(Exception):
    """Fewer devices are left than the job needs."""


@dataclass
class Record:
    """What is known of one device."""

    failures: int = 0
    quarantined_at: float | None = None
    why: str = ""


@dataclass(frozen=True)
class Assignment:
    """What an engine may use."""

    environment: dict[str, str]
    devices: tuple[str, ...] = field(default=())
    """Those it will use, and that are judged by how it ends."""


def uuids() -> list[str]:
    """The GPUs of this host in nvidia-smi's order; none where it is absent, fails or hangs."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=uuid", "--format=csv,noheader"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=LISTING_TIMEOUT_S, check=True)
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError):
        return []
    return answer.stdout.split()


class Gpus:
    """The devices of this host, and the note about them."""

    def __init__(self, data_dir: Path, listing: Callable[[], list[str]] = uuids, host: str | None = None) -> None:
        self._path = data_dir / "gpus" / f"{host or socket.gethostname()}.json"
        self._listing = listing

    def assign(self, environment: Mapping[str, str], resources: Resources, hosts: int = 1) -> Assignment:
        """What an engine with these needs, of which this host bears an equal part, may use. Raises NoHealthyGpu."""
        devices = self._visible(environment) if resources.device != "cpu" and resources.cpu_ranks == 1 else []
        count = max(1, resources.gpus // hosts)
        bad = set(self.quarantined()).intersection(devices)
        if not bad:
            return Assignment(dict(environment), tuple(devices[:count]))
        healthy = [device for device in devices if device not in bad]
        if len(healthy) < count:
            raise NoHealthyGpu(f"{count} GPUs are needed and {len(healthy)} are not in quarantine (in it: {', '.join(sorted(bad))})")
        return Assignment({**environment, VISIBLE: ",".join(healthy)}, tuple(healthy[:count]))

    def judge(self, devices: Sequence[str], outcome: Outcome) -> list[str]:
        """Take in how an attempt on these devices ended; returns those that are in quarantine because of it."""
        if outcome.status == "failed" and not DEVICE_FAILURE.search(outcome.message):
            return []  # says nothing about the device
        with self._records() as records:
            for device in devices:
                if outcome.status != "failed":
                    records.setdefault(device, Record()).failures = 0
                    continue
                records.setdefault(device, Record()).failures += 1
            return [device for device in devices if records[device].failures >= MAX_FAILURES and _lock_up(records[device], outcome.message)]

    def condemn(self, devices: Sequence[str], why: str) -> list[str]:
        """Quarantine at once; returns those that were not in it."""
        with self._records() as records:
            return [device for device in devices if _lock_up(records.setdefault(device, Record()), why)]

    def quarantined(self) -> dict[str, Record]:
        """Devices that are given to nobody."""
        return {device: record for device, record in self._read().items() if record.quarantined_at is not None}

    def release(self, device: str) -> bool:
        """Give a device back; False when it was not in quarantine."""
        with self._records() as records:
            record = records.pop(device, None)
        return record is not None and record.quarantined_at is not None

    def _visible(self, environment: Mapping[str, str]) -> list[str]:
        named = environment.get(VISIBLE)
        if named is None:
            return self._listing()
        words = [word.strip() for word in named.split(",")]
        end = next((place for place, word in enumerate(words) if word in ("", "-1")), len(words))
        return words[:end]

    def _read(self) -> dict[str, Record]:
        try:
            content = json.loads(self._path.read_bytes())
        except FileNotFoundError:
            return {}
        return {device: Record(**record) for device, record in content.items()}

    @contextmanager
    def _records(self) -> Iterator[dict[str, Record]]:
        """Read, change, write, with nobody in between."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.with_suffix(".lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            before = self._read()
            records = self._read()
            yield records
            if records != before:
                write_atomic(self._path, json.dumps({device: asdict(record) for device, record in records.items()}, indent=1).encode())


def _lock_up(record: Record, why: str) -> bool:
    if record.quarantined_at is not None:
        return False
    record.quarantined_at, record.why = time.time(), why[:500]
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """List the quarantine of this host, or release a device from it."""
    parser = argparse.ArgumentParser(prog="python -m worker.gpus", description=main.__doc__)
    parser.add_argument("data_dir", type=Path)
    parser.add_argument("--release", metavar="DEVICE")
    options = parser.parse_args(arguments)
    gpus = Gpus(options.data_dir)
    if options.release is not None:
        was_there = gpus.release(options.release)
        print(f"{options.release} {'is given to jobs again' if was_there else 'is not in quarantine'}")
        return 0 if was_there else 1
    for device, record in gpus.quarantined().items():
        print(f"{device} since {time.strftime('%Y-%m-%d %H:%M:%SZ', time.gmtime(record.quarantined_at))}: {record.why}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
