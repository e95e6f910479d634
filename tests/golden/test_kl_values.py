"""The value of every estimator, against numbers worked out by hand (float64) on two four-token distributions."""

from __future__ import annotations

import math

import pytest
import torch

from grpo_engine.contract.kl import Direction, Estimator, KlConfig
from grpo_engine.kl import exact_kl, kl_statistics, kl_value
from tests.golden.enumeration import OFF_POLICY, A, B, Case, expected_value

ANCHORS = {
    "A": (A, 0.022839075591, 0.022975461003, 0.045814536594),
    "B": (B, 0.551967511237, 0.858512801633, 1.410480312871),
}
TOKENS = {
    ("A", "k1"): [0.223143551314, -0.182321556794, -0.287682072452, 0],
    ("A", "k2"): [0.024896522247, 0.016620575036, 0.041380487405, 0],
    ("A", "k3"): [0.023143551314, 0.017678443206, 0.045651260882, 0],
    ("B", "k1"): [1.029619417181, -0.223143551314, -1.021651247532, -3.218875824868],
    ("B", "k3"): [0.386762274324, 0.026856448686, 0.756126530246, 20.781124175132],
}
MOMENTS = {
    ("A", "k1"): (0.022839075591, 0.045099332612),
    ("A", "k2"): (0.022810477993, 0.000115513093),
    ("A", "k3"): (0.022839075591, 0.000136926091),
    ("A", "abs"): (0.200304475723, 0.005499072991),
    ("B", "k1"): (0.551967511237, 0.644922806604),
    ("B", "k2"): (0.474795470033, 0.264263309395),
    ("B", "k3"): (0.551967511237, 4.170192339593),
    ("B", "abs"): (0.889499672816, 0.158381272126),
}
FORWARD_VARIANCE = {
    ("A", "k1", "ref_policy"): 0.049442309738,
    ("A", "k3", "ref_policy"): 0.000169811719,
    ("A", "k3", "jeffreys"): 0.000608650207,
    ("B", "k1", "ref_policy"): 64.855270333328,
    ("B", "k3", "ref_policy"): 31.308014109095,
    ("B", "k3", "jeffreys"): 58.295029772849,
}
CASES = {"A": A, "B": B}


def values(case: Case, estimator: Estimator, direction: Direction = "policy_ref") -> torch.Tensor:
    return kl_value(case.logits, case.ref_logprob_V, estimator, direction)


def moments(case: Case, estimator: Estimator, direction: Direction = "policy_ref") -> tuple[float, float]:
    probability = torch.tensor(case.policy, dtype=torch.float64)
    value = values(case, estimator, direction)
    mean = (probability * value).sum()
    return float(mean), float((probability * (value - mean) ** 2).sum())


@pytest.mark.parametrize("name", ANCHORS)
def test_exact_divergences(name: str) -> None:
    case, policy_ref, ref_policy, jeffreys = ANCHORS[name]
    for direction, expected in (("policy_ref", policy_ref), ("ref_policy", ref_policy), ("jeffreys", jeffreys)):
        got = exact_kl(case.logits[None], case.ref_logprob_V[None], direction)  # type: ignore[arg-type]
        assert got.item() == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("name", "estimator"), TOKENS)
def test_per_token_values(name: str, estimator: Estimator) -> None:
    assert values(CASES[name], estimator).tolist() == pytest.approx(TOKENS[name, estimator], abs=1e-9)


@pytest.mark.parametrize(("name", "estimator"), MOMENTS)
def test_mean_and_variance_under_the_policy(name: str, estimator: Estimator) -> None:
    assert moments(CASES[name], estimator) == pytest.approx(MOMENTS[name, estimator], abs=1e-9)


@pytest.mark.parametrize(("name", "estimator", "direction"), FORWARD_VARIANCE)
def test_the_other_directions_from_policy_samples(name: str, estimator: Estimator, direction: Direction) -> None:
    mean, variance = moments(CASES[name], estimator, direction)
    exact = ANCHORS[name][2] if direction == "ref_policy" else ANCHORS[name][3]
    assert mean == pytest.approx(exact, abs=1e-9)
    assert variance == pytest.approx(FORWARD_VARIANCE[name, estimator, direction], abs=1e-8)


def test_off_policy_the_importance_weight_makes_k3_unbiased() -> None:
    unweighted = expected_value(A, KlConfig(importance="none"), OFF_POLICY)
    assert unweighted == pytest.approx(0.021376850532, abs=1e-9)
    for estimator in ("k1", "k3"):
        weighted = expected_value(A, KlConfig(estimator=estimator, importance="old"), OFF_POLICY)  # type: ignore[arg-type]
        assert weighted == pytest.approx(0.022839075591, abs=1e-9)


def test_schulmans_gaussian_table() -> None:
    """N(0, 1) against N(mu, 1): relative bias and relative standard deviation of k1, k2, k3, by quadrature."""
    grid = torch.linspace(-12, 12, 200_001, dtype=torch.float64)
    density = torch.exp(-grid.square() / 2) / math.sqrt(2 * math.pi) * (grid[1] - grid[0])
    expected = {
        0.1: {"k1": (0, 20), "k2": (0.0025, 1.417745), "k3": (0, 1.416575)},
        1.0: {"k1": (0, 2), "k2": (0.25, 1.732051), "k3": (0, 1.695030)},
    }
    for mu, table in expected.items():
        true = mu**2 / 2
        for estimator, (bias, spread) in table.items():
            value = kl_value(-grid.square() / 2, -(grid - mu).square() / 2, estimator)  # type: ignore[arg-type]
            mean = float((density * value).sum())
            deviation = float((density * (value - mean).square()).sum()) ** 0.5
            assert mean / true - 1 == pytest.approx(bias, abs=1e-6)
            assert deviation / true == pytest.approx(spread, abs=1e-5)


def test_a_million_samples_agree_with_the_sum_and_expose_k2() -> None:
    generator = torch.Generator().manual_seed(7)
    probability = torch.tensor(B.policy, dtype=torch.float64)
    token_N = torch.multinomial(probability, 1_000_000, replacement=True, generator=generator)
    for estimator, is_biased in (("k1", False), ("k3", False), ("k2", True)):
        value_N = values(B, estimator)[token_N]  # type: ignore[arg-type]
        error = float(value_N.mean()) - 0.551967511237
        noise = 4 * float(value_N.std()) / 1000
        if is_biased:
            assert error == pytest.approx(-0.077172041204, abs=noise)
            assert abs(error) > noise
        else:
            assert abs(error) < noise


def test_statistics_separate_tokens_from_completions() -> None:
    value_BT = torch.tensor([[0.1, 0.1, 9.0], [0.01, 0.03, 0.05], [7.0, 7.0, 7.0]])
    mask_BT = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0]])
    got = kl_statistics(value_BT, mask_BT)
    tokens = torch.tensor([0.1, 0.1, 0.01, 0.03, 0.05], dtype=torch.float64)
    assert got == pytest.approx(
        {
            "mean": 0.058,
            "se": float(tokens.std()) / 5**0.5,
            "p50": 0.065,
            "p95": 0.03 + 0.95 * 0.07,
            "max": 0.1,
            "token_max": 0.1,
            "per_sequence_mean": (0.2 + 0.09) / 2,
        },
        abs=1e-7,
    )
