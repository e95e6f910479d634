"""Published checkpoints as model and as reference, states of another build, and an engine that leaves at once."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from grpo_engine.__main__ import failure, read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.events import EventLog
from grpo_engine.outcome import ConfigError
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, train
from tests.tiny import make_model

SOURCE = "method.grpo.reference.source"


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def published(job: Path) -> Path:
    """The checkpoint of a run of two steps."""
    return train(job, "parent", make_spec(job, limits={"num_steps": 2})) / "checkpoints" / "step-000002"


def loaded(run_dir: Path) -> dict[str, Any]:
    return events(run_dir, "model.loaded")[0].data


def child(job: Path, name: str, role: str, folder: Path | None, **grpo: Any) -> Path:
    """A job that begins with a checkpoint, or is measured against it."""
    spec = make_spec(job, **{"limits": {"num_steps": 1}, **grpo})
    if role == "model":
        spec["model"] = "ftckpt-0123"
    else:
        spec["method"]["grpo"]["reference"] = {"source": "checkpoint:ftckpt-0123"}
    paths = {} if folder is None else {f"{role}_from": str(folder)}
    return train(job, name, spec, **paths)


def test_a_job_goes_on_from_published_weights(job: Path, published: Path) -> None:
    run_dir = child(job, "continued", "model", published)
    assert outcome(run_dir).status == "succeeded", outcome(run_dir).message
    parent = loaded(published.parents[1])
    assert loaded(run_dir)["policy_sha256"] == loaded(run_dir)["reference_sha256"] != parent["policy_sha256"]
    assert series(run_dir)[1]["kl/ref/k3/mean"] == 0.0, "the reference is the root of the new lineage"


def test_a_job_is_measured_against_published_weights(job: Path, published: Path) -> None:
    run_dir = child(job, "measured", "reference", published)
    assert outcome(run_dir).status == "succeeded", outcome(run_dir).message
    assert loaded(run_dir)["policy_sha256"] == loaded(published.parents[1])["policy_sha256"] != loaded(run_dir)["reference_sha256"]
    assert series(run_dir)[1]["kl/ref/k3/mean"] > 0


def test_the_reference_is_pinned_over_a_resume(job: Path, published: Path) -> None:
    first = child(job, "pinned", "reference", published)
    spec = json.loads((first / "dispatch.json").read_text())["spec"]
    spec["method"]["grpo"]["limits"]["num_steps"] = 2
    state = f"{first}/checkpoints/resume-000001"
    again = train(job, "pinned-2", spec, epoch=2, resume_from=state, reference_from=str(published))
    assert outcome(again).status == "succeeded", outcome(again).message
    other = train(job, "pinned-3", spec, epoch=2, resume_from=state, reference_from=str(job / "model"))
    assert outcome(other).reason == "reference_mismatch"


def changed(folder: Path) -> None:
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (folder / "model.safetensors").write_bytes(weights)


def cut(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize("harm", [changed, cut, shutil.rmtree])
@pytest.mark.parametrize(("role", "param"), [("model", "model"), ("reference", SOURCE)])
def test_damaged_weights_are_a_config_error_that_names_the_field(
    job: Path, published: Path, tmp_path: Path, harm: Callable[[Path], None], role: str, param: str
) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(published, folder)
    harm(folder)
    verdict = outcome(child(job, f"damaged-{tmp_path.name}", role, folder))
    assert (verdict.reason, verdict.param, verdict.retryable) == ("config_error", param, False)


@pytest.mark.parametrize(("role", "param"), [("model", "model"), ("reference", SOURCE)])
def test_a_checkpoint_nobody_resolved_is_a_config_error(job: Path, role: str, param: str) -> None:
    verdict = outcome(child(job, f"unresolved-{role}", role, None))
    assert (verdict.reason, verdict.param) == ("config_error", param)
    assert f"{role}_from" in verdict.message


def test_a_reference_of_another_architecture_is_a_config_error(job: Path, tmp_path: Path) -> None:
    verdict = outcome(child(job, "other", "reference", make_model(tmp_path / "other", "TINY_QWEN2")))
    assert (verdict.reason, verdict.param, verdict.retryable) == ("config_error", SOURCE, False)


@pytest.mark.parametrize("path", [("detectors",), ("readings",), ("cursor", "epoch"), ("rng", "torch")])
def test_a_state_of_another_build_says_what_to_do(job: Path, tmp_path: Path, path: tuple[str, ...]) -> None:
    run_dir = make_run(job, f"old-{tmp_path.name}")
    log = EventLog(run_dir / "events.jsonl", 1)
    with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log) as learner:
        resume = learner.capture(0.0)
        place = resume.state
        for key in path[:-1]:
            place = place[key]
        del place[path[-1]]
        with pytest.raises(ConfigError, match=rf"lacks '{path[-1]}'; resume it with the version that wrote it") as caught:
            learner.restore(resume, [])
    verdict = failure(caught.value, log)
    log.close()
    assert (verdict.reason, verdict.retryable) == ("config_error", False)


def test_the_engine_leaves_without_waiting_for_anything() -> None:
    code = "import atexit; from grpo_engine.__main__ import leave; atexit.register(print, 'late'); print('early', end=''); leave(85)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (85, "early")
