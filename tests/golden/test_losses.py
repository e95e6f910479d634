"""Policy losses and aggregation: values, gradients, and what must not change them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from grpo_engine.contract.aggregation import kl_aggregation, loss_aggregation
from grpo_engine.contract.job import Aggregation, LossConfig
from grpo_engine.contract.kl import KlConfig
from grpo_engine.kl import kl_loss_tokens
from grpo_engine.loss import Normaliser, PolicyTokens, aggregate, policy_loss_tokens

AGGREGATIONS: tuple[Aggregation, ...] = ("token_mean", "seq_mean_token_mean", "seq_sum", "constant")
LENGTHS = [2, 8]
KL_BT = torch.tensor([[0.1, 0.1, *[0.0] * 6], [0.01] * 8], dtype=torch.float64)
MASK_BT = torch.tensor([[1, 1, *[0] * 6], [1] * 8])


def whole(value_BT: Tensor, mask_BT: Tensor, aggregation: Aggregation, limit: int = 16) -> float:
    return float(aggregate(value_BT, mask_BT, Normaliser.create(mask_BT, aggregation, limit)))


@pytest.mark.parametrize(
    ("aggregation", "expected"), [("seq_mean_token_mean", 0.055), ("token_mean", 0.028), ("seq_sum", 0.14), ("constant", 0.00875)]
)
def test_two_responses_of_two_and_eight_tokens(aggregation: Aggregation, expected: float) -> None:
    assert whole(KL_BT, MASK_BT, aggregation) == pytest.approx(expected, abs=1e-12)


def test_the_mean_of_micro_batch_means_would_be_wrong() -> None:
    """What some trainers compute under gradient accumulation: 0.055 instead of the token mean 0.028."""
    rows = [whole(KL_BT[row : row + 1], MASK_BT[row : row + 1], "token_mean") for row in range(2)]
    assert sum(rows) / 2 == pytest.approx(0.055)
    normaliser = Normaliser.create(MASK_BT, "token_mean", 16)
    shares = [float(aggregate(KL_BT[row : row + 1], MASK_BT[row : row + 1], normaliser)) for row in range(2)]
    assert sum(shares) == pytest.approx(0.028)


@pytest.mark.parametrize("micro", [[[0, 1, 2, 3]], [[0], [1], [2], [3]], [[3, 1], [0], [2]]])
@pytest.mark.parametrize("width", [40, 57])
def test_the_constant_denominator_is_constant(micro: list[list[int]], width: int) -> None:
    """Row sums 10, 20, 30, 40 and a limit of 100 tokens: 100 / (4 * 100), whatever the padding and the split."""
    value = torch.zeros(4, width, dtype=torch.float64)
    mask = torch.zeros(4, width)
    for row, total in enumerate((10, 20, 30, 40)):
        value[row, :total] = 1.0
        mask[row, :total] = 1
    normaliser = Normaliser.create(mask, "constant", 100)
    assert sum(float(aggregate(value[rows], mask[rows], normaliser)) for rows in micro) == pytest.approx(0.25, abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_step_without_any_token_is_zero_with_zero_gradient(aggregation: Aggregation) -> None:
    value = torch.full((2, 2), float("nan"), dtype=torch.float64, requires_grad=True)
    mask = torch.zeros(2, 2)
    loss = aggregate(value, mask, Normaliser.create(mask, aggregation, 16))
    loss.backward()
    assert loss.item() == 0.0
    assert value.grad is not None
    assert value.grad.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_fully_masked_rows_do_not_count_as_zeros(aggregation: Aggregation) -> None:
    value = torch.ones(4, 1, dtype=torch.float64)
    mask = torch.tensor([[1], [0], [1], [0]])
    assert whole(value, mask, aggregation, limit=1) == 1.0


def rows(lengths: list[int]) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(sum(lengths))
    shape = (len(lengths), max(lengths))
    mask = (torch.arange(shape[1]) < torch.tensor(lengths)[:, None]).double()
    logprob, old, ref = (-3 * torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    return logprob, old, ref, mask, torch.randn(shape[0], generator=generator, dtype=torch.float64)


def step_gradient(lengths: list[int], split: list[list[int]], aggregation: Aggregation, padding: int) -> tuple[float, Tensor]:
    """Loss and gradient of policy + 0.3 * KL over a step cut into `split`, with `padding` columns of rubbish."""
    logprob, old, ref, mask, advantage = rows(lengths)
    rubbish = torch.full((len(lengths), padding), float("nan"), dtype=torch.float64)
    mask = torch.cat([mask, torch.zeros_like(rubbish)], -1)
    logprob = logprob.requires_grad_()
    padded, old, ref = (torch.cat([tensor, rubbish], -1) for tensor in (logprob, old, ref))
    normaliser = Normaliser.create(mask, aggregation, 32)
    total = 0.0
    for index in split:
        policy = policy_loss_tokens(padded[index], old[index], advantage[index], mask[index], LossConfig())
        kl = kl_loss_tokens(padded[index], ref[index], old[index], None, mask[index], KlConfig())
        loss = aggregate(policy.loss_BT + 0.3 * kl.surrogate_BT, mask[index], normaliser)
        loss.backward(retain_graph=True)
        total += loss.item()
    assert logprob.grad is not None
    return total, logprob.grad


@st.composite
def splits(draw: st.DrawFn) -> tuple[list[int], list[list[int]]]:
    lengths = draw(st.lists(st.integers(1, 6), min_size=1, max_size=6))
    order = draw(st.permutations(range(len(lengths))))
    cuts = draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    groups: list[list[int]] = [[]]
    for index, cut in zip(order, cuts, strict=True):
        if cut and groups[-1]:
            groups.append([])
        groups[-1].append(index)
    return lengths, groups


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(cut=splits(), padding=st.integers(0, 3))
def test_micro_batches_order_and_padding_change_nothing(
    aggregation: Aggregation, cut: tuple[list[int], list[list[int]]], padding: int
) -> None:
    lengths, split = cut
    loss, gradient = step_gradient(lengths, [list(range(len(lengths)))], aggregation, 0)
    other_loss, other_gradient = step_gradient(lengths, split, aggregation, padding)
    assert other_loss == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(other_gradient, gradient, atol=1e-14, rtol=1e-12)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_ranks_that_share_their_counts_add_up_to_one_rank(aggregation: Aggregation, num_ranks: int) -> None:
    logprob, _, _, mask, _ = rows([2, 5, 1, 4, 3, 6])
    shards = [(logprob[rank::num_ranks], mask[rank::num_ranks]) for rank in range(num_ranks)]
    locals_ = [Normaliser.create(shard_mask, aggregation, 32) for _, shard_mask in shards]
    tokens, sequences = sum(each.num_tokens for each in locals_), sum(each.num_sequences for each in locals_)
    shared = Normaliser(aggregation, tokens, sequences, 32)
    total = sum(float(aggregate(value, shard_mask, shared)) for value, shard_mask in shards)
    assert total == pytest.approx(whole(logprob, mask, aggregation, 32), abs=1e-12)


def one_token(rho: float, advantage: float, **settings: Any) -> tuple[PolicyTokens, float]:
    logprob = torch.tensor([[rho]], dtype=torch.float64).log().requires_grad_()
    tokens = policy_loss_tokens(logprob, torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), LossConfig(**settings))
    tokens.loss_BT.sum().backward()
    assert logprob.grad is not None
    return tokens, logprob.grad.item()


@pytest.mark.parametrize(
    ("rho", "advantage", "loss", "gradient", "low", "high"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),
        (1.5, 2.0, -2.4, 0.0, False, True),
        (1.5, -2.0, 3.0, 3.0, False, False),
        (0.5, 2.0, -1.0, -1.0, False, False),
        (0.5, -2.0, 1.6, 0.0, True, False),
    ],
)
def test_the_clipped_objective(rho: float, advantage: float, loss: float, gradient: float, low: bool, high: bool) -> None:
    tokens, slope = one_token(rho, advantage)
    assert tokens.loss_BT.item() == pytest.approx(loss)
    assert slope == pytest.approx(gradient)
    assert (bool(tokens.clipped_low_BT), bool(tokens.clipped_high_BT)) == (low, high)


def test_clip_higher() -> None:
    assert one_token(1.25, 1.0)[1] == 0.0
    assert one_token(1.25, 1.0, epsilon_high=0.28)[1] == pytest.approx(-1.25)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    """-sg(clip(rho)) A log pi: the weight is bounded, the token still learns."""
    tokens, slope = one_token(1.5, 2.0, type="cispo")
    assert slope == pytest.approx(-1.2 * 2.0)
    assert bool(tokens.clipped_high_BT)
    assert one_token(0.5, 2.0, type="cispo")[1] == pytest.approx(-0.8 * 2.0)


def test_gspo_uses_the_ratio_of_the_sequence() -> None:
    """log-ratios (0.3, -0.1): s = exp(0.1); its gradient is that of s_i = exp(mean log-ratio), both tokens alike."""
    mask = torch.ones(1, 2)
    logprob = torch.tensor([[0.3, -0.1]], dtype=torch.float64, requires_grad=True)
    tokens = policy_loss_tokens(logprob, torch.zeros(1, 2), torch.tensor([2.0]), mask, LossConfig(type="gspo"))
    assert tokens.ratio_BT.tolist() == [pytest.approx([1.1051709181] * 2)]
    aggregate(tokens.loss_BT, mask, Normaliser.create(mask, "seq_mean_token_mean", 2)).backward()
    direct = torch.tensor([[0.3, -0.1]], dtype=torch.float64, requires_grad=True)
    (-2.0 * direct.mean().exp()).backward()
    torch.testing.assert_close(logprob.grad, direct.grad, atol=1e-12, rtol=0)


def test_gspo_ignores_padding() -> None:
    logprob = torch.tensor([[0.3, -0.1, 50.0]], dtype=torch.float64)
    tokens = policy_loss_tokens(logprob, torch.zeros(1, 3), torch.tensor([2.0]), torch.tensor([[1, 1, 0]]), LossConfig(type="gspo"))
    assert tokens.ratio_BT.tolist() == [pytest.approx([1.1051709181, 1.1051709181, 1.0])]


def test_each_loss_has_its_papers_aggregation() -> None:
    papers = {name: loss_aggregation(LossConfig(type=name)) for name in ("grpo", "dr_grpo", "dapo", "gspo", "bnpo", "cispo")}  # type: ignore[arg-type]
    assert papers == {
        "grpo": "seq_mean_token_mean",
        "dr_grpo": "constant",
        "dapo": "token_mean",
        "gspo": "seq_mean_token_mean",
        "bnpo": "token_mean",
        "cispo": "token_mean",
    }
    for loss, kl in itertools.product(AGGREGATIONS, AGGREGATIONS):
        assert kl_aggregation(KlConfig(aggregation=kl), LossConfig(aggregation=loss)) == kl
        assert kl_aggregation(KlConfig(), LossConfig(aggregation=loss)) == loss
