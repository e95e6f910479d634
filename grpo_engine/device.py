"""Where and how a job computes: device, compute dtype, seeds and threads.

Mixed precision here means fp32 master weights beside a bf16 module that does the forward and backward pass. It is never
autocast, so that the policy and the reference run the very same kernels. Not here: ranks and process groups.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.resources import Resources


@dataclass(frozen=True)
class Device:
    """The result of `choose_device`."""

    device: torch.device
    compute_dtype: torch.dtype
    """Storage of the modules that run the forward pass."""

    @property
    def is_mixed(self) -> bool:
        """Whether fp32 masters stand beside a bf16 module."""
        return self.compute_dtype == torch.bfloat16

    @property
    def precision(self) -> str:
        """`bf16` or `fp32`, as in `resources.precision`."""
        return "bf16" if self.is_mixed else "fp32"


def choose_device(resources: Resources, local: int | None = None, hosts: int = 1) -> Device:
    """Pick device and compute dtype. `local` is this process's number among the job's on this host; None when it is alone.
    Over several hosts each gives an equal part of the job's GPUs.

    `auto` takes CUDA when torch sees a GPU (so `CUDA_VISIBLE_DEVICES` is respected), otherwise the CPU.
    Raises InvalidRequest when the job asks for hardware that is not there.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (needed := resources.gpus // hosts) > visible:
        raise InvalidRequest(
            f"{needed} GPUs were asked for and torch sees {visible} on this machine; lower resources.gpus "
            "or send the job to a worker that has them",
            param="method.grpo.resources.gpus",
        )
    if resources.gpus > 0 and resources.device == "cpu":
        raise InvalidRequest(
            "resources.gpus is above 0 while resources.device is cpu; set gpus to 0 or device to cuda", param="method.grpo.resources.gpus"
        )
    if resources.device == "cuda" and visible == 0:
        raise InvalidRequest(
            "resources.device is cuda and torch sees no GPU on this machine; set it to auto or cpu", param="method.grpo.resources.device"
        )
    is_cuda = resources.device == "cuda" or (resources.device == "auto" and visible > 0 and resources.cpu_ranks == 1)
    device = torch.device("cuda", local or 0) if is_cuda else torch.device("cpu")
    return Device(device, _compute_dtype(resources.precision, device))


def _compute_dtype(precision: str, device: torch.device) -> torch.dtype:
    if precision == "auto":
        return torch.bfloat16 if has_fast_bf16(device) else torch.float32
    if precision == "fp32":
        return torch.float32
    if device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise InvalidRequest("this GPU has no bf16; set resources.precision to fp32 or auto", param="method.grpo.resources.precision")
    return torch.bfloat16


def has_fast_bf16(device: torch.device) -> bool:
    """Whether the processor multiplies bf16 matrices in hardware."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16", False) or capabilities.get("amx_bf16", False) or capabilities.get("bf16", False))


def seed_everything(seed: int) -> None:
    """Seed Python's and torch's global generators. Sampling does not use them: its randomness is keyed (rollout.py)."""
    random.seed(seed)
    torch.manual_seed(seed)


def share_threads(ranks_here: int) -> int:
    """Give this process its part of the CPU threads torch would use alone. Returns the number in force."""
    return set_threads(max(1, torch.get_num_threads() // ranks_here))


def set_threads(count: int | None) -> int:
    """Set torch's CPU threads (null leaves torch's choice, which follows OMP_NUM_THREADS) and return the number in force."""
    if count is not None:
        torch.set_num_threads(count)
    return torch.get_num_threads()


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next step instead of giving it back to the system; call once, early.

    A step allocates and frees the same gigabytes again; without this each comes back as page faults to be zeroed (measured:
    100,000 faults and a quarter of the backward pass's time, against none). Returns False where there is no glibc.
    """
    try:
        libc = ctypes.CDLL("libc.so.6")
    except OSError:
        return False
    mmap_max, trim_threshold, top_pad = -4, -1, -2  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD of malloc.h
    settings = ((mmap_max, 0), (trim_threshold, 2**31 - 1), (top_pad, 64 * 2**20))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


@contextmanager
def bf16_products(is_enabled: bool) -> Iterator[None]:
    """Within: fp32 matrix products on the CPU round their inputs to bf16 and accumulate and return fp32.

    For inputs that are bf16 numbers already nothing is lost, so logits come out in full fp32 at the speed of bf16
    (torch has no CPU product of bf16 matrices with an fp32 result).
    """
    if not is_enabled:
        yield
        return
    settings = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = settings.fp32_precision
    settings.fp32_precision = "bf16"
    try:
        yield
    finally:
        settings.fp32_precision = before


def release_cache() -> None:
    """Give back what a failed forward left in the GPU's cache."""
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
