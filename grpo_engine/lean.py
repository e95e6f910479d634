"""The forward pass of Llama-shaped models written out, for sampling on the CPU.

One new token a row makes small tensors: calling through a model's modules costs more than the arithmetic between its
matrix products. Here query, key and value come from one product, the activation, the gate and the residual sums are done
inside the products (oneDNN), and weights in bf16 are laid out for the processor once per rollout. Norms, embeddings and
positions are the model's own modules. The first use compares it with the model (`Network.why_not_lean` says what is wrong);
other families, adapters, sharded weights and GPUs take the model's own forward.

Shapes as in attention.py, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from grpo_engine.attention import BranchPlan, Plan
from grpo_engine.network import Network, relative_gap

Forward = Callable[[Tensor, Tensor, Plan], Tensor]
"""Final hidden states (N, C) of token ids (N) at positions (N), attending as the plan says."""

FAMILIES = (LlamaModel, MistralModel, Qwen2Model, Qwen3Model)

_PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

_LIMIT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Allowed gap to the model's own hidden states, relative, the median over tokens."""


class _Plain:
    """A linear layer and what may be done to its result."""

    def __init__(self, layer: nn.Linear) -> None:
        self._weight, self._bias = layer.weight, layer.bias

    def __call__(self, rows: Tensor) -> Tensor:
        return functional.linear(rows, self._weight, self._bias)

    def silu(self, rows: Tensor) -> Tensor:
        return functional.silu(self(rows), inplace=True)

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        return self(rows).mul_(other)

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        return self(rows).add_(other)


class _Packed:
    """The same with a bf16 weight laid out for the processor, and the follow-up done before the result is rounded."""

    def __init__(self, layers: Sequence[nn.Linear], rows: int) -> None:
        weight = layers[0].weight.detach() if len(layers) == 1 else torch.cat([layer.weight.detach() for layer in layers])
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
        biases: list[Tensor] = [layer.bias for layer in layers]
        self._bias = None if biases[0] is None else torch.cat(biases).detach()

    def __call__(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "none", [], "")
        return output

    def silu(self, rows: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._weight, self._bias, "swish", [], "")
        return output

    def times(self, rows: Tensor, other: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self._weight, self._bias, "mul")
        return output

    def plus(self, rows: Tensor, other: Tensor) -> Tensor:
        output: Tensor = torch.ops.mkldnn._linear_pointwise.binary(rows, other, self._weight, self._bias, "add")
        return output


Product = _Plain | _Packed


@dataclass(frozen=True)
class _Layer:
    """One decoder layer, taken apart."""

    input_norm: nn.Module
    query_key_value: Sequence[Product]
    """One product that gives all three, or three."""
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    scaling: float
    window: int | None
    output: Product
    middle_norm: nn.Module
    gate: Product
    up: Product
    down: Product


class LeanForward:
    """See the module's head. Holds the weights as they were when it was made: make a new one for each rollout."""

    def __init__(self, network: Network, rows: int) -> None:
        self._base: Any = network.module.base_model
        config = network.module.config.get_text_config()
        self._heads, self._kv_heads = config.num_attention_heads, config.num_key_value_heads
        self._layers = [_take_apart(layer, rows) for layer in self._base.layers]
        self._head = _Packed([network.module.get_output_embeddings()], rows) if network.dtype == torch.bfloat16 else None
        self._network = network

    def __call__(self, ids_N: Tensor, positions_N: Tensor, plan: Plan) -> Tensor:
        """See `Forward`."""
        hidden_NC: Tensor = self._base.embed_tokens(ids_N)
        cos_1ND, sin_1ND = self._base.rotary_emb(hidden_NC[None], position_ids=positions_N[None])
        half = cos_1ND.shape[-1] // 2
        cos_N1D = cos_1ND[0][:, None]
        sin_N1D = torch.cat([-sin_1ND[0, :, :half], sin_1ND[0, :, half:]], 1)[:, None]
        for number, layer in enumerate(self._layers):
            query_key, value = self._project(layer, layer.input_norm(hidden_NC))
            rotated = torch.addcmul(query_key * cos_N1D, query_key.roll(half, -1), sin_N1D)
            query, key = rotated[:, : self._heads], rotated[:, self._heads :]
            attended = plan.attend(number, query, key, value, layer.scaling, layer.window)
            hidden_NC = layer.output.plus(attended.flatten(1), hidden_NC)
            normed = layer.middle_norm(hidden_NC)
            hidden_NC = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), hidden_NC)
        final: Tensor = self._base.norm(hidden_NC)
        return final

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """As `Network.logits`."""
        if self._head is None:
            return self._network.logits(hidden_NC)
        logits, scale = self._head(hidden_NC).float(), self._network.head.scale
        return logits if scale == 1.0 else logits * scale

    def _project(self, layer: _Layer, hidden_NC: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys (N, H + K, D), and values (N, K, D)."""
        parts = [product(hidden_NC) for product in layer.query_key_value]
        joined = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
        rows = joined.view(len(joined), self._heads + 2 * self._kv_heads, -1)
        split = self._heads + self._kv_heads
        query_key, value = rows[:, :split], rows[:, split:]
        if layer.query_norm is not None and layer.key_norm is not None:
            query_key = torch.cat([layer.query_norm(query_key[:, : self._heads]), layer.key_norm(query_key[:, self._heads :])], 1)
        return query_key, value


def _take_apart(layer: Any, rows: int) -> _Layer:
    attention, mlp = layer.self_attn, layer.mlp
    is_packed = attention.q_proj.weight.dtype == torch.bfloat16

    def product(part: nn.Linear) -> Product:
        return _Packed([part], rows) if is_packed else _Plain(part)

    three = [attention.q_proj, attention.k_proj, attention.v_proj]
    return _Layer(
        input_norm=layer.input_layernorm,
        query_key_value=[_Packed(three, rows)] if is_packed else [_Plain(part) for part in three],
        query_norm=getattr(attention, "q_norm", None),
        key_norm=getattr(attention, "k_norm", None),
        scaling=attention.scaling,
        window=getattr(attention, "sliding_window", getattr(attention.config, "sliding_window", None)),
        output=product(attention.o_proj),
        middle_norm=layer.post_attention_layernorm,
        gate=product(mlp.gate_proj),
        up=product(mlp.up_proj),
        down=product(mlp.down_proj),
    )


def make_lean(network: Network, rows: int) -> LeanForward | None:
    """The written-out forward of the network's present weights for about `rows` rows; None where there is none. Under no_grad.

    The first one is compared with the model's own forward; when they differ, `network.why_not_lean` is set and None returned.
    """
    if network.why_not_lean or not _has_shape(network):
        return None
    lean = LeanForward(network, rows)
    if not network.is_lean_checked:
        network.why_not_lean = _compare(network, lean)
        network.is_lean_checked = True
        if network.why_not_lean:
            network.untold.append(network.why_not_lean)
    return None if network.why_not_lean else lean


def _has_shape(network: Network) -> bool:
    base = network.module.base_model
    if not network.is_branched or network.device.type != "cpu" or type(base) not in FAMILIES:
        return False
    if network.dtype == torch.bfloat16 and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    head = network.module.get_output_embeddings()
    parts = [part for name, part in base.named_modules() if name.rsplit(".", 1)[-1] in _PROJECTIONS]
    config = network.module.config.get_text_config()
    is_plain = all(type(part) is nn.Linear and type(part.weight) is nn.Parameter for part in (*parts, head))
    return is_plain and len(parts) == len(_PROJECTIONS) * len(base.layers) and config.hidden_act in ("silu", "swish")


def _compare(network: Network, lean: LeanForward) -> str:
    """Two short branches through both forwards. Returns what is wrong, or nothing."""
    count: int = network.module.get_input_embeddings().num_embeddings
    ids = ((torch.arange(12) * 7919 + 1) % count).tolist()
    plans = [BranchPlan.build([ids[:5]], [[ids[5:9], ids[9:]]], network.device) for _ in range(2)]
    try:
        found = lean(plans[0].input_ids_N, plans[0].position_ids_N, plans[0])
        found_logits = lean.logits(found)
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        return f"the written-out forward fails: {type(error).__name__}: {error}"
    expected = network.hidden(plans[1])
    gaps = (relative_gap(found, expected), relative_gap(found_logits, network.logits(expected)))
    limit = _LIMIT[network.dtype]
    wrong = [gap for gap in gaps if not gap <= limit]  # NaN is wrong too
    return f"the written-out forward differs by {wrong[0]:.1e} (relative, allowed {limit:.0e}) from the model's" if wrong else ""
