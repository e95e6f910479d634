"""Sampling: groups of completions for prompts, with the sampler's own log-probabilities.

Tokens come from a decoder (decode.py); this file chooses them. Every completion has its own random stream keyed by
(seed, step, prompt row, completion index), so results depend neither on the order of prompts nor on what else is in the
batch, up to rounding of the logits. A token is drawn by inverting the cumulative distribution at one uniform number.
Rows that ended are dropped while the others go on. Not here: rewards, and any tokeniser but for decoding.

Shapes: P prompts   G completions of each   B rows still growing   V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from grpo_engine.batch import Completion, Group, Prompt
from grpo_engine.contract.job import SamplingConfig
from grpo_engine.decode import Decoder, make_decoder
from grpo_engine.device import release_cache
from grpo_engine.lean import make_lean
from grpo_engine.memory import Budget, sampling_budget
from grpo_engine.packing import WORTH_CALLS, packed_linears
from grpo_engine.policy import Policy

COMPACT_BELOW = 0.85
"""Drop finished rows once fewer than this share of the rows in the decoder are alive."""

_BLOCK = 256
"""Vocabulary entries summed at once when a cumulative distribution is inverted."""

_NUCLEUS_GUESS = 1024
"""Candidates looked at first for top-p; all are sorted when these do not reach it."""


@torch.no_grad()
def sample_groups(
    policy: Policy,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingConfig,
    seed: int,
    step: int,
    *,
    first_completion: int = 0,
    compact_below: float = COMPACT_BELOW,
    budget: Budget | None = None,
) -> list[Group]:
    """Sample `group_size` completions for each prompt. Their random streams are numbered from `first_completion`.

    Over several ranks each samples its share of the prompts, and every rank gets all groups. The end token is part of the
    completion; a completion without one is marked truncated. No more completions are sampled at once than `budget` allows
    (None: all). Raises ValueError when a prompt leaves no room in the model's context, OutOfMemory when half the budget is too much.
    """
    limit = sampling.max_completion_tokens
    longest = max(len(prompt.token_ids) for prompt in prompts)
    if longest + limit > policy.context_length:
        raise ValueError(
            f"a prompt of {longest} tokens and max_completion_tokens {limit} exceed the model's context of {policy.context_length}"
        )
    ranks = policy.ranks
    mine = [prompts[at] for at in ranks.share_of(len(prompts))]
    numbers = range(first_completion, first_completion + group_size)
    budget = budget or sampling_budget(max(1, len(mine) * group_size), ranks.any)

    def work() -> list[Completion]:
        parts = _parts(mine, numbers, budget.size)
        return [found for part, some in parts for found in _sample(policy, part, some, sampling, seed, step, compact_below)]

    with policy.network.whole():
        found = budget.fit(work, "sampling", release_cache)
    own = [found[at : at + group_size] for at in range(0, len(found), group_size)]
    return [Group(prompt, completions, first_completion) for prompt, completions in zip(prompts, ranks.gather(own), strict=True)]


def _parts(prompts: Sequence[Prompt], numbers: range, at_once: int) -> Iterator[tuple[Sequence[Prompt], range]]:
    """Prompts and completion numbers to be sampled together, in order: whole groups, or pieces of one where a group is too large."""
    if (groups := at_once // len(numbers)) >= 1:
        yield from ((prompts[at : at + groups], numbers) for at in range(0, len(prompts), groups))
        return
    for prompt in prompts:
        yield from (([prompt], numbers[at : at + at_once]) for at in range(0, len(numbers), at_once))


def _sample(
    policy: Policy, prompts: Sequence[Prompt], numbers: range, sampling: SamplingConfig, seed: int, step: int, compact_below: float
) -> list[Completion]:
    """The completions of the first prompt, then those of the next."""
    limit, group_size = sampling.max_completion_tokens, len(numbers)
    uniform_BT = torch.stack([uniforms(seed, step, prompt.row, number, limit) for prompt in prompts for number in numbers]).to(
        policy.network.device
    )
    lean = make_lean(policy.network, len(uniform_BT)) if limit >= WORTH_CALLS else None
    with nullcontext() if lean else packed_linears(policy.model, limit, len(uniform_BT)):
        decoder = make_decoder(policy.network, limit, lean)
        tokens_of, logprobs_of = _decode(policy, decoder, prompts, group_size, sampling, uniform_BT, compact_below)
    texts = policy.tokenizer.batch_decode(
        [_without_end(tokens, policy.eos_ids) for tokens in tokens_of], skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    return [
        Completion(tokens, logprobs, text, is_truncated=tokens[-1] not in policy.eos_ids)
        for tokens, logprobs, text in zip(tokens_of, logprobs_of, texts, strict=True)
    ]


def _decode(
    policy: Policy,
    decoder: Decoder,
    prompts: Sequence[Prompt],
    group_size: int,
    sampling: SamplingConfig,
    uniform_BT: Tensor,
    compact_below: float,
) -> tuple[list[list[int]], list[list[float]]]:
    total, limit = len(uniform_BT), uniform_BT.shape[1]
    device = uniform_BT.device
    ends = torch.tensor(sorted(policy.eos_ids), device=device, dtype=torch.long)
    token_out = torch.zeros(total, limit, dtype=torch.long, device=device)
    logprob_out = torch.zeros(total, limit, dtype=torch.float64, device=device)
    length_out = torch.full((total,), limit, device=device)
    logits_BV = decoder.start([prompt.token_ids for prompt in prompts], group_size)
    row_B = torch.arange(total, device=device)
    alive_B = torch.ones(total, dtype=torch.bool, device=device)
    for at in range(limit):
        token_B, logprob_B = choose_tokens(logits_BV, uniform_BT[row_B, at], sampling.temperature, sampling.top_p)
        token_out[row_B[alive_B], at] = token_B[alive_B]
        logprob_out[row_B[alive_B], at] = logprob_B[alive_B]
        ended_B = alive_B & torch.isin(token_B, ends)
        length_out[row_B[ended_B]] = at + 1
        alive_B = alive_B & ~ended_B
        num_alive = int(alive_B.sum())
        if num_alive == 0 or at + 1 == limit:
            break
        if num_alive < compact_below * len(alive_B):
            kept = alive_B.nonzero()[:, 0]
            decoder.keep(kept)
            token_B, row_B, alive_B = token_B[kept], row_B[kept], alive_B[kept]
        logits_BV = decoder.step(token_B)
    lengths = length_out.tolist()
    tokens = [row[:length] for row, length in zip(token_out.tolist(), lengths, strict=True)]
    return tokens, [row[:length] for row, length in zip(logprob_out.tolist(), lengths, strict=True)]


def _without_end(tokens: list[int], eos_ids: frozenset[int]) -> list[int]:
    return tokens[:-1] if tokens[-1] in eos_ids else tokens


def uniforms(seed: int, step: int, prompt_row: int, completion: int, count: int) -> Tensor:
    """The random numbers in [0, 1) of one completion, float64; the first ones do not depend on `count`."""
    key = hashlib.sha256(f"{seed} {step} {prompt_row} {completion}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)
    return torch.rand(count, generator=generator, dtype=torch.float64)


def choose_tokens(logits_BV: Tensor, uniform_B: Tensor, temperature: float, top_p: float) -> tuple[Tensor, Tensor]:
    """Draw one token a row and give its log-probability under the distribution drawn from (after temperature and top-p)."""
    scaled_BV = logits_BV if temperature == 1.0 else logits_BV / temperature
    if top_p < 1.0:
        return _choose_nucleus(torch.log_softmax(scaled_BV, 1), uniform_B, top_p)
    peak_B1 = scaled_BV.amax(1, keepdim=True)
    token_B, total_B = invert_cumulative(torch.sub(scaled_BV, peak_B1).exp_(), uniform_B)
    return token_B, (scaled_BV.gather(1, token_B[:, None]) - peak_B1)[:, 0].double() - total_B.log()


def _choose_nucleus(logprob_BV: Tensor, uniform_B: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Top-p: the fewest likeliest tokens whose probabilities reach `top_p`, renormalised."""
    vocabulary = logprob_BV.shape[1]
    count = min(_NUCLEUS_GUESS, vocabulary)
    sorted_logprob, order = torch.topk(logprob_BV, count)
    if count < vocabulary and bool((sorted_logprob.double().exp().sum(1) < top_p).any()):
        sorted_logprob, order = torch.sort(logprob_BV, descending=True, stable=True)
    share = sorted_logprob.double().exp()
    before = share.cumsum(1) - share
    share = share.masked_fill(before >= top_p, 0.0)
    place_B, total_B = invert_cumulative(share, uniform_B)
    chosen = share.gather(1, place_B[:, None])[:, 0]
    return order.gather(1, place_B[:, None])[:, 0], chosen.log() - total_B.log()


def invert_cumulative(weight_BV: Tensor, uniform_B: Tensor) -> tuple[Tensor, Tensor]:
    """For each row the first index whose cumulative weight exceeds uniform * total, and the total. Never an index of weight 0.

    Two levels, blocks and then entries of one block; sums over blocks in float64, a single pass over the weights.
    """
    rows, vocabulary = weight_BV.shape
    blocks = -(-vocabulary // _BLOCK)
    padded = torch.nn.functional.pad(weight_BV, (0, blocks * _BLOCK - vocabulary)) if vocabulary % _BLOCK else weight_BV
    weight_BKE = padded.view(rows, blocks, _BLOCK)
    block_sum_BK = weight_BKE.sum(2).double()
    cumulative_BK = block_sum_BK.cumsum(1)
    goal_B = uniform_B.double() * cumulative_BK[:, -1]
    block_B = _first_above(cumulative_BK, goal_B, block_sum_BK)
    inside_BE = weight_BKE[torch.arange(rows, device=weight_BV.device), block_B].double()
    base_B = (cumulative_BK - block_sum_BK).gather(1, block_B[:, None])[:, 0]
    entry_B = _first_above(inside_BE.cumsum(1), goal_B - base_B, inside_BE)
    return block_B * _BLOCK + entry_B, cumulative_BK[:, -1]


def _first_above(cumulative_BK: Tensor, goal_B: Tensor, weight_BK: Tensor) -> Tensor:
    """First index with cumulative > goal; where rounding leaves none, the last index of positive weight."""
    found_B = torch.searchsorted(cumulative_BK, goal_B[:, None], right=True)[:, 0]
    last_B = weight_BK.shape[1] - 1 - (weight_BK > 0).flip(1).to(torch.uint8).argmax(1)
    return torch.minimum(found_B, last_B)
