"""What flows through one training step: prompts, groups of completions, and their padded tensors.

Shape legend, used in tensor names throughout the engine:
    P prompts of a step   G completions of one prompt (the group)   B = P * G rows
    T completion tokens, padded to the longest of the batch   S prompt tokens   V vocabulary   N tokens in a flat chunk
Row b belongs to prompt b // G. Only completion tokens are ever scored; the end token is part of the completion.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Prompt:
    """One dataset row, rendered and tokenised."""

    row: int
    """Index of the row in the dataset."""
    text: str
    token_ids: list[int]
    item: dict[str, Any]
    """The row as graders see it (`{{item.column}}`)."""


@dataclass
class Completion:
    """One sampled answer. `token_ids` holds the end token when the model emitted one."""

    token_ids: list[int]
    sampler_logprobs: list[float]
    """Log-probability under the sampling distribution, after temperature and truncation."""
    text: str
    is_truncated: bool
    """Hit the token limit without an end token."""
    reward: float = float("nan")
    parts: dict[str, float] = field(default_factory=dict)
    """Score of each part of a composed grader."""


@dataclass
class Group:
    """The completions of one prompt."""

    prompt: Prompt
    completions: list[Completion]
    first_completion: int = 0
    """Number of the first one's random stream; the others' follow."""


@dataclass
class Rollout:
    """Everything sampled in one step."""

    step: int
    groups: list[Group]

    @property
    def rows(self) -> list[tuple[Prompt, Completion]]:
        """All (prompt, completion) pairs, groups in order."""
        return [(group.prompt, completion) for group in self.groups for completion in group.completions]

    def completion_mask_BT(self, device: torch.device | str = "cpu") -> Tensor:
        """1.0 at completion tokens, 0.0 at padding."""
        lengths_B = torch.tensor([len(completion.token_ids) for _, completion in self.rows], device=device)
        return (torch.arange(int(lengths_B.max()), device=device) < lengths_B[:, None]).float()

    def sampler_logprob_BT(self, device: torch.device | str = "cpu") -> Tensor:
        """The sampler's log-probabilities, 0 at padding."""
        return pad_rows([completion.sampler_logprobs for _, completion in self.rows], 0.0).to(device)

    def reward_PG(self) -> Tensor:
        """Rewards in float64, one row a group."""
        return torch.tensor([[c.reward for c in group.completions] for group in self.groups], dtype=torch.float64)

    def is_truncated_PG(self) -> Tensor:
        """True where a completion hit the token limit."""
        return torch.tensor([[c.is_truncated for c in group.completions] for group in self.groups])

    @property
    def num_tokens(self) -> int:
        """Prompt tokens (once a group) and completion tokens."""
        prompts = sum(len(group.prompt.token_ids) for group in self.groups)
        return prompts + sum(len(completion.token_ids) for _, completion in self.rows)


def pad_rows(rows: list[list[float]], value: float) -> Tensor:
    """Right-pad lists of floats into one float32 tensor."""
    width = max(len(row) for row in rows)
    return torch.tensor([row + [value] * (width - len(row)) for row in rows], dtype=torch.float32)
