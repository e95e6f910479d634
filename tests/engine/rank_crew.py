"""Real processes that join as the ranks of a job: forked from a server that has loaded torch once."""

from __future__ import annotations

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch

from grpo_engine.contract.resources import Resources
from grpo_engine.rank_processes import Seat
from grpo_engine.ranks import ALONE, Ranks, join

Found = TypeVar("Found")
DEADLINE_S = 150
SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["grpo_engine.assemble", "grpo_engine.train", "tests.engine.model_fixtures"])


def in_processes(resources: Resources, work: Callable[..., Found], *args: Any) -> list[Found]:
    """`work(ranks, *args)` once a rank; results in rank order. One rank is `ALONE`. Both must be importable and be pickled."""
    with tempfile.TemporaryDirectory() as folder:
        pairs = [SERVER.Pipe() for _ in range(resources.num_ranks)]
        crew = [
            SERVER.Process(target=_rank, args=(there, resources, Seat(rank, len(pairs), f"{folder}/meet"), work, args))
            for rank, (_, there) in enumerate(pairs)
        ]
        for process in crew:
            process.start()
        try:
            for rank, (here, _) in enumerate(pairs):
                assert here.poll(DEADLINE_S), f"rank {rank} says nothing"
            answers = [here.recv() for here, _ in pairs]
        finally:
            for process in crew:
                process.kill()
                process.join()
    troubles = [answer for is_good, answer in answers if not is_good]
    assert not troubles, troubles[0]
    return [answer for _, answer in answers]


def _rank(there: Connection, resources: Resources, seat: Seat, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    try:
        ranks: Ranks = ALONE if seat.size == 1 else join(resources, seat)
        there.send((True, work(ranks, *args)))
    except BaseException:  # noqa: BLE001  reported by the test
        there.send((False, f"rank {seat.rank}:\n{traceback.format_exc()}"))
    there.poll(None)  # the others may still need this one's socket; the test ends it
