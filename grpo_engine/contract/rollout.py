"""One sampled completion as it is kept: the engine writes it a line, the server shows it as it is."""

from __future__ import annotations

import re
from typing import Literal

from grpo_engine.contract.view_base import Number, View

_NAME = re.compile(r"step-(\d{6,12})\.jsonl\.zst")


def rollout_name(step: int) -> str:
    """File name of a step's rollouts."""
    return f"step-{step:06d}.jsonl.zst"


def rollout_step(name: str) -> int | None:
    """The step of a file name; None for a file that is something else."""
    found = _NAME.fullmatch(name)
    return int(found[1]) if found else None


class ReferenceAnswer(View):
    """What the reference answers to the same prompt with the same random draws."""

    completion: str
    """Without special tokens."""
    num_tokens: int
    """Its end token included."""
    is_truncated: bool
    """Hit the token limit without an end token."""
    num_same_tokens: int
    """Tokens at the beginning in which both agree; all of them when the policy would still say what the reference says."""


class KeptCompletion(View):
    """One completion of a step with what it earned."""

    index: int
    """Place in the step, from 0; completions of one prompt are neighbours."""
    row: int
    """Index of the prompt's row in the training file, from 0, unusable rows left out."""
    prompt: str | None = None
    """As fed to the model; null when the job redacts its rollouts."""
    completion: str | None = None
    """Without special tokens; null when the job redacts its rollouts."""
    num_prompt_tokens: int
    num_tokens: int
    """Of the completion, its end token included."""
    is_truncated: bool
    """Hit the token limit without an end token."""
    reward: Number
    parts: dict[str, Number] = {}
    """Score of each part of a composed grader."""
    advantage: Number | None = None
    """null in a step whose rewards were not all finite."""
    kl: Number | None = None
    """Mean of the tokens' KL."""
    token_ids: list[int] | None = None
    """null when the job redacts its rollouts, as are the texts."""
    token_texts: list[str] | None = None
    """Each token decoded alone; a character spread over several tokens shows as U+FFFD in each."""
    token_logprobs: list[Number] | None = None
    """Under the policy before this step's first update, after temperature; null in a step without an update."""
    token_kl: list[Number] | None = None
    """KL to the reference in nats, by the job's estimator and direction; null without a reference."""
    reference: ReferenceAnswer | None = None
    """The reference's own answer; null in steps in which it is not asked (`telemetry.rollouts_reference_every`)."""


class RolloutPage(View):
    """Completions of one step, in order of `index`."""

    object: Literal["list"] = "list"
    step: int
    attempt: int
    """The attempt whose run of this step counts."""
    num_completions: int
    data: list[KeptCompletion]
    has_more: bool = False
