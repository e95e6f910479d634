"""Next-token logits for many completions of a few prompts: the two decoders behind rollout.py.

`BranchedDecoder` computes each prompt once per group and reads its keys and values once per group; the completions' own
keys and values lie in a preallocated buffer that grows by doubling, and finished rows are dropped from it.
`CachedDecoder` is the plain way through transformers' cache, one group at a time and without any padding; it serves
every model the branched attention does not (hybrid and linear-attention layers, soft caps).

Shapes as in attention.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from grpo_engine.attention import BranchPlan
from grpo_engine.network import Network


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


def make_decoder(network: Network, max_new_tokens: int) -> Decoder:
    """The fastest decoder that is right for this network."""
    return BranchedDecoder(network, max_new_tokens) if network.is_branched else CachedDecoder(network)


class BranchedDecoder:
    """Decodes with the prompt's keys and values shared by its group."""

    def __init__(self, network: Network, max_new_tokens: int) -> None:
        self._network = network
        self._limit = max_new_tokens
        self._prompt_kv: list[tuple[Tensor, Tensor]] = []
        self._own_kv: list[tuple[Tensor, Tensor]] = []
        self._length = 0

    def start(self, prompts: Sequence[Sequence[int]], group_size: int) -> Tensor:
        """See `Decoder.start`."""
        plan = BranchPlan.build(prompts, [[] for _ in prompts], self._network.device)
        plan.keep_prompt_kv = self._prompt_kv
        hidden_NC = self._network.hidden(plan)
        self._lengths_P = plan.prompt_lengths_P
        self._group_B = torch.arange(len(prompts), device=hidden_NC.device).repeat_interleave(group_size)
        last = torch.cumsum(self._lengths_P, 0) - 1
        return self._network.logits(hidden_NC[last]).repeat_interleave(group_size, 0)

    def step(self, token_B: Tensor) -> Tensor:
        """See `Decoder.step`."""
        self._grow(len(token_B))
        self._layout()
        positions = self._lengths_P[self._group_B] + self._length
        hidden_BC = self._network.hidden_of(token_B, positions, self)
        self._length += 1
        return self._network.logits(hidden_BC)

    def keep(self, index_B: Tensor) -> None:
        """See `Decoder.keep`. Prompts left without completions go too."""
        groups, self._group_B = torch.unique(self._group_B[index_B], return_inverse=True)
        if len(groups) < len(self._lengths_P):
            self._lengths_P = self._lengths_P[groups]
            self._prompt_kv = [(key.index_select(0, groups), value.index_select(0, groups)) for key, value in self._prompt_kv]
        self._own_kv = [(key.index_select(0, index_B), value.index_select(0, index_B)) for key, value in self._own_kv]

    def _grow(self, batch: int) -> None:
        capacity = self._own_kv[0][0].shape[2] if self._own_kv else 0
        if self._length < capacity:
            return
        size = min(max(2 * capacity, 64), self._limit)
        grown = []
        for layer, pair in enumerate(self._prompt_kv):
            new = tuple(prompt.new_zeros(batch, prompt.shape[1], size, prompt.shape[3]) for prompt in pair)
            for old, fresh in zip(self._own_kv[layer] if self._own_kv else (), new, strict=False):
                fresh[:, :, :capacity] = old
            grown.append((new[0], new[1]))
        self._own_kv = grown

    def _layout(self) -> None:
        """Slot of each row in its group, so that a group's queries form one matrix against the shared prompt."""
        group_B = self._group_B
        counts = torch.bincount(group_B, minlength=len(self._lengths_P))
        starts = torch.cumsum(counts, 0) - counts
        self._slot_B = torch.arange(len(group_B), device=group_B.device) - starts[group_B]
        self._slots = int(counts.max())
        self._is_full = bool((counts == self._slots).all())
        self._masks: dict[int | None, tuple[Tensor, Tensor | None]] = {}

    def _mask(self, window: int | None, width_S: int) -> tuple[Tensor, Tensor | None]:
        """Which keys are out of reach: (B, 1, 1, S) of the prompt, and (t+1,) of the completion when a window cuts it."""
        if window not in self._masks:
            at_S = torch.arange(width_S, device=self._group_B.device)
            length_B1 = self._lengths_P[self._group_B][:, None]
            far = at_S >= length_B1
            own = None
            if window is not None:
                far = far | (length_B1 + self._length - at_S >= window)
                at_T = torch.arange(self._length + 1, device=at_S.device)
                own = self._length - at_T >= window
            self._masks[window] = (far[:, None, None], own)
        return self._masks[window]

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention of one new token a row: to the group's prompt, and to the row's own past."""
        prompt_key, prompt_value = self._prompt_kv[layer]
        own_key, own_value = self._own_kv[layer]
        own_key[:, :, self._length], own_value[:, :, self._length] = key_NKD, value_NKD
        own_key, own_value = own_key[:, :, : self._length + 1], own_value[:, :, : self._length + 1]
        batch, heads, size = query_NHD.shape
        kv_heads, width_S = prompt_key.shape[1], prompt_key.shape[2]
        query = (query_NHD * scaling).view(batch, kv_heads, -1, size)
        to_prompt = self._ungroup(self._group(query) @ prompt_key.transpose(2, 3), query.shape[2])
        far, own_far = self._mask(window, width_S)
        to_own = query @ own_key.transpose(2, 3)
        scores = torch.cat([to_prompt.masked_fill(far, float("-inf")), to_own], 3)
        if own_far is not None:
            scores[..., width_S:].masked_fill_(own_far, float("-inf"))
        share = torch.softmax(scores.float() if scores.dtype == torch.bfloat16 else scores, 3).to(query.dtype)
        from_prompt = self._ungroup(self._group(share[..., :width_S]) @ prompt_value, query.shape[2])
        return (from_prompt + share[..., width_S:] @ own_value).reshape(batch, heads, size)

    def _group(self, rows_BKRX: Tensor) -> Tensor:
        """(B, K, R, X) -> (P, K, slots * R, X)."""
        _, kv_heads, repeats, width = rows_BKRX.shape
        groups = len(self._lengths_P)
        if self._is_full:
            padded = rows_BKRX.view(groups, self._slots, kv_heads, repeats, width)
        else:
            padded = rows_BKRX.new_zeros(groups, self._slots, kv_heads, repeats, width)
            padded[self._group_B, self._slot_B] = rows_BKRX
        return padded.transpose(1, 2).reshape(groups, kv_heads, self._slots * repeats, width)

    def _ungroup(self, rows_PKQX: Tensor, repeats: int) -> Tensor:
        """The inverse of `_group`."""
        groups, kv_heads, _, width = rows_PKQX.shape
        rows = rows_PKQX.view(groups, kv_heads, self._slots, repeats, width).transpose(1, 2)
        return rows.reshape(-1, kv_heads, repeats, width) if self._is_full else rows[self._group_B, self._slot_B]


class CachedDecoder:
    """Decodes through transformers' own cache: each group's prompt is fed to all its rows, unpadded."""

    def __init__(self, network: Network) -> None:
        self._network = network
        parameters = inspect.signature(type(network.module).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._caches: list[Any] = []
        self._batches: list[list[int]] = []
        """Rows of each group that are still wanted, as positions in the group's cache."""

    def start(self, prompts: Sequence[Sequence[int]], group_size: int) -> Tensor:
        """See `Decoder.start`."""
        self._sizes = [group_size] * len(prompts)
        self._batches = [list(range(group_size)) for _ in prompts]
        self._caches = [None] * len(prompts)
        rows = [
            self._forward(group, torch.tensor([list(prompt)] * group_size, device=self._network.device))
            for group, prompt in enumerate(prompts)
        ]
        return torch.cat(rows)

    def step(self, token_B: Tensor) -> Tensor:
        """See `Decoder.step`. A group's finished rows are fed a dummy token until the whole group has ended."""
        rows, at = [], 0
        for group, wanted in enumerate(self._batches):
            if not wanted:
                continue
            tokens = token_B.new_zeros(self._sizes[group], 1)
            tokens[wanted, 0] = token_B[at : at + len(wanted)]
            at += len(wanted)
            rows.append(self._forward(group, tokens)[wanted])
        return torch.cat(rows)

    def keep(self, index_B: Tensor) -> None:
        """See `Decoder.keep`."""
        flat = [(group, row) for group, rows in enumerate(self._batches) for row in rows]
        kept = {flat[index] for index in index_B.tolist()}
        self._batches = [[row for row in rows if (group, row) in kept] for group, rows in enumerate(self._batches)]
        for group, rows in enumerate(self._batches):
            if not rows:
                self._caches[group] = None

    def _forward(self, group: int, ids_GS: Tensor) -> Tensor:
        cache = {} if self._caches[group] is None else {self._cache_name: self._caches[group]}
        outputs = self._network.module(input_ids=ids_GS, use_cache=True, logits_to_keep=1, **cache)
        self._caches[group] = outputs[self._cache_name]
        logits: Tensor = outputs.logits[:, -1]
        return logits.float() if logits.dtype == torch.bfloat16 else logits
