"""Several ranks for one job, each a thread with a gloo group of its own: the same numbers as one process."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch._C._distributed_c10d import HashStore

from grpo_engine.__main__ import read_dispatch
from grpo_engine.assemble import assemble
from grpo_engine.events import EventLog
from grpo_engine.keeper import Keeper
from grpo_engine.ranks import ALONE, Ranks, gloo_group
from grpo_engine.silent_log import SilentLog
from grpo_engine.train import train as steps_of
from tests.engine.model_fixtures import in_float64
from tests.engine.runs import DEADLINE_S, events, make_job, make_run, make_spec, series

Found = TypeVar("Found")
ROUNDING = 1e-5
"""fp32 gradients are added in another order; two AdamW steps later metrics differ by about this."""


def together(size: int, work: Callable[[Ranks], Found]) -> list[Found]:
    """Run `work` once a rank, each in a thread with a gloo group of its own; results in rank order."""
    if size == 1:
        return [work(ALONE)]
    store, found, failed = HashStore(), {}, []

    def one(rank: int) -> None:
        try:
            group = gloo_group(store, rank, size, timedelta(seconds=60))
            found[rank] = work(Ranks(rank, size, group, group, rank))
        except BaseException as error:  # noqa: BLE001  reported by the main thread
            failed.append(error)

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
    if failed:
        raise failed[0]
    return [found[rank] for rank in range(size)]


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("ranks"))


def run_together(job: Path, name: str, size: int, spec: dict[str, Any], is_double: bool = False) -> list[dict[str, torch.Tensor]]:
    """A whole run over `size` ranks; returns the final weights of each."""
    run_dir = make_run(job, name, spec)

    def one(ranks: Ranks) -> dict[str, torch.Tensor]:
        log = EventLog(run_dir / "events.jsonl", 1) if ranks.is_first else SilentLog(1)
        with assemble(read_dispatch(run_dir / "dispatch.json"), run_dir, log, ranks) as learner:
            if is_double:
                assert learner.reference is not None
                for module in (learner.policy.model, learner.reference.model):
                    in_float64(module)
            for _ in steps_of(learner, Keeper(run_dir, learner, log), log):
                pass
            return {name: value.clone() for name, value in learner.policy.weights().items()}

    return together(size, one)


def test_acts_of_the_group() -> None:
    def acts(ranks: Ranks) -> tuple[Any, ...]:
        total = torch.tensor([1.0 + ranks.rank, 10.0])
        ranks.add(total)
        parts = [torch.full((3,), float(ranks.rank)), torch.ones(2, 2)]
        ranks.add_all(parts)
        return (
            list(ranks.share_of(5)),
            ranks.gather([ranks.rank] * ranks.rank),
            ranks.first(lambda: {"by": ranks.rank}),
            ranks.any(ranks.rank == 2),
            total.tolist(),
            [part.tolist() for part in parts],
        )

    found = together(3, acts)
    assert [one[0] for one in found] == [[0], [1, 2], [3, 4]]
    shared = ([1, 2, 2], {"by": 0}, True, [6.0, 30.0], [[3.0] * 3, [[3.0] * 2] * 2])
    assert [one[1:] for one in found] == [shared] * 3
    alone = torch.ones(2)
    ALONE.add(alone)
    assert (ALONE.gather([1]), ALONE.first(lambda: 2), ALONE.any(False), alone.tolist()) == ([1], 2, False, [1.0, 1.0])


@pytest.mark.parametrize("size", [2, 4])
def test_in_fp64_any_number_of_ranks_gives_the_same_numbers(job: Path, size: int) -> None:
    """3 groups over 1, 2 and 4 ranks: uneven shares, and one rank without a group. KL, beta, loss and gradient to 1e-9."""
    grpo = {"limits": {"num_steps": 3}, "loss": {"scale_rewards": "batch"}, "telemetry": {"gradient_split_every": 2, "exact_kl": True}}
    spec = make_spec(job, **grpo)
    if not (job / "attempts" / "alone").exists():
        run_together(job, "alone", 1, spec, is_double=True)
    weights = run_together(job, f"of-{size}", size, spec, is_double=True)
    assert all(torch.equal(weights[0][name], other[name]) for other in weights for name in other)
    one, several = series(job / "attempts" / "alone"), series(job / "attempts" / f"of-{size}")
    assert one.keys() == several.keys() == {1, 2, 3}
    for step, metrics in one.items():
        assert metrics.keys() == several[step].keys()
        for name, value in metrics.items():
            assert math.isclose(several[step][name], value, rel_tol=1e-9, abs_tol=1e-9), (step, name, value, several[step][name])
    assert one[2]["grad_norm/kl"] > 0
    assert one[3]["kl/ref/k3/mean"] > 0


@pytest.mark.parametrize("more", [{"adapter": {"type": "lora", "rank": 2}}, {"loss": {"dynamic_sampling": True}}])
def test_other_settings_give_the_same_series(job: Path, more: dict[str, Any]) -> None:
    spec = make_spec(job, limits={"num_steps": 2}, **more)
    name = next(iter(more))
    run_together(job, f"{name}-1", 1, spec)
    run_together(job, f"{name}-3", 3, spec)
    one, three = series(job / "attempts" / f"{name}-1"), series(job / "attempts" / f"{name}-3")
    for step, metrics in one.items():
        for key, value in metrics.items():
            assert math.isclose(three[step][key], value, rel_tol=1e-3, abs_tol=ROUNDING), (step, key, value, three[step][key])


def test_memory_that_runs_out_on_one_rank_halves_all(job: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import grpo_engine.update as update_module

    real = update_module.forward_backward
    failed: list[bool] = []

    def fails_once(learner: Any, *args: Any, **more: Any) -> None:
        if learner.ranks.rank == 1 and not failed:
            failed.append(True)
            raise MemoryError("tried to allocate 4 GiB")
        real(learner, *args, **more)

    monkeypatch.setattr(update_module, "forward_backward", fails_once)
    run_together(job, "memory", 2, make_spec(job, limits={"num_steps": 2}))
    (reduced,) = events(job / "attempts" / "memory", "memory.reduced")
    assert "another rank" in reduced.message
    assert sorted(series(job / "attempts" / "memory")) == [1, 2]
