"""A base model, named, as the reference of a job that goes on from a checkpoint: KL counts from the root of the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.runs import events, make_job, make_spec, outcome, series, train
from tests.tiny import make_model


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def fork(job: Path, name: str, source: str) -> Path:
    parent = job / "attempts" / "parent"
    if not parent.exists():
        train(job, "parent", make_spec(job, limits={"num_steps": 2}))
    spec = make_spec(job, limits={"num_steps": 1}, reference={"source": source})
    spec["model"] = "ftckpt-0123"
    return train(job, name, spec, model_from=str(parent / "checkpoints" / "step-000002"))


def test_kl_counts_from_the_root(job: Path) -> None:
    run_dir = fork(job, "fork", f"model:{job / 'model'}")
    assert outcome(run_dir).status == "succeeded", outcome(run_dir).message
    root = events(job / "attempts" / "parent", "model.loaded")[0].data
    mine = events(run_dir, "model.loaded")[0].data
    assert mine["reference_sha256"] == root["policy_sha256"] != mine["policy_sha256"]
    assert series(run_dir)[1]["kl/ref/k3/mean"] > 0


@pytest.mark.parametrize("kind", ["another architecture", "no such folder"])
def test_a_reference_that_cannot_be_one_is_the_specs_fault(job: Path, tmp_path: Path, kind: str) -> None:
    if kind == "another architecture":
        make_model(tmp_path / "other", "TINY_GPT2")
    run_dir = fork(job, kind.replace(" ", "-"), f"model:{tmp_path / 'other'}")
    verdict = outcome(run_dir)
    assert (verdict.status, verdict.reason, verdict.param) == ("failed", "config_error", "method.grpo.reference.source")
