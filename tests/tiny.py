"""Tiny random models and tokenizers, made on the spot: every part of the engine runs for real in milliseconds.

`make_model(folder, "TINY")` writes a folder that loads like any model. Kinds:
    TINY            Llama shape, 2 layers, hidden 64, 4 heads (2 key heads), window 256, untied, ChatML-like template
    TINY_QWEN2      Qwen2 shape (query/key/value biases); `sliding_window=n` makes the second layer slide
    TINY_GPT2       learned positions (scaled x20 so that a shift shows), dropout 0.1, pad = eos, no chat template
    TINY_TIED       TINY with tied embeddings
    TINY_BOS        TINY whose template writes <bos> and whose tokenizer prepends <bos> too
    TINY_BIGVOCAB   85 more embedding rows than tokens
    TINY_SMALLVOCAB one token more than embedding rows
    TINY_SHORT      12 characters + 5 special tokens: most 16-token completions end by themselves, at different lengths
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
)

SPECIAL = ["<bos>", "<eos>", "<pad>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

SHORT_CHARACTERS = "0123456789+="

KINDS = ("TINY", "TINY_QWEN2", "TINY_GPT2", "TINY_TIED", "TINY_BOS", "TINY_BIGVOCAB", "TINY_SMALLVOCAB", "TINY_SHORT")


def byte_tokenizer() -> Tokenizer:
    """256 bytes, then the special tokens; any text round-trips."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: number for number, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def character_tokenizer() -> Tokenizer:
    """12 characters, then the special tokens; other characters become <pad>."""
    vocabulary = {symbol: number for number, symbol in enumerate([*SHORT_CHARACTERS, *SPECIAL])}
    tokenizer = Tokenizer(models.WordLevel(vocab=vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return tokenizer


def make_tokenizer(kind: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a kind of model."""
    backend = character_tokenizer() if kind == "TINY_SHORT" else byte_tokenizer()
    if kind == "TINY_BOS":
        bos = backend.token_to_id("<bos>")
        backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", bos)])
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<eos>" if kind == "TINY_GPT2" else "<pad>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=256, clean_up_tokenization_spaces=False, **names)
    if kind != "TINY_GPT2":
        tokenizer.chat_template = "{{ bos_token }}" + CHATML if kind == "TINY_BOS" else CHATML
    if kind == "TINY_SMALLVOCAB":
        tokenizer.add_tokens(["<extra>"])
    return tokenizer


def make_module(kind: str, vocabulary: int, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random module of a kind, in fp32. `changes` go into its configuration."""
    torch.manual_seed(seed)
    ids = {"bos_token_id": vocabulary - 5, "eos_token_id": vocabulary - 4, "pad_token_id": vocabulary - 3}
    if kind == "TINY_GPT2":
        ids["pad_token_id"] = ids["eos_token_id"]
        gpt2 = GPT2Config(vocab_size=vocabulary, n_positions=256, n_embd=64, n_layer=2, n_head=4, **{**ids, **changes})
        module: PreTrainedModel = GPT2LMHeadModel(gpt2)
        with torch.no_grad():
            module.transformer.wpe.weight.mul_(20)
        return module
    rows = vocabulary + 85 if kind == "TINY_BIGVOCAB" else vocabulary
    settings: dict[str, Any] = {
        "vocab_size": rows,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": kind == "TINY_TIED",
        "initializer_range": 0.1,
        **ids,
        **changes,
    }
    if kind == "TINY_QWEN2":
        if "sliding_window" in settings:
            settings |= {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]}
        return Qwen2ForCausalLM(Qwen2Config(**settings))
    return LlamaForCausalLM(LlamaConfig(**settings))


def make_model(folder: Path, kind: str = "TINY", seed: int = 0, **changes: Any) -> Path:
    """Write a tiny model of a kind and its tokenizer into a folder; returns the folder."""
    if kind not in KINDS:
        raise ValueError(f"unknown kind {kind}")
    tokenizer = make_tokenizer(kind)
    # transformers reads a Qwen2 folder with its own tokenizer class, which adds <|endoftext|>
    vocabulary = len(tokenizer) + {"TINY_SMALLVOCAB": -1, "TINY_QWEN2": 1}.get(kind, 0)
    make_module(kind, vocabulary, seed, **changes).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def printable(count: int, start: int = 0) -> str:
    """Some text of so many characters."""
    letters = string.ascii_letters + string.digits
    return "".join(letters[(start + number) % len(letters)] for number in range(count))


def make_classifier(folder: Path, kind: str = "TINY", seed: int = 0, *, num_labels: int = 1, broken: bool = False) -> Path:
    """Write a tiny sequence classifier (TINY or TINY_GPT2) and its tokenizer; `broken` ones answer NaN."""
    tokenizer = make_tokenizer(kind)
    module = make_module(kind, len(tokenizer), seed)
    torch.manual_seed(seed + 1)
    classes = {"TINY": LlamaForSequenceClassification, "TINY_GPT2": GPT2ForSequenceClassification}
    module.config.num_labels = num_labels
    classifier = classes[kind](module.config)
    classifier.base_model.load_state_dict(module.base_model.state_dict())
    if broken:
        with torch.no_grad():
            classifier.score.weight.fill_(float("nan"))
    classifier.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
