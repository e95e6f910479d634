"""Weights, gradients and optimizer state divided over real gloo processes: the same numbers as one process that holds all."""

from __future__ import annotations

import json
import math
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import grpo_engine.policy
import grpo_engine.reference
from grpo_engine.__main__ import read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.contract.resources import Resources
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.memory import OutOfMemory, token_budget
from grpo_engine.ranks import Ranks
from grpo_engine.silent_log import SilentLog
from grpo_engine.train import train
from tests.engine.model_fixtures import in_float64
from tests.engine.rank_crew import in_processes
from tests.engine.runs import events, make_job, make_run, make_spec, series

STEPS = 3
SMALL = 20
"""Tokens in a micro-batch: a group has several, and ranks have different numbers of them."""
FULL = {"loss": {"scale_rewards": "batch"}, "telemetry": {"gradient_split_every": 2, "exact_kl": True}}


@dataclass
class Held:
    """What one rank had at the end of a run."""

    tokens: list[list[list[int]]]
    """Of every completion of every step."""
    weights: dict[str, Tensor]
    """Whole, on the first rank."""
    num_bytes: int
    """Of masters and optimizer state."""


def double_module(folder: Path, load: Any = grpo_engine.policy.load_module) -> PreTrainedModel:
    module: PreTrainedModel = load(folder)
    in_float64(module)
    return module


def run_to_the_end(ranks: Ranks, run_dir: Path, is_double: bool) -> Held:
    """A whole attempt as one of its ranks."""
    warnings.simplefilter("error")
    if is_double:
        for module in (grpo_engine.policy, grpo_engine.reference):
            vars(module)["load_module"] = double_module
    log = EventLog(run_dir / "events.jsonl", 1) if ranks.is_first else SilentLog(1)
    with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log, ranks) as learner:
        steps = train(learner, Keeper(run_dir, learner, log), log)
        tokens = [[completion.token_ids for _, completion in result.rollout.rows] for result in steps]
        own = [*learner.policy.masters.values()]
        own += [value for state in learner.optimizer._adamw.state.values() for value in state.values()]
        return Held(tokens, {name: value.clone() for name, value in learner.policy.weights().items()}, sum(part.nbytes for part in own))


def run_over(job: Path, size: int, *, is_double: bool = True, steps: int = STEPS, after: Path | None = None, **grpo: Any) -> list[Held]:
    """A run over so many processes; with two and more its weights are divided. Its events are in attempts/`size`, or, when it continues
    the state of another, in attempts/`size`-resumed."""
    resources = {"cpu_ranks": size, "micro_batch_tokens": SMALL, "strategy": "fsdp" if size > 1 else "ddp", **grpo.pop("resources", {})}
    spec = make_spec(job, **grpo, limits={"num_steps": steps}, resources=resources)
    more = {} if after is None else {"epoch": 2, "resume_from": str(after)}
    run_dir = make_run(job, f"{size}-resumed" if more else str(size), spec, **more)
    return in_processes(Resources.model_validate_json(json.dumps(resources)), run_to_the_end, run_dir, is_double)


def assert_alike(job: Path, alone: Held, divided: list[Held], limit: float, steps: int = STEPS) -> None:
    one, several = series(job / "attempts" / "1"), series(job / "attempts" / str(len(divided)))
    assert one.keys() == several.keys() == set(range(1, steps + 1))
    for step, metrics in one.items():
        assert metrics.keys() == several[step].keys()
        for name, value in metrics.items():
            assert math.isclose(several[step][name], value, rel_tol=limit, abs_tol=limit), (step, name, value, several[step][name])
    assert all(held.tokens == alone.tokens for held in divided), "the same completions, in fp64 also after updates"
    assert divided[0].weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        torch.testing.assert_close(divided[0].weights[name], weight, rtol=limit, atol=limit)


@pytest.mark.slow
def test_two_processes_with_half_of_everything_give_the_numbers_of_one(tmp_path: Path) -> None:
    """Losses, gradient norms, KL, beta and weights to 1e-9; each holds half of the masters and half of Adam's moments."""
    job = make_job(tmp_path)
    alone = run_over(job, 1, **FULL)[0]
    divided = run_over(job, 2, **FULL)
    assert_alike(job, alone, divided, 1e-9)
    one = series(job / "attempts" / "1")
    assert one[2]["grad_norm/kl"] > 0
    assert one[3]["kl/ref/k3/mean"] > 0
    for held in divided:
        assert abs(held.num_bytes / alone.num_bytes - 1 / 2) < 0.01
    assert not divided[1].weights, "only the first rank gathers"
    assert events(job / "attempts" / "2", "engine.started")[0].data["strategy"] == "fsdp"


@pytest.mark.slow
@pytest.mark.parametrize("size", [3, 4])
def test_uneven_shares_and_a_rank_without_a_group(tmp_path: Path, size: int) -> None:
    """Three groups: one each, and one rank that only takes part in the others' forwards and backwards."""
    job = make_job(tmp_path)
    alone = run_over(job, 1, **FULL)[0]
    divided = run_over(job, size, **FULL)
    assert_alike(job, alone, divided, 1e-9)
    assert max(held.num_bytes for held in divided) < alone.num_bytes * (1 / size + 0.01)


def test_where_forwards_are_acts_of_all_the_first_shortage_is_the_end() -> None:
    """The others wait in the middle of the same forward: they could not be told to halve."""
    budget = token_budget(100, is_short=lambda short: pytest.fail("no act of all may follow"))
    budget.is_final = True
    assert budget.fit(lambda: 7, "the update") == 7

    def work() -> None:
        raise MemoryError("tried to allocate 4 GiB")

    with pytest.raises(OutOfMemory, match=r"micro-batches of 100 tokens: 4,294,967,296 bytes.*micro_batch_tokens"):
        budget.fit(work, "the update")
    assert not budget.was_halved


CASES: dict[str, tuple[str, dict[str, Any], float]] = {
    "adapter": ("TINY_SHORT", {"adapter": {"type": "lora", "rank": 2}, "kl": {"estimator": "exact"}}, 1e-9),
    "penalty_in_the_reward_and_activations_recomputed": (
        "TINY_SHORT",
        {
            "kl": {"placement": "reward", "estimator": "k1"},
            "loss": {"num_iterations": 2},
            "resources": {"activation_checkpointing": True},
        },
        1e-9,
    ),
    "tied_with_a_moving_reference_that_answers": (
        "TINY_TIED",
        {
            "reference": {"sync_every": 1, "mixup_alpha": 0.5},
            "telemetry": {"rollouts_reference_every": 1, "rollouts_every": 1},
            "loss": {"dynamic_sampling": True},
        },
        1e-9,
    ),
    "gpt2": ("TINY_GPT2", {"data": {"chat_template": "none"}}, 1e-9),
    "bf16": ("TINY_SHORT", {"resources": {"precision": "bf16"}}, 1e-6),
    "bf16_adapter": ("TINY_SHORT", {"resources": {"precision": "bf16"}, "adapter": {"type": "lora", "rank": 2}}, 1e-6),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_other_settings_and_shapes(tmp_path: Path, case: str) -> None:
    kind, grpo, limit = CASES[case]
    job = make_job(tmp_path, kind)
    if kind == "TINY_GPT2":  # it has no chat template
        rows = [{"prompt": f"{a}+{b}=", "reference_answer": str(a + b)} for a in range(4) for b in range(4)]
        (job / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    is_double = "bf16" not in case
    alone = run_over(job, 1, is_double=is_double, **grpo)[0]
    divided = run_over(job, 2, is_double=is_double, **grpo)
    assert_alike(job, alone, divided, limit)
    published = [job / "attempts" / size / "checkpoints" / f"step-{STEPS:06d}" for size in ("1", "2")]
    assert sorted(path.name for path in published[0].rglob("*")) == sorted(path.name for path in published[1].rglob("*"))
    for name in ("config.json", "generation_config.json"):
        assert (published[0] / name).read_bytes() == (published[1] / name).read_bytes()


@pytest.mark.slow
def test_a_rollback_puts_every_part_back(tmp_path: Path) -> None:
    """KL is above the limit at step 2: back to step 0 with another seed, and at step 2 again the end."""
    job = make_job(tmp_path)
    rule = {"detector": "kl_out_of_control", "action": {"type": "rollback", "reseed": True, "max_count": 1}}
    tight = {"kl_out_of_control": {"kl": 1e-9, "updates": 1, "clear_after": 1}}
    alone = run_over(job, 1, guardrails=[rule], diagnostics=tight)[0]
    divided = run_over(job, 2, guardrails=[rule], diagnostics=tight)
    assert len(divided[0].tokens) == 4
    assert [event.data["to_step"] for event in events(job / "attempts" / "2", "run.rewound")] == [0]
    assert_alike(job, alone, divided, 1e-9, steps=2)


@pytest.mark.slow
def test_a_state_is_continued_by_any_number_under_either_strategy(tmp_path: Path) -> None:
    """What lies on the disk is whole: two steps by one and the third by three, or two steps by two and the third by one."""
    job = make_job(tmp_path)
    whole, part = job / "whole", job / "part"
    for directory in (whole, part):
        directory.mkdir()
        for name in ("model", "rows.jsonl"):
            (directory / name).symlink_to(job / name)
    undisturbed = run_over(whole, 1)[0]
    for size, then in ((1, 3), (2, 1)):
        run_over(part, size, steps=STEPS - 1)
        state = part / "attempts" / str(size) / "checkpoints" / f"resume-{STEPS - 1:06d}"
        continued = run_over(part, then, after=state)[0]
        assert continued.tokens == undisturbed.tokens[STEPS - 1 :]
        for name, weight in undisturbed.weights.items():
            torch.testing.assert_close(continued.weights[name], weight, rtol=1e-9, atol=1e-9)
