"""The processes that share one job, and the few acts they do together.

Every rank runs the whole loop. It samples and differentiates its own share of a step's groups; everything that is decided
(advantages, beta, detectors, dynamic sampling, guardrails) is computed by every rank from the same gathered numbers, and what
only one process can know (a command, the clock, a grade, whether a file was written) is known by the first and told to the
others. A job of one process has the same object with every act left out. Not here: who starts the processes
(rank_processes.py), and weights that are divided over the ranks (sharding.py).
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore
from torch.distributed import ProcessGroupGloo
from torch.distributed.device_mesh import DeviceMesh

from grpo_engine.contract.resources import Resources
from grpo_engine.device import choose_device, share_threads
from grpo_engine.outcome import RunFailure
from grpo_engine.rank_processes import LOOPBACK, LOST, Seat

Item = TypeVar("Item")
MEETING = timedelta(minutes=10)
"""How long the first may wait for the last to start: a loaded host is slow to load torch, and that is no silence."""
BOUND_GLOO = "grpo_gloo"
"""Name under which torch knows gloo groups that are bound to an interface of our choice."""
BUCKET_BYTES = 64 * 2**20
"""Gradients travel in pieces of about this size."""


class RankLost(RunFailure):
    """Another rank did not answer: it died, or it was silent for longer than `resources.rank_timeout_s`."""

    reason = LOST


@dataclass(frozen=True)
class Ranks:
    """This process among those of its job."""

    rank: int = 0
    size: int = 1
    control: Any = None
    """Process group for objects and tensors in main memory (gloo); None in a job of one process."""
    data: Any = None
    """Process group for tensors on the device: NCCL's on GPUs, otherwise `control`."""
    local: int | None = None
    """Number of this process among those of its host, which is the number of its GPU; None in a job of one process."""
    hosts: int = 1
    """Hosts the job's processes run on, as many on each."""
    mesh: Any = None
    """torch's DeviceMesh over all ranks, for weights that are divided; None where each rank holds all."""

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that speaks, writes files, listens to commands and grades."""
        return self.rank == 0

    def share_of(self, count: int) -> range:
        """This rank's part of `count` things in a row; sizes differ by one at most, and may be 0."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """The items of all ranks, in rank order."""
        if self.size == 1:
            return list(items)
        return [item for part in self._exchange(list(items)) for item in part]

    def first(self, work: Callable[[], Item]) -> Item:
        """What `work` returns on the first rank, on every rank. The others do not call it."""
        if self.size == 1:
            return work()
        content = pickle.dumps(work()) if self.is_first else b""
        length = torch.tensor([len(content)])
        _run(self.control.broadcast([length], _from_first()))
        buffer = torch.frombuffer(bytearray(content), dtype=torch.uint8) if self.is_first else torch.empty(int(length), dtype=torch.uint8)
        _run(self.control.broadcast([buffer], _from_first()))
        found: Item = pickle.loads(buffer.numpy().tobytes())
        return found

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return self.largest(int(flag)) > 0

    def largest(self, number: int) -> int:
        """The largest of the ranks' numbers."""
        if self.size == 1:
            return number
        found = torch.tensor([number])
        self._reduce(self.control, found, dist.ReduceOp.MAX)
        return int(found)

    def wait(self) -> None:
        """Go on when all ranks have come this far."""
        self.largest(0)

    def add(self, tensor: Tensor) -> None:
        """Replace a tensor by its sum over the ranks, the same bits on each."""
        if self.size > 1:
            self._reduce(self.control if tensor.device.type == "cpu" else self.data, tensor, dist.ReduceOp.SUM)

    def add_all(self, tensors: Sequence[Tensor]) -> None:
        """`add` for many tensors of one dtype and device, in buckets."""
        if self.size == 1:
            return
        bucket: list[Tensor] = []
        for tensor in tensors:
            if bucket and sum(part.nbytes for part in bucket) + tensor.nbytes > BUCKET_BYTES:
                self._add_bucket(bucket)
                bucket = []
            bucket.append(tensor)
        if bucket:
            self._add_bucket(bucket)

    def _add_bucket(self, tensors: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        self.add(flat)
        for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def to_first(self, tensor: Tensor) -> list[Tensor] | None:
        """Everybody's tensor, all of one shape and dtype, in rank order: on the first rank; None on the others."""
        found = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_first else []
        group = self.control if tensor.device.type == "cpu" else self.data
        _run(group.gather([found] if found else [], [tensor.contiguous()], _to_first()))
        return found or None

    def _exchange(self, item: Any) -> list[Any]:
        """Everybody's object, in rank order."""
        content = torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)
        lengths = torch.zeros(self.size, dtype=torch.int64)
        lengths[self.rank] = len(content)
        self.add(lengths)
        padded = torch.zeros(int(lengths.max()), dtype=torch.uint8)
        padded[: len(content)] = content
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        _run(self.control.allgather([parts], [padded]))
        return [pickle.loads(part[:length].numpy().tobytes()) for part, length in zip(parts, lengths.tolist(), strict=True)]

    @staticmethod
    def _reduce(group: Any, tensor: Tensor, operation: Any) -> None:
        options = dist.AllreduceOptions()
        options.reduceOp = operation
        _run(group.allreduce([tensor], options))


ALONE = Ranks()


def _from_first() -> Any:
    options = dist.BroadcastOptions()
    options.rootRank = 0
    return options


def _to_first() -> Any:
    options = dist.GatherOptions()
    options.rootRank = 0
    return options


def _run(work: Any) -> None:
    work.wait()


def join(resources: Resources, seat: Seat) -> Ranks:
    """Meet the other ranks of the job; on one host everything is bound to loopback. Blocks until all are there.

    Raises RankLost when they do not come within `MEETING` (or `resources.rank_timeout_s`, if that is longer), InvalidRequest when
    there are not enough GPUs.
    """
    device = choose_device(resources, seat.local, seat.hosts).device
    timeout = timedelta(seconds=resources.rank_timeout_s)
    group = partial(gloo_group, interface=seat.interface)
    try:
        store = _store(seat, max(timeout, MEETING))
        store.set(f"here-{seat.rank}", "1")
        store.wait([f"here-{rank}" for rank in range(seat.size)])
        control = data = group(PrefixStore("control", store), seat.rank, seat.size, timeout)
        if device.type == "cuda":
            torch.cuda.set_device(device)
            data = _world("nccl", store, seat, timeout)
        else:
            share_threads(seat.here)
        mesh = _mesh(store, seat, timeout, device, group) if resources.strategy == "fsdp" else None
    except RuntimeError as error:
        raise RankLost(f"the ranks could not meet: {error}") from error
    return Ranks(seat.rank, seat.size, control, data, seat.local, seat.hosts, mesh)


def _store(seat: Seat, timeout: timedelta) -> Store:
    """Where the ranks find each other. Over several hosts the first rank serves it on all its addresses, to anybody."""
    if seat.hosts == 1:
        store: Store = FileStore(seat.meet, seat.size)
        store.set_timeout(timeout)
        return store
    host, port = seat.meet.rsplit(":", 1)
    return TCPStore(host.strip("[]"), int(port), seat.size, seat.rank == 0, timeout, wait_for_workers=False)


def _world(backend: str, store: Store, seat: Seat, timeout: timedelta) -> Any:
    """torch's default group, which NCCL and FSDP need."""
    world = PrefixStore("world", store)
    dist.init_process_group(backend, store=world, rank=seat.rank, world_size=seat.size, timeout=timeout)
    return dist.group.WORLD


def _mesh(store: Store, seat: Seat, timeout: timedelta, device: torch.device, group: Callable[..., Any]) -> DeviceMesh:
    """All ranks in a row. On the CPU its group is made here as well, so that it is bound to the same interface as the others."""
    if device.type == "cpu":
        dist.Backend.register_backend(BOUND_GLOO, group, devices=["cpu"])
        _world(f"cpu:{BOUND_GLOO}", store, seat, timeout)
    world = dist.group.WORLD
    assert world is not None, "the default group was just made"
    return DeviceMesh.from_group(world, device.type)


def gloo_group(store: Store, rank: int, size: int, timeout: timedelta, interface: str = LOOPBACK) -> Any:
    """A gloo group bound to one interface, given by its name or an address of it, beside torch's global default group."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    is_address = "." in interface or ":" in interface
    options._devices = [ProcessGroupGloo.create_device(**{"hostname" if is_address else "interface": interface})]
    options._timeout = timeout
    store.set_timeout(timeout)
    return ProcessGroupGloo(store, rank, size, options)
