"""The grader `score_model`: a local sequence classifier, and the messages it reads."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import NonNegativeInt, PositiveInt, Strict, broken_rule
from grpo_engine.contract.grader_part import GraderPart, Name, Template


class TextPart(Strict):
    """Text inside a message, in OpenAI's shape. Images and audio are refused: a classifier reads text."""

    type: Literal["input_text", "output_text", "text"]
    text: Template


class ClassifierMessage(Strict):
    """A turn of what a classifier reads; its text is a template."""

    role: Literal["system", "developer", "user", "assistant"]
    """`developer` is read as `system`."""
    content: Template | TextPart | Annotated[list[Template | TextPart], Field(min_length=1, max_length=16)]
    """Several parts are joined without anything between them."""
    type: Literal["message"] | None = None


class ScoreModel(GraderPart):
    """A sequence classifier (reward model) of this server reads the text; its logit is the score. Nothing is sampled.

    OpenAI's object of this name asks a judge model for a number. Its `sampling_params` and `range` are refused here.
    """

    type: Literal["score_model"]
    name: Name = "score_model"
    model: Annotated[str, Field(min_length=1, max_length=512)]
    """A classifier, named as base models are: a folder below the server's model directory, or a Hub id."""
    input: Template | Annotated[list[Template | ClassifierMessage], Field(min_length=1, max_length=64)]
    """A text, or messages for the classifier's own chat template. A text among them, `"{{item.messages}}"`, is a column that holds
    messages (or a user's text) and stands for those."""
    input_pair: Template | None = None
    """Second text, for classifiers that read pairs (question, answer) without a chat template."""
    label: NonNegativeInt | Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """Number or name of the label whose logit counts; null = the only one."""
    activation: Literal["none", "sigmoid", "softmax"] = "none"
    """What is done to the logit; `softmax` is over all labels."""
    scale: float = 1.0
    """The score is scale * value + shift."""
    shift: float = 0.0
    clip: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """[lowest, highest]: scores beyond are set to them. null = as they come."""
    pass_threshold: float | None = None
    """1.0 from this score on and 0.0 below it; null = the score itself."""
    max_tokens: PositiveInt | None = None
    """Most tokens it reads; null = as many as it can. Never more than that."""
    truncate: Literal["refuse", "start", "end"] = "refuse"
    """A longer text is a fault of its completion, or loses tokens at its start or end."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where it runs, beside the model that is trained. Weights and arithmetic are fp32."""
    timeout_s: Annotated[float, Field(gt=0, le=600)] = 60.0
    """For one completion."""
    sampling_params: dict[str, Any] | None = None
    """OpenAI's, for a judge that is sampled. Refused."""
    range: list[float] | None = None
    """OpenAI's, for a judge that writes a number. Refused; see `clip`."""

    @model_validator(mode="after")
    def _fits_together(self) -> ScoreModel:
        if self.input_pair is not None and not isinstance(self.input, str):
            raise broken_rule("input_pair", "messages have no second text; give input as text, or leave input_pair out")
        if self.clip is not None and not self.clip[0] < self.clip[1]:
            raise broken_rule("clip", "clip must be [lowest, highest] with lowest below highest")
        if self.scale == 0:
            raise broken_rule("scale", "scale 0 gives every completion the same score; use another")
        return self
