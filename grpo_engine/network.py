"""One causal language model as the engine sees it: a body that gives hidden states and a head that gives logits.

Policy and reference are both a `Network` and run the very same code, so that equal weights give bitwise equal numbers.
The head is applied by vocabulary.py in tiles; the whole-vocabulary logits of a batch never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_engine.attention import BRANCHED, BranchPlan, Plan, UnsupportedAttention
from grpo_engine.contract.error import InvalidRequest

if TYPE_CHECKING:
    from grpo_engine.sharding import Sharding


@dataclass(frozen=True)
class Head:
    """logits = scale * (hidden @ weight^T + bias)."""

    weight_VC: Tensor
    bias_V: Tensor | None
    scale: float = 1.0


@dataclass
class Network:
    """A transformers module with the ways the engine calls it."""

    module: PreTrainedModel
    is_branched: bool
    """Whether the branched attention computes this model; otherwise everything takes the plain padded forward."""
    why_not_branched: str = ""
    why_not_lean: str = ""
    """What was wrong with the written-out forward of lean.py; then the module's own serves sampling too."""
    is_lean_checked: bool = False
    sharding: Sharding | None = None
    """How the weights are divided over the ranks; None where this process holds all of them."""

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Within, and without gradients, this process holds all weights. An act of all ranks together where weights are divided."""
        if self.sharding is None:
            yield
            return
        with self.sharding.whole():
            yield

    def _body(self, **inputs: Any) -> Tensor:
        if self.sharding is not None:
            return self.sharding.body(**inputs)
        hidden: Tensor = self.module.base_model(**inputs).last_hidden_state
        return hidden

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        device: torch.device = self.module.get_input_embeddings().weight.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        """Storage and compute dtype of the weights."""
        dtype: torch.dtype = self.module.get_input_embeddings().weight.dtype
        return dtype

    @property
    def head(self) -> Head:
        """The output projection, with the constant factor some families apply."""
        linear = self.module.get_output_embeddings()
        config = self.module.config.get_text_config()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1.0)
        return Head(linear.weight, getattr(linear, "bias", None), scale)

    def hidden(self, plan: BranchPlan) -> Tensor:
        """Final hidden states (N, C) of packed, branched tokens."""
        return self.hidden_of(plan.input_ids_N, plan.position_ids_N, plan)

    def hidden_of(self, ids_N: Tensor, positions_N: Tensor, plan: Plan) -> Tensor:
        """Final hidden states (N, C) of packed tokens at the given positions, attending as the plan says."""
        # A 4D mask is handed through untouched by transformers for every layer type; the plan replaces it.
        untouched = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=ids_N.device)
        hidden = self._body(
            input_ids=ids_N[None], position_ids=positions_N[None], attention_mask=untouched, use_cache=False, branch_plan=plan
        )
        return hidden[0]

    def hidden_padded(self, ids_BL: Tensor, mask_BL: Tensor) -> Tensor:
        """Final hidden states (B, L, C) of right-padded rows through the model's own attention and masks."""
        return self._body(input_ids=ids_BL, attention_mask=mask_BL, use_cache=False)

    def logits(self, hidden_NC: Tensor) -> Tensor:
        """Whole-vocabulary logits, at least fp32; for decoding, where N is small."""
        scale = self.head.scale
        logits: Tensor = self.module.get_output_embeddings()(hidden_NC)
        logits = logits.float() if logits.dtype == torch.bfloat16 else logits
        return logits if scale == 1.0 else logits * scale


def make_network(module: PreTrainedModel) -> Network:
    """Prepare a freshly loaded module: dropout off, train mode, attention chosen and probed.

    Raises InvalidRequest when the head is not `scale * linear`, because log-probabilities would be wrong.
    """
    disable_dropout(module)
    module.train()  # in eval() transformers skips activation checkpointing without a word; with dropout at 0 the numbers agree
    network = Network(module, is_branched=False)
    _check_head(network)
    reason = _set_branched(module)
    if not reason:
        network.is_branched = True
        reason = _probe(network)
        network.is_branched = not reason
    network.why_not_branched = reason
    return network


def disable_dropout(module: nn.Module) -> None:
    """Set every dropout probability to 0, in dropout layers and in the attributes transformers keeps beside them."""
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.AlphaDropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and ("dropout" in name or name in ("layerdrop", "layer_drop")):
                setattr(part, name, 0.0)


def _set_branched(module: PreTrainedModel) -> str:
    config = module.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ["full_attention"])
    if not kinds <= {"full_attention", "sliding_attention"}:
        return f"layer types {', '.join(sorted(kinds))}"
    if not (module._supports_attention_backend and module._supports_sdpa and module._can_set_attn_implementation()):
        return f"{type(module).__name__} has no exchangeable attention"
    if module.config._attn_implementation != "sdpa":
        return f"attention implementation {module.config._attn_implementation}"
    module.set_attn_implementation(BRANCHED)
    return ""


def _probe_ids(module: PreTrainedModel, device: torch.device) -> Tensor:
    count: int = module.get_input_embeddings().num_embeddings
    return (torch.arange(12, device=device) * 7919 + 1) % count


@torch.no_grad()
def _check_head(network: Network) -> None:
    is_capped = bool(getattr(network.module.config.get_text_config(), "final_logit_softcapping", None))  # too mild for the numbers below
    ids = _probe_ids(network.module, network.device)[None]
    mask = torch.ones_like(ids)
    expected = network.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].float()
    found = network.logits(network.hidden_padded(ids, mask)[0]).float()
    if is_capped or not torch.allclose(expected, found, rtol=2e-2 if network.dtype == torch.bfloat16 else 1e-3, atol=1e-3):
        raise InvalidRequest(
            f"{type(network.module).__name__} changes its logits after the output layer (a soft cap, for example); "
            "such models are not supported, choose another model",
            param="model",
        )


@torch.no_grad()
def _probe(network: Network) -> str:
    """Two short branches against the plain forward: catches layers that ignore the plan. Returns what is wrong, or nothing."""
    ids = _probe_ids(network.module, network.device)
    prompt, first, second = ids[:5].tolist(), ids[5:9].tolist(), ids[9:].tolist()
    plan = BranchPlan.build([prompt], [[first, second]], network.device)
    try:
        branched = network.hidden(plan).float()
    except (UnsupportedAttention, TypeError, RuntimeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    plain = torch.cat(
        [
            network.hidden_padded(row, torch.ones_like(row))[0, start:].float()
            for row, start in ((ids[None, :9], 0), (torch.cat([ids[:5], ids[9:]])[None], 5))
        ]
    )
    gap_N = (branched - plain).norm(dim=1) / plain.norm(dim=1)
    # The median of each part: in bf16 single tokens may differ widely between two right orders of summation.
    gap = max(float(part.median()) for part in gap_N.split([5, 4, 3]))
    limit = 0.15 if network.dtype == torch.bfloat16 else 1e-4
    return "" if gap <= limit else f"hidden states differ by {gap:.1e} (relative) from the plain forward"
