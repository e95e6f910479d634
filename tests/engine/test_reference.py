"""The reference is a frozen copy that gives bitwise the policy's numbers until the policy moves."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from grpo_engine.policy import weights_sha256
from grpo_engine.publish import save_published
from grpo_engine.reference import load_reference
from tests.engine.model_fixtures import largest_kl, tiny_policy

KINDS = ("TINY", "TINY_TIED", "TINY_QWEN2", "TINY_GPT2")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_step_one_kl_is_exactly_zero(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(tmp_path, kind, dtype)
    reference = load_reference(policy)
    assert largest_kl(policy, reference) == (0.0, 0.0)
    assert reference.sha256 == policy.sha256
    policy.network.is_branched = reference.network.is_branched = False
    assert largest_kl(policy, reference) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_changed_reference_weight_shows(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = tiny_policy(tmp_path, dtype=dtype)
    reference = load_reference(policy)
    with torch.no_grad():
        reference.model.lm_head.weight[5, 0] += 1.0
    ratio, exact = largest_kl(policy, reference)
    assert ratio > 0
    assert exact > 0


def test_the_reference_stays_when_the_policy_moves_and_has_no_gradients(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, "TINY_TIED")
    reference = load_reference(policy)
    before = weights_sha256(reference.weights())
    with torch.no_grad():
        policy.masters["model.embed_tokens.weight"].mul_(1.1)
    policy.refresh()
    assert weights_sha256(reference.weights()) == before
    assert not any(parameter.requires_grad for parameter in reference.model.parameters())
    assert reference.model.lm_head.weight is reference.model.model.embed_tokens.weight
    assert largest_kl(policy, reference)[0] > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sync_mixes_and_a_full_sync_copies(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = tiny_policy(tmp_path, dtype=dtype)
    reference = load_reference(policy)
    old = policy.masters["lm_head.weight"].detach().clone()
    with torch.no_grad():
        policy.masters["lm_head.weight"].add_(0.5)
    policy.refresh()
    reference.sync(policy, 0.6)
    mixed = reference.model.lm_head.weight.float()
    torch.testing.assert_close(
        mixed, old + 0.6 * 0.5, rtol=1e-2 if dtype == torch.bfloat16 else 1e-6, atol=1e-2 if dtype == torch.bfloat16 else 1e-6
    )
    assert reference.sha256 != policy.sha256
    reference.sync(policy, 1.0)
    assert largest_kl(policy, reference) == (0.0, 0.0)


def test_a_synced_reference_is_restored(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, dtype=torch.bfloat16)
    reference, fresh = load_reference(policy), load_reference(policy)
    with torch.no_grad():
        policy.masters["lm_head.weight"].add_(0.5)
    reference.sync(policy, 0.6)
    fresh.load_weights({name: weight.clone() for name, weight in reference.weights().items()}, reference.sha256)
    assert weights_sha256(fresh.weights()) == weights_sha256(reference.weights())
    assert fresh.sha256 == reference.sha256
    with pytest.raises(ValueError, match="does not belong"):
        fresh.load_weights({"x": torch.zeros(1)}, "")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_reference_from_a_published_folder_is_the_same_as_the_copy(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = tiny_policy(tmp_path / "in", "TINY_GPT2", dtype)
    save_published(policy, tmp_path / "out")
    reference = load_reference(policy, tmp_path / "out")
    assert reference.sha256 == policy.sha256
    assert largest_kl(policy, reference) == (0.0, 0.0)


def test_a_reference_of_another_architecture_is_refused(tmp_path: Path) -> None:
    policy, other = tiny_policy(tmp_path / "a"), tmp_path / "b"
    tiny_policy(other, intermediate_size=64)
    with pytest.raises(ValueError, match="another architecture"):
        load_reference(policy, other)
