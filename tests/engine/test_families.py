"""Model families as they come: each is computed like its own plain forward, sampled from it, or refused with its name."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BambaConfig,
    BambaForCausalLM,
    Cohere2Config,
    CpmAntConfig,
    DiffLlamaConfig,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3TextConfig,
    Lfm2Config,
    Llama4TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    PhimoeConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen3NextConfig,
    XLMConfig,
)

from grpo_engine import network as network_module
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.decode import make_decoder
from grpo_engine.logprob import MicroBatch, disable_branching, token_stats
from grpo_engine.network import Network, make_network
from grpo_engine.plain_decode import CachedDecoder, PlainDecoder
from tests.engine.model_fixtures import ragged_rows, tiny_policy
from tests.engine.runs import events, make_job, make_spec, train

SIZES = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
DENSE = {**SIZES, "num_key_value_heads": 2, "max_position_embeddings": 256}
LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
STATES = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
STATES_ONLY = {"vocab_size": 300, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8, "head_dim": 8, "num_heads": 8, "n_groups": 1}
BOTH = ["sliding_attention", "full_attention"]

BRANCHED: dict[str, PreTrainedConfig] = {
    "mistral": MistralConfig(**DENSE, sliding_window=6),
    "gemma3": Gemma3TextConfig(**DENSE, head_dim=8, sliding_window=6, layer_types=BOTH),
    "phi3": Phi3Config(**DENSE, sliding_window=6, pad_token_id=0),
    "olmo3": Olmo3Config(**DENSE, sliding_window=6, layer_types=BOTH),
    "cohere2": Cohere2Config(**DENSE, sliding_window=6, layer_types=BOTH),
}
"""Sliding windows shorter than the rows. The padding token of olmo3 is among the tokens tried at start-up, and its state is 0."""

PLAIN: dict[str, tuple[PreTrainedConfig, str]] = {
    "gemma2": (
        Gemma2Config(**DENSE, head_dim=8, sliding_window=6, final_logit_softcapping=None, layer_types=BOTH),
        "no exchangeable attention",
    ),
    "qwen3_next": (Qwen3NextConfig(**DENSE, **LINEAR, **EXPERTS, layer_types=["linear_attention", "full_attention"]), "linear_attention"),
    "diffllama": (DiffLlamaConfig(**DENSE), "attends more than once"),
    "lfm2": (Lfm2Config(**DENSE, layer_types=["conv", "full_attention"]), "conv"),
    "bamba": (BambaConfig(**DENSE, **STATES, attn_layer_indices=[1]), "linear_attention"),
    "mamba2": (Mamba2Config(**STATES_ONLY, chunk_size=16), "linear_attention"),
    "llama4": (
        Llama4TextConfig(**DENSE, head_dim=8, intermediate_size_mlp=48, num_local_experts=2, attention_chunk_size=8),
        "chunked_attention",
    ),
}
"""Soft-capped attention, hybrid, state-space and chunked models, and what keeps them from the branched attention."""


def _prepared(config: PreTrainedConfig, family: type[PreTrainedModel] | None = None, dtype: torch.dtype = torch.float32) -> Network:
    torch.manual_seed(0)
    config = deepcopy(config)  # a module's choice of attention is kept in it
    module = AutoModelForCausalLM.from_config(config) if family is None else family(config)
    return make_network(module.to(dtype))


def _logprobs(network: Network, ids: list[int]) -> torch.Tensor:
    """(len(ids), V) by one call of the module for this row alone."""
    return torch.log_softmax(network.module(torch.tensor([ids])).logits[0].float(), -1)


@torch.no_grad()
def _check(network: Network) -> None:
    """The log-probabilities of ragged rows, and decoding of two prompts with rows dropped on the way, against unpadded rows."""
    rows = ragged_rows()
    stats = token_stats(network, MicroBatch(list(range(len(rows))), rows), temperature=1.0, pad_id=0)
    for number, (prompt, completion) in enumerate(rows):
        target = torch.tensor(completion.token_ids)
        expected = _logprobs(network, prompt.token_ids + completion.token_ids)[len(prompt.token_ids) - 1 : -1].gather(1, target[:, None])
        torch.testing.assert_close(stats.logprob_BT[number, : len(target)], expected[:, 0], rtol=0, atol=5e-5)
    grown = [prompt.token_ids.copy() for prompt, _ in (rows[0], rows[-1]) for _ in range(2)]
    decoder = make_decoder(network, 16)
    logits = decoder.start([grown[0].copy(), grown[2].copy()], 2)
    for step in range(12):
        if step == 4:
            decoder.keep(torch.tensor([1, 2, 3]))
            grown, logits = grown[1:], logits[1:]
        expected = torch.stack([_logprobs(network, ids)[-1] for ids in grown])
        torch.testing.assert_close(torch.log_softmax(logits.float(), -1), expected, rtol=0, atol=5e-5)
        tokens = [(7 * row + 31 * step) % 300 for row in range(len(grown))]
        for ids, token in zip(grown, tokens, strict=True):
            ids.append(token)
        logits = decoder.step(torch.tensor(tokens))


@pytest.mark.parametrize("name", BRANCHED)
def test_sliding_windows_are_branched_and_equal_the_plain_forward_beyond_them(name: str) -> None:
    network = _prepared(BRANCHED[name])
    assert network.is_branched, network.why_not_branched
    _check(network)


@pytest.mark.parametrize("name", PLAIN)
def test_hybrid_and_state_space_models_are_computed_and_sampled_without_the_shortcut(name: str) -> None:
    """Bamba counts positions from 0 in each call unless it is told them; Llama4 calls its body by a name it does not have."""
    config, reason = PLAIN[name]
    network = _prepared(config)
    assert not network.is_branched
    assert reason in network.why_not_branched
    assert network.why_not_cached == ""
    assert isinstance(make_decoder(network, 16), CachedDecoder)
    _check(network)


def test_a_body_in_fp32_under_a_head_in_bf16_is_computed_as_its_authors_do() -> None:
    """State-space models add their layers up in fp32, and bring the sum back before the head."""
    network = _prepared(PLAIN["mamba2"][0], dtype=torch.bfloat16)
    ids = torch.arange(9)[None]
    with torch.no_grad():
        found = network.logits(network.hidden_padded(ids, torch.ones_like(ids)))
        assert torch.equal(found, network.module(ids).logits.float())


class Forgetful(BambaForCausalLM):  # type: ignore[misc]
    """Decodes every token at position 0, as it would without being told."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, cache: Any = None, **rest: Any) -> Any:
        rest.pop("position_ids", None)
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, cache=cache, **rest)


class Uncached(BambaForCausalLM):  # type: ignore[misc]
    """Cannot be decoded through a cache."""

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, cache: Any = None, **rest: Any) -> Any:
        if cache is not None:
            raise IndexError("no such state")
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **rest)


@pytest.mark.parametrize(("family", "reason"), [(Forgetful, "cache differs by"), (Uncached, "cache fails with IndexError: no such state")])
def test_a_family_whose_cache_is_wrong_is_decoded_from_whole_rows(family: type[PreTrainedModel], reason: str) -> None:
    network = _prepared(PLAIN["bamba"][0], family)
    assert reason in network.why_not_cached
    assert network.untold == [network.why_not_cached]
    assert isinstance(make_decoder(network, 16), PlainDecoder)
    _check(network)


def test_a_fast_forward_that_is_switched_off_has_its_cache_compared_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy, reference = tiny_policy(tmp_path / "a").network, tiny_policy(tmp_path / "b").network
    step = CachedDecoder.step
    monkeypatch.setattr(CachedDecoder, "step", lambda decoder, token_B: 1.1 * step(decoder, token_B))
    disable_branching("differs", policy, reference)
    assert "cache differs by" in policy.why_not_cached
    assert reference.why_not_cached == policy.why_not_cached
    assert isinstance(make_decoder(reference, 16), PlainDecoder)


def test_a_run_says_that_each_token_is_computed_from_its_whole_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network_module, "_probe", lambda _: "differs")
    monkeypatch.setattr(network_module, "_probe_cache", lambda _: "the cache differs")
    monkeypatch.setattr(CachedDecoder, "start", None)
    root = make_job(tmp_path)
    run_dir = train(root, spec=make_spec(root, limits={"num_steps": 2}))
    reasons = [(event.step, event.data["reason"]) for event in events(run_dir, "shortcut.disabled")]
    assert reasons == [(1, "the prompt is computed for every completion: differs"), (1, "the cache differs")]
    assert [event.step for event in events(run_dir, "step.completed")] == [1, 2]


class Broken(LlamaForCausalLM):  # type: ignore[misc]
    """Fails whenever it is called."""

    def forward(self, **_: Any) -> Any:
        raise KeyError("rope")


def test_a_model_whose_own_forward_fails_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(**DENSE)
    with pytest.raises(InvalidRequest, match=r"Broken cannot be trained here.*KeyError: 'rope'.*choose another model") as caught:
        _prepared(config, Broken)
    assert caught.value.param == "model"

    def no_memory(**_: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(Broken, "forward", lambda _, **inputs: no_memory(**inputs))
    with pytest.raises(MemoryError):
        _prepared(config, Broken)


def test_numbers_that_are_none_in_one_branch_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = Network.hidden

    def spoiled(network: Network, plan: Any) -> torch.Tensor:
        found = hidden(network, plan).clone()
        found[-3:] = float("nan")
        return found

    monkeypatch.setattr(Network, "hidden", spoiled)
    network = _prepared(BRANCHED["mistral"])
    assert not network.is_branched
    assert "nan" in network.why_not_branched


def test_logits_changed_after_the_output_layer_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A soft cap leaves the small logits of a small model nearly alone, so its setting is looked at too."""
    torch.manual_seed(0)
    config = Gemma2Config(**DENSE, head_dim=8)
    with pytest.raises(InvalidRequest, match="soft cap") as caught:
        make_network(Gemma2ForCausalLM(config))
    assert caught.value.param == "model"
    config.final_logit_softcapping = None
    assert make_network(Gemma2ForCausalLM(config)).dtype == torch.float32
    monkeypatch.setattr(Network, "logits", lambda network, hidden: 2 * network.module.get_output_embeddings()(hidden))
    with pytest.raises(InvalidRequest, match="after the output layer"):
        make_network(Gemma2ForCausalLM(config))


NOISY = {
    "mixtral": MixtralConfig(**DENSE, num_local_experts=4, router_jitter_noise=0.3),
    "phimoe": PhimoeConfig(**DENSE, num_local_experts=4, pad_token_id=0, bos_token_id=1, eos_token_id=2, router_jitter_noise=0.3),
}


@pytest.mark.parametrize("name", NOISY)
def test_routers_draw_no_noise(name: str) -> None:
    network = _prepared(NOISY[name])
    assert network.module.training
    _check(network)


CPMANT = {"vocab_size": 300, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 2}
NOT_CAUSAL = {
    "padding": (CpmAntConfig(**CPMANT, prompt_types=4, prompt_length=4, segment_types=4), "CpmAntForCausalLM .* when .* follow"),
    "both directions": (XLMConfig(vocab_size=300, emb_dim=32, n_layers=2, n_heads=4, pad_index=0), "XLMWithLMHeadModel .* not causal"),
}


@pytest.mark.parametrize("name", NOT_CAUSAL)
def test_a_model_whose_tokens_depend_on_what_follows_is_refused(name: str) -> None:
    config, words = NOT_CAUSAL[name]
    with pytest.raises(InvalidRequest, match=words):
        _prepared(config)
