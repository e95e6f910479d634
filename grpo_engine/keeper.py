"""When a run writes checkpoints, what it says about them, and which older ones it deletes.

Training outlives a failed write: `checkpoint.failed`, the partial directory is gone, the next interval tries again. An
older resume state is deleted only after the newer one is complete and announced, and the events up to it are on the disk:
else a power cut could take words about steps that no state is left to do again. Nothing is deleted once this attempt has
a verdict: its worker was taken for dead, and the next attempt may be reading what lies here.
"""

from __future__ import annotations

import math
import os
import platform
import shutil
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError

from grpo_engine import checkpoint
from grpo_engine.checkpoint import Kind, Manifest
from grpo_engine.events import EventLog
from grpo_engine.learner import Learner
from grpo_engine.outcome import OUTCOME_FILE, CheckpointDamaged
from grpo_engine.publish import published_weights, save_published

CHECKPOINTS_DIR = "checkpoints"


class Keeper:
    """Writes the checkpoints of one attempt."""

    def __init__(self, run_dir: Path, learner: Learner, log: EventLog) -> None:
        self.directory = run_dir / CHECKPOINTS_DIR
        self._learner = learner
        self._log = log
        self._saved: dict[Kind, list[Manifest]] = {"published": [], "resume": []}
        self.seconds = 0.0
        """Time spent writing since it was last asked for."""
        self._kept_resumes = 2 if any(rule.action.type == "rollback" for rule in learner.grpo.guardrails) else 1
        """A rollback needs a state from before the trouble, which the newest may not be."""
        if learner.ranks.is_first:
            checkpoint.remove_partial(self.directory)

    @property
    def _is_given_up(self) -> bool:
        """Whether somebody has written this attempt's verdict: the next one may be reading a state that lies here."""
        return (self.directory.parent / OUTCOME_FILE).exists()

    @property
    def may_roll_back(self) -> bool:
        """Whether a guardrail may roll back, so that the attempt must begin with a resume state of its own."""
        return self._kept_resumes > 1

    @property
    def newest_resume(self) -> str | None:
        """Name of the newest resume state of this attempt."""
        saved = self._saved["resume"]
        return saved[-1].name if saved else None

    def resume_before(self, step: int) -> Path | None:
        """The newest kept resume state from before a step, else the oldest kept one; None when there is none."""
        saved = self._saved["resume"]
        if not saved:
            return None
        earlier = [manifest for manifest in saved if manifest.step < step]
        return self.directory / (earlier[-1] if earlier else saved[0]).name

    def inherit(self, resumed_from: Path) -> None:
        """Take over the state before the one resumed from: a rollback must find what it would have found without the stop."""
        if not self.may_roll_back:
            return
        manifest = self._learner.ranks.first(lambda: self._take_over(resumed_from))
        if manifest is not None:
            self._saved["resume"].append(manifest)
            self._announce(manifest, 0.0)

    def rewind(self, step: int) -> None:
        """Forget the checkpoints of later steps, and delete the resume states among them; that of `step` is to be written anew."""
        for manifest in self._saved["resume"]:
            if manifest.step > step and self._learner.ranks.is_first and not self._is_given_up:
                shutil.rmtree(self.directory / manifest.name)
        self._saved["resume"] = [manifest for manifest in self._saved["resume"] if manifest.step < step]
        self._saved["published"] = [manifest for manifest in self._saved["published"] if manifest.step <= step]

    def take_seconds(self) -> float:
        """Seconds spent writing since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        return seconds

    def save_due(self, elapsed_s: float) -> None:
        """Write what falls due after the learner's step."""
        cfg, step = self._learner.grpo.checkpoints, self._learner.step
        if cfg.every is not None and step % cfg.every == 0:
            self.publish()
        if step % cfg.resume_every == 0:
            self.save_resume(elapsed_s)

    def publish(self) -> bool:
        """Publish the weights as transformers loads them, once a step. Returns whether they are on disk."""
        policy = self._learner.policy

        def prepare() -> Callable[[Path], None]:
            weights = published_weights(policy)
            return lambda path: save_published(policy, path, weights)

        return self._save("published", prepare)

    def save_resume(self, elapsed_s: float) -> bool:
        """Renew the rolling resume state, once a step. Returns whether it is on disk."""

        def prepare() -> Callable[[Path], None]:
            resume = self._learner.capture(elapsed_s)
            return lambda path: checkpoint.write_resume(path, resume)

        return self._save("resume", prepare)

    def _save(self, kind: Kind, prepare: Callable[[], Callable[[Path], None]]) -> bool:
        """`prepare` is an act of all ranks, which may have to bring whole weights together; the first alone writes."""
        learner, started = self._learner, time.perf_counter()
        saved = self._saved[kind]
        if saved and saved[-1].step == learner.step:
            return True
        write = prepare()
        manifest = learner.ranks.first(lambda: self._write(kind, write))
        self.seconds += time.perf_counter() - started
        if manifest is None:
            return False
        saved.append(manifest)
        self._announce(manifest, time.perf_counter() - started)
        self._retire(kind)
        return True

    def _write(self, kind: Kind, write: Callable[[Path], None]) -> Manifest | None:
        """Put one checkpoint on the disk; None, after an event, when the disk refuses."""
        learner, saved = self._learner, self._saved[kind]
        expected = max((manifest.num_bytes for manifest in saved[-1:]), default=self._first_estimate(kind))
        try:
            return checkpoint.save(
                self.directory,
                kind,
                learner.step,
                write,
                epoch=learner.epoch,
                job_id=learner.job_id,
                about=self._about(),
                expected_bytes=expected,
            )
        except (OSError, SafetensorError) as error:
            self._tell_failure(kind, learner.step, error)
            return None

    def _tell_failure(self, kind: Kind, step: int, error: Exception) -> None:
        name = checkpoint.checkpoint_name(kind, step)
        data = {"name": name, "kind": kind, "step": step, "errno": getattr(error, "errno", None), "reason": str(error)}
        message = f"checkpoint {name} could not be written: {error}; training goes on"
        self._log.emit("checkpoint.failed", message, step=step, level="error", data=data)

    def _take_over(self, resumed_from: Path) -> Manifest | None:
        """Link the newest whole state that is older, and lies beside, into this attempt. Its epoch stays: commands follow it."""
        older = _older_than(self._learner.step, resumed_from.parent)
        if older is None:
            return None

        def link(directory: Path) -> None:
            for entry in older.files:
                _link(resumed_from.parent / older.name / entry.name, directory / entry.name)

        try:
            return checkpoint.save(self.directory, "resume", older.step, link, epoch=older.epoch, job_id=older.job_id, about=older.about)
        except OSError as error:
            self._tell_failure("resume", older.step, error)
            return None

    def _announce(self, manifest: Manifest, seconds: float) -> None:
        described = manifest.to_json()
        data = {key: described[key] for key in ("name", "step", "kind", "files", "bytes")}
        data |= {key: described[key] for key in ("ref_kl", "reward", "beta") if key in described}
        message = f"{manifest.kind} checkpoint {manifest.name}: {manifest.num_bytes:,} bytes in {seconds:.1f} s"
        self._log.emit("checkpoint.saved", message, step=manifest.step, data={**data, "seconds": seconds})

    def _retire(self, kind: Kind) -> None:
        """Delete this attempt's older resume states. Published weights are the bookkeeper's to retire: it knows the pins."""
        saved = self._saved[kind]
        if kind == "published" or len(saved) <= self._kept_resumes or not self._learner.ranks.first(self._may_delete):
            return
        while len(saved) > self._kept_resumes:
            name = saved.pop(0).name
            if self._learner.ranks.is_first:
                shutil.rmtree(self.directory / name, ignore_errors=True)

    def _may_delete(self) -> bool:
        return self._log.sync() and not self._is_given_up

    def _about(self) -> dict[str, Any]:
        learner, readings = self._learner, self._learner.readings
        about: dict[str, Any] = {
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "python": platform.python_version()},
            "threads": torch.get_num_threads(),
            "ranks": learner.ranks.size,
            "reference_sha256": learner.reference_sha256,
        }
        for key, metric in (("ref_kl", "kl/ref/k3/mean"), ("reward", "reward/mean"), ("beta", "beta/applied")):
            if math.isfinite(readings.get(metric, math.nan)):
                about[key] = readings[metric]
        return about

    def _first_estimate(self, kind: Kind) -> int:
        policy = self._learner.policy
        return 12 * policy.num_parameters if kind == "resume" else 4 * policy.num_in_memory


def _older_than(step: int, parent: Path) -> Manifest | None:
    """The newest resume state below `parent` from before a step that verifies."""
    for path in sorted(parent.glob("resume-*"), key=lambda path: int(path.name.removeprefix("resume-")), reverse=True):
        if int(path.name.removeprefix("resume-")) < step:
            with suppress(CheckpointDamaged):
                return checkpoint.verify(path)
    return None


def _link(source: Path, target: Path) -> None:
    """The same file under another name, without a second copy where the file system allows it."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)
