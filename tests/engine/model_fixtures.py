"""Tiny policies and rows for the tests of the model side."""

from __future__ import annotations

import warnings
from functools import partial
from pathlib import Path

import torch
from peft import PeftModel
from transformers import PreTrainedModel

from grpo_engine.batch import Completion, Prompt
from grpo_engine.contract.job import LoraConfig
from grpo_engine.device import Device
from grpo_engine.logprob import rollout_stats, split_rows, token_stats
from grpo_engine.policy import Policy, load_policy_folder
from grpo_engine.reference import Reference
from tests.tiny import make_model

SHAPES = {
    "llama": ("TINY", {}),
    "tied": ("TINY_TIED", {}),
    "qwen2": ("TINY_QWEN2", {}),
    "gpt2": ("TINY_GPT2", {}),
    "window": ("TINY_QWEN2", {"sliding_window": 6}),
    "head_bias": ("TINY", {"attention_bias": True, "mlp_bias": True}),
}
"""Architectures the branched forward must compute like the plain one; `window` slides shorter than the rows below."""


def tiny_policy(
    folder: Path,
    kind: str = "TINY",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    lora: LoraConfig | None = None,
    **changes: object,
) -> Policy:
    """A tiny random policy; float64 is for exactness tests only.

    transformers computes RMS norms in fp32 whatever the model's dtype, which hides everything below 1e-7; in float64 they
    are replaced by the same formula in float64.
    """
    device = Device(torch.device("cpu"), _storage(dtype))
    policy = load_policy_folder(make_model(folder, kind, seed, **changes), device, lora=lora, seed=seed)
    if dtype == torch.float64:
        in_float64(policy.model)
    return policy


def in_float64(module: PreTrainedModel) -> None:
    """Compute in float64 throughout."""
    module.to(torch.float64)
    for part in module.modules():
        if hasattr(part, "variance_epsilon"):
            part.forward = partial(_rms_norm, part)


def _rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def _storage(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


def with_adapter(base: PreTrainedModel, folder: Path) -> PeftModel:
    """What anybody does with an adapter folder: peft over the base model."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")  # peft 0.21 asks transformers 5.24 so
        return PeftModel.from_pretrained(base, folder)


def largest_kl(policy: Policy, reference: Reference) -> tuple[float, float]:
    """Largest |log-ratio| and largest exact KL of a rollout, measured as in a step: the policy with gradients."""
    rows = ragged_rows()
    batches = split_rows(rows, 30, policy.network.is_branched)
    frozen, states = rollout_stats(reference.network, batches, temperature=0.9, pad_id=policy.pad_id, keep_states=True)
    ratio = exact = 0.0
    for batch, state in zip(batches, states, strict=True):
        stats = token_stats(policy.network, batch, temperature=0.9, pad_id=policy.pad_id, width=12, reference=state)
        assert stats.logprob_BT.requires_grad
        assert stats.exact_policy_ref_BT is not None
        assert stats.exact_ref_policy_BT is not None
        ratio = max(ratio, float((stats.logprob_BT.detach() - frozen.logprob_BT[batch.index]).abs().max()))
        exact = max(exact, *(float(value.detach().abs().max()) for value in (stats.exact_policy_ref_BT, stats.exact_ref_policy_BT)))
    return ratio, exact


def ragged_rows(vocabulary: int = 256, seed: int = 0) -> list[tuple[Prompt, Completion]]:
    """Three groups with prompts of 1, 9 and 14 tokens and completions of 1 to 12 tokens: every kind of left-over padding."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = torch.randint(0, vocabulary, (count,), generator=generator).tolist()
        return drawn

    lengths = {1: [3, 1, 12], 9: [1, 1], 14: [5, 12, 2, 7]}
    rows = []
    for number, (prompt_length, completion_lengths) in enumerate(lengths.items()):
        prompt = Prompt(number, "", tokens(prompt_length), {})
        rows += [(prompt, Completion(tokens(length), [0.0] * length, "", False)) for length in completion_lengths]
    return rows
