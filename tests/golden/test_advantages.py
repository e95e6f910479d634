"""Advantages from worked examples: normalisation, near-equal rewards, masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from grpo_engine.advantage import NonFiniteRewards, group_advantages
from grpo_engine.contract.job import LossConfig


def advantages(rewards: list[list[float]], **settings: Any) -> list[list[float]]:
    got = group_advantages(torch.tensor(rewards, dtype=torch.float64), LossConfig(**settings))
    return got.advantage_PG.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"adv_eps": 0.0}, [1.5, -0.5]),
        ({"adv_eps": 1e-4}, [1.499700059988, -0.499900019996]),
        ({"adv_eps": 1e-6}, [1.499997000006, -0.499999000002]),
        ({"adv_eps": 0.0, "ddof": 0}, [1.732050807569, -0.577350269190]),
        ({"scale_rewards": "none"}, [0.75, -0.25]),
    ],
)
def test_one_right_answer_in_four(settings: dict[str, Any], expected: list[float]) -> None:
    got = advantages([[1, 0, 0, 0]], **settings)[0]
    assert got == pytest.approx([expected[0], *[expected[1]] * 3], abs=1e-9)


def test_groups_are_normalised_on_their_own() -> None:
    got = advantages([[1, 1, 0, 0], [0, 0, 0, 1]])
    half = 3**0.5 / 2
    assert got[0] == pytest.approx([half, half, -half, -half], abs=2e-3)
    assert got[1] == pytest.approx([-0.5, -0.5, -0.5, 1.5], abs=2e-3)


def test_batch_scale_uses_the_deviation_of_all_rewards() -> None:
    got = advantages([[1, 1, 0, 0], [0, 0, 0, 1]], scale_rewards="batch", adv_eps=0.0)
    deviation = float(torch.tensor([1.0, 1, 0, 0, 0, 0, 0, 1], dtype=torch.float64).std())
    assert got[0] == pytest.approx([0.5 / deviation] * 2 + [-0.5 / deviation] * 2)
    assert got[1][3] == pytest.approx(0.75 / deviation)


@pytest.mark.parametrize(("eps", "largest"), [(1e-4, 0.5), (1e-6, 1.470588235295), (1e-9, 1.499970000601)])
def test_rewards_that_differ_a_little_are_scaled_up_by_design(eps: float, largest: float) -> None:
    """Differences of 1e-4 are real and adv_eps says how far they are blown up; only rounding noise is removed."""
    assert max(advantages([[0.5, 0.5, 0.5, 0.5001]], adv_eps=eps)[0]) == pytest.approx(largest, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("group", [[0.7] * 8, [0.1] * 7, [0.3, 0.3, 0.1 + 0.2, 0.3], [0.1 + 0.2 - 0.3, 0.0, 0.0], [1e6] * 5, [0.0] * 4])
def test_rewards_equal_up_to_rounding_have_no_advantage(group: list[float], dtype: torch.dtype) -> None:
    got = group_advantages(torch.tensor([group], dtype=dtype), LossConfig(adv_eps=1e-9))
    assert got.is_zero_std_P.tolist() == [True]
    assert got.std_P.tolist() == [0.0]
    assert not got.advantage_PG.any()


@pytest.mark.parametrize("ddof", [0, 1])
@given(rewards=st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=16))
def test_no_advantage_ever_exceeds_the_bound_of_its_group(rewards: list[float], ddof: int) -> None:
    """(G - 1) / sqrt(G) for ddof 1, sqrt(G - 1) for ddof 0; and the group's advantages add up to 0."""
    size = len(rewards)
    bound = (size - 1) / size**0.5 if ddof else (size - 1) ** 0.5
    got = advantages([rewards], adv_eps=0.0, ddof=ddof)[0]
    assert max(abs(value) for value in got) <= bound * (1 + 1e-9)
    assert sum(got) == pytest.approx(0, abs=1e-6)


@given(
    rewards=st.lists(st.floats(-10, 10), min_size=2, max_size=8),
    shift=st.floats(-100, 100),
)
def test_a_constant_added_to_every_reward_changes_nothing(rewards: list[float], shift: float) -> None:
    if max(rewards) - min(rewards) < 1e-2:
        return
    assert advantages([[value + shift for value in rewards]])[0] == pytest.approx(advantages([rewards])[0], abs=1e-6)


def test_what_groups_of_equal_rewards_take_part_in() -> None:
    rewards = torch.tensor([[1.0, 1.0], [1.0, 0.0]], dtype=torch.float64)
    kept = {name: group_advantages(rewards, LossConfig(zero_std_groups=name)) for name in ("keep", "mask_policy", "drop_all")}  # type: ignore[arg-type]
    assert kept["keep"].policy_keep_PG.tolist() == [[True, True], [True, True]]
    assert kept["mask_policy"].policy_keep_PG.tolist() == [[False, False], [True, True]]
    assert kept["mask_policy"].kl_keep_PG.tolist() == [[True, True], [True, True]]
    assert kept["drop_all"].kl_keep_PG.tolist() == [[False, False], [True, True]]


def test_truncated_completions_leave_both_terms_but_not_the_statistics() -> None:
    rewards = torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64)
    truncated = torch.tensor([[False, True, False]])
    got = group_advantages(rewards, LossConfig(mask_truncated=True), truncated)
    assert got.policy_keep_PG.tolist() == got.kl_keep_PG.tolist() == [[True, False, True]]
    assert got.advantage_PG.tolist() == group_advantages(rewards, LossConfig()).advantage_PG.tolist()
    with pytest.raises(ValueError, match="truncated"):
        group_advantages(rewards, LossConfig(mask_truncated=True))


@pytest.mark.parametrize("rewards", [[[1.0, float("inf")]], [[1.0, float("-inf")]], [[float("nan")] * 2, [float("nan")] * 2]])
def test_non_finite_rewards_are_refused(rewards: list[list[float]]) -> None:
    with pytest.raises(NonFiniteRewards, match="quarantine"):
        advantages(rewards)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("ddof", [0, 1])
def test_a_completion_without_a_grade_is_as_if_it_were_not_there(scale: str, ddof: int) -> None:
    nan = float("nan")
    cfg = LossConfig(scale_rewards=scale, ddof=ddof)  # type: ignore[arg-type]
    got = group_advantages(torch.tensor([[1.0, nan, 0.0, 0.0, nan]], dtype=torch.float64), cfg)
    alone = group_advantages(torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64), cfg)
    assert got.advantage_PG[0, [0, 2, 3]].tolist() == alone.advantage_PG[0].tolist()
    assert got.advantage_PG[0, [1, 4]].tolist() == [0.0, 0.0]
    assert got.std_P.tolist() == alone.std_P.tolist()
    assert got.policy_keep_PG.tolist() == got.kl_keep_PG.tolist() == [[True, False, True, True, False]]


def test_a_group_with_one_grade_has_nothing_to_compare() -> None:
    nan = float("nan")
    rewards = torch.tensor([[3.0, nan, nan], [nan, nan, nan], [1.0, 0.0, 0.0]], dtype=torch.float64)
    got = group_advantages(rewards, LossConfig(zero_std_groups="mask_policy"))
    assert got.is_zero_std_P.tolist() == [True, True, False]
    assert got.advantage_PG[:2].tolist() == [[0.0] * 3, [0.0] * 3]
    assert got.policy_keep_PG.tolist() == [[False] * 3, [False] * 3, [True] * 3]
    assert got.kl_keep_PG.tolist() == [[True, False, False], [False] * 3, [True] * 3]
