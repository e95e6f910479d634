"""One causal language model as the engine sees it: a body that gives hidden states and a head that gives logits.

Policy and reference are both a `Network` and run the very same code, so that equal weights give bitwise equal numbers.
The head is applied by vocabulary.py in tiles; the whole-vocabulary logits of a batch never exist at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from grpo_engine.attention import BRANCHED, BranchPlan, Plan, UnsupportedAttention
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.memory import is_out_of_memory
from grpo_engine.plain_decode import CachedDecoder, PlainDecoder
from grpo_engine.row_counts import packed_states

if TYPE_CHECKING:
    from grpo_engine.sharding import Sharding


LONGEST_TRIED = 512
"""Sliding windows of more tokens are not exceeded by the comparisons at start-up, which take seconds with them; those of step 1
compare the fast forward on the run's own rows."""


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
    why_not_cached: str = ""
    """What was wrong with decoding through transformers' cache; then each token is computed from its whole row (plain_decode.py)."""
    is_lean_checked: bool = False
    untold: list[str] = field(default_factory=list)
    """Reasons why sampling takes a slower way that no event has told yet."""
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
        hidden: Tensor = body_of(self.module)(**inputs).last_hidden_state
        return hidden.to(self.dtype)  # Mamba adds its layers up in fp32 whatever the weights are

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
        return packed_states(self.hidden_of, plan)

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
    """Prepare a freshly loaded module: dropout off, train mode, attention chosen and probed, and where it is not branched the cache.

    Raises InvalidRequest when the head is not `scale * linear`, because log-probabilities would be wrong, and when the module's
    own forward fails.
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
    if reason:
        check_cached(network)
    return network


def check_cached(network: Network) -> None:
    """Before a network that is not branched is used: what may follow a row in a batch, and decoding through transformers' cache.

    Raises InvalidRequest where a row's numbers depend on what follows it. For a cache that is wrong there is a way around it.
    """
    _check_rows(network)
    network.why_not_cached = _probe_cache(network)
    if network.why_not_cached:
        network.untold.append(network.why_not_cached)


def body_of(module: PreTrainedModel) -> nn.Module:
    """The part that gives hidden states. Llama4ForCausalLM has none by the name it gives itself, and answers with the whole model."""
    base: nn.Module = module.base_model
    return base if base is not module else getattr(module, "model", module)


def disable_dropout(module: nn.Module) -> None:
    """Set every dropout probability and the noise of every router to 0, in layers and in the attributes transformers keeps beside them."""
    for part in module.modules():
        if isinstance(part, nn.Dropout | nn.AlphaDropout):
            part.p = 0.0
        for name, value in vars(part).items():
            if isinstance(value, float) and any(word in name for word in ("dropout", "jitter", "layerdrop", "layer_drop")):
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


def probe_ids(network: Network, count: int) -> Tensor:
    """So many token ids to try a model with, more or less scattered over its vocabulary."""
    size: int = network.module.get_input_embeddings().num_embeddings
    return (torch.arange(count, device=network.device) * 7919 + 1) % size


def probe_length(network: Network) -> int:
    """Length of a prompt to try a model with: beyond its sliding window or attention chunk, where that is not too long to be tried."""
    config = network.module.config.get_text_config()
    longest = min(LONGEST_TRIED, (getattr(config, "max_position_embeddings", None) or LONGEST_TRIED + 17) - 17)
    sizes = [getattr(config, name, None) or 0 for name in ("sliding_window", "attention_chunk_size")]
    return 5 + max(size if size <= longest else 0 for size in sizes)


def relative_gap(found_NC: Tensor, expected_NC: Tensor) -> float:
    """|found - expected| / |expected|, the median over tokens; NaN where one of them is not a number.

    The median, because in bf16 single tokens may differ widely between two right orders of summation. A token of hidden state 0
    (the padding token of some families, which comes early among `probe_ids`) has no gap when both are 0.
    """
    found, expected = found_NC.double(), expected_NC.double()
    size_N = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    return float(((found - expected).norm(dim=1) / size_N).median())


@contextmanager
def _own_forward(network: Network) -> Iterator[None]:
    """Within, the module computes as its authors wrote it; what fails there is the model's, and it is refused."""
    try:
        yield
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise InvalidRequest(
            f"{type(network.module).__name__} cannot be trained here: its own forward fails on a few tokens "
            f"({type(error).__name__}: {error}); choose another model",
            param="model",
        ) from error


def _limit(network: Network) -> float:
    """Allowed `relative_gap` to the plain forward.

    Two right orders of summation differ by 2e-6 in fp32 (SmolLM2-135M); wrong positions, windows or states change every token, by
    1e-2 even in a small random model. In bf16 one rounding is 4e-3 and they add up over the layers: only a gross fault can be told
    from rounding.
    """
    return 0.15 if network.dtype == torch.bfloat16 else 1e-4


@torch.no_grad()
def _check_head(network: Network) -> None:
    name = type(network.module).__name__
    is_capped = bool(getattr(network.module.config.get_text_config(), "final_logit_softcapping", None))  # too mild for the numbers below
    ids = probe_ids(network, 12)[None]
    mask = torch.ones_like(ids)
    with _own_forward(network):
        expected = network.module(input_ids=ids, attention_mask=mask, use_cache=False).logits[0].float()
        found = network.logits(network.hidden_padded(ids, mask)[0]).float()
    if is_capped or not torch.allclose(expected, found, rtol=2e-2 if network.dtype == torch.bfloat16 else 1e-3, atol=1e-3):
        raise InvalidRequest(
            f"{name} changes its logits after the output layer (a soft cap, for example); "
            "such models are not supported, choose another model",
            param="model",
        )


@torch.no_grad()
def _check_rows(network: Network) -> None:
    ids = probe_ids(network, 12)
    rows = torch.stack([ids, torch.cat([ids[:7], ids[:5]])])
    mask = torch.ones_like(rows)
    mask[1, 7:] = 0
    with _own_forward(network):
        longer, padded = network.hidden_padded(rows, mask)[:, :7]
        alone = network.hidden_padded(rows[1:, :7], mask[1:, :7])[0]
    for found, what in ((longer, "more tokens follow (it is not causal)"), (padded, "padding follows")):
        gap = relative_gap(found, alone)
        if not gap <= _limit(network):
            raise InvalidRequest(
                f"{type(network.module).__name__} gives tokens other numbers ({gap:.1e}, relative) when {what}; "
                "such models are not supported, choose a causal language model that can be padded on the right",
                param="model",
            )


@torch.no_grad()
def _probe(network: Network) -> str:
    """Two short branches against the plain forward: catches layers that ignore the plan. Returns what is wrong, or nothing."""
    start = probe_length(network)
    ids = probe_ids(network, start + 7)
    prompt, first, second = ids[:start].tolist(), ids[start:-3].tolist(), ids[-3:].tolist()
    plan = BranchPlan.build([prompt], [[first, second]], network.device)
    plan.keep_prompt_kv = []  # as decoding does
    try:
        branched = network.hidden(plan).float()
    except (UnsupportedAttention, TypeError, RuntimeError, ValueError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
    with _own_forward(network):
        rows = ((ids[None, :-3], 0), (torch.cat([ids[:start], ids[-3:]])[None], start))
        plain = torch.cat([network.hidden_padded(row, torch.ones_like(row))[0, at:].float() for row, at in rows])
    limit = _limit(network)
    parts = ((part, part + size) for part, size in ((0, start), (start, 4), (start + 4, 3)))
    wrong = [gap for a, b in parts if not (gap := relative_gap(branched[a:b], plain[a:b])) <= limit]  # NaN is wrong too
    return f"hidden states differ by {wrong[0]:.1e} (relative) from the plain forward" if wrong else ""


@torch.no_grad()
def _probe_cache(network: Network) -> str:
    """A few tokens of two rows of one prompt, decoded with and without transformers' cache. Returns what is wrong, or nothing."""
    start = probe_length(network)
    ids = probe_ids(network, start + 12)
    prompt, steps = ids[:start].tolist(), ids[start:].tolist()

    def logits(decoder: CachedDecoder | PlainDecoder) -> Tensor:
        pairs = [ids.new_tensor(steps[at : at + 2]) for at in range(0, len(steps), 2)]
        rows = torch.cat([decoder.start([prompt], 2), *(decoder.step(token_B) for token_B in pairs)])
        return rows - rows.mean(1, keepdim=True)  # a constant on all logits has no effect

    instead = "so each token is computed from its whole row"
    with _own_forward(network):
        plain = logits(PlainDecoder(network))
    try:
        cached = logits(CachedDecoder(network))
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"decoding through transformers' cache fails with {type(error).__name__}: {error}, {instead}"
    wrong = [gap for row in (0, 1) if not (gap := relative_gap(cached[row::2], plain[row::2])) <= _limit(network)]
    if not wrong:
        return ""
    return f"decoding through transformers' cache differs by {wrong[0]:.1e} (relative) from the plain forward, {instead}"
