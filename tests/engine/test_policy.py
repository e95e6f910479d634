"""Loading, refusing and saving models; masters in fp32 beside a bf16 module."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from grpo_engine.contract.error import InvalidRequest, Unavailable
from grpo_engine.device import Device
from grpo_engine.gguf_model import SMOLLM2, bundled_folder, bundled_gguf, convert_gguf
from grpo_engine.logprob import MicroBatch, token_stats
from grpo_engine.models import model_folder
from grpo_engine.policy import Policy, end_tokens, load_module, load_policy, load_policy_folder, weights_sha256
from grpo_engine.publish import save_published
from tests.engine.model_fixtures import ragged_rows, tiny_policy
from tests.tiny import SPECIAL, byte_tokenizer, make_model

CPU = torch.device("cpu")
FP32, BF16 = Device(CPU, torch.float32), Device(CPU, torch.bfloat16)


def _edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def _load(folder: Path) -> Policy:
    return load_policy_folder(folder, FP32)


def _backward(policy: Policy) -> None:
    rows = ragged_rows()
    token_stats(policy.network, MicroBatch(list(range(len(rows))), rows), temperature=1.0, pad_id=0).logprob_BT.sum().backward()


def test_end_tokens_come_from_tokenizer_settings_and_template(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "a")
    _edit(folder / "generation_config.json", eos_token_id=[7, 257])
    policy = _load(folder)
    assert policy.eos_ids == {7, 257, 260}
    assert policy.pad_id == 258
    policy.tokenizer.chat_template = {"default": policy.tokenizer.chat_template, "tool_use": ""}
    assert end_tokens(policy.model, policy.tokenizer) == policy.eos_ids


def test_pad_equal_to_eos_stays_an_end_token(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, "TINY_GPT2")
    assert policy.eos_ids == {257}
    assert policy.pad_id == 257
    assert policy.context_length == 256


def test_all_dropouts_are_off_in_train_mode_and_the_saved_config_keeps_them(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path / "model", "TINY_GPT2")
    assert policy.model.training
    assert all(part.p == 0 for part in policy.model.modules() if isinstance(part, torch.nn.Dropout))
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(policy.model(ids).logits, policy.model(ids).logits)
    save_published(policy, tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["attn_pdrop"] == 0.1


def test_dropout_kept_in_attributes_is_off_too(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, attention_dropout=0.5)
    assert policy.network.is_branched
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(policy.model(ids).logits, policy.model(ids).logits)


def test_a_bigger_embedding_is_kept_and_a_smaller_one_refused(tmp_path: Path) -> None:
    big = tiny_policy(tmp_path / "big", "TINY_BIGVOCAB")
    assert big.model.get_input_embeddings().num_embeddings == len(big.tokenizer) + 85
    save_published(big, tmp_path / "out")
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out").config.vocab_size == len(big.tokenizer) + 85
    with pytest.raises(InvalidRequest, match="resize the embedding"):
        tiny_policy(tmp_path / "small", "TINY_SMALLVOCAB")


def test_foreign_code_pickles_quantised_and_missing_weights_are_refused(tmp_path: Path) -> None:
    cases = {
        "auto_map": ("config.json", {"auto_map": {"AutoModelForCausalLM": "evil.Model"}}, "never run"),
        "tokenizer": ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["evil.T", None]}}, "never run"),
        "quantised": ("config.json", {"quantization_config": {"quant_method": "gptq"}}, "quantised"),
    }
    for name, (file, change, message) in cases.items():
        folder = make_model(tmp_path / name)
        _edit(folder / file, **change)
        with pytest.raises(InvalidRequest, match=message) as caught:
            _load(folder)
        assert caught.value.param == "model"
    pickled = make_model(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    (pickled / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(InvalidRequest, match="pickled"):
        _load(pickled)
    (pickled / "pytorch_model.bin").unlink()
    with pytest.raises(InvalidRequest, match=r"no \.safetensors"):
        _load(pickled)
    partial = make_model(tmp_path / "partial")
    weights = load_file(partial / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, partial / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidRequest, match="lacks weights"):
        _load(partial)
    broken = make_model(tmp_path / "broken")
    (broken / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(InvalidRequest, match="cannot be loaded"):
        _load(broken)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        _load(tmp_path / "empty")


def test_model_directory_bounds_local_names(tmp_path: Path) -> None:
    inside, outside = make_model(tmp_path / "models" / "mine"), make_model(tmp_path / "elsewhere")
    root = tmp_path / "models"
    (root / "link").symlink_to(outside)
    assert load_policy("mine", FP32, tmp_path / "cache", root).folder == inside.resolve()
    for name in ("../elsewhere", str(outside), "link", "."):
        with pytest.raises(InvalidRequest, match="below the server's model directory"):
            load_policy(name, FP32, tmp_path / "cache", root)
    with pytest.raises(InvalidRequest, match="no folder"):
        load_policy("a/b/c", FP32, tmp_path / "cache", root)
    with pytest.raises(InvalidRequest, match="no model folder"):
        load_policy(str(tmp_path / "nowhere"), FP32, tmp_path / "cache")
    with pytest.raises(InvalidRequest, match="neither a model folder"):
        load_policy("what is this", FP32, tmp_path / "cache")


def test_an_unreachable_hub_is_said_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Unavailable, match="Hub cannot be reached"):
        model_folder("someone/some-model", tmp_path, None, lambda done, total, what: None)


def test_models_loaded_by_many_threads_at_once_leave_loading_whole(tmp_path: Path) -> None:
    folder = make_model(tmp_path, "TINY_TIED")
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda _: load_module(folder), range(64)))
    module = load_module(folder)
    assert module.get_output_embeddings().weight is module.get_input_embeddings().weight


@pytest.mark.parametrize("kind", ["TINY", "TINY_TIED", "TINY_QWEN2", "TINY_GPT2"])
@pytest.mark.parametrize("device", [FP32, BF16], ids=["fp32", "bf16"])
def test_published_weights_load_as_they_are_and_hold_the_masters(tmp_path: Path, kind: str, device: Device) -> None:
    policy = load_policy_folder(make_model(tmp_path / "in", kind), device)
    with torch.no_grad():
        for master in policy.trainable_parameters():
            master.add_(1e-6)
    policy.refresh()
    save_published(policy, tmp_path / "out")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.float32
    found = dict(loaded.named_parameters())
    assert set(found) == set(policy.masters)
    for name, master in policy.masters.items():
        assert torch.equal(found[name], master)
    assert (loaded.get_output_embeddings().weight is loaded.get_input_embeddings().weight) == (kind in ("TINY_TIED", "TINY_GPT2"))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float32"
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert tokenizer.encode("2+2=é") == policy.tokenizer.encode("2+2=é")
    assert tokenizer.chat_template == policy.tokenizer.chat_template
    assert (tmp_path / "out" / "generation_config.json").is_file()
    again = load_policy_folder(tmp_path / "out", device)
    assert again.sha256 == weights_sha256(policy.weights())


def test_mixed_precision_keeps_small_updates_and_sums_gradients_in_fp32(tmp_path: Path) -> None:
    mixed = tiny_policy(tmp_path / "a", "TINY_TIED", torch.bfloat16)
    assert {parameter.dtype for parameter in mixed.model.parameters()} == {torch.bfloat16}
    assert {master.dtype for master in mixed.trainable_parameters()} == {torch.float32}
    _backward(mixed)
    once = {name: master.grad.clone() for name, master in mixed.masters.items() if master.grad is not None}
    assert set(once) == set(mixed.masters)
    assert all(parameter.grad is None for parameter in mixed.model.parameters())
    for _ in range(4):
        _backward(mixed)
    for name, master in mixed.masters.items():
        assert master.grad is not None
        assert master.grad.dtype == torch.float32
        torch.testing.assert_close(master.grad, 5 * once[name], rtol=1e-5, atol=1e-5)
    before = mixed.model.get_input_embeddings().weight.clone()
    with torch.no_grad():
        for _ in range(2000):
            mixed.masters["model.embed_tokens.weight"].add_(1e-6)
    mixed.refresh()
    moved = (mixed.model.get_input_embeddings().weight.float() - before.float()).detach()
    assert float(moved.mean()) == pytest.approx(2e-3, rel=0.05)
    mixed.zero_grad()
    assert all(master.grad is None for master in mixed.trainable_parameters())


def test_mixed_gradients_are_close_to_fp32_ones(tmp_path: Path) -> None:
    full, mixed = tiny_policy(tmp_path / "a"), tiny_policy(tmp_path / "b", dtype=torch.bfloat16)
    _backward(full)
    _backward(mixed)
    for name, master in full.masters.items():
        other = mixed.masters[name].grad
        assert master.grad is not None
        assert other is not None
        assert torch.nn.functional.cosine_similarity(master.grad.flatten(), other.flatten(), dim=0) > 0.99


def test_buffers_stay_in_fp32_in_mixed_precision(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path, dtype=torch.bfloat16)
    assert policy.model.model.rotary_emb.inv_freq.dtype == torch.float32


def test_weights_round_trip_and_foreign_weights_are_refused(tmp_path: Path) -> None:
    first, second = tiny_policy(tmp_path / "a", dtype=torch.bfloat16), tiny_policy(tmp_path / "b", dtype=torch.bfloat16, seed=1)
    assert first.sha256 != second.sha256
    second.load_weights(first.weights())
    assert weights_sha256(second.weights()) == first.sha256
    assert torch.equal(second.model.lm_head.weight, first.model.lm_head.weight)
    with pytest.raises(ValueError, match="do not belong"):
        second.load_weights({"x": torch.zeros(1)})
    with pytest.raises(ValueError, match="shape"):
        second.load_weights({name: weight[..., :1] for name, weight in first.weights().items()})


def test_fingerprint_sees_one_changed_weight(tmp_path: Path) -> None:
    policy = tiny_policy(tmp_path)
    before = weights_sha256(policy.weights())
    assert before == policy.sha256
    with torch.no_grad():
        policy.masters["lm_head.weight"][0, 0] += 1e-3
    assert weights_sha256(policy.weights()) != before


def _write_gguf(path: Path) -> None:
    """A random 1-layer Llama with a byte-level vocabulary, as llama.cpp writes it; one matrix in Q8_0."""
    vocabulary = [*json.loads(byte_tokenizer().to_str())["model"]["vocab"], "he", *SPECIAL, "<|endoftext|>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_block_count(1)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(len(vocabulary))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([1] * 257 + [3] * (1 + len(SPECIAL)))
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(vocabulary.index("<|im_start|>"))
    writer.add_eos_token_id(vocabulary.index("<|im_end|>"))
    writer.add_pad_token_id(vocabulary.index("<pad>"))
    writer.add_unk_token_id(vocabulary.index("<|endoftext|>"))
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}")
    torch.manual_seed(0)
    shapes = {"token_embd": (len(vocabulary), 32), "output": (len(vocabulary), 32), "output_norm": (32,)}
    shapes |= {"blk.0.attn_q": (32, 32), "blk.0.attn_k": (16, 32), "blk.0.attn_v": (16, 32), "blk.0.attn_output": (32, 32)}
    shapes |= {"blk.0.ffn_gate": (64, 32), "blk.0.ffn_up": (64, 32), "blk.0.ffn_down": (32, 64)}
    shapes |= {"blk.0.attn_norm": (32,), "blk.0.ffn_norm": (32,)}
    for name, shape in shapes.items():
        values = torch.randn(shape).numpy()
        if name == "blk.0.ffn_up":
            quantised = gguf.quants.quantize(values, gguf.GGMLQuantizationType.Q8_0)
            writer.add_tensor(f"{name}.weight", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        else:
            writer.add_tensor(f"{name}.weight", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _assert_same_model(original: torch.nn.Module, folder: Path, gguf_path: Path) -> None:
    """The converted copy generates token for token what the GGUF-loaded model does, and reads text alike."""
    copy = AutoModelForCausalLM.from_pretrained(folder)
    tokenizers = [AutoTokenizer.from_pretrained(gguf_path.parent, gguf_file=gguf_path.name), AutoTokenizer.from_pretrained(folder)]
    messages = [{"role": "user", "content": "What is 12 + 30? Antworte kurz: äöü"}]
    texts = [tokenizer.apply_chat_template(messages, tokenize=False) for tokenizer in tokenizers]
    assert texts[0] == texts[1]
    ids = [tokenizer.encode(texts[0], add_special_tokens=False) for tokenizer in tokenizers]
    assert ids[0] == ids[1]
    prompt = torch.tensor([ids[0]])
    assert torch.equal(original(prompt).logits, copy(prompt).logits)
    answers = [model.generate(prompt, max_new_tokens=16, do_sample=False).tolist() for model in (original, copy)]
    assert answers[0] == answers[1]


def test_a_gguf_model_becomes_an_ordinary_folder(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    _write_gguf(path)
    original = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.float32)
    with pytest.raises(ValueError, match="not serializable"):
        original.save_pretrained(tmp_path / "refused")
    folder = tmp_path / "converted"
    folder.mkdir()
    convert_gguf(path, folder)
    _assert_same_model(original, folder, path)
    policy = _load(folder)
    assert policy.eos_ids == {policy.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert policy.network.is_branched
    save_published(policy, tmp_path / "published")
    assert "quantization_config" not in json.loads((tmp_path / "published" / "config.json").read_text())


def test_the_bundled_model_is_found_without_importing_its_package() -> None:
    assert bundled_gguf().name.startswith("SmolLM2-135M-Instruct")


@pytest.mark.slow
def test_smollm2_is_converted_once_and_token_for_token(tmp_path: Path) -> None:
    said: list[str] = []
    folder = bundled_folder(tmp_path, lambda done, total, what: said.append(what))
    assert said
    assert bundled_folder(tmp_path, lambda done, total, what: said.append("again")) == folder
    assert "again" not in said
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]
    path = bundled_gguf()
    _assert_same_model(AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32), folder, path)
    policy = load_policy(SMOLLM2, FP32, tmp_path)
    assert policy.eos_ids == {policy.tokenizer.convert_tokens_to_ids("<|im_end|>")}
    assert policy.network.is_branched
