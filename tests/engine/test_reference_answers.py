"""The reference's own answers: drawn with the completions' random numbers, kept beside them, and without any trace in the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_engine.__main__ import read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.rollout import KeptCompletion
from grpo_engine.device import Device
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.policy import load_policy_folder
from grpo_engine.rollout import sample_groups
from grpo_engine.silent_log import SilentLog
from grpo_engine.train import train as steps_of
from jobs.rollouts import read_rollouts
from tests.engine.runs import events, make_job, make_run, make_spec, outcome, series, train, weights_sha256
from tests.engine.test_ranks import together

ASKED: dict[str, Any] = {"rollouts_reference_every": 1}
LORA: dict[str, Any] = {"adapter": {"type": "lora", "rank": 4}, "optimizer": {"learning_rate": 0.05, "warmup_steps": 0}}
RARE = {"type": "regex", "pattern": "^[0-1]"}
"""Right now and then, so that with dynamic sampling groups are drawn anew."""
CASES: dict[str, dict[str, Any]] = {
    "all weights": {},
    "an adapter": LORA,
    "dynamic sampling": {"grader": RARE, "loss": {"dynamic_sampling": True}},
    "KL monitored at beta 0": {"beta": 0, "kl": {"monitor": True}},
    "bf16": {"resources": {"precision": "bf16", "device": "cpu"}},
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def spec_of(job: Path, **changes: Any) -> dict[str, Any]:
    return make_spec(job, **{"limits": {"num_steps": 3}, "telemetry": ASKED, **changes})


def page(run_dir: Path, step: int) -> list[KeptCompletion]:
    return read_rollouts(run_dir / "rollouts" / f"step-{step:06d}.jsonl.zst", limit=1000)[0]


def texts(run_dir: Path, step: int) -> list[str]:
    return [one.reference.completion for one in page(run_dir, step) if one.reference is not None]


@pytest.mark.parametrize("name", CASES)
def test_every_completion_has_its_counterpart_and_training_is_bit_for_bit_the_same(job: Path, name: str) -> None:
    folder = name.replace(" ", "-")
    asked = train(job, f"{folder}-asked", spec_of(job, **CASES[name]))
    plain = train(job, f"{folder}-plain", spec_of(job, **CASES[name], telemetry={"rollouts_reference_every": None}))
    assert outcome(asked).status == "succeeded", outcome(asked).message
    assert series(asked) == series(plain)
    assert weights_sha256(asked, 3) == weights_sha256(plain, 3)
    if name == "dynamic sampling":
        assert series(asked)[1]["groups/resample_rounds"] > 0, "some of the groups were drawn later"
    for step in (1, 2, 3):
        found = page(asked, step)
        assert [one.completion for one in found] == [one.completion for one in page(plain, step)]
        assert all(one.reference is None for one in page(plain, step))
        for one in found:
            assert one.reference is not None
            assert one.reference.num_same_tokens <= min(one.num_tokens, one.reference.num_tokens)
            is_same = one.reference.num_same_tokens == one.num_tokens == one.reference.num_tokens
            if is_same or step == 1:
                assert (one.reference.completion, one.reference.is_truncated) == (one.completion, one.is_truncated)
                assert is_same, "at step 1 the policy is the reference"
    assert any(one.reference and one.reference.completion != one.completion for step in (2, 3) for one in page(asked, step))


@pytest.mark.parametrize("more", [{}, LORA], ids=["all weights", "an adapter"])
@pytest.mark.parametrize("is_branched", [True, False], ids=["branched", "plain forward"])
def test_they_are_what_the_base_model_answers(job: Path, tmp_path: Path, more: dict[str, Any], is_branched: bool) -> None:
    """The oracle is the base model, loaded anew, asked the same prompts with the same numbers."""
    run_dir = make_run(job, tmp_path.name, spec_of(job, **more, limits={"num_steps": 2}))
    log = EventLog(run_dir / "events.jsonl", 1)
    with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log) as learner:
        if not is_branched:
            learner.disable_branching("to try the plain forward")
        results = list(steps_of(learner, Keeper(run_dir, learner, log), log))
        base = load_policy_folder(job / "model", Device(torch.device("cpu"), torch.float32))
        base.network.is_branched = is_branched
        for result in results:
            sampling, groups = learner.grpo.sampling, result.rollout.groups
            prompts = [group.prompt for group in groups]
            expected = sample_groups(base, prompts, sampling.group_size, sampling, learner.seed, result.step)
            assert texts(run_dir, result.step) == [answer.text for group in expected for answer in group.completions]
    log.close()
    assert any(one.reference and one.reference.completion != one.completion for one in page(run_dir, 2))


def test_only_the_steps_that_are_kept_and_asked_for_cost_anything(job: Path) -> None:
    run_dir = train(job, "few", spec_of(job, limits={"num_steps": 6}, telemetry={"rollouts_every": 2, "rollouts_reference_every": 3}))
    answered = [step for step in (2, 4, 6) if all(one.reference for one in page(run_dir, step))]
    timed = [event.step for event in events(run_dir, "step.completed") if "time/reference_answers_s" in event.data["metrics"]]
    assert answered == timed == [6]


def test_two_ranks_keep_what_one_process_keeps(job: Path) -> None:
    spec = spec_of(job, limits={"num_steps": 2})
    alone = train(job, "alone", spec)
    run_dir = make_run(job, "two-ranks", spec)

    def one(ranks: Any) -> None:
        log = EventLog(run_dir / "events.jsonl", 1) if ranks.is_first else SilentLog(1)
        with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log, ranks) as learner:
            for _ in steps_of(learner, Keeper(run_dir, learner, log), log):
                pass

    together(2, one)
    for step in (1, 2):
        assert texts(run_dir, step) == texts(alone, step)
        assert len(texts(alone, step)) == 12


def test_a_resumed_run_keeps_the_same_answers(job: Path) -> None:
    spec = spec_of(job, reference={"sync_every": 2}, checkpoints={"resume_every": 2}, limits={"num_steps": 3})
    paused = train(job, "before", {**spec, "method": {"type": "grpo", "grpo": {**spec["method"]["grpo"], "limits": {"num_steps": 2}}}})
    whole = train(job, "whole", spec)
    again = train(job, "again", spec, epoch=2, resume_from=f"{paused}/checkpoints/resume-000002")
    assert outcome(again).status == "succeeded", outcome(again).message
    assert texts(again, 3) == texts(whole, 3)
    assert series(again)[3] == series(whole)[3]


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"beta": 0}, "method.grpo.telemetry.rollouts_reference_every", "set kl.monitor to true"),
        ({"beta": 0, **LORA}, "method.grpo.telemetry.rollouts_reference_every", "set kl.monitor to true"),
        ({"telemetry": {**ASKED, "rollouts_every": None}}, "method.grpo.telemetry.rollouts_reference_every", "set rollouts_every"),
        ({"telemetry": {**ASKED, "rollouts_redact": True}}, "method.grpo.telemetry.rollouts_reference_every", "keeps no text"),
    ],
)
def test_what_cannot_be_asked_or_kept_is_refused_by_name(job: Path, changes: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(InvalidRequest, match=words) as refused:
        resolve_spec(spec_of(job, **changes))
    assert refused.value.param == param
