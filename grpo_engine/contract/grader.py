"""Graders: declarative, composable, OpenAI's shapes where they exist. No code from a job is ever run.

Templates such as `{{item.reference_answer}}` and `{{sample.output_text}}` are filled from the dataset row and the
completion. A grader that cannot give a finite number is an error that is counted, never a silent zero.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from grpo_engine.contract.base import Fraction, NonNegativeFloat, NonNegativeInt, PositiveInt, Strict, broken_rule
from grpo_engine.contract.classifier import ScoreModel
from grpo_engine.contract.grader_part import GraderPart, Name, Template

TagName = Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_]{0,63}$")]
Extraction = Annotated[str, Field(pattern=r"^(auto|boxed|hash|last_number|none|xml:[A-Za-z][A-Za-z0-9_]{0,63})$")]
SimilarityMetric = Literal[
    "fuzzy_match", "rouge_1", "rouge_2", "rouge_3", "rouge_4", "rouge_5", "rouge_l", "gleu", "bleu", "meteor", "cosine"
]  # fmt: skip
OUTPUT = "{{sample.output_text}}"


class StringCheck(GraderPart):
    """1.0 when the comparison holds, else 0.0."""

    type: Literal["string_check"]
    name: Name = "string_check"
    input: Template = OUTPUT
    reference: Template
    operation: Literal["eq", "ne", "like", "ilike"] = "eq"
    """`eq` equal, `ne` not equal, `like` the input contains the reference, `ilike` the same without regard to case."""


class Regex(GraderPart):
    """1.0 when the RE2 pattern is found in the input, else 0.0. Linear time: no lookaround, no back-references."""

    type: Literal["regex"]
    name: Name = "regex"
    input: Template = OUTPUT
    pattern: Annotated[str, Field(min_length=1, max_length=1024)]
    flags: Annotated[list[Literal["IGNORECASE", "MULTILINE", "DOTALL"]], Field(max_length=3)] = []
    """`DOTALL` lets `.` match line breaks; without `MULTILINE`, `^` and `$` are the ends of the whole text."""
    match: Literal["search", "full"] = "search"
    """Found anywhere, or the whole input matches."""


class TextSimilarity(GraderPart):
    """How alike input and reference are, from 0.0 to 1.0."""

    type: Literal["text_similarity"]
    name: Name = "text_similarity"
    input: Template = OUTPUT
    reference: Template
    evaluation_metric: SimilarityMetric = "fuzzy_match"
    """`fuzzy_match` is rapidfuzz's ratio; `rouge_*` are F1 over words; `gleu` is Google's sentence GLEU."""
    pass_threshold: Fraction | None = None
    """1.0 from this similarity on and 0.0 below it; null = the similarity itself."""


class NumberCheck(GraderPart):
    """1.0 when the number in the input equals the reference within the tolerance, else 0.0."""

    type: Literal["number"]
    name: Name = "number"
    input: Template = OUTPUT
    reference: Template = "{{item.reference_answer}}"
    extract: Literal["last_number", "none"] = "last_number"
    """The last number of the input, or the whole input must be one."""
    absolute_tolerance: NonNegativeFloat = 0.0
    relative_tolerance: NonNegativeFloat = 0.0
    """Times the reference's magnitude. The larger of both tolerances counts."""


class Math(GraderPart):
    """1.0 when the answer in the input equals the reference as mathematics, else 0.0."""

    type: Literal["math"]
    name: Name = "math"
    input: Template = OUTPUT
    reference: Template = "{{item.reference_answer}}"
    extract: Extraction = "auto"
    """Where the answer stands: the last `boxed`, the last `#### ` line (`hash`), the last `xml:<tag>` outside the reasoning block,
    the `last_number`, the whole input (`none`), or `auto`, which tries them in the documented order."""


class JsonSchema(GraderPart):
    """1.0 when the input is strict JSON of the required kind (and fits the schema), else 0.0."""

    type: Literal["json_schema"]
    name: Name = "json_schema"
    input: Template = OUTPUT
    json_schema: dict[str, Any] | None = None
    """JSON Schema 2020-12 (or as its `$schema` says); references inside the schema only. null = any schema."""
    require: Literal["any", "object", "array"] = "any"
    allow_fence: bool = False
    """Also take JSON that one ```` ```json ```` fence holds, with nothing but blanks around the fence."""


class Length(GraderPart):
    """1.0 when the length lies between the targets, falling to 0.0 over `falloff` units outside them."""

    type: Literal["length"]
    name: Name = "length"
    input: Template = OUTPUT
    unit: Literal["tokens", "characters", "words"] = "tokens"
    """`tokens` of the completion (its input must then be the whole completion), Unicode `characters`, or blank-separated `words`."""
    target_min: NonNegativeInt = 1
    target_max: PositiveInt
    falloff: NonNegativeInt = 0
    """0 = a hard edge. With `falloff` f, a length d units outside the targets scores max(0, 1 - d / f) (DAPO's soft overlong form)."""

    @model_validator(mode="after")
    def _ordered(self) -> Length:
        if self.target_min > self.target_max:
            raise broken_rule("target_min", "target_min is above target_max; swap them")
        if self.unit == "tokens" and self.input != OUTPUT:
            raise broken_rule("unit", "unit 'tokens' counts the completion; leave input as it is, or count characters or words")
        return self


class Format(GraderPart):
    """1.0 when the input is exactly these tags in this order, each once, nothing but blanks between and around them, else 0.0."""

    type: Literal["format"]
    name: Name = "format"
    input: Template = OUTPUT
    tags: Annotated[list[TagName], Field(min_length=1, max_length=8)] = ["think", "answer"]

    @model_validator(mode="after")
    def _each_once(self) -> Format:
        if len(set(self.tags)) != len(self.tags):
            raise broken_rule("tags", "one tag stands twice, and each may stand once only; remove the repetition")
        return self


class Repetition(GraderPart):
    """`max_penalty` times the share of repeated word n-grams: 0.0 without repetition (open-r1's repetition penalty)."""

    type: Literal["repetition"]
    name: Name = "repetition"
    input: Template = OUTPUT
    ngram: Annotated[int, Field(ge=1, le=100)] = 3
    max_penalty: Annotated[float, Field(ge=-1000, le=0)] = -1.0


class Plugin(GraderPart):
    """A grader that the operator installed under the entry point group `grpo.graders`."""

    type: Literal["plugin"]
    name: Name = "plugin"
    plugin: Name
    """Name of the entry point."""
    config: dict[str, Any] = {}
    """Passed to the plug-in as it stands."""


class LabelModel(Strict):
    """A judge model picks a label (OpenAI's shape). Not carried out yet."""

    type: Literal["label_model"]
    name: Name = "label_model"
    model: Annotated[str, Field(min_length=1, max_length=512)]
    input: Annotated[list[dict[str, Any]], Field(max_length=64)]
    labels: Annotated[list[str], Field(max_length=256)]
    passing_labels: Annotated[list[str], Field(max_length=256)]


class Remote(GraderPart):
    """An HTTPS service on the operator's allow-list scores the completion: see docs/graders.md for the exchange."""

    type: Literal["remote"]
    name: Name = "remote"
    url: Annotated[str, Field(pattern=r"^https?://", max_length=2048)]
    batch_size: Annotated[int, Field(ge=1, le=256)] = 16
    """Completions of one request; those of a prompt stand together."""
    range: Annotated[list[float], Field(min_length=2, max_length=2)] | None = None
    """Lowest and highest score; one outside is a fault. null = any within +-1,000,000."""
    timeout_s: Annotated[float, Field(gt=0, le=60)] = 10.0
    """For one try, from first to last byte."""
    retries: Annotated[int, Field(ge=0, le=5)] = 2
    """Further tries after no answer, 429 or 5xx."""

    @model_validator(mode="after")
    def _range_is_ordered(self) -> Remote:
        if self.range is not None and not self.range[0] < self.range[1]:
            raise broken_rule("range", "range must be [lowest, highest] with lowest below highest")
        return self


class RemotePolicy(Strict):
    """What the operator allows remote graders."""

    hosts: list[str]
    """`host` (port 443) or `host:port`."""
    secret_file: str
    """File with the secrets that sign requests, one `whsec_...` a line."""
    allow_private: bool = False
    """Whether http and addresses that are not public are allowed."""


class Python(Strict):
    """OpenAI's python grader. Always refused: code from a job is never run."""

    type: Literal["python"]
    name: Name = "python"
    source: str
    image_tag: str | None = None


class Multi(Strict):
    """Graders combined: a weighted sum, or OpenAI's formula over their names."""

    type: Literal["multi"]
    name: Name = "multi"
    graders: Annotated[dict[Name, Grader], Field(min_length=1, max_length=16)]
    weights: dict[Name, float] | None = None
    """The sum of weight times score. Graders that do not apply to a row add nothing; the others keep their weights."""
    calculate_output: Annotated[str, Field(min_length=1, max_length=1024)] | None = None
    """Arithmetic over the grader names: + - * / ^ ( ), min max abs floor ceil exp sqrt log. Graders that do not apply count 0."""

    @model_validator(mode="after")
    def _combined_once(self) -> Multi:
        if (self.weights is None) == (self.calculate_output is None):
            raise broken_rule("weights" if self.weights is None else "calculate_output", "give exactly one of weights and calculate_output")
        if self.weights is not None and set(self.weights) != set(self.graders):
            raise broken_rule("weights", "weights must name exactly the graders; add or remove names until both agree")
        return self


Grader = Annotated[
    StringCheck
    | Regex
    | TextSimilarity
    | NumberCheck
    | Math
    | JsonSchema
    | Length
    | Format
    | Repetition
    | Plugin
    | ScoreModel
    | LabelModel
    | Remote
    | Python
    | Multi,
    Field(discriminator="type"),
]
Multi.model_rebuild()

_NOT_YET = {"bleu", "meteor", "cosine"}
_JUDGE = "put a judge behind a remote grader or an installed plug-in"


def unsupported_graders(grader: Grader, at: str) -> Iterator[tuple[str, str]]:
    """(path, remedy) of each grader, or setting of one, that is described here and not carried out."""
    if isinstance(grader, Multi):
        for name, part in grader.graders.items():
            yield from unsupported_graders(part, f"{at}.graders.{name}")
    elif isinstance(grader, Python):
        yield f"{at}.type", "'python' never will be: code from a job is not run here; use the declarative graders or an installed plug-in"
    elif isinstance(grader, LabelModel):
        yield f"{at}.type", f"'label_model' is described only; {_JUDGE}, or use score_model with a local classifier and its label"
    elif isinstance(grader, ScoreModel):
        if grader.sampling_params is not None:
            yield f"{at}.sampling_params", f"score_model is a local classifier here and nothing is sampled: leave it out; {_JUDGE}"
        if grader.range is not None:
            yield f"{at}.range", f"score_model is a local classifier here, whose logits have no range: use clip, scale and shift; {_JUDGE}"
    elif isinstance(grader, TextSimilarity) and grader.evaluation_metric in _NOT_YET:
        yield f"{at}.evaluation_metric", f"instead of {grader.evaluation_metric!r} use fuzzy_match, rouge_1 to rouge_5, rouge_l or gleu"
