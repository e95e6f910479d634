"""Low-rank adapters: exact start, right gradients, one set of base weights, and checkpoints that everybody loads."""

from __future__ import annotations

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.func import functional_call
from transformers import AutoModelForCausalLM

from grpo_engine.checkpoint import verify
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.job import LoraConfig
from grpo_engine.device import Device
from grpo_engine.logprob import MicroBatch, check_shortcut, token_stats
from grpo_engine.network import Network
from grpo_engine.outcome import CheckpointDamaged
from grpo_engine.policy import Policy, load_policy_folder
from grpo_engine.publish import save_published
from grpo_engine.reference import load_reference
from tests.engine.model_fixtures import SHAPES, largest_kl, ragged_rows, tiny_policy, with_adapter
from tests.engine.runs import events, make_job, make_spec, outcome, series, train, weights_sha256

LORA = LoraConfig(type="lora", rank=4, alpha=8.0)
KINDS = ("TINY", "TINY_TIED", "TINY_QWEN2", "TINY_GPT2")
DTYPES = (torch.float32, torch.bfloat16)
ADAPTER: dict[str, Any] = {"adapter": {"type": "lora", "rank": 4}, "optimizer": {"learning_rate": 0.01, "warmup_steps": 0}}


def away(policy: Policy) -> Policy:
    """The policy with an adapter that is no longer at its start."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, master in policy.masters.items():
            if ".lora_B." in name:
                master.copy_(0.05 * torch.randn(master.shape, generator=generator))
    policy.refresh()
    return policy


def whole() -> MicroBatch:
    rows = ragged_rows()
    return MicroBatch(list(range(len(rows))), rows)


def gradients(policy: Policy, network: Network) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    policy.zero_grad()
    stats = token_stats(network, whole(), temperature=0.8, pad_id=policy.pad_id)
    weight_BT = torch.linspace(-1, 2, stats.logprob_BT.numel(), dtype=stats.logprob_BT.dtype).view(stats.logprob_BT.shape)
    ((stats.logprob_BT + 0.1 * stats.entropy_BT) * stats.mask_BT * weight_BT).sum().backward()
    found = {name: master.grad.clone() for name, master in policy.masters.items() if master.grad is not None}
    assert set(found) == set(policy.masters)
    return stats.logprob_BT.detach(), found


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_step_one_kl_is_exactly_zero(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    policy = tiny_policy(tmp_path, kind, dtype, lora=LORA)
    reference = load_reference(policy)
    assert policy.network.is_branched
    assert largest_kl(policy, reference) == (0.0, 0.0)
    assert reference.sha256 == policy.sha256
    policy.network.is_branched = reference.network.is_branched = False
    assert largest_kl(policy, reference) == (0.0, 0.0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_reference_is_the_bare_base_wherever_the_policy_goes(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    bare = tiny_policy(tmp_path, kind, dtype)
    policy = away(tiny_policy(tmp_path, kind, dtype, lora=LORA))
    reference = load_reference(policy)
    for is_branched in (True, False):
        bare.network.is_branched = policy.network.is_branched = reference.network.is_branched = is_branched
        with torch.no_grad():
            expected, found, moved = (
                token_stats(network, whole(), temperature=1.0, pad_id=0).logprob_BT
                for network in (bare.network, reference.network, policy.network)
            )
        assert torch.equal(found, expected)
        assert (moved - expected).abs().max() > 1e-2
    assert all(parameter.requires_grad == (".lora_" in name) for name, parameter in policy.model.named_parameters())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_branched_forward_equals_plain_padded_forward(tmp_path: Path, shape: str, dtype: torch.dtype) -> None:
    kind, changes = SHAPES[shape]
    policy = away(tiny_policy(tmp_path, kind, dtype, lora=LORA, **changes))
    assert policy.network.is_branched, policy.network.why_not_branched
    assert check_shortcut(policy.network, ragged_rows(), temperature=1.0, pad_id=0).is_equal
    fast, fast_grads = gradients(policy, policy.network)
    plain, plain_grads = gradients(policy, Network(policy.model, is_branched=False))
    tolerance = 1e-9 if dtype == torch.float64 else 5e-5
    torch.testing.assert_close(fast, plain, rtol=0, atol=tolerance)
    for name, gradient in fast_grads.items():
        scale = max(1.0, float(plain_grads[name].abs().max()))
        torch.testing.assert_close(gradient, plain_grads[name], rtol=0, atol=tolerance * scale, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_values_and_gradients_are_those_of_the_formula(tmp_path: Path, kind: str) -> None:
    """W + (alpha / rank) B A written into a bare model by hand, differentiated by torch: an oracle without peft."""
    policy = away(tiny_policy(tmp_path, kind, torch.float64, lora=LORA))
    bare = tiny_policy(tmp_path, kind, torch.float64)
    weights = dict(bare.model.named_parameters())
    masters = {name: master.detach().clone().requires_grad_() for name, master in policy.masters.items()}
    assert policy.adapter is not None
    for layer in policy.adapter.layers:
        delta = masters[f"{layer}.lora_B.default.weight"] @ masters[f"{layer}.lora_A.default.weight"] * 2.0
        weights[f"{layer}.weight"] = weights[f"{layer}.weight"].detach() + (delta.T if kind == "TINY_GPT2" else delta)
    prompt, completion = ragged_rows()[2]
    ids = torch.tensor([prompt.token_ids + completion.token_ids])
    logits = functional_call(bare.model, weights, (ids,)).logits[0]
    target = torch.tensor(completion.token_ids)
    expected = torch.log_softmax(logits, -1)[len(prompt.token_ids) - 1 : -1].gather(1, target[:, None])[:, 0]
    expected.sum().backward()
    stats = token_stats(policy.network, MicroBatch([0], [(prompt, completion)]), temperature=1.0, pad_id=0)
    stats.logprob_BT.sum().backward()
    torch.testing.assert_close(stats.logprob_BT[0].detach(), expected.detach(), rtol=0, atol=1e-9)
    for name, master in policy.masters.items():
        torch.testing.assert_close(master.grad, masters[name].grad, rtol=1e-9, atol=1e-9, msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_checkpoint_may_be_the_reference(tmp_path: Path, dtype: torch.dtype) -> None:
    policy = tiny_policy(tmp_path / "base", dtype=dtype, lora=LORA)
    same = load_reference(policy, policy.folder)
    assert same.model is not policy.model
    assert same.sha256 == policy.sha256
    assert largest_kl(policy, same) == (0.0, 0.0)
    tiny_policy(tmp_path / "other", seed=1)
    assert largest_kl(policy, load_reference(policy, tmp_path / "other"))[0] > 0.1
    tiny_policy(tmp_path / "wider", intermediate_size=64)
    with pytest.raises(ValueError, match="another architecture"):
        load_reference(policy, tmp_path / "wider")


def test_activation_checkpointing_changes_no_gradient(tmp_path: Path) -> None:
    policy = away(tiny_policy(tmp_path, lora=LORA))
    _, plain = gradients(policy, policy.network)
    policy.set_activation_checkpointing(True)
    _, again = gradients(policy, policy.network)
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


def embeddings_in_memory() -> list[torch.Tensor]:
    """Every tensor alive that is as big as the tiny model's embedding or head."""
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor) and found.shape == (263, 72)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_second_set_of_base_weights_is_held(tmp_path: Path, dtype: torch.dtype) -> None:
    """The embedding and the head exist once, in the compute storage; a job that trains all weights holds a reference's too."""
    shape = {"vocab_size": 263, "hidden_size": 72, "num_attention_heads": 2, "num_key_value_heads": 1}
    policy = tiny_policy(tmp_path, dtype=dtype, lora=LORA, **shape)
    reference = load_reference(policy)
    assert [found.dtype for found in embeddings_in_memory()] == [dtype] * 2
    assert reference.model is policy.model
    assert policy.num_parameters < policy.num_in_memory / 5
    del policy, reference
    full = tiny_policy(tmp_path, dtype=dtype, **shape)
    copy = load_reference(full)
    assert len(embeddings_in_memory()) == (4 if dtype == torch.float32 else 6)
    assert copy.model is not full.model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_merged_model_answers_like_base_and_adapter(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    """Merged in fp32, also where the run computes in bf16."""
    policy = away(tiny_policy(tmp_path / "base", kind, dtype, lora=LORA))
    before = {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()}
    save_published(policy, tmp_path / "out")
    merged, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values())
    assert merged.dtype == torch.float32
    assert (merged.get_output_embeddings().weight is merged.get_input_embeddings().weight) == (kind in ("TINY_TIED", "TINY_GPT2"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    ids = torch.randint(0, 256, (3, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        bare, answer = base.eval()(ids).logits, merged.eval()(ids).logits
        both = with_adapter(base, tmp_path / "out" / "adapter").eval()(ids).logits
    torch.testing.assert_close(answer, both, rtol=0, atol=1e-5)
    assert (answer - bare).abs().max() > 1e-2
    assert {path.name: path.read_bytes() for path in (tmp_path / "base").iterdir()} == before
    again = load_policy_folder(tmp_path / "out", Device(torch.device("cpu"), torch.float32), lora=LORA)
    assert largest_kl(again, load_reference(again)) == (0.0, 0.0), "a fresh adapter on the merged model starts at its own zero"


def test_the_adapter_says_what_it_is(tmp_path: Path) -> None:
    policy = load_policy_folder(
        tiny_policy(tmp_path / "base").folder, Device(torch.device("cpu"), torch.float32), lora=LORA, name="organisation/base"
    )
    save_published(policy, tmp_path / "out")
    described = json.loads((tmp_path / "out" / "adapter" / "adapter_config.json").read_text())
    wanted = {"r": 4, "lora_alpha": 8.0, "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "organisation/base"}
    assert {key: described[key] for key in wanted} == wanted
    assert described["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert str(tmp_path) not in json.dumps(described)


def test_a_base_that_changed_or_went_away_is_never_merged_with(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "base", dtype=torch.bfloat16, lora=LORA)
    path = tmp_path / "base" / "model.safetensors"
    weights = load_file(path)
    weights["model.norm.weight"][3] += 0.5
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(OSError, match=r"model\.norm\.weight of the base model is not what it was"):
        save_published(policy, tmp_path / "out")
    path.unlink()
    with pytest.raises(OSError, match="cannot be read again"):
        save_published(policy, tmp_path / "out")


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("lm_head", "lm_head cannot carry an adapter"),
        ("embed_tokens", "model.embed_tokens cannot carry an adapter"),
        ("mlp", "model.layers.0.mlp cannot carry an adapter"),
        ("query", "no layer called 'query'; its linear layers are down_proj"),
        ("proj", "no layer called 'proj'"),
    ],
)
def test_a_target_that_cannot_carry_an_adapter_is_refused(tmp_path: Path, target: str, words: str) -> None:
    cfg = LoraConfig(type="lora", target_modules=["q_proj", target])
    with pytest.raises(InvalidRequest, match=words) as caught:
        tiny_policy(tmp_path, lora=cfg)
    assert caught.value.param == "method.grpo.adapter.target_modules"


def test_targets_by_whole_name_and_by_end(tmp_path: Path) -> None:
    cfg = LoraConfig(type="lora", target_modules=["model.layers.1.mlp.up_proj", "q_proj"])
    policy = tiny_policy(tmp_path, lora=cfg)
    assert policy.adapter is not None
    assert set(policy.adapter.layers) == {
        "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"
    }  # fmt: skip


def test_issue_trl_3108_a_reference_sync_beside_an_adapter_is_refused() -> None:
    raw = make_spec(Path("/models"), reference={"sync_every": 2}, adapter={"type": "lora"})
    with pytest.raises(InvalidRequest, match="remove sync_every, or remove adapter") as caught:
        resolve_spec({**raw, "training_file": "file-1"})
    assert caught.value.status == 422
    assert caught.value.param == "method.grpo.reference.sync_every"


def test_the_base_is_a_reference_by_name_only_beside_an_adapter() -> None:
    raw = make_spec(Path("/models"), reference={"source": "base"}, adapter={"type": "lora"})
    assert resolve_spec({**raw, "training_file": "file-1"}).method.grpo.reference.source == "base"
    del raw["method"]["grpo"]["adapter"]
    with pytest.raises(InvalidRequest, match=r"reference\.source"):
        resolve_spec({**raw, "training_file": "file-1"})


def test_issue_trl_3194_a_model_that_brings_an_adapter_is_refused_with_the_way_out(tmp_path: Path) -> None:
    """Loaded as it lies there it would be base plus adapter; the bare base would be the wrong reference. Merged, its KL starts at 0."""
    policy = away(tiny_policy(tmp_path / "base", lora=LORA))
    save_published(policy, tmp_path / "out")
    for path in (tmp_path / "out" / "adapter").iterdir():
        path.rename(tmp_path / "base" / path.name)
    with pytest.raises(InvalidRequest, match="merge it first"):
        load_policy_folder(tmp_path / "base", Device(torch.device("cpu"), torch.float32))
    merged = load_policy_folder(tmp_path / "out", Device(torch.device("cpu"), torch.float32))
    assert largest_kl(merged, load_reference(merged)) == (0.0, 0.0)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_job(tmp_path_factory.mktemp("job"))


def adapter_spec(job: Path, precision: str, steps: int, **grpo: Any) -> dict[str, Any]:
    return make_spec(job, **ADAPTER, resources={"precision": precision}, limits={"num_steps": steps}, **grpo)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_run_learns_publishes_and_resumes_exactly(job: Path, precision: str) -> None:
    whole_run = train(job, f"whole-{precision}", adapter_spec(job, precision, 6))
    first = train(job, f"first-{precision}", adapter_spec(job, precision, 3))
    rest = train(job, f"rest-{precision}", adapter_spec(job, precision, 6), epoch=2, resume_from=f"{first}/checkpoints/resume-000003")
    rows = series(whole_run)
    assert outcome(whole_run).status == "succeeded"
    assert rows[1]["kl/ref/k3/max"] == 0.0
    assert rows[1]["grad_norm/total"] > 0
    assert rows[6]["kl/ref/k3/mean"] > 0
    assert series(rest) == {step: rows[step] for step in (4, 5, 6)}
    assert weights_sha256(rest, 6) == weights_sha256(whole_run, 6)
    loaded = events(whole_run, "model.loaded")[0].data
    assert 0 < loaded["trained_parameters"] < loaded["parameters"]
    assert loaded["reference_sha256"] == loaded["policy_sha256"]
    published = verify(whole_run / "checkpoints" / "step-000006")
    names = {entry.name for entry in published.files}
    assert {"model.safetensors", "config.json", "adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= names
    (saved,) = [event for event in events(whole_run, "checkpoint.saved") if event.data["kind"] == "published"]
    assert {entry["name"] for entry in saved.data["files"]} == names
    resume = load_file(whole_run / "checkpoints" / "resume-000006" / "weights.safetensors")
    assert all(".lora_" in name and weight.dtype == torch.float32 for name, weight in resume.items())
    assert sum(weight.numel() for weight in resume.values()) == loaded["trained_parameters"]


def test_another_base_is_refused_at_resume_even_without_a_reference(job: Path, tmp_path: Path) -> None:
    first = train(job, "no-reference", adapter_spec(job, "fp32", 1, beta=0))
    assert events(first, "model.loaded")[0].data["has_reference"] is False
    other = make_job(tmp_path, seed=1)
    spec = {**adapter_spec(job, "fp32", 2, beta=0), "model": str(other / "model")}
    mixed = train(job, "other-base", spec, epoch=2, resume_from=f"{first}/checkpoints/resume-000001")
    assert (outcome(mixed).reason, outcome(mixed).retryable) == ("reference_mismatch", False)
    assert "base model has SHA-256" in outcome(mixed).message


def test_a_flipped_bit_in_the_adapter_folder_is_damage(job: Path) -> None:
    run_dir = train(job, "damage", adapter_spec(job, "fp32", 1))
    directory = run_dir / "checkpoints" / "step-000001"
    path = directory / "adapter" / "adapter_model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointDamaged, match=r"adapter_model\.safetensors is not what was written"):
        verify(directory)
    content[-1] ^= 1
    path.write_bytes(content)
    verify(directory)
    (directory / "adapter" / "extra").write_text("x")
    with pytest.raises(CheckpointDamaged, match="adapter/extra, which its manifest does not know"):
        verify(directory)
