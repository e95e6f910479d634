"""Public accidents that only a model can show, in runs of a tiny one (rows of tests/golden/kl_rows.json)."""

from __future__ import annotations

import math
from pathlib import Path

from tests.engine.runs import events, make_job, make_spec, outcome, series, train


def test_issue_trl_3500_dropout_leaves_kl_at_step_one_at_zero(tmp_path: Path) -> None:
    """The model's own configuration has a dropout of 0.1; policy and reference must compute alike all the same."""
    job = make_job(tmp_path, "TINY_GPT2")
    grader = {"type": "regex", "pattern": "[a-m]"}
    spec = make_spec(job, data={"chat_template": "none"}, limits={"num_steps": 2}, grader=grader)
    run_dir = train(job, spec=spec)
    assert outcome(run_dir).status == "succeeded", outcome(run_dir).message
    first, second = series(run_dir)[1], series(run_dir)[2]
    assert {first[f"kl/ref/{name}/{statistic}"] for name in ("k1", "k2", "k3", "abs") for statistic in ("mean", "token_max")} == {0.0}
    assert second["kl/ref/k3/mean"] > 0


def test_issue_nemo_rl_2443_a_run_with_beta_zero_holds_no_reference(tmp_path: Path) -> None:
    job = make_job(tmp_path)
    run_dir = train(job, spec=make_spec(job, beta=0, limits={"num_steps": 2}))
    assert outcome(run_dir).status == "succeeded"
    assert events(run_dir, "model.loaded")[0].data["has_reference"] is False
    for row in series(run_dir).values():
        assert row["beta/applied"] == 0
        assert not [name for name in row if name.startswith(("kl/ref", "kl_per_sequence/", "kl/loss_term", "loss/kl"))]
        assert all(math.isfinite(value) for value in row.values())


def test_issue_prime_rl_679_the_sampler_reports_log_probs_after_temperature(tmp_path: Path) -> None:
    """At temperature 0.6 sampler and policy are the same distribution; an untempered report would read a KL of its own."""
    job = make_job(tmp_path)
    run_dir = train(job, spec=make_spec(job, sampling={"temperature": 0.6}, limits={"num_steps": 1}))
    assert abs(series(run_dir)[1]["kl/sampler/k3/mean"]) < 1e-8
    assert series(run_dir)[1]["kl/ref/k3/mean"] == 0.0
