"""The scratch directory of a probe: `probes/<id>` in the data directory, there only while the probe runs."""

from __future__ import annotations

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from pydantic import ValidationError

from grpo_engine.contract.event import Outcome
from jobs.artifacts import Artifacts, write_atomic
from jobs.event_files import read_events
from jobs.probes import PROBE_ID
from worker.processes import Identity, end_attempt, identify

log = logging.getLogger(__name__)

STRANGE_AGE_S = 3600.0
"""A scratch directory that names no supervisor is removed when it is this old."""
TAIL_BYTES = 4000
_ACTIVITIES = {
    "engine.started": "reading the data and loading the model",
    "model.provisioning": "fetching or converting the model",
    "model.loaded": "doing its first step",
}


class ProbePlace:
    """Where one probe runs. It carries what an engine's launch asks of an attempt; its job id is the probe's."""

    epoch = 1

    def __init__(self, artifacts: Artifacts, probe_id: str) -> None:
        self.artifacts = artifacts
        self.probe_id = self.job_id = probe_id
        self.path = probes_dir(artifacts) / probe_id
        self.log_path = self.path / "engine.log"

    def __str__(self) -> str:
        return self.probe_id

    def prepare(self) -> None:
        """Make the directory, and note who looks after it. Raises OSError when it cannot be made."""
        self.path.mkdir(parents=True)
        self.write_run(None)

    def write_run(self, engine: Identity | None) -> None:
        """Note who supervises, for the sweep."""
        supervisor = identify(os.getpid())
        assert supervisor is not None, "a process that runs has a start time"
        content = {"supervisor": supervisor.to_dict(), **({} if engine is None else engine.to_dict())}
        write_atomic(self.path / "run.json", json.dumps(content).encode())

    def supervisor(self) -> Identity | None:
        """Who looks or looked after it; None when that is unknown."""
        try:
            content = json.loads((self.path / "run.json").read_bytes())
        except (FileNotFoundError, ValueError):
            return None
        return Identity.from_dict(content.get("supervisor", {})) if isinstance(content, dict) else None

    def outcome(self) -> Outcome | None:
        """The engine's verdict; None when it left none that can be read."""
        try:
            return Outcome.model_validate_json((self.path / "outcome.json").read_bytes())
        except (FileNotFoundError, ValidationError):
            return None

    def activity(self) -> str:
        """What the engine was doing last."""
        events, _ = read_events(self.path / "events.jsonl")
        said = [event.type for event in events if event.type in _ACTIVITIES]
        return _ACTIVITIES[said[-1]] if said else "starting"

    def tail(self) -> str:
        """The end of the engine's log."""
        try:
            return self.log_path.read_bytes()[-TAIL_BYTES:].decode("utf-8", "replace")
        except FileNotFoundError:
            return ""

    def close(self) -> None:
        """End what is left of the probe, and remove the directory."""
        end_attempt(self.job_id, self.epoch, grace_s=0.0)
        self.remove()

    def remove(self) -> None:
        """Remove the directory; what cannot be removed is said, and tried again at the next start."""
        try:
            shutil.rmtree(self.path)
        except FileNotFoundError:
            return
        except OSError as error:
            log.error("%s: its scratch directory %s cannot be removed: %s", self.probe_id, self.path, error)


def probes_dir(artifacts: Artifacts) -> Path:
    """Where scratch directories lie."""
    return artifacts.data_dir / "probes"


def sweep_probes(artifacts: Artifacts) -> list[str]:
    """At worker start: end and remove probes whose supervisor is dead. Those of living workers and other hosts are left alone."""
    swept = []
    for place in _places(artifacts):
        if _is_dead(place):
            log.warning("%s: its worker died; cleaned up", place.probe_id)
            place.close()
            swept.append(place.probe_id)
    return swept


def _is_dead(place: ProbePlace) -> bool:
    supervisor = place.supervisor()
    if supervisor is None:
        return _age_s(place.path) > STRANGE_AGE_S
    return supervisor.is_from_here and not supervisor.is_alive()


def _places(artifacts: Artifacts) -> Iterator[ProbePlace]:
    directory = probes_dir(artifacts)
    for path in sorted(directory.iterdir()) if directory.is_dir() else ():
        if PROBE_ID.fullmatch(path.name) and path.is_dir() and not path.is_symlink():
            yield ProbePlace(artifacts, path.name)


def _age_s(path: Path) -> float:
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
