"""A whole run on a tiny model: events, metrics, beta, commands, checkpoints, verdict."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine.__main__ import run
from grpo_engine.checkpoint import verify
from grpo_engine.contract.command import Command
from grpo_engine.contract.telemetry import is_known
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, train, weights_sha256


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@pytest.fixture(scope="module")
def finished(job: Path) -> Path:
    return train(job, "finished")


def test_a_run_tells_its_story_in_order(finished: Path) -> None:
    kinds = [event.type for event in events(finished)]
    assert kinds[:3] == ["engine.started", "data.loaded", "model.loaded"]
    assert kinds[-1] == "run.finished"
    assert [event.step for event in events(finished, "step.completed")] == [1, 2, 3, 4, 5, 6]
    assert outcome(finished).status == "succeeded"
    assert outcome(finished).last_step == 6


def test_every_metric_is_described_and_finite(finished: Path) -> None:
    for metrics in series(finished).values():
        for name, value in metrics.items():
            assert is_known(name), name
            assert isinstance(value, int | float), name
            assert math.isfinite(value), name
    wanted = {
        *(f"kl/ref/{estimator}/{statistic}" for estimator in ("k1", "k2", "k3") for statistic in ("mean", "se", "p50", "p95", "max")),
        *("kl/loss_term", "beta/applied", "beta/next", "beta/action", "beta/target", "loss/policy", "loss/kl", "loss/total"),
        *("grad_norm/total", "reward/mean", "reward/std", "groups/zero_std_frac", "policy/entropy", "completion/length_mean"),
        *("completion/length_p95", "completion/truncated_frac", "kl/old/k1/mean", "kl/sampler/k3/mean", "kl_per_sequence/ref/k3/mean"),
    }
    assert wanted <= set(series(finished)[1])
    metrics = events(finished, "step.completed")[0].data["metrics"]
    assert {"time/step_s", "time/sample_s", "time/grade_s", "time/reference_s", "time/update_s", "throughput/tokens_per_s"} <= set(metrics)


def test_kl_starts_at_exactly_zero_and_moves(finished: Path) -> None:
    rows = series(finished)
    assert [rows[1][f"kl/ref/{name}/max"] for name in ("k1", "k2", "k3", "abs")] == [0.0] * 4
    assert rows[6]["kl/ref/k3/mean"] > 0


def test_the_total_loss_is_the_sum_of_its_terms(finished: Path) -> None:
    for metrics in series(finished).values():
        assert metrics["loss/total"] == pytest.approx(metrics["loss/policy"] + metrics["beta/applied"] * metrics["kl/loss_term"], abs=1e-9)


def test_the_beta_series_follows_from_the_kl_series(finished: Path) -> None:
    rows, beta, is_armed, raises = series(finished), 0.04, False, 0
    for step in sorted(rows):
        kl = rows[step]["kl/ref/k3/mean"]
        assert rows[step]["beta/applied"] == pytest.approx(beta, rel=1e-12)
        is_armed = is_armed or kl >= 0.8 * 0.02
        if kl > 0.02:
            beta, raises = min(beta * 1.2, 1.0), raises + 1
        elif kl < 0.8 * 0.02 and is_armed:
            beta = max(beta / 1.2, 0.01)
        assert rows[step]["beta/next"] == pytest.approx(beta, rel=1e-12)
    assert raises > 0
    changed = events(finished, "beta.changed")
    assert changed
    assert all(event.data["new"] != event.data["old"] for event in changed)


def test_the_warm_up_shows_in_the_learning_rate(finished: Path) -> None:
    rates = [metrics["optimizer/learning_rate"] for metrics in series(finished).values()]
    assert rates == pytest.approx([5e-4, 1e-3, 1e-3, 1e-3, 1e-3, 1e-3])


def test_the_published_weights_load_in_transformers_and_differ_from_the_base(job: Path, finished: Path) -> None:
    folder = finished / "checkpoints" / "step-000006"
    assert verify(folder).kind == "published"
    trained, base = AutoModelForCausalLM.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(job / "model")
    assert any(not torch.equal(a, b) for a, b in zip(trained.parameters(), base.parameters(), strict=True))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("1+2=", return_tensors="pt")["input_ids"]
    assert trained.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False).shape[1] > ids.shape[1]


def test_only_the_newest_resume_state_is_kept_and_each_was_announced(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "checkpoints").iterdir()) == ["resume-000006", "step-000006"]
    saved = [event.data for event in events(finished, "checkpoint.saved")]
    assert [data["name"] for data in saved] == ["resume-000003", "step-000006", "resume-000006"]
    assert {"files", "bytes", "ref_kl", "reward", "beta", "kind", "step"} <= set(saved[0])


def test_the_same_job_gives_the_same_numbers_and_weights(job: Path, finished: Path) -> None:
    again = train(job, "again")
    assert series(again) == series(finished)
    assert weights_sha256(again, 6) == weights_sha256(finished, 6)


def test_another_seed_gives_another_run(job: Path, finished: Path) -> None:
    other = train(job, "seed", {**make_spec(job), "seed": 8})
    assert series(other) != series(finished)


def test_beta_zero_loads_no_reference_and_reports_no_kl_to_it(job: Path) -> None:
    run_dir = train(job, "zero", make_spec(job, beta=0, limits={"num_steps": 2}))
    assert events(run_dir, "model.loaded")[0].data["has_reference"] is False
    for metrics in series(run_dir).values():
        assert not [name for name in metrics if name.startswith(("kl/ref", "kl_per_sequence", "kl/loss_term", "loss/kl"))]
        assert metrics["loss/total"] == metrics["loss/policy"]


def test_beta_zero_with_monitoring_measures_without_steering(job: Path) -> None:
    plain = train(job, "zero-plain", make_spec(job, beta=0, limits={"num_steps": 3}))
    watched = train(job, "zero-watched", make_spec(job, beta=0, kl={"monitor": True}, limits={"num_steps": 3}))
    assert series(watched)[3]["kl/ref/k3/mean"] > 0
    assert series(watched)[3]["loss/total"] == series(watched)[3]["loss/policy"]
    assert weights_sha256(plain, 3) == weights_sha256(watched, 3)


def test_the_penalty_changes_the_weights(job: Path) -> None:
    weak = train(job, "weak", make_spec(job, beta=0.001, limits={"num_steps": 3}))
    strong = train(job, "strong", make_spec(job, beta=5.0, limits={"num_steps": 3}))
    assert weights_sha256(weak, 3) != weights_sha256(strong, 3)


def test_the_reference_follows_the_policy_when_told_to(job: Path) -> None:
    spec = make_spec(job, beta=0.02, reference={"sync_every": 2, "mixup_alpha": 1.0}, limits={"num_steps": 5})
    rows = series(train(job, "sync", spec))
    assert [rows[step]["kl/ref/k3/max"] == 0 for step in range(1, 6)] == [True, False, True, False, True]


def write_commands(run_dir: Path, *commands: Command) -> None:
    (run_dir / "commands.jsonl").write_text("".join(command.model_dump_json() + "\n" for command in commands))


def test_set_changes_beta_target_and_learning_rate_and_answers(job: Path) -> None:
    run_dir = make_run(job, "set")
    write_commands(run_dir, Command(number=4, type="set", beta=0.2, target=0.5, learning_rate=2e-3, actor="ada"))
    run(run_dir)
    (applied,) = events(run_dir, "control.applied")
    assert applied.data["command"] == 4
    assert applied.data["effective_step"] == 1
    assert applied.data["actor"] == "ada"
    assert applied.data["old"] == {"beta": 0.04, "target": 0.02, "learning_rate": 1e-3}
    assert applied.data["new"] == {"beta": 0.2, "target": 0.5, "learning_rate": 2e-3}
    rows = series(run_dir)
    assert rows[1]["beta/applied"] == 0.2
    assert rows[2]["beta/target"] == 0.5
    assert rows[3]["optimizer/learning_rate"] == 2e-3


@pytest.mark.parametrize(
    ("beta", "command", "reason"),
    [
        (0, Command(number=1, type="set", beta=0.1), "reference_not_loaded"),
        (0.1, Command(number=1, type="set", target=0.1), "has no target"),
        ({"rule": "deadband", "value": 0.04, "target": 0.02, "min": 0.01}, Command(number=1, type="set", beta=5.0, target=0.3), "outside"),
    ],
)
def test_a_command_that_cannot_act_is_refused_as_a_whole(job: Path, beta: Any, command: Command, reason: str, tmp_path: Path) -> None:
    run_dir = make_run(job, f"refused-{tmp_path.name}", make_spec(job, beta=beta, limits={"num_steps": 1}))
    write_commands(run_dir, command)
    run(run_dir)
    (refused,) = events(run_dir, "control.refused")
    assert refused.data["command"] == 1
    assert reason in refused.data["reason"]
    assert events(run_dir, "control.applied") == []
    assert series(run_dir)[1].get("beta/target") in (None, 0.02)


@pytest.mark.parametrize("kind", ["pause", "drain"])
def test_pause_and_drain_checkpoint_and_stop(job: Path, kind: str) -> None:
    run_dir = make_run(job, kind)
    write_commands(run_dir, Command.model_validate_json(json.dumps({"number": 1, "type": kind})))
    assert run(run_dir) == 85
    verdict = outcome(run_dir)
    assert (verdict.status, verdict.reason, verdict.last_step) == ("stopped", kind, 0)
    assert verdict.resume_checkpoint == "resume-000000"
    verify(run_dir / "checkpoints" / "resume-000000")


def test_a_checkpoint_command_publishes_at_once(job: Path) -> None:
    run_dir = make_run(job, "checkpoint-command", make_spec(job, limits={"num_steps": 1}))
    write_commands(run_dir, Command(number=1, type="checkpoint"))
    run(run_dir)
    assert [event.data["name"] for event in events(run_dir, "checkpoint.saved")][:2] == ["step-000000", "resume-000000"]


def test_published_every_n_steps(job: Path) -> None:
    run_dir = train(job, "every", make_spec(job, checkpoints={"every": 2, "resume_every": 100}, limits={"num_steps": 5}))
    names = [event.data["name"] for event in events(run_dir, "checkpoint.saved")]
    assert names == ["step-000002", "step-000004", "step-000005", "resume-000005"]


def test_a_reference_that_is_not_the_policy_fails_at_step_one(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_engine.assemble as assemble

    real = assemble.load_reference

    def moved(*args: Any, **options: Any) -> Any:
        reference = real(*args, **options)
        with torch.no_grad():
            next(iter(reference.model.parameters())).mul_(1.5)
        return reference

    monkeypatch.setattr(assemble, "load_reference", moved)
    run_dir = make_run(job, "moved-reference")
    assert run(run_dir) == 86
    assert outcome(run_dir).reason == "reference_mismatch"
    assert series(run_dir)[1]["kl/ref/k3/mean"] > 1e-4
