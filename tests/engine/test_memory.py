"""Memory runs out: once the step goes on with a smaller split and the same numbers, then the end says how much and what to change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from grpo_engine import rollout, update
from grpo_engine.__main__ import failure
from grpo_engine.logprob import MicroBatch, TokenStats, rollout_stats, token_stats
from grpo_engine.memory import SETTINGS, OutOfMemory, is_out_of_memory, requested_bytes, token_budget
from tests.engine.runs import events, make_job, make_spec, outcome, series, train, weights_sha256

BUDGET = 150
"""A step of the job below takes about 200 tokens, a row about 40."""
HALF = BUDGET // 2
WANTED = 123_456_789


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def spec(job: Path, tokens: int, **grpo: Any) -> dict[str, Any]:
    return make_spec(job, resources={"micro_batch_tokens": tokens}, **{"limits": {"num_steps": 3}, **grpo})


class Allocator:
    """Refuses any forward of more than `limit` tokens, as torch's CPU allocator words it, but for the first `spared` of them."""

    def __init__(self, limit: int, where: str, spared: int = 0) -> None:
        self.limit, self.where, self.spared, self.refused = limit, where, spared, 0

    def check(self, where: str, batch: MicroBatch) -> None:
        prompts = {prompt.row: len(prompt.token_ids) for prompt, _ in batch.rows}
        tokens = sum(prompts.values()) + sum(len(completion.token_ids) for _, completion in batch.rows)
        if where != self.where or tokens <= self.limit:
            return
        if self.spared > 0:
            self.spared -= 1
            return
        self.refused += 1
        raise RuntimeError(
            f"[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate {WANTED} bytes. Error code 12"
        )


def inject(monkeypatch: pytest.MonkeyPatch, allocator: Allocator) -> None:
    """Put the allocator into the two forwards of a step: the reference's (`reference`) and the policy's (`update`)."""

    def of_update(network: Any, batch: MicroBatch, **options: Any) -> TokenStats:
        stats = token_stats(network, batch, **options)
        allocator.check("update", batch)
        return stats

    def of_reference(network: Any, batches: list[MicroBatch], **options: Any) -> Any:
        for batch in batches:
            allocator.check("reference", batch)
        return rollout_stats(network, batches, **options)

    monkeypatch.setattr(update, "token_stats", of_update)
    monkeypatch.setattr(update, "rollout_stats", of_reference)


@pytest.mark.parametrize("where", ["reference", "update"])
@pytest.mark.parametrize("kl", [{}, {"estimator": "exact"}])
def test_a_step_that_does_not_fit_is_split_once_and_keeps_its_numbers(
    job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, kl: dict[str, Any]
) -> None:
    small = train(job, f"small-{tmp_path.name}", spec(job, HALF, kl=kl))
    assert not events(small, "memory.reduced")
    inject(monkeypatch, allocator := Allocator(HALF, where))
    run_dir = train(job, f"split-{tmp_path.name}", spec(job, BUDGET, kl=kl))
    assert allocator.refused == 1
    (event,) = events(run_dir, "memory.reduced")
    assert (event.step, event.level, event.data) == (1, "warn", {"micro_batch_tokens": HALF})
    assert f"{WANTED:,} bytes could not be had" in event.message
    assert "75 tokens instead of 150" in event.message
    assert outcome(run_dir).status == "succeeded"
    assert series(run_dir)[1]["kl/ref/k3/max"] == 0.0
    assert series(run_dir) == series(small), "as if the job had asked for the smaller budget"
    assert weights_sha256(run_dir, 3) == weights_sha256(small, 3)


def test_the_second_time_is_the_end_and_says_what_to_change(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    inject(monkeypatch, allocator := Allocator(1, "update"))
    run_dir = train(job, "hopeless", spec(job, BUDGET))
    verdict = outcome(run_dir)
    assert allocator.refused == 2
    assert (verdict.status, verdict.reason, verdict.last_step) == ("failed", "out_of_memory", 0)
    assert verdict.param == "method.grpo.resources.micro_batch_tokens"
    assert f"{WANTED:,} bytes" in verdict.message
    assert "micro-batches of 75 tokens, halved before" in verdict.message
    assert SETTINGS in verdict.message


def test_a_second_update_of_a_step_may_run_out_too(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first update is in the weights already and is not done twice."""
    twice = spec(job, BUDGET, loss={"num_iterations": 2}, limits={"num_steps": 1})
    inject(monkeypatch, probe := Allocator(HALF, "update", spared=1000))
    plain = train(job, "second-plain", twice)
    of_one_update, rest = divmod(1000 - probe.spared, 2)
    assert of_one_update > 0
    assert rest == 0
    inject(monkeypatch, allocator := Allocator(HALF, "update", spared=of_one_update))
    run_dir = train(job, "second", twice)
    assert allocator.refused == 1
    assert "in update 2 of a step" in events(run_dir, "memory.reduced")[0].message
    first, again = series(plain)[1], series(run_dir)[1]
    assert again["grad_norm/total"] == first["grad_norm/total"]
    for name, value in first.items():
        assert again[name] == pytest.approx(value, rel=1e-3, abs=1e-5), name


def test_a_resumed_run_keeps_the_smaller_split(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        inject(patch, Allocator(HALF, "update"))
        whole = train(job, "halved-whole", spec(job, BUDGET, limits={"num_steps": 6}))
        first = train(job, "halved-first", spec(job, BUDGET))
    rest = train(job, "halved-rest", spec(job, BUDGET, limits={"num_steps": 6}), epoch=2, resume_from=f"{first}/checkpoints/resume-000003")
    assert [len(events(run_dir, "memory.reduced")) for run_dir in (whole, first, rest)] == [1, 1, 0]
    assert series(rest) == {step: series(whole)[step] for step in (4, 5, 6)}


def test_what_the_allocators_say_is_understood() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)
    assert requested_bytes(caught.value) == 2**58
    gpu = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 8 GiB")
    assert is_out_of_memory(gpu)
    assert requested_bytes(gpu) == 3 * 2**29
    assert requested_bytes(MemoryError()) is None
    assert not is_out_of_memory(RuntimeError("shapes differ"))
    verdict = failure(gpu, None)
    assert verdict.reason == "out_of_memory"
    assert f"{3 * 2**29:,} bytes" in verdict.message
    assert SETTINGS in verdict.message


def test_a_budget_halves_once_and_lets_other_errors_through() -> None:
    budget, cleaned = token_budget(64), []

    def work() -> int:
        if budget.size > 32:
            raise MemoryError
        return budget.size

    assert budget.fit(work, "a test", lambda: cleaned.append(1)) == 32
    assert cleaned == [1]
    assert "32 tokens instead of 64" in (budget.take_news() or "")
    assert budget.take_news() is None
    budget.load({"size": 64, "was_halved": False})
    assert budget.was_halved, "a rollback does not undo it"

    def always() -> None:
        raise MemoryError

    with pytest.raises(OutOfMemory, match="halved before"):
        budget.fit(always, "a test")

    def other() -> None:
        raise RuntimeError("shapes differ")

    with pytest.raises(RuntimeError, match="shapes differ"):
        token_budget(64).fit(other, "a test")


def refuse_rows(monkeypatch: pytest.MonkeyPatch, limit: int) -> list[int]:
    """A sampler that runs out of memory beyond `limit` rows; the list gets the number of rows of each call."""
    asked: list[int] = []
    sample = rollout._sample

    def limited(policy: Any, prompts: Any, numbers: range, *rest: Any) -> Any:
        asked.append(rows := len(prompts) * len(numbers))
        if rows > limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.50 GiB.")
        return sample(policy, prompts, numbers, *rest)

    monkeypatch.setattr(rollout, "_sample", limited)
    return asked


@pytest.mark.parametrize("prompts", [2, 1])
def test_sampling_that_does_not_fit_is_done_in_halves(job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts: int) -> None:
    """Whole groups where they fit, pieces of one where they do not; every completion has its own random stream, so nothing else changes."""
    sampling = {"prompts_per_step": prompts, "group_size": 4, "max_completion_tokens": 8}
    held_out = {"every": 3, "grader": {"type": "regex", "pattern": "[0-4]"}}
    changed = {**spec(job, BUDGET, sampling=sampling, evaluation=held_out), "validation_file": "file-rows"}
    held_out_rows = {"validation_file": str(job / "rows.jsonl")}
    whole = train(job, f"at-once-{tmp_path.name}", changed, **held_out_rows)
    asked = refuse_rows(monkeypatch, rows := 2 * prompts)
    run_dir = train(job, f"in-halves-{tmp_path.name}", changed, **held_out_rows)
    assert asked[:3] == [2 * rows, rows, rows]
    assert max(asked[1:]) <= rows
    (event,) = events(run_dir, "memory.reduced")
    assert (event.step, event.level, event.data) == (1, "warn", {"completions_at_once": rows})
    assert f"{3 * 2**29:,} bytes could not be had" in event.message
    for step, metrics in series(whole).items():
        for name, value in metrics.items():
            assert series(run_dir)[step][name] == pytest.approx(value, rel=1e-3, abs=1e-5), (step, name)


def test_sampling_that_does_not_fit_in_halves_ends_the_run(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_rows(monkeypatch, 1)
    verdict = outcome(train(job, "no-room", spec(job, BUDGET)))
    assert (verdict.status, verdict.reason, verdict.param) == ("failed", "out_of_memory", "method.grpo.sampling.group_size")
    assert "in sampling, with" in verdict.message
    assert SETTINGS in verdict.message


def test_a_resumed_run_samples_in_halves_again(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sampling = {"prompts_per_step": 2, "group_size": 4, "max_completion_tokens": 8}
    with monkeypatch.context() as patch:
        refuse_rows(patch, 4)
        first = train(job, "halves-first", spec(job, BUDGET, sampling=sampling))
    longer = spec(job, BUDGET, sampling=sampling, limits={"num_steps": 4})
    asked = refuse_rows(monkeypatch, 4)
    rest = train(job, "halves-rest", longer, epoch=2, resume_from=f"{first}/checkpoints/resume-000003")
    assert asked == [4, 4]
    assert not events(rest, "memory.reduced")
