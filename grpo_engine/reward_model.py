"""The process of a `score_model` grader: loads one sequence classifier and reads one text at a time, in fp32, without padding.

Asked by `grpo_engine/grader/classifier.py` over JSON lines. The same rules as for models that are trained: safetensors only, no code
from the model's repository, local folders below the server's model directory only.
"""

from __future__ import annotations

import json
import queue
import resource
import signal
import threading
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from safetensors import SafetensorError
from torch import Tensor
from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from grpo_engine.contract.error import GrpoError, InvalidRequest
from grpo_engine.grader.served import answer, die_with_parent, private_stdout, read_requests
from grpo_engine.models import model_folder
from grpo_engine.policy import load_tokenizer, weights_sha256


class Unreadable(Exception):
    """A text that the classifier cannot read; the message says why."""


class RewardModel:
    """A classifier with its tokenizer."""

    def __init__(self, folder: Path, *, device: str, max_tokens: int | None, truncate: str) -> None:
        """Raises InvalidRequest."""
        if device == "cuda" and not torch.cuda.is_available():
            raise InvalidRequest("the classifier is to run on a GPU and this host has none; set device to cpu")
        module = _load_module(folder)
        self.tokenizer = load_tokenizer(folder)
        self._check_vocabulary(module, self.tokenizer, folder.name)
        self.sha256 = weights_sha256(dict(module.named_parameters()))
        self.module = module.eval().requires_grad_(False).to(device)
        self.labels = [str(module.config.id2label[number]) for number in range(module.config.num_labels)]
        self._device = torch.device(device)
        self._limit = min(_context_length(module, self.tokenizer), max_tokens or 2**40)
        self._truncate = truncate

    @property
    def has_chat_template(self) -> bool:
        """Whether it can read messages."""
        return self.tokenizer.chat_template is not None

    @torch.inference_mode()
    def read(self, request: dict[str, Any]) -> dict[str, Any]:
        """Logits of one text, pair or conversation. Raises Unreadable."""
        if "messages" in request:
            encoded, count = self._encode_messages(request["messages"])
        else:
            encoded, count = self._encode_texts(*request["texts"])
        shown = int(encoded["input_ids"].shape[1])
        if shown == 0:
            raise Unreadable("the text has no token")
        logits = self.module(**{name: value.to(self._device) for name, value in encoded.items()}).logits
        return {"logits": logits[0].float().cpu().tolist(), "num_tokens": shown, "is_truncated": shown < count}

    def _encode_messages(self, messages: list[dict[str, str]]) -> tuple[dict[str, Tensor], int]:
        """The template writes its own special tokens; one begin token at most."""
        try:
            text = str(self.tokenizer.apply_chat_template(messages, tokenize=False))
        except (TemplateError, ValueError) as error:
            raise Unreadable(f"its chat template refuses the messages: {error}") from error
        token_ids = list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        while len(token_ids) > 1 and token_ids[0] == token_ids[1] == self.tokenizer.bos_token_id:
            del token_ids[0]
        count = len(token_ids)
        self._refuse_long(count)
        if count > self._limit:
            token_ids = token_ids[-self._limit :] if self._truncate == "start" else token_ids[: self._limit]
        tokens = torch.tensor([token_ids], dtype=torch.long)
        return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}, count

    def _encode_texts(self, text: str, pair: str | None = None) -> tuple[dict[str, Tensor], int]:
        """The tokenizer adds its special tokens and keeps them when the text is cut; of a pair the longer text is cut."""
        count = len(self.tokenizer(text, pair)["input_ids"])
        self._refuse_long(count)
        self.tokenizer.truncation_side = "left" if self._truncate == "start" else "right"
        encoded = self.tokenizer(text, pair, truncation="longest_first", max_length=min(self._limit, max(count, 1)), return_tensors="pt")
        return {name: value for name, value in encoded.items() if name in ("input_ids", "attention_mask", "token_type_ids")}, count

    def _refuse_long(self, count: int) -> None:
        if count > self._limit and self._truncate == "refuse":
            raise Unreadable(f"the text has {count} tokens, more than the {self._limit} it may read; set truncate to start or end")

    @staticmethod
    def _check_vocabulary(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str) -> None:
        rows, largest = module.get_input_embeddings().num_embeddings, max(tokenizer.get_vocab().values())
        if largest >= rows:
            raise InvalidRequest(f"the tokenizer of {name} has token ids up to {largest} and the model's embedding only {rows} rows")


def _load_module(folder: Path) -> PreTrainedModel:
    """In fp32. Refuses weights with missing parts: a language model's head would be random."""
    try:
        module, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, trust_remote_code=False, use_safetensors=True, local_files_only=True, output_loading_info=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, ImportError, SafetensorError) as error:
        raise InvalidRequest(f"{folder.name} cannot be loaded as a sequence classifier: {error}") from error
    missing = sorted(info["missing_keys"])
    if missing:
        raise InvalidRequest(
            f"{folder.name} lacks weights of a sequence classifier, for example {', '.join(missing[:3])}; name a model with a trained "
            "classification head"
        )
    loaded: PreTrainedModel = module
    return loaded


def _context_length(module: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> int:
    limits = [getattr(module.config.get_text_config(), "max_position_embeddings", None), tokenizer.model_max_length]
    return min([int(limit) for limit in limits if limit is not None and 0 < limit < 2**40], default=2**40)


def _load(asked: dict[str, Any]) -> RewardModel:
    model_dir = None if asked["model_dir"] is None else Path(asked["model_dir"])
    folder = model_folder(asked["model"], Path(asked["cache_dir"]), model_dir, lambda done, total, what: None)
    return RewardModel(folder, device=asked["device"], max_tokens=asked["max_tokens"], truncate=asked["truncate"])


class Server:
    """What the process does with each request: load once, then read."""

    def __init__(self) -> None:
        self._model: RewardModel | None = None

    def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """The answer; `problem` says in it what was wrong with the model or the text. Other errors are raised."""
        try:
            if "load" in request:
                model = self._model = _load(request["load"])
                return {"sha256": model.sha256, "labels": model.labels, "has_chat_template": model.has_chat_template}
            assert self._model is not None, "it is loaded first"
            return self._model.read(request["read"])
        except (GrpoError, Unreadable) as problem:
            return {"problem": str(problem)[:1000]}
        except torch.OutOfMemoryError as problem:
            return {"problem": f"out of memory: {problem}"[:1000]}


def main() -> None:
    """Serve until standard input ends. Whatever else goes wrong ends the process, which is a fault of what it was reading."""
    answers = private_stdout()
    die_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    disable_progress_bar()
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    answer(answers, {"ready": True})
    server = Server()
    while True:
        answer(answers, server.serve(json.loads(requests.get())))


if __name__ == "__main__":
    main()
