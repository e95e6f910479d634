"""Tiny policies and rows for the tests of the model side."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch

from grpo_engine.batch import Completion, Prompt
from grpo_engine.device import Device
from grpo_engine.policy import Policy, load_policy_folder
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


def tiny_policy(folder: Path, kind: str = "TINY", dtype: torch.dtype = torch.float32, seed: int = 0, **changes: object) -> Policy:
    """A tiny random policy; float64 is for exactness tests only.

    transformers computes RMS norms in fp32 whatever the model's dtype, which hides everything below 1e-7; in float64 they
    are replaced by the same formula in float64.
    """
    policy = load_policy_folder(make_model(folder, kind, seed, **changes), Device(torch.device("cpu"), _storage(dtype)))
    if dtype == torch.float64:
        policy.model.to(torch.float64)
        for part in policy.model.modules():
            if hasattr(part, "variance_epsilon"):
                part.forward = partial(_rms_norm, part)
    return policy


def _rms_norm(norm: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    return norm.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon)


def _storage(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


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
