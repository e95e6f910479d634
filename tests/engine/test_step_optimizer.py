"""The learning rate's course, and AdamW with state that can be saved and restored exactly."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from safetensors.torch import load, save

from grpo_engine.contract.job import OptimizerConfig
from grpo_engine.optimizer import Optimizer, learning_rate_at


def test_warm_up_reaches_the_base_at_its_last_step() -> None:
    cfg = OptimizerConfig(warmup_steps=4)
    assert [learning_rate_at(step, 1.0, cfg, 10) for step in range(1, 7)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_linear_and_cosine_start_at_the_base_and_still_learn_in_the_last_step() -> None:
    linear = [learning_rate_at(step, 2.0, OptimizerConfig(lr_schedule="linear"), 4) for step in range(1, 5)]
    assert linear == [2.0, 1.5, 1.0, 0.5]
    cosine = [learning_rate_at(step, 2.0, OptimizerConfig(lr_schedule="cosine", warmup_steps=2), 6) for step in range(1, 7)]
    assert cosine[:3] == [1.0, 2.0, 2.0]
    assert cosine[4] == pytest.approx(1 + math.cos(math.pi / 2))
    assert all(a > b > 0 for a, b in itertools.pairwise(cosine[2:]))


def masters() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {"a.weight": torch.randn(3, 4).requires_grad_(), "b|c": torch.randn(5).requires_grad_()}


def train(parameters: dict[str, torch.Tensor], optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        for parameter in parameters.values():
            (parameter**2).sum().mul(step).backward()
        optimizer.step(0.01, optimizer.grad_norm())


def test_saved_and_restored_it_continues_bit_for_bit() -> None:
    cfg = OptimizerConfig(weight_decay=0.1)
    whole = masters()
    train(whole, Optimizer(whole, cfg), range(1, 7))

    first = masters()
    optimizer = Optimizer(first, cfg)
    train(first, optimizer, range(1, 4))
    saved = load(save({name: value.contiguous() for name, value in optimizer.state().items()}))
    second = {name: value.detach().clone().requires_grad_() for name, value in first.items()}
    resumed = Optimizer(second, cfg)
    resumed.load(saved)
    train(second, resumed, range(4, 7))
    assert all(torch.equal(whole[name], second[name]) for name in whole)


def test_clipping_bounds_the_gradient_and_null_leaves_it_alone() -> None:
    for max_norm, expected in ((1.0, 1.0), (None, 10.0)):
        parameter = torch.zeros(1, requires_grad=True)
        parameter.grad = torch.tensor([10.0])
        optimizer = Optimizer({"p": parameter}, OptimizerConfig(max_grad_norm=max_norm))
        assert optimizer.grad_norm() == 10.0
        optimizer.step(1e-3, 10.0)
        assert float(parameter.grad) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_non_finite_gradient_shows_in_the_norm(bad: float) -> None:
    parameters = masters()
    optimizer = Optimizer(parameters, OptimizerConfig())
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    parameters["b|c"].grad[2] = bad  # type: ignore[index]
    assert not math.isfinite(optimizer.grad_norm())
