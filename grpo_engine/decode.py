"""Next-token logits for many completions of a few prompts: the decoders behind rollout.py, and the fastest of them.

`BranchedDecoder` computes each prompt once per group and reads its keys and values once per group; the completions' own
keys and values lie in a preallocated buffer that grows by doubling, and finished rows are dropped from it.
Every model the branched attention does not serve takes those of plain_decode.py.

Shapes as in attention.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from grpo_engine.attention import BranchPlan
from grpo_engine.lean import Forward, LeanForward
from grpo_engine.network import Network
from grpo_engine.plain_decode import CachedDecoder, PlainDecoder
from grpo_engine.row_counts import packed_states


class Decoder(Protocol):
    """A batch of completions that grow by one token at a time."""

    def start(self, prompts: Sequence[Sequence[int]], group_size: int) -> Tensor:
        """Logits (P * group_size, V) of the first completion token; row b belongs to prompt b // group_size."""
        ...

    def step(self, token_B: Tensor) -> Tensor:
        """Append one token to each row and return the next logits (B, V)."""
        ...

    def keep(self, index_B: Tensor) -> None:
        """Drop all rows but these (ascending)."""
        ...


def make_decoder(network: Network, max_new_tokens: int, lean: LeanForward | None = None) -> Decoder:
    """The fastest decoder that is right for this network."""
    if network.is_branched:
        return BranchedDecoder(network, max_new_tokens, lean)
    return PlainDecoder(network) if network.why_not_cached else CachedDecoder(network)


class BranchedDecoder:
    """Decodes with the prompt's keys and values shared by its group.

    Rows stand in a grid of prompts times slots, as many slots as the fullest group has rows left, so that a group's
    queries form one matrix against the shared prompt; the cells that are over are computed and thrown away. On the CPU the
    completions' own keys and values are kept in fp32: their products are many and tiny, and oneDNN's bf16 ones take three
    times as long.

    Grid shapes: P prompts   K key/value heads   G slots   R query heads of a key head   D head size   L cached tokens.
    """

    def __init__(self, network: Network, max_new_tokens: int, lean: LeanForward | None = None) -> None:
        self._network = network
        self._hidden: Forward = network.hidden_of if lean is None else lean
        self._logits: Callable[[Tensor], Tensor] = network.logits if lean is None else lean.logits
        self._limit = max_new_tokens
        self._prompt_kv: list[tuple[Tensor, Tensor]] = []
        self._own_kv: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def start(self, prompts: Sequence[Sequence[int]], group_size: int) -> Tensor:
        """See `Decoder.start`."""
        plan = BranchPlan.build(prompts, [[] for _ in prompts], self._network.device)
        plan.keep_prompt_kv = self._prompt_kv
        hidden_NC = packed_states(self._hidden, plan)
        self._lengths_P, self._slots = plan.prompt_lengths_P, group_size
        self._cell_B = torch.arange(len(prompts) * group_size, device=hidden_NC.device)
        last = torch.cumsum(self._lengths_P, 0) - 1
        return self._logits(hidden_NC[last]).repeat_interleave(group_size, 0)

    def step(self, token_B: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._grow()
        self._masks: dict[int | None, tuple[Tensor | None, Tensor | None]] = {}
        cells = len(self._lengths_P) * self._slots
        is_full = len(token_B) == cells
        token_N = token_B if is_full else token_B.new_zeros(cells).index_copy_(0, self._cell_B, token_B)
        positions_N = self._lengths_P.repeat_interleave(self._slots) + self._length
        hidden_NC = self._hidden(token_N, positions_N, self)
        self._length += 1
        return self._logits(hidden_NC if is_full else hidden_NC.index_select(0, self._cell_B))

    def keep(self, index_B: Tensor) -> None:
        """See `Decoder.keep`. The grid shrinks when a group has ended or the fullest group has fewer rows."""
        cell_B = self._cell_B[index_B]
        groups, group_B, counts = torch.unique(cell_B // self._slots, return_inverse=True, return_counts=True)
        slots = int(counts.max())
        if len(groups) == len(self._lengths_P) and slots == self._slots:
            self._cell_B = cell_B
            return
        slot_B = torch.arange(len(cell_B), device=cell_B.device) - (torch.cumsum(counts, 0) - counts)[group_B]
        source_PG = torch.zeros(len(groups), slots, dtype=torch.long, device=cell_B.device)  # cells left over repeat slot 0
        source_PG[group_B, slot_B] = cell_B % self._slots
        if len(groups) < len(self._lengths_P):
            self._lengths_P = self._lengths_P[groups]
            self._prompt_kv = [(key.index_select(0, groups), value.index_select(0, groups)) for key, value in self._prompt_kv]
        for layer, (key, value) in enumerate(self._own_kv):
            heads = torch.arange(key.shape[1], device=cell_B.device)[None, :, None]
            at = (groups[:, None, None], heads, source_PG[:, None])
            self._own_kv[layer] = (key[at], value[at])
        self._cell_B, self._slots = group_B * slots + slot_B, slots

    def _grow(self) -> None:
        capacity = self._own_kv[0][0].shape[3] if self._own_kv else 0
        if self._length < capacity:
            return
        size = min(max(2 * capacity, 64), self._limit)
        for layer, (prompt, _) in enumerate(self._prompt_kv):
            dtype = torch.float32 if prompt.dtype == torch.bfloat16 and prompt.device.type == "cpu" else prompt.dtype
            shape = (prompt.shape[0], prompt.shape[1], self._slots, size, prompt.shape[3])
            pair = (prompt.new_empty(shape, dtype=dtype), prompt.new_empty(shape, dtype=dtype))
            if not capacity:
                self._own_kv.append(pair)
                continue
            for old, fresh in zip(self._own_kv[layer], pair, strict=True):
                fresh[:, :, :, :capacity] = old
            self._own_kv[layer] = pair

    def _mask(self, window: int | None, width_S: int) -> tuple[Tensor | None, Tensor | None]:
        """Which keys are out of reach: (P, 1, 1, S) of the prompt, to be added, and (L,) of the completion when a window cuts it."""
        if window not in self._masks:
            at_S = torch.arange(width_S, device=self._lengths_P.device)
            length_P1 = self._lengths_P[:, None]
            far_PS = at_S >= length_P1
            own = None
            if window is not None:
                far_PS = far_PS | (length_P1 + self._length - at_S >= window)
                own = self._length - torch.arange(self._length + 1, device=at_S.device) >= window
            added = torch.zeros(far_PS.shape, dtype=self._prompt_kv[0][0].dtype, device=at_S.device).masked_fill_(far_PS, float("-inf"))
            self._masks[window] = (added[:, None, None] if bool(far_PS.any()) else None, own)
        return self._masks[window]

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention of one new token a row: to the group's prompt, and to the row's own past.

        The prompt counts as one more key of the row, whose score is the log-sum-exp of the scores within it.
        """
        prompt_key, prompt_value = self._prompt_kv[layer]
        groups, kv_heads, width_S, size = prompt_key.shape
        grid = (groups, self._slots, kv_heads)
        own_key, own_value = self._own_kv[layer]
        own_key[:, :, :, self._length] = key_NKD.view(*grid, size).transpose(1, 2)
        own_value[:, :, :, self._length] = value_NKD.view(*grid, size).transpose(1, 2)
        own_key, own_value = (cache[:, :, :, : self._length + 1].flatten(0, 2) for cache in (own_key, own_value))
        query = query_NHD.reshape(*grid, -1, size).transpose(1, 2).contiguous()  # (P, K, G, R, D)
        repeats = query.shape[3]
        far, own_far = self._mask(window, width_S)
        to_prompt = _flash if query.device.type == "cpu" else _written_out
        from_prompt, lse = to_prompt(query.view(groups, kv_heads, -1, size), prompt_key, prompt_value, far, scaling)
        to_own = torch.bmm(query.view(-1, repeats, size).to(own_key.dtype), own_key.transpose(1, 2))
        to_own = (to_own.float() if to_own.dtype == torch.bfloat16 else to_own).mul_(scaling)
        if own_far is not None:
            to_own.masked_fill_(own_far, float("-inf"))
        share = torch.softmax(torch.cat([lse.reshape(-1, repeats, 1), to_own], 2), 2)
        from_own = torch.bmm(share[..., 1:].to(own_value.dtype), own_value)
        output = torch.addcmul(from_own, share[..., :1], from_prompt.reshape(-1, repeats, size))
        return output.view(query.shape).transpose(1, 2).to(query.dtype).reshape(query_NHD.shape)


def _flash(query: Tensor, key: Tensor, value: Tensor, far: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """Attention (P, K, Q, D) of queries to their prompt and its log-sum-exp (P, K, Q), by torch's fused kernel of the CPU.

    `far` (P, 1, 1, S) is added to the scores. A prompt all of whose keys are out of reach gives 0 and minus infinity.
    """
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(query, key, value, 0.0, False, attn_mask=far, scale=scaling)
    return (output, lse) if far is None else (output, lse.masked_fill(far.amax(3) < 0, float("-inf")))


def _written_out(query: Tensor, key: Tensor, value: Tensor, far: Tensor | None, scaling: float) -> tuple[Tensor, Tensor]:
    """The same anywhere."""
    scores = query @ key.transpose(2, 3)
    scores = (scores.float() if scores.dtype == torch.bfloat16 else scores).mul_(scaling)
    if far is not None:
        scores += far
    lse = scores.logsumexp(3)
    return (scores - lse[..., None]).exp().nan_to_num().to(value.dtype) @ value, lse
