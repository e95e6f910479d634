"""Attention over branched token sequences: every prompt once, its completions as branches of it.

All tokens of a forward pass lie packed in one row of N tokens, without padding, so the matrix products touch real tokens
only. A `BranchPlan` says which token belongs to which prompt or completion; the attention function below gathers the
queries and keys of each branch, lets a completion see its prompt and its own past, and scatters the result back.
Positions restart at the end of the prompt for each completion. The plan travels to the attention function as the
keyword argument `branch_plan` of the model's forward; without one the function is transformers' own SDPA.

Sliding windows are honoured in token positions, layer by layer. Left out, and refused by UnsupportedAttention: soft
caps, attention sinks, position biases, chunked windows, and layers that are no attention at all.

Shapes: N packed tokens   P prompts   B completions   S prompt tokens   T completion tokens   H query heads
K key/value heads   R = H / K   D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from grpo_engine.branch_attention import Layout, branch_attention
from grpo_engine.masked_attention import masked_attention

BRANCHED = "grpo_branched"
"""Name under which the attention function is registered with transformers."""

WORTH_KEYS = 192
"""From this many keys on the attention without masks is the faster one on the CPU (32 rows of SmolLM2, forward and backward, two
cores: 11 ms against 20 at 80 keys, 76 against 36 at 505)."""

_HARMLESS = {"is_causal", "use_cache", "position_ids", "output_attentions", "cache", "past_key_values", "cache_position"}


class UnsupportedAttention(Exception):
    """This layer asks for something the branched attention does not compute; use the plain padded forward."""


class Plan(Protocol):
    """What the attention function needs from a plan."""

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None) -> Tensor:
        """Attention output (N, H, D)."""
        ...


def branched_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function transformers calls in every layer; tensors are (1, heads, N, D) when a plan is given."""
    plan: Plan | None = kwargs.pop("branch_plan", None)
    if plan is None:
        output: tuple[Tensor, Tensor | None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return output
    window = kwargs.pop("sliding_window", None)
    _refuse_unknown(module, window, kwargs)
    if dropout:
        raise UnsupportedAttention("attention dropout is not 0")
    out_NHD = plan.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        window,
    )
    return out_NHD[None], None


def _refuse_unknown(module: nn.Module, window: int | None, kwargs: dict[str, Any]) -> None:
    unknown = sorted(name for name, value in kwargs.items() if value is not None and name not in _HARMLESS)
    if unknown:
        raise UnsupportedAttention(f"{type(module).__name__} passes {', '.join(unknown)} to its attention")
    config = getattr(module, "config", None)
    types = getattr(config, "layer_types", None)
    kind = types[int(module.layer_idx)] if types else None  # type: ignore[arg-type]
    if kind not in (None, "full_attention", "sliding_attention"):
        raise UnsupportedAttention(f"layer type {kind}")
    has_window = kind == "sliding_attention" if types else getattr(config, "sliding_window", None) is not None
    if has_window and window is None:
        raise UnsupportedAttention(f"{type(module).__name__} has a sliding window and does not pass it to its attention")


AttentionInterface.register(BRANCHED, branched_attention)
AttentionMaskInterface.register(BRANCHED, sdpa_mask)


def merge_heads(query_BTHD: Tensor, num_kv_heads: int) -> Tensor:
    """(B, T, H, D) -> (B, K, R*T, D): query heads that share a key head become further queries of it."""
    batch, length, heads, size = query_BTHD.shape
    repeats = heads // num_kv_heads
    return query_BTHD.view(batch, length, num_kv_heads, repeats, size).permute(0, 2, 3, 1, 4).reshape(batch, num_kv_heads, -1, size)


def split_heads(output_BKQD: Tensor, length: int) -> Tensor:
    """The inverse of `merge_heads`: (B, K, R*T, D) -> (B, T, H, D)."""
    batch, kv_heads, rows, size = output_BKQD.shape
    repeats = rows // length
    return output_BKQD.view(batch, kv_heads, repeats, length, size).permute(0, 3, 1, 2, 4).reshape(batch, length, kv_heads * repeats, size)


class _ShareRows(torch.autograd.Function):
    """rows[index] whose gradient is summed in fp32: a group's completions all add to the gradient of their one prompt."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        wide = grads[0].float() if grads[0].dtype == torch.bfloat16 else grads[0]
        total = wide.new_zeros(ctx.count, *wide.shape[1:]).index_add_(0, index, wide)
        return total.to(grads[0].dtype), None


class _Spread(torch.autograd.Function):
    """Packed rows into padded places: rows[place]. The gradient is a gather, not a scatter-add: each row has one place of
    its own (`own_place`); the places that padding fills up carry no gradient, because `_Collect` gives them none."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, place: Tensor, own_place: Tensor) -> Tensor:
        ctx.save_for_backward(own_place)
        return rows.index_select(0, place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        (own_place,) = ctx.saved_tensors
        return grads[0].index_select(0, own_place), None, None


class _Collect(torch.autograd.Function):
    """Padded places back into packed rows: rows[own_place]. Padding gets a zero gradient."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, own_place: Tensor) -> Tensor:
        ctx.save_for_backward(own_place)
        ctx.count = len(rows)
        return rows.index_select(0, own_place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (own_place,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.count, *grads[0].shape[1:]).index_copy_(0, own_place, grads[0]), None


def share_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] along the first dimension, with gradients summed in at least fp32."""
    shared: Tensor = _ShareRows.apply(rows, index)  # type: ignore[no-untyped-call]
    return shared


@dataclass
class BranchPlan:
    """Where every packed token stands. Packed order: prompt 1, its completions one after the other, prompt 2, ..."""

    input_ids_N: Tensor
    position_ids_N: Tensor
    prompt_index_PS: Tensor
    """Packed index of each prompt token, right-padded with the prompt's own first token."""
    prompt_lengths_P: Tensor
    own_index_BT: Tensor
    """Packed index of each completion token that is fed (all but the last), right-padded with the prompt's first token."""
    group_B: Tensor
    """Prompt of each completion."""
    unpack_N: Tensor
    """Place of token n among the padded rows: prompts (P*S), then completions (B*T)."""
    place_M: Tensor
    """Packed index of each padded place, M = P*S + B*T."""
    layout: Layout
    """The same for the attention that needs no padding."""
    keep_prompt_kv: list[tuple[Tensor, Tensor]] | None = None
    """When a list: each layer's prompt keys and values (P, K, S, D) are appended, for decoding."""
    _masks: dict[tuple[str, int | None, torch.dtype], Tensor] = field(default_factory=dict)

    @staticmethod
    def build(prompts: Sequence[Sequence[int]], branches: Sequence[Sequence[Sequence[int]]], device: torch.device) -> BranchPlan:
        """Lay out prompts and, for each prompt, the completion tokens that are fed (may be empty)."""
        ids: list[int] = []
        positions: list[int] = []
        prompt_rows: list[list[int]] = []
        own_rows: list[list[int]] = []
        groups: list[int] = []
        bounds: list[tuple[int, int, int]] = []
        for number, (prompt, completions) in enumerate(zip(prompts, branches, strict=True)):
            prompt_rows.append(list(range(len(ids), len(ids) + len(prompt))))
            ids += prompt
            positions += range(len(prompt))
            for completion in completions:
                own_rows.append(list(range(len(ids), len(ids) + len(completion))))
                groups.append(number)
                ids += completion
                positions += range(len(prompt), len(prompt) + len(completion))
            bounds.append((prompt_rows[-1][0], prompt_rows[-1][-1] + 1, len(ids)))
        width_S = max(len(row) for row in prompt_rows)
        width_T = max((len(row) for row in own_rows), default=0)
        unpack = [0] * len(ids)
        for row, indices in enumerate(prompt_rows):
            for column, index in enumerate(indices):
                unpack[index] = row * width_S + column
        for row, indices in enumerate(own_rows):
            for column, index in enumerate(indices):
                unpack[index] = len(prompt_rows) * width_S + row * width_T + column

        def tensor(values: Any, shape: tuple[int, ...]) -> Tensor:
            return torch.tensor(values, dtype=torch.long).reshape(shape).to(device)

        first = [row[0] for row in prompt_rows]
        prompt_index = [row + row[:1] * (width_S - len(row)) for row in prompt_rows]
        own_index = [row + [first[g]] * (width_T - len(row)) for row, g in zip(own_rows, groups, strict=True)]
        return BranchPlan(
            input_ids_N=tensor(ids, (-1,)),
            position_ids_N=tensor(positions, (-1,)),
            prompt_index_PS=tensor(prompt_index, (len(prompt_rows), width_S)),
            prompt_lengths_P=tensor([len(row) for row in prompt_rows], (-1,)),
            own_index_BT=tensor(own_index, (len(own_rows), width_T)),
            group_B=tensor(groups, (-1,)),
            unpack_N=tensor(unpack, (-1,)),
            place_M=tensor([index for row in (*prompt_index, *own_index) for index in row], (-1,)),
            layout=Layout(
                bounds,
                tensor([index for row in own_rows for index in row], (-1,)),
                tensor([row * width_T + column for row, indices in enumerate(own_rows) for column in range(len(indices))], (-1,)),
                (len(own_rows), width_T),
            ),
        )

    def attend(self, layer: int, query_NHD: Tensor, key_NKD: Tensor, value_NKD: Tensor, scaling: float, window: int | None) -> Tensor:
        """See `Plan.attend`. Where keys and values are kept, layers must come in order, each once: decoding finds them by layer."""
        if self.keep_prompt_kv is not None:
            if layer != len(self.keep_prompt_kv):
                raise UnsupportedAttention(f"layer {layer} attends more than once, or out of order")
            key, value = (rows[self.prompt_index_PS].transpose(1, 2).contiguous() for rows in (key_NKD, value_NKD))
            self.keep_prompt_kv.append((key, value))
        num_keys = self.prompt_index_PS.shape[1] + self.own_index_BT.shape[1]
        if query_NHD.device.type == "cpu" and num_keys >= WORTH_KEYS and (window is None or window >= num_keys):
            return branch_attention(query_NHD, key_NKD, value_NKD, self.layout, scaling)
        heads, size, kv_heads = query_NHD.shape[1], query_NHD.shape[2], key_NKD.shape[1]
        prompts, branches = self.prompt_index_PS.shape, self.own_index_BT.shape
        split = prompts[0] * prompts[1]

        def spread(rows_NHD: Tensor) -> tuple[Tensor, Tensor]:
            """(P, S, heads, D) of the prompts and (B, T, heads, D) of the completions."""
            flat: Tensor = _Spread.apply(rows_NHD.flatten(1), self.place_M, self.unpack_N)  # type: ignore[no-untyped-call]
            tail = rows_NHD.shape[1:]
            return flat[:split].view(*prompts, *tail), flat[split:].view(*branches, *tail)

        prompt_query, own_query = spread(query_NHD)
        prompt_key, own_key = spread(key_NKD)
        prompt_value, own_value = spread(value_NKD)
        dtype, repeats = query_NHD.dtype, heads // kv_heads
        output = self._sdpa(prompt_query, prompt_key, prompt_value, self._mask("prompt", window, dtype, repeats), scaling).flatten(0, 1)
        if branches[1]:
            keys = torch.cat([share_rows(prompt_key, self.group_B), own_key], 1)
            values = torch.cat([share_rows(prompt_value, self.group_B), own_value], 1)
            own = self._sdpa(own_query, keys, values, self._mask("own", window, dtype, repeats), scaling).flatten(0, 1)
            output = torch.cat([output, own])
        collected: Tensor = _Collect.apply(output, self.unpack_N)  # type: ignore[no-untyped-call]
        return collected.view(-1, heads, size)

    @staticmethod
    def _sdpa(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float) -> Tensor:
        merged = merge_heads(query, key.shape[2])
        out = masked_attention(merged, key.transpose(1, 2), value.transpose(1, 2), mask, scaling)
        return split_heads(out, query.shape[1])

    def _mask(self, kind: str, window: int | None, dtype: torch.dtype, repeats: int) -> Tensor:
        """Additive mask (rows, 1, R * queries, keys), made once for all layers with the same window."""
        name = (kind, window, dtype)
        if name not in self._masks:
            allowed = self._prompt_allowed(window) if kind == "prompt" else self._own_allowed(window)
            wide = torch.float32 if dtype == torch.bfloat16 else dtype
            mask = torch.zeros(allowed.shape, dtype=wide, device=allowed.device).masked_fill_(~allowed, float("-inf"))
            self._masks[name] = mask[:, None].repeat(1, 1, repeats, 1)
        return self._masks[name]

    def _prompt_allowed(self, window: int | None) -> Tensor:
        at = torch.arange(self.prompt_index_PS.shape[1], device=self.prompt_index_PS.device)
        distance = at[:, None] - at[None, :]
        allowed = (distance >= 0) & (distance < (window or distance.numel() + 1))
        return allowed[None].expand(self.prompt_index_PS.shape[0], -1, -1)

    def _own_allowed(self, window: int | None) -> Tensor:
        device = self.own_index_BT.device
        width_T, width_S = self.own_index_BT.shape[1], self.prompt_index_PS.shape[1]
        query_T = torch.arange(width_T, device=device)
        prompt_S = torch.arange(width_S, device=device)
        length_B = self.prompt_lengths_P[self.group_B]
        limit = window or 2**62
        own = (query_T[:, None] >= query_T[None, :]) & (query_T[:, None] - query_T[None, :] < limit)
        to_prompt = (prompt_S < length_B[:, None, None]) & (length_B[:, None, None] + query_T[:, None] - prompt_S < limit)
        return torch.cat([to_prompt, own.expand(len(length_B), -1, -1)], 2)
