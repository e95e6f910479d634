"""Decoding for the models that the branched attention does not serve: hybrid and linear-attention layers, sinks, biases.

`CachedDecoder` goes through transformers' cache, one group at a time and without any padding. Whether a family's cache is right
is compared with the plain forward before it is used (`network.check_cached`); where it is not, `PlainDecoder` computes the whole row
again for each token, which needs nothing but the forward that the policy's log-probabilities come from.

Shapes as in decode.py.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from grpo_engine.network import Network


class CachedDecoder:
    """Decodes through transformers' own cache: each group's prompt is fed to all its rows, unpadded. See `decode.Decoder`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        parameters = inspect.signature(type(network.module).forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._caches: list[Any] = []
        self._batches: list[list[int]] = []
        """Rows of each group that are still wanted, as positions in the group's cache."""

    def start(self, prompts: Sequence[Sequence[int]], group_size: int) -> Tensor:
        """See `decode.Decoder.start`."""
        self._sizes = [group_size] * len(prompts)
        self._lengths = [0] * len(prompts)
        self._batches = [list(range(group_size)) for _ in prompts]
        self._caches = [None] * len(prompts)
        rows = [
            self._forward(group, torch.tensor([list(prompt)] * group_size, device=self._network.device))
            for group, prompt in enumerate(prompts)
        ]
        return torch.cat(rows)

    def step(self, token_B: Tensor) -> Tensor:
        """See `decode.Decoder.step`. A group's finished rows are fed a dummy token until the whole group has ended."""
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
        """See `decode.Decoder.keep`."""
        flat = [(group, row) for group, rows in enumerate(self._batches) for row in rows]
        kept = {flat[index] for index in index_B.tolist()}
        self._batches = [[row for row in rows if (group, row) in kept] for group, rows in enumerate(self._batches)]
        for group, rows in enumerate(self._batches):
            if not rows:
                self._caches[group] = None

    def _forward(self, group: int, ids_GS: Tensor) -> Tensor:
        further = {} if self._caches[group] is None else {self._cache_name: self._caches[group]}
        start = self._lengths[group]
        self._lengths[group] += ids_GS.shape[1]
        if self._takes_positions:  # as transformers' own generate() does: Bamba would count from 0 again at every call
            further["position_ids"] = torch.arange(start, self._lengths[group], device=ids_GS.device).expand_as(ids_GS)
        outputs = self._network.module(input_ids=ids_GS, use_cache=True, logits_to_keep=1, **further)
        self._caches[group] = outputs[self._cache_name]
        logits: Tensor = outputs.logits[:, -1]
        return logits.float() if logits.dtype == torch.bfloat16 else logits


class PlainDecoder:
    """Decodes without any cache: the plain forward over all rows, padded on the right, for every token. See `decode.Decoder`."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._rows: list[list[int]] = []

    def start(self, prompts: Sequence[Sequence[int]], group_size: int) -> Tensor:
        """See `decode.Decoder.start`."""
        self._rows = [list(prompt) for prompt in prompts]
        logits_PV = self._next()
        self._rows = [list(prompt) for prompt in prompts for _ in range(group_size)]
        return logits_PV.repeat_interleave(group_size, 0)

    def step(self, token_B: Tensor) -> Tensor:
        """See `decode.Decoder.step`."""
        for row, token in zip(self._rows, token_B.tolist(), strict=True):
            row.append(token)
        return self._next()

    def keep(self, index_B: Tensor) -> None:
        """See `decode.Decoder.keep`."""
        self._rows = [self._rows[index] for index in index_B.tolist()]

    def _next(self) -> Tensor:
        device, width = self._network.device, max(len(row) for row in self._rows)
        ids_BL = torch.tensor([row + row[:1] * (width - len(row)) for row in self._rows], device=device)
        length_B = torch.tensor([len(row) for row in self._rows], device=device)
        mask_BL = (torch.arange(width, device=device) < length_B[:, None]).long()
        hidden_BLC = self._network.hidden_padded(ids_BL, mask_BL)
        return self._network.logits(hidden_BLC[torch.arange(len(length_B), device=device), length_B - 1])
