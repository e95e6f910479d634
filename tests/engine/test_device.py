"""Device and precision choice, and products in bf16 with fp32 results."""

from __future__ import annotations

import random
import subprocess
import sys

import pytest
import torch

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.resources import Resources
from grpo_engine.device import Device, bf16_products, choose_device, has_fast_bf16, seed_everything, set_threads

CPU = torch.device("cpu")


def test_precision_follows_the_processor_and_the_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    for capability, expected in (({"avx512_bf16": True}, "bf16"), ({"amx_bf16": True}, "bf16"), ({"avx2": True}, "fp32")):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capability: found)
        assert choose_device(Resources(device="cpu")).precision == expected
        assert has_fast_bf16(CPU) == (expected == "bf16")
        assert choose_device(Resources(device="cpu", precision="fp32")) == Device(CPU, torch.float32)
        assert choose_device(Resources(device="cpu", precision="bf16")) == Device(CPU, torch.bfloat16)


def test_auto_takes_a_gpu_when_torch_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    assert choose_device(Resources(gpus=1)) == Device(torch.device("cuda", 0), torch.float32)
    assert choose_device(Resources(device="cpu")).device == CPU
    with pytest.raises(InvalidRequest, match="no bf16"):
        choose_device(Resources(precision="bf16"))
    with pytest.raises(InvalidRequest, match="3 GPUs were asked for and torch sees 2"):
        choose_device(Resources(gpus=3))
    with pytest.raises(InvalidRequest, match="set gpus to 0"):
        choose_device(Resources(gpus=1, device="cpu"))


def test_asking_for_absent_hardware_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InvalidRequest, match="torch sees no GPU") as caught:
        choose_device(Resources(device="cuda"))
    assert caught.value.param == "method.grpo.resources.device"
    with pytest.raises(InvalidRequest, match="1 GPUs were asked for and torch sees 0"):
        choose_device(Resources(gpus=1))
    assert choose_device(Resources()).device == CPU


def test_seeds_repeat() -> None:
    seed_everything(3)
    first = (random.random(), torch.rand(3).tolist())
    seed_everything(3)
    assert (random.random(), torch.rand(3).tolist()) == first


def test_threads_are_set_and_reported() -> None:
    before = torch.get_num_threads()
    try:
        assert set_threads(1) == 1
        assert set_threads(None) == 1
    finally:
        torch.set_num_threads(before)


def test_bf16_products_lose_nothing_of_bf16_inputs_and_end_with_the_block() -> None:
    torch.manual_seed(0)
    left, right = torch.randn(64, 128).bfloat16().float(), torch.randn(128, 96).bfloat16().float()
    exact = left.double() @ right.double()
    before = torch.backends.mkldnn.matmul.fp32_precision  # type: ignore[attr-defined]
    with bf16_products(True):
        product = left @ right
    assert (product.double() - exact).abs().max() < 1e-4
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="inside"), bf16_products(True):
        raise RuntimeError("inside")
    assert torch.backends.mkldnn.matmul.fp32_precision == before  # type: ignore[attr-defined]


def test_freed_memory_is_kept() -> None:
    """In a process of its own: once warm, a freed 64 MB block comes back without page faults."""
    code = """
import resource, torch
from grpo_engine.device import keep_freed_memory
assert keep_freed_memory()
for _ in range(40):
    torch.ones(16 * 2**20)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
torch.ones(16 * 2**20)
assert resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before < 1000
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
