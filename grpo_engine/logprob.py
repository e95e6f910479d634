"""Log-probabilities, entropy and exact KL of completion tokens under a network, with or without gradients.

One path for the policy and the reference, so that equal weights give a KL of exactly 0: rows are split into the same
micro-batches, each prompt is computed once per group (attention.py), and the head is applied to completion positions
only, tile by tile (vocabulary.py). The plain padded forward is kept as the fallback and as the measure of the fast path.
Not here: losses, and anything about rewards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from grpo_engine.attention import BranchPlan
from grpo_engine.batch import Completion, Prompt
from grpo_engine.network import Network, check_cached
from grpo_engine.vocabulary import ReferenceStates, vocabulary_stats

Row = tuple[Prompt, Completion]

TOLERANCE = {torch.float64: 1e-9, torch.float32: 5e-5, torch.bfloat16: 0.1}
"""Allowed gap between the branched and the plain forward. Largest gap in log-probability; mean gap in bf16, where both
orders of summation round differently (0.03 on SmolLM2-135M)."""


@dataclass(frozen=True)
class MicroBatch:
    """Rows of a rollout that go through one forward."""

    index: list[int]
    """Positions of the rows in the rollout, ascending."""
    rows: list[Row]


@dataclass(frozen=True)
class TokenStats:
    """Per-token results, padded to the width asked for; 0 at padding."""

    logprob_BT: Tensor
    """log pi(token), after temperature, fp32 (fp64 for fp64 weights)."""
    entropy_BT: Tensor
    """Entropy of the whole distribution, after temperature, in nats."""
    mask_BT: Tensor
    """1.0 at completion tokens."""
    exact_policy_ref_BT: Tensor | None = None
    """Exact KL(policy || reference) at each position, when a reference was given."""
    exact_ref_policy_BT: Tensor | None = None
    """Exact KL(reference || policy) at each position, when a reference was given."""
    states: ReferenceStates | None = None
    """Final hidden states at the scored positions, when asked for: the reference's side of a later exact KL."""


def split_rows(rows: Sequence[Row], micro_batch_tokens: int, is_branched: bool) -> list[MicroBatch]:
    """Split rows into micro-batches of at most so many computed tokens (one row may exceed it).

    Consecutive rows of the same prompt stay together where they fit. The split depends on lengths only, so that the
    policy and the reference get the same one.
    """
    batches: list[MicroBatch] = []
    index: list[int] = []
    for number in range(len(rows)):
        if index and _cost([rows[i] for i in [*index, number]], is_branched) > micro_batch_tokens:
            batches.append(MicroBatch(index, [rows[i] for i in index]))
            index = []
        index.append(number)
    batches.append(MicroBatch(index, [rows[i] for i in index]))
    return batches


def _cost(rows: Sequence[Row], is_branched: bool) -> int:
    if not is_branched:
        return len(rows) * max(len(prompt.token_ids) + len(completion.token_ids) for prompt, completion in rows)
    prompts = sum(len(prompt.token_ids) for prompt, _ in _by_prompt(rows))
    return prompts + sum(len(completion.token_ids) for _, completion in rows)


def _by_prompt(rows: Sequence[Row]) -> list[tuple[Prompt, list[Completion]]]:
    """Runs of consecutive rows whose prompts have the same tokens."""
    runs = groupby(rows, key=lambda row: row[0].token_ids)
    grouped = []
    for _, run in runs:
        members = list(run)
        grouped.append((members[0][0], [completion for _, completion in members]))
    return grouped


def token_stats(
    network: Network,
    batch: MicroBatch,
    *,
    temperature: float,
    pad_id: int,
    width: int | None = None,
    reference: ReferenceStates | None = None,
    keep_states: bool = False,
) -> TokenStats:
    """Statistics of every completion token of a micro-batch.

    `width` pads the results (default: the longest completion). Gradients flow unless the caller is in `no_grad`; also
    through the exact KLs, towards the policy only. `reference` must come from the same micro-batch (`TokenStats.states`).
    Completions must not be empty.
    """
    lengths = [len(completion.token_ids) for _, completion in batch.rows]
    if min(lengths) == 0:
        raise ValueError("a completion is empty; a sampled completion holds at least its end token")
    hidden_NC = _branched_states(network, batch.rows) if network.is_branched else _padded_states(network, batch.rows, pad_id)
    target_N = torch.tensor([token for _, completion in batch.rows for token in completion.token_ids], device=hidden_NC.device)
    head = network.head
    stats = vocabulary_stats(hidden_NC, head, target_N, temperature, reference)
    columns = torch.arange(width or max(lengths), device=hidden_NC.device)
    is_token_BT = columns < torch.tensor(lengths, device=hidden_NC.device)[:, None]

    def spread(values_N: Tensor | None) -> Tensor | None:
        return None if values_N is None else values_N.new_zeros(is_token_BT.shape).masked_scatter(is_token_BT, values_N)

    logprob_BT, entropy_BT = spread(stats.logprob_N), spread(stats.entropy_N)
    assert logprob_BT is not None
    assert entropy_BT is not None
    return TokenStats(
        logprob_BT=logprob_BT,
        entropy_BT=entropy_BT,
        mask_BT=is_token_BT.to(logprob_BT.dtype),
        exact_policy_ref_BT=spread(stats.kl_policy_ref_N),
        exact_ref_policy_BT=spread(stats.kl_ref_policy_N),
        states=ReferenceStates(hidden_NC.detach(), head) if keep_states else None,
    )


@torch.no_grad()
def rollout_stats(
    network: Network,
    batches: Sequence[MicroBatch],
    *,
    temperature: float,
    pad_id: int,
    references: Sequence[ReferenceStates] | None = None,
    keep_states: bool = False,
) -> tuple[TokenStats, list[ReferenceStates]]:
    """`token_stats` of all micro-batches without gradients, joined in row order, and the states of each when asked for.

    For the reference (once per rollout) and for monitoring. The joined result carries no `states`.
    """
    width = max(len(completion.token_ids) for batch in batches for _, completion in batch.rows)
    parts = [
        token_stats(
            network,
            batch,
            temperature=temperature,
            pad_id=pad_id,
            width=width,
            reference=None if references is None else references[number],
            keep_states=keep_states,
        )
        for number, batch in enumerate(batches)
    ]
    order = torch.tensor([index for batch in batches for index in batch.index]).argsort()

    def join(values: Sequence[Tensor | None]) -> Tensor | None:
        present = [value for value in values if value is not None]
        return torch.cat(present)[order.to(present[0].device)] if present else None

    logprob_BT, entropy_BT = join([part.logprob_BT for part in parts]), join([part.entropy_BT for part in parts])
    mask_BT = join([part.mask_BT for part in parts])
    assert logprob_BT is not None
    assert entropy_BT is not None
    assert mask_BT is not None
    joined = TokenStats(
        logprob_BT,
        entropy_BT,
        mask_BT,
        join([part.exact_policy_ref_BT for part in parts]),
        join([part.exact_ref_policy_BT for part in parts]),
    )
    return joined, [part.states for part in parts if part.states is not None]


def _branched_states(network: Network, rows: Sequence[Row]) -> Tensor:
    """Hidden states (N, C) that predict each completion token, prompts computed once. At least fp32."""
    groups = _by_prompt(rows)
    branches = [[completion.token_ids[:-1] for completion in completions] for _, completions in groups]
    plan = BranchPlan.build([prompt.token_ids for prompt, _ in groups], branches, network.device)
    positions: list[int] = []
    start = 0
    for (prompt, _), fed in zip(groups, branches, strict=True):
        last = start + len(prompt.token_ids) - 1
        start = last + 1
        for tokens in fed:
            positions += [last, *range(start, start + len(tokens))]
            start += len(tokens)
    hidden_NC = _widen(network.hidden(plan))
    return hidden_NC.index_select(0, torch.tensor(positions, device=hidden_NC.device))


def _padded_states(network: Network, rows: Sequence[Row], pad_id: int) -> Tensor:
    """The same through the plain right-padded forward, where later padding cannot reach earlier tokens."""
    sequences = [prompt.token_ids + completion.token_ids[:-1] for prompt, completion in rows]
    width = max(len(sequence) for sequence in sequences)
    ids_BL = torch.tensor([sequence + [pad_id] * (width - len(sequence)) for sequence in sequences], device=network.device)
    mask_BL = torch.tensor([[1] * len(sequence) + [0] * (width - len(sequence)) for sequence in sequences], device=network.device)
    hidden_NC = _widen(network.hidden_padded(ids_BL, mask_BL)).flatten(0, 1)
    positions = [
        number * width + len(prompt.token_ids) - 1 + at
        for number, (prompt, completion) in enumerate(rows)
        for at in range(len(completion.token_ids))
    ]
    return hidden_NC.index_select(0, torch.tensor(positions, device=hidden_NC.device))


def _widen(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype == torch.bfloat16 else tensor


@dataclass(frozen=True)
class ShortcutCheck:
    """Whether the branched forward gave the same log-probabilities as the plain one."""

    is_equal: bool
    gap: float
    """Largest difference (mean difference in bf16) in nats."""
    tolerance: float
    reason: str
    """Empty when equal; otherwise a sentence for the event `shortcut.disabled`."""


@torch.no_grad()
def check_shortcut(network: Network, rows: Sequence[Row], *, temperature: float, pad_id: int, max_rows: int = 8) -> ShortcutCheck:
    """Compare both forwards on the longest rows of a batch. The caller turns the fast path off with `disable_branching`."""
    with network.whole():
        return _check_shortcut(network, rows, temperature, pad_id, max_rows)


def _check_shortcut(network: Network, rows: Sequence[Row], temperature: float, pad_id: int, max_rows: int) -> ShortcutCheck:
    tolerance = TOLERANCE[network.dtype]
    if not network.is_branched:
        return ShortcutCheck(False, float("nan"), tolerance, f"the prompt is computed for every completion: {network.why_not_branched}")
    longest = sorted(range(len(rows)), key=lambda i: -len(rows[i][0].token_ids) - len(rows[i][1].token_ids))[:max_rows]
    batch = MicroBatch(sorted(longest), [rows[i] for i in sorted(longest)])
    plain_network = replace(network, is_branched=False)
    fast = token_stats(network, batch, temperature=temperature, pad_id=pad_id)
    plain = token_stats(plain_network, batch, temperature=temperature, pad_id=pad_id)
    gap_BT = (fast.logprob_BT - plain.logprob_BT).abs()
    gap = float(gap_BT.sum() / fast.mask_BT.sum()) if network.dtype == torch.bfloat16 else float(gap_BT.max())
    if gap <= tolerance:
        return ShortcutCheck(True, gap, tolerance, "")
    return ShortcutCheck(
        False, gap, tolerance, f"log-probabilities differ by {gap:.2e} nats from the plain padded forward (allowed {tolerance:.0e})"
    )


def disable_branching(reason: str, *networks: Network) -> None:
    """Send the policy, which comes first, and the reference through the plain padded forward from now on. An act of all ranks together."""
    for network in networks:
        network.is_branched = False
        network.why_not_branched = reason
    with networks[0].whole():
        check_cached(networks[0])
    for network in networks[1:]:
        network.why_not_cached = networks[0].why_not_cached
