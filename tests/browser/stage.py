"""A real server with a furnished database: jobs made through the ledger, telemetry as an engine would send it."""

from __future__ import annotations

import hashlib
import json
import math
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from api.sse import StreamLimits
from grpo_engine.contract.event import EngineEvent
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.telemetry import KL_ESTIMATORS, KL_STATISTICS
from jobs.ledger import JobRecord, Ledger
from jobs.lifecycle import State
from jobs.live import Live

ROWS = [{"prompt": f"{a} + {a} = ", "answer": str(2 * a)} for a in range(1, 21)]
DEADBAND = {"rule": "deadband", "value": 0.02, "target": 0.03, "update_every": 10, "ema_decay": 0.9}


LIMITS = StreamLimits(heartbeat_s=0.5, poll_s=0.05, retry_redis_s=0.2)

OpenPage = Callable[..., Any]
"""`open_page("#/jobs", width=1280, scheme="light", script="")` → a Playwright page."""


class Problems(list[str]):
    """What the browser complained about; empty at the end of each test, unless the test expects it and says so."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed: list[str] = []

    def allow(self, part: str) -> None:
        """Complaints that hold this text are expected; there must be one, and more may still be on their way."""
        assert any(part in problem for problem in self), f"the browser did not complain about {part}"
        self._allowed.append(part)

    def unexpected(self) -> list[str]:
        """The complaints that nobody allowed."""
        return [problem for problem in self if not any(part in problem for part in self._allowed)]


class Stage:
    """Jobs, and the hand that plays dispatcher, worker and engine."""

    def __init__(self, ledger: Ledger, live: Live) -> None:
        self.ledger = ledger
        self.live = live
        self.seq: dict[str, int] = {}
        self.epoch: dict[str, int] = {}
        content = b"".join(json.dumps(row).encode() + b"\n" for row in ROWS)
        self.upload = self._keep_file(content)

    def _keep_file(self, content: bytes) -> str:
        file_id = "file-sums"
        path = self.ledger.artifacts.file_content(file_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
        self.ledger.add_file(
            file_id, filename="sums.jsonl", purpose="fine-tune", num_bytes=len(content),
            sha256=hashlib.sha256(content).hexdigest(), rows=len(ROWS),
        )  # fmt: skip
        return file_id

    def job(
        self, suffix: str, *, beta: Any = 0.04, num_steps: int = 200, start: bool = True, telemetry: Any = None, **changes: Any
    ) -> JobRecord:
        """An accepted job; started unless told otherwise."""
        grpo = {
            "grader": {"type": "string_check", "reference": "{{item.answer}}"},
            "beta": beta,
            "limits": {"num_steps": num_steps},
            **({"telemetry": telemetry} if telemetry else {}),
        }
        body = {"model": "tiny", "training_file": self.upload, "suffix": suffix, "method": {"type": "grpo", "grpo": grpo}, **changes}
        job = self.ledger.create_job(resolve_spec(body), training_path=self.ledger.artifacts.file_content(self.upload))
        if start:
            self.start(job.id)
        return job

    def start(self, job_id: str) -> int:
        """Dispatch and claim."""
        job = self.ledger.get_job(job_id)
        dispatched = self.ledger.dispatch(job_id, from_epoch=job.epoch)
        assert dispatched is not None
        assert self.ledger.mark_running(job_id, dispatched.epoch, "worker-1") is not None
        self.seq[job_id], self.epoch[job_id] = 0, dispatched.epoch
        return dispatched.epoch

    def say(
        self, job_id: str, kind: str, message: str, *, step: int | None = None, level: Any = "info", data: dict[str, Any] | None = None
    ) -> None:
        """An engine event into the database, as the dispatcher would bring it."""
        self._take(job_id, [self._event(job_id, kind, message, step, level, data or {})])

    def steps(self, job_id: str, first: int, last: int, **changes: Any) -> None:
        """Telemetry of steps first to last."""
        rows = []
        for step in range(first, last + 1):
            metrics = {**telemetry(step), **changes}
            beta = {"beta": metrics["beta/next"], "target": metrics["beta/target"], "ref_sha256": "ab" * 32}
            rows.append(self._event(job_id, "step.completed", f"step {step}", step, "info", {"metrics": metrics, "beta": beta}))
        self._take(job_id, rows)

    def long_run(self, job_id: str, num_steps: int) -> None:
        """Many steps with few metrics."""
        names = ("kl/ref/k3/mean", "beta/applied", "reward/mean", "time/step_s")
        rows = []
        for step in range(1, num_steps + 1):
            full = telemetry(step)
            data = {"metrics": {name: full[name] for name in names}, "beta": {"target": None}}
            rows.append(self._event(job_id, "step.completed", f"step {step}", step, "info", data))
        self._take(job_id, rows)

    def checkpoint(self, job_id: str, step: int) -> None:
        """Published weights on disk, and their event."""
        job = self.ledger.get_job(job_id)
        name = f"step-{step:06d}"
        folder: Path = self.ledger.artifacts.checkpoint_dir(job_id, job.epoch, name)
        folder.mkdir(parents=True)
        content = b"weights of step " + str(step).encode()
        (folder / "model.safetensors").write_bytes(content)
        (folder / "manifest.json").write_text("{}")
        (folder / "config.json").write_text('{"model_type": "llama", "dtype": "float32"}')
        files = [{"name": "model.safetensors", "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}]
        data = {
            "name": name,
            "step": step,
            "kind": "published",
            "files": files,
            "bytes": len(content),
            "ref_kl": 0.021,
            "reward": 0.7,
            "beta": 0.02,
        }
        self.say(job_id, "checkpoint.saved", f"saved {name}", step=step, data=data)

    def log(self, job_id: str, text: str) -> None:
        """What the engine printed."""
        path = self.ledger.artifacts.log_path(job_id, self.ledger.get_job(job_id).epoch)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def end(self, job_id: str, state: State, reason: str, **values: Any) -> None:
        """The job's end."""
        job = self.ledger.get_job(job_id)
        assert self.ledger.transition(job_id, epoch=job.epoch, expected=[job.state], to=state, reason=reason, **values) is not None

    def _event(self, job_id: str, kind: str, message: str, step: int | None, level: Any, data: dict[str, Any]) -> EngineEvent:
        self.seq[job_id] += 1
        return EngineEvent(
            epoch=self.epoch[job_id], seq=self.seq[job_id], time=time.time(), type=kind, step=step, level=level, message=message, data=data
        )

    def _take(self, job_id: str, events: list[EngineEvent]) -> None:
        assert self.ledger.ingest(job_id, events).taken == len(events)


def telemetry(step: int) -> dict[str, float]:
    """One step of a plausible run: KL climbs from 0 and is held near 0.03, reward saturates, lengths grow."""
    noise = random.Random(step)
    kl = 0.0 if step == 1 else 0.03 * (1 - math.exp(-step / 30)) * (1 + 0.25 * noise.gauss(0, 1)) + 0.004 * math.sin(step / 11)
    kl = max(kl, 0.0)
    beta = 0.02 * 1.2 ** round(2 * math.sin(step / 40))
    action = (step % 10 == 0) * (1 if kl > 0.03 else -1 if kl < 0.024 else 0)
    reward = 0.85 * (1 - math.exp(-step / 60)) + 0.03 * noise.gauss(0, 1)
    metrics = {
        "beta/applied": beta, "beta/next": beta, "beta/action": float(action), "beta/target": 0.03, "beta/ema": kl,
        "reward/mean": reward, "reward/std": 0.3, "reward/group_std": 0.18, "reward/grader/exact": reward * 0.9,
        "reward/grader/format": min(1.0, reward + 0.1), "loss/policy": -0.02 + 0.01 * noise.gauss(0, 1), "loss/kl": beta * kl,
        "loss/total": -0.02 + beta * kl, "grad_norm/total": 1.4 + 0.3 * noise.random(), "policy/entropy": 1.2 + 0.8 * math.exp(-step / 80),
        "completion/length_mean": 40 + 12 * (1 - math.exp(-step / 50)), "completion/length_p95": 61.0, "completion/truncated_frac": 0.06,
        "groups/zero_std_frac": 0.2, "completion/rep_ngram4": 0.02, "grader/failed_frac": 0.0, "kl/clip_frac": 0.0,
        "policy/clip_frac_low": 0.01, "policy/clip_frac_high": 0.02, "time/step_s": 2.1, "time/sample_s": 1.2, "time/grade_s": 0.1,
        "time/reference_s": 0.2, "time/update_s": 0.6, "throughput/tokens_per_s": 820.0, "optimizer/learning_rate": 1e-6,
    }  # fmt: skip
    for pair, scale in (("ref", 1.0), ("old", 0.01), ("sampler", 0.02)):
        for place, estimator in enumerate(KL_ESTIMATORS[:-1]):
            for statistic in KL_STATISTICS:
                factor = {"mean": 1.0, "se": 0.1, "p50": 0.8, "p95": 2.5, "max": 4.0, "token_max": 9.0}[statistic]
                metrics[f"kl/{pair}/{estimator}/{statistic}"] = kl * scale * factor * (1 + 0.08 * place)
            if pair == "ref":
                metrics[f"kl_per_sequence/ref/{estimator}/mean"] = kl * 45 * (1 + 0.08 * place)
    return metrics


def furnish(stage: Stage) -> dict[str, str]:
    """A handful of jobs in every state; returns their ids by name."""
    ids = {}
    done = stage.job("sums-fixed", num_steps=150, metadata={"team": "maths"})
    stage.steps(done.id, 1, 150)
    stage.checkpoint(done.id, 150)
    stage.end(done.id, State.SUCCEEDED, "All steps done.")
    ids["done"] = done.id
    failed = stage.job("sums-diverged", num_steps=200)
    stage.steps(failed.id, 1, 37)
    stage.log(failed.id, "loading tiny\nstep 37\nthe loss was not finite\n")
    message = "the loss was not finite in 3 steps in a row"
    stage.end(failed.id, State.FAILED, message, error_code="nonfinite", error_message=message, error_param=None)
    ids["failed"] = failed.id
    running = stage.job("sums-steered", beta=DEADBAND, num_steps=400)
    stage.say(running.id, "engine.started", "engine started on cpu in fp32", data={"device": "cpu"})
    stage.steps(running.id, 1, 120)
    stage.say(running.id, "detector.fired", "kl_out_of_control: 0.12 nats per token", step=90, level="warn")
    stage.checkpoint(running.id, 100)
    stage.log(running.id, "loading tiny\n" + "".join(f"step {step}\n" for step in range(1, 121)))
    ids["running"] = running.id
    paused = stage.job("sums-paused", num_steps=300, start=False)
    stage.ledger.request(paused.id, "pause")
    ids["paused"] = paused.id
    ids["queued"] = stage.job("sums-waiting", num_steps=300, start=False).id
    ids["queued2"] = stage.job("sums-waiting-too", num_steps=300, start=False).id
    return ids
