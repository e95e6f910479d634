"""How dataset rows become prompts and references."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.contract.base import PositiveInt, Strict

RowFormat = Literal["auto", "messages", "prompt", "gsm8k", "math", "verl"]
FieldPath = Annotated[str, Field(min_length=1, max_length=128)]


class DataConfig(Strict):
    """Reading the training file. Rows keep every column; graders reach them as `{{item.column}}`."""

    format: RowFormat = "auto"
    """`messages` (OpenAI), `prompt` (text or messages, TRL), `gsm8k`, `math`, `verl`; `auto` looks at each row's columns."""
    prompt_field: FieldPath | None = None
    """Column that holds the prompt (text or messages), when it has a name of its own; dots reach nested keys."""
    reference_field: FieldPath | None = None
    """Column copied to `item.reference_answer`; dots reach nested keys. Every row must then have it."""
    system_prompt: Annotated[str, Field(max_length=65536)] | None = None
    """Put before the messages of rows that have no system message, and before text prompts."""
    chat_template: Literal["model", "none"] = "model"
    """`model` renders messages with the model's chat template; `none` feeds the text of the messages as it stands."""
    prompt_as: Literal["auto", "text", "user"] = "auto"
    """What a prompt given as text is: `text` is fed as it stands, `user` becomes a user message, and `auto` takes `text` for a
    `prompt` column (as TRL does) and `user` for the questions of `gsm8k` and `math` rows."""
    bad_rows: Literal["refuse", "skip"] = "refuse"
    """A row that cannot be used: refuse the file and name the line, or leave the row out and report it."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are skipped and counted; null = what the model's context leaves beside the completion."""
    shuffle: bool = True
    """A new order each epoch, from the job's seed."""
