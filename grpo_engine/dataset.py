"""Dataset rows as tokenised prompts, and the order in which a run meets them.

A prompt is rendered once at the start. The order of an epoch depends on (seed, epoch) alone, each prompt comes once per
epoch, and a cursor of two integers continues it exactly. Streaming from disk is left out: prompts live in memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError

from grpo_engine.batch import Prompt
from grpo_engine.contract.data import DataConfig
from grpo_engine.outcome import ConfigError
from grpo_engine.rows import Row

DATA_PARAM = "method.grpo.data"
_FAULTS = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RecursionError)
"""What a template's own expressions raise beside jinja's errors: `1 + "a"`, `messages[7]["content"].x`."""
_PROBE = "one more word"


class Dataset:
    """Prompts in a deterministic, resumable order."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, *, should_shuffle: bool) -> None:
        assert prompts, "a dataset has at least one prompt"
        self.prompts = list(prompts)
        self._seed = seed
        self._should_shuffle = should_shuffle
        self._epoch = 0
        self._position = 0
        self._order = self._order_of(0)

    def take(self, count: int) -> list[Prompt]:
        """The next `count` prompts; crosses into the next epoch when this one ends."""
        taken: list[Prompt] = []
        while len(taken) < count:
            if self._position == len(self._order):
                self._epoch += 1
                self._position = 0
                self._order = self._order_of(self._epoch)
            part = self._order[self._position : self._position + count - len(taken)]
            self._position += len(part)
            taken += [self.prompts[index] for index in part]
        return taken

    @property
    def epoch(self) -> float:
        """Passes over the data so far."""
        return self._epoch + self._position / len(self._order)

    def cursor(self) -> dict[str, int]:
        """Where the run is: epoch (from 0), prompts taken of it, and how many there are."""
        return {"epoch": self._epoch, "position": self._position, "num_prompts": len(self.prompts)}

    def seek(self, cursor: dict[str, int]) -> None:
        """Continue from a cursor. Raises ConfigError when it belongs to other data."""
        if cursor["num_prompts"] != len(self.prompts):
            raise ConfigError(
                f"the checkpoint was made with {cursor['num_prompts']} prompts and the training file now gives {len(self.prompts)}; "
                "resume with the same file",
                param="training_file",
            )
        self._epoch, self._position = cursor["epoch"], cursor["position"]
        self._order = self._order_of(self._epoch)

    def _order_of(self, epoch: int) -> list[int]:
        indices = range(len(self.prompts))
        if not self._should_shuffle:
            return list(indices)
        return sorted(indices, key=lambda index: hashlib.sha256(f"{self._seed}/{epoch}/{index}".encode()).digest())


def make_prompts(
    rows: Sequence[Row], tokenizer: Any, data: DataConfig, *, context_length: int, max_completion_tokens: int
) -> tuple[list[Prompt], int]:
    """Render and tokenise rows. Returns the prompts that fit and the number of rows skipped as too long.

    Raises ConfigError when a row cannot be rendered, no room is left for a prompt, or no row fits.
    """
    room = context_length - max_completion_tokens
    if room < 1:
        raise ConfigError(
            f"max_completion_tokens {max_completion_tokens} leaves no room for a prompt in the model's context of {context_length}; "
            "lower it",
            param="method.grpo.sampling.max_completion_tokens",
        )
    limit = min(room, data.max_prompt_tokens or room)
    prompts = []
    for index, row in enumerate(rows):
        text, token_ids = render(row, tokenizer, data)
        if len(token_ids) <= limit:
            prompts.append(Prompt(row=index, text=text, token_ids=token_ids, item=row.item))
    if not prompts:
        detail = f"all {len(rows)} prompts are longer than {limit} tokens; raise max_prompt_tokens or lower max_completion_tokens"
        raise ConfigError(detail if rows else "the training file holds no rows; add at least one", param="training_file")
    return prompts, len(rows) - len(prompts)


def num_untemplated(rows: Sequence[Row], tokenizer: Any, data: DataConfig) -> int:
    """Rows of text that go without the model's chat template though the job never said so; 0 for a model that has none."""
    if getattr(tokenizer, "chat_template", None) is None or data.chat_template == "none" or data.prompt_as != "auto":
        return 0
    return sum(row.text is not None for row in rows)


def render(row: Row, tokenizer: Any, data: DataConfig) -> tuple[str, list[int]]:
    """A row's prompt as text and token ids, with the begin-of-text token at most once and no end token of the tokenizer's own.

    Messages go through the model's chat template, which writes its own special tokens; text gets the tokenizer's.
    Raises ConfigError naming the row's line and the remedy.
    """
    if row.messages is not None:
        text = _apply_template(_with_system(row.messages, data.system_prompt), tokenizer, row.line)
        token_ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    else:
        assert row.text is not None, "a row holds messages or text"
        text = row.text if data.system_prompt is None else f"{data.system_prompt}\n\n{row.text}"
        token_ids = list(tokenizer(text)["input_ids"])
        if token_ids and token_ids[-1] == tokenizer.eos_token_id and not text.endswith(tokenizer.eos_token):
            token_ids.pop()
    while len(token_ids) > 1 and token_ids[0] == token_ids[1] == tokenizer.bos_token_id:
        del token_ids[0]
    if not token_ids:
        raise ConfigError(f"line {row.line} gives an empty prompt; add text to it or remove the line", param="training_file")
    return text, token_ids


def _with_system(messages: list[dict[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    if system_prompt is None or any(message["role"] == "system" for message in messages):
        return messages
    return [{"role": "system", "content": system_prompt}, *messages]


def _apply_template(messages: list[dict[str, str]], tokenizer: Any, line: int) -> str:
    if getattr(tokenizer, "chat_template", None) is None:
        raise ConfigError(
            "the model's tokenizer has no chat template; set chat_template to none and give prompts as text, or train an instruct model",
            param=f"{DATA_PARAM}.chat_template",
        )
    text = _rendered(messages, tokenizer, line)
    for index, message in enumerate(messages):
        if message["role"] != "assistant" and (content := message["content"].strip()) and content not in text:
            _check_is_read(messages, index, text, tokenizer, line)
    return text


def _check_is_read(messages: list[dict[str, str]], index: int, text: str, tokenizer: Any, line: int) -> None:
    """A template may rewrite a message; one whose words change nothing would train on another prompt than the row's."""
    message = messages[index]
    changed = [*messages[:index], {**message, "content": f"{message['content']} {_PROBE}"}, *messages[index + 1 :]]
    if _rendered(changed, tokenizer, line) != text:
        return
    if message["role"] == "system":
        remedy = "move its words into the user message, or remove it (data.system_prompt makes one)"
    else:
        remedy = "keep the last user message alone, or set chat_template to none"
    detail = f"line {line}: the model's chat template leaves out message {index + 1}, from {message['role']!r}; {remedy}"
    raise ConfigError(detail, param="training_file")


def _rendered(messages: list[dict[str, str]], tokenizer: Any, line: int) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except (TemplateError, *_FAULTS) as error:
        kind = "" if isinstance(error, TemplateError | ValueError) else f"{type(error).__name__}: "
        raise ConfigError(f"line {line}: the model's chat template refuses the messages: {kind}{error}", param="training_file") from error
