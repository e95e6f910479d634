"""How dataset rows become prompts and references."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from grpo_engine.contract.base import PositiveInt, Strict

RowFormat = Literal["auto", "messages", "prompt", "gsm8k", "math", "verl"]


class DataConfig(Strict):
    """Reading the training file. Rows keep every column; graders reach them as `{{item.column}}`."""

    format: RowFormat = "auto"
    """`messages` (OpenAI), `prompt` (text or messages, TRL), `gsm8k`, `math`, `verl`; `auto` looks at the columns."""
    prompt_field: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Column that holds the prompt, when it has a name of its own."""
    reference_field: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    """Column copied to `item.reference_answer`."""
    system_prompt: Annotated[str, Field(max_length=65536)] | None = None
    """Put before the messages of rows that have no system message."""
    chat_template: Literal["model", "none"] = "model"
    """`model` renders messages (and text prompts) with the model's chat template; `none` feeds text as it stands."""
    max_prompt_tokens: PositiveInt | None = None
    """Longer prompts are skipped and counted; null = what the model's context leaves beside the completion."""
    shuffle: bool = True
    """A new order each epoch, from the job's seed."""
