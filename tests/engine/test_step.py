"""One train step: against a plain re-implementation, however it is cut, and when numbers break."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from grpo_engine.__main__ import read_dispatch, run
from grpo_engine.advantage import group_advantages
from grpo_engine.assemble import assemble
from grpo_engine.batch import Rollout
from grpo_engine.events import EventLog
from grpo_engine.learner import Learner
from grpo_engine.rollout import sample_groups
from grpo_engine.step import train_step
from grpo_engine.update import forward_backward, prepare_update
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, train, weights_sha256


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


@contextmanager
def learner_of(job: Path, name: str, **grpo: Any) -> Iterator[Learner]:
    """A learner before step 1."""
    run_dir = make_run(job, name, make_spec(job, **grpo))
    log = EventLog(run_dir / "events.jsonl", 1)
    with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log) as learner:
        yield learner
    log.close()


def rollout_of(learner: Learner, step: int) -> Rollout:
    """A rollout with rewards that vary inside every group."""
    sampling = learner.grpo.sampling
    prompts = learner.dataset.take(sampling.prompts_per_step)
    rollout = Rollout(step, sample_groups(learner.policy, prompts, sampling.group_size, sampling, 3, step))
    for number, (_, completion) in enumerate(rollout.rows):
        completion.reward = float((number * 7) % 5)
    return rollout


def plain_logprobs(model: Any, rollout: Rollout) -> list[torch.Tensor]:
    """Log-probabilities of each row's completion, one row at a time, through the whole logits."""
    rows = []
    for prompt, completion in rollout.rows:
        ids = torch.tensor([prompt.token_ids + completion.token_ids])
        logits = model(input_ids=ids).logits[0, len(prompt.token_ids) - 1 : -1]
        rows.append(torch.log_softmax(logits.double(), -1).gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0])
    return rows


def test_loss_and_gradient_equal_a_plain_reimplementation(job: Path) -> None:
    """GRPO with beta * k3 (unbiased, on-policy): mean over rows of the row's mean of -A*log pi + beta*x^2/2-shaped gradient."""
    with learner_of(job, "plain", beta=0.3, resources={"micro_batch_tokens": 60}) as learner:
        train_step(learner, 1)
        reference = AutoModelForCausalLM.from_pretrained(job / "model")
        rollout = rollout_of(learner, 2)
        advantages = group_advantages(rollout.reward_PG(), learner.grpo.loss)
        update = prepare_update(learner, rollout, advantages, 0.3)
        assert len(update.batches) > 1
        for number in range(len(update.batches)):
            forward_backward(learner, update, number, is_first=True)
        found = {name: master.grad.clone() for name, master in learner.policy.masters.items() if master.grad is not None}

        plain = AutoModelForCausalLM.from_pretrained(job / "model")
        plain.load_state_dict({name: value.detach() for name, value in learner.policy.masters.items()}, strict=False)
        with torch.no_grad():
            refs = plain_logprobs(reference, rollout)
        policy_loss = kl_loss = kl_value = torch.zeros((), dtype=torch.float64)
        for logprob, ref, advantage in zip(plain_logprobs(plain, rollout), refs, advantages.advantage_PG.flatten(), strict=True):
            x = ref - logprob
            policy_loss = policy_loss - ((logprob - logprob.detach()).exp() * advantage).mean()
            kl_loss = kl_loss + (x.square() / 2).mean()
            kl_value = kl_value + (x.exp() - x - 1).mean()
        count = len(rollout.rows)
        ((policy_loss + 0.3 * kl_loss) / count).backward()
        assert update.policy_sum == pytest.approx(float(policy_loss.detach()) / count, abs=1e-6)
        assert update.kl_sum == pytest.approx(float(kl_value.detach()) / count, rel=1e-3)
        assert update.kl_sum > 1e-5
        for name, parameter in plain.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=2e-3, atol=2e-6)


def numbers(rows: dict[int, dict[str, Any]]) -> dict[str, float]:
    return {f"{step} {name}": value for step, metrics in rows.items() for name, value in metrics.items()}


def test_the_result_does_not_depend_on_how_the_step_is_cut(job: Path) -> None:
    runs = [
        series(train(job, f"cut-{tokens}", make_spec(job, resources={"micro_batch_tokens": tokens}, limits={"num_steps": 2})))
        for tokens in (16384, 60, 1)
    ]
    for other in runs[1:]:
        for name, value in numbers(runs[0]).items():
            assert numbers(other)[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


def test_several_updates_leave_the_old_policy_behind_and_measure_the_reference_before_the_first(job: Path) -> None:
    run_dir = train(job, "several", make_spec(job, loss={"num_iterations": 3}, limits={"num_steps": 2}))
    first = series(run_dir)[1]
    assert first["kl/ref/k3/max"] == 0.0
    assert first["kl/old/k3/mean"] > 0
    assert first["policy/ratio_mean"] != 1.0
    once = series(train(job, "once", make_spec(job, loss={"num_iterations": 1}, limits={"num_steps": 2})))[1]
    assert once["kl/old/k3/max"] == 0.0
    assert once["policy/ratio_mean"] == 1.0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("estimator", ["k3", "exact"])
def test_kl_at_step_one_is_exactly_zero_in_each_precision(job: Path, precision: str, estimator: str) -> None:
    spec = make_spec(job, kl={"estimator": estimator}, beta=0.1, resources={"precision": precision}, limits={"num_steps": 2})
    rows = series(train(job, f"zero-{precision}-{estimator}", spec))
    assert rows[1]["kl/ref/k3/max"] == 0.0
    assert rows[1][f"kl/ref/{estimator}/max"] == 0.0
    assert rows[2][f"kl/ref/{estimator}/mean"] > 0


@pytest.mark.parametrize("placement", ["reward", "advantage"])
def test_a_penalty_in_the_advantage_steers_without_a_loss_term(job: Path, placement: str) -> None:
    def grpo(beta: float) -> dict[str, Any]:
        return {"kl": {"estimator": "k1", "placement": placement}, "beta": beta, "limits": {"num_steps": 3}}

    runs = {beta: train(job, f"{placement}-{beta}", make_spec(job, **grpo(beta))) for beta in (0.001, 2.0)}
    last = series(runs[2.0])[3]
    assert last["kl/loss_term"] == last["loss/kl"] == 0.0
    assert last["loss/total"] == last["loss/policy"]
    assert last["kl/ref/k1/mean"] != 0
    assert weights_sha256(runs[0.001], 3) != weights_sha256(runs[2.0], 3)


def test_rewards_kl_and_advantage_placement_do_not_depend_on_the_cut(job: Path) -> None:
    spec = {"kl": {"estimator": "k1", "placement": "advantage"}, "beta": 0.5, "limits": {"num_steps": 2}}
    whole = series(train(job, "advantage-whole", make_spec(job, **spec)))
    cut = series(train(job, "advantage-cut", make_spec(job, **spec, resources={"micro_batch_tokens": 1})))
    for name, value in numbers(whole).items():
        assert numbers(cut)[name] == pytest.approx(value, rel=2e-3, abs=2e-5), name


BROKEN_GRADER = {"type": "string_check", "reference": "{{item.no_such_column}}", "operation": "eq"}


def break_rewards(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """One completion of these steps gets an infinite reward."""
    import grpo_engine.collect as collect_module

    real = collect_module.grade

    def grade(learner: Learner, rollout: Rollout) -> list[str]:
        errors = real(learner, rollout)
        if rollout.step in steps:
            rollout.groups[0].completions[0].reward = math.inf
            errors = [*errors, "the grader returned inf"]
        return errors

    monkeypatch.setattr(collect_module, "grade", grade)


def break_gradients(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The gradients of these steps hold an infinity."""
    import grpo_engine.step as step_module

    real = step_module.optimize

    def optimize(learner: Learner, update: Any, *args: Any, **options: Any) -> Any:
        norm = learner.optimizer.grad_norm
        if learner.step + 1 in steps:
            monkeypatch.setattr(learner.optimizer, "grad_norm", lambda: norm() + math.inf)
        result = real(learner, update, *args, **options)
        monkeypatch.setattr(learner.optimizer, "grad_norm", norm)
        return result

    monkeypatch.setattr(step_module, "optimize", optimize)


def break_logprobs(monkeypatch: pytest.MonkeyPatch, steps: set[int]) -> None:
    """The loss of these steps is NaN."""
    import grpo_engine.step as step_module

    real = step_module.prepare_update

    def prepare(learner: Learner, *args: Any) -> Any:
        update = real(learner, *args)
        if learner.step + 1 in steps:
            assert update.tensors.ref_logprob_BT is not None
            update.tensors.ref_logprob_BT[0, 0] = math.nan
        return update

    monkeypatch.setattr(step_module, "prepare_update", prepare)


@pytest.mark.parametrize("break_it", [break_rewards, break_gradients, break_logprobs])
def test_a_step_with_broken_numbers_leaves_weights_and_beta_alone(
    job: Path, monkeypatch: pytest.MonkeyPatch, break_it: Any, tmp_path: Path
) -> None:
    break_it(monkeypatch, {3})
    spec = make_spec(job, checkpoints={"every": 1, "resume_every": 1}, limits={"num_steps": 4})
    run_dir = train(job, f"broken-{tmp_path.name}", spec)
    (quarantined,) = events(run_dir, "step.quarantined")
    assert (quarantined.step, quarantined.level) == (3, "error")
    assert weights_sha256(run_dir, 3) == weights_sha256(run_dir, 2)
    assert weights_sha256(run_dir, 4) != weights_sha256(run_dir, 3)
    rows = series(run_dir)
    assert rows[3]["beta/next"] == rows[3]["beta/applied"]
    assert rows[3]["beta/action"] == 0
    assert events(run_dir, "step.completed")[2].data["beta"]["nonfinite_skips"] == 1
    assert outcome(run_dir).status == "succeeded"


def test_a_completion_that_could_not_be_graded_leaves_the_others_training(
    job: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """https://github.com/huggingface/trl/issues/4501: one missing grade costs that completion, not the step."""
    import grpo_engine.collect as collect_module

    real = collect_module.grade

    def grade(learner: Learner, rollout: Rollout) -> list[str]:
        real(learner, rollout)
        rollout.groups[0].completions[0].reward = math.nan
        return ["the grader gave no answer within 10 s"]

    monkeypatch.setattr(collect_module, "grade", grade)
    run_dir = train(job, f"one-missing-{tmp_path.name}", make_spec(job, checkpoints={"every": 1}, limits={"num_steps": 2}))
    assert not events(run_dir, "step.quarantined")
    assert weights_sha256(run_dir, 2) != weights_sha256(run_dir, 1)
    rows = series(run_dir)
    assert 0 < rows[1]["grader/failed_frac"] < 1
    assert all(math.isfinite(value) for value in rows[1].values())
    assert len(events(run_dir, "grader.failed")) == 2


def test_abort_ends_the_run_as_diverged_with_clean_weights(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    break_gradients(monkeypatch, {2})
    run_dir = make_run(job, "abort", make_spec(job, optimizer={"on_nonfinite": "abort"}))
    assert run(run_dir) == 87
    assert (outcome(run_dir).reason, outcome(run_dir).retryable, outcome(run_dir).last_step) == ("nonfinite", False, 2)


def test_a_grader_that_never_answers_ends_the_run_and_says_why(job: Path) -> None:
    run_dir = train(job, "no-grades", make_spec(job, grader=BROKEN_GRADER))
    assert outcome(run_dir).reason == "grader"
    assert "no_such_column" in outcome(run_dir).message
    failed = events(run_dir, "grader.failed")
    assert [event.step for event in failed] == [1, 2, 3]
    assert failed[0].data["count"] == 12
    assert series(run_dir)[1]["grader/failed_frac"] == 1.0
    assert "reward/mean" not in series(run_dir)[1]


def test_parts_of_a_multi_grader_are_reported_by_name(job: Path) -> None:
    grader = {
        "type": "multi",
        "graders": {
            "small": {"type": "regex", "pattern": "^[0-4]"},
            "exact": {"type": "string_check", "reference": "{{item.reference_answer}}"},
        },
        "weights": {"small": 0.3, "exact": 0.7},
    }
    row = series(train(job, "parts", make_spec(job, grader=grader, limits={"num_steps": 1})))[1]
    assert row["reward/mean"] == pytest.approx(0.3 * row["reward/grader/small"] + 0.7 * row["reward/grader/exact"])


@pytest.mark.parametrize(
    "changed",
    [
        {"loss": {"mask_truncated": True}},
        {"loss": {"zero_std_groups": "drop_all"}},
        {"loss": {"scale_rewards": "none"}},
        {"loss": {"aggregation": "token_mean"}},
        {"kl": {"aggregation": "seq_sum"}},
        {"kl": {"direction": "ref_policy"}},
        {"kl": {"grad": "naive"}},
        {"optimizer": {"weight_decay": 0.5}},
        {"optimizer": {"max_grad_norm": 0.01, "betas": [0.5, 0.9]}},
        {"optimizer": {"lr_schedule": "linear"}},
        {"sampling": {"temperature": 0.7}},
        {"sampling": {"top_p": 0.6}},
        {"data": {"shuffle": False}},
        {"data": {"system_prompt": "1"}},
        {"resources": {"precision": "bf16"}},
    ],
    ids=lambda changed: str(changed),
)
def test_each_accepted_setting_changes_the_weights(job: Path, changed: dict[str, Any], tmp_path: Path) -> None:
    base = {"beta": 0.5, "limits": {"num_steps": 4}}
    plain = job / "attempts" / "settings-base"
    if not plain.exists():
        train(job, "settings-base", make_spec(job, **base))
    other = train(job, f"settings-{tmp_path.name}", make_spec(job, **base, **changed))
    assert outcome(other).status == "succeeded"
    assert weights_sha256(other, 4) != weights_sha256(plain, 4)


def test_activation_checkpointing_changes_memory_and_nothing_else(job: Path) -> None:
    runs = [
        train(job, f"activation-{is_on}", make_spec(job, resources={"activation_checkpointing": is_on}, limits={"num_steps": 2}))
        for is_on in (False, True)
    ]
    assert outcome(runs[1]).status == "succeeded"
    for name, value in numbers(series(runs[0])).items():
        assert numbers(series(runs[1]))[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_measuring_more_does_not_change_the_training(job: Path) -> None:
    def grpo(telemetry: dict[str, Any]) -> dict[str, Any]:
        return {"beta": 0.5, "telemetry": telemetry, "limits": {"num_steps": 4}}

    plain = train(job, "measure-plain", make_spec(job, **grpo({})))
    more = train(job, "measure-more", make_spec(job, **grpo({"exact_kl": True, "kl_details_every": 2})))
    assert weights_sha256(plain, 4) == weights_sha256(more, 4)
    rows = series(more)
    assert rows[1]["kl/ref/exact/max"] == 0.0
    assert rows[4]["kl/ref/exact/mean"] == pytest.approx(rows[4]["kl/ref/k3/mean"], rel=0.5)
    details = {event.step: event.data.get("kl") for event in events(more, "step.completed")}
    assert [step for step, detail in details.items() if detail is not None] == [2, 4]
    detail = details[4]
    assert sum(detail["by_position"]["count"]) == round(12 * rows[4]["completion/length_mean"])
    assert detail["top_tokens"][0]["kl"] == pytest.approx(rows[4]["kl/ref/k3/token_max"])
    weighted = sum(m * c for m, c in zip(detail["by_position"]["mean"], detail["by_position"]["count"], strict=True) if c)
    assert weighted / sum(detail["by_position"]["count"]) == pytest.approx(rows[4]["kl/ref/k3/mean"])
    assert len(detail["top_prompts"]) == 3


def test_the_two_gradients_are_measured_apart_and_add_up(job: Path) -> None:
    spec = {"beta": 0.5, "limits": {"num_steps": 4}}
    plain = series(train(job, "split-plain", make_spec(job, **spec)))
    split = series(train(job, "split", make_spec(job, **spec, telemetry={"gradient_split_every": 2})))
    assert [step for step, metrics in split.items() if "grad_norm/kl" in metrics] == [2, 4]
    row = split[2]
    a, b, cosine = row["grad_norm/policy"], row["grad_norm/kl"], row["grad_cosine/policy_kl"]
    assert a > 0
    assert b > 0
    assert math.sqrt(a * a + b * b + 2 * a * b * cosine) == pytest.approx(row["grad_norm/total"], rel=1e-4)
    for name, value in plain[2].items():
        assert split[2][name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize(
    ("grpo", "words"),
    [
        ({"beta": 0, "telemetry": {"exact_kl": True}}, "holds no reference"),
        ({"beta": 0, "kl": {"monitor": True}, "telemetry": {"gradient_split_every": 1}}, "needs a KL term"),
    ],
)
def test_a_measurement_that_cannot_be_made_is_refused(job: Path, grpo: dict[str, Any], words: str, tmp_path: Path) -> None:
    run_dir = train(job, f"unmeasurable-{tmp_path.name}", make_spec(job, **grpo))
    assert outcome(run_dir).reason == "config_error"
    assert words in outcome(run_dir).message
