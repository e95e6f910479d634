"""From a grader's configuration to a function that scores one sample.

Compiling reads templates, patterns, formulas and schemas once and refuses what is wrong with them; grading then cannot fail for
those reasons. `needs_process` says which graders may take long and so run only in the killable processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from grpo_engine.contract.classifier import ScoreModel
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.grader import (
    Format,
    Grader,
    JsonSchema,
    Length,
    Math,
    Multi,
    NumberCheck,
    Plugin,
    Regex,
    Remote,
    Repetition,
    StringCheck,
    TextSimilarity,
)
from grpo_engine.grader import outside, shape, text
from grpo_engine.grader import plugin as plugins
from grpo_engine.grader.classifier_input import classifier_templates
from grpo_engine.grader.formula import parse_formula
from grpo_engine.grader.sample import MAX_SCORE, GraderFault, MissingField, OutputNotJson, Score, View
from grpo_engine.grader.schema import compile_schema
from grpo_engine.grader.template import Template, parse_template

Grade = Callable[[View], tuple[float, dict[str, Any]]]
LoadPlugin = Callable[[Plugin], plugins.Grade]
Leaf = StringCheck | Regex | TextSimilarity | NumberCheck | Math | JsonSchema | Length | Format | Repetition | Plugin | ScoreModel | Remote
_IN_PROCESS = (TextSimilarity, Math, JsonSchema, Plugin)


@dataclass(frozen=True)
class LeafTemplates:
    """The templates of one grader, with its path in the job for messages."""

    cfg: Leaf
    at: str
    input: Template
    reference: Template | None


def needs_process(cfg: Grader) -> bool:
    """Whether grading may take more than linear time or run an operator's code."""
    if isinstance(cfg, Multi):
        return any(needs_process(part) for part in cfg.graders.values())
    return isinstance(cfg, _IN_PROCESS)


def leaves(cfg: Grader, at: str) -> Iterator[LeafTemplates]:
    """Each grader that reads templates, with them parsed. Raises InvalidRequest naming the field."""
    if isinstance(cfg, Multi):
        for name, part in cfg.graders.items():
            yield from leaves(part, f"{at}.graders.{name}")
    elif isinstance(cfg, Plugin | Remote):
        yield LeafTemplates(cfg, at, Template(()), None)
    elif isinstance(cfg, ScoreModel):
        yield LeafTemplates(cfg, at, classifier_templates(cfg, at).joined, None)
    elif isinstance(cfg, Leaf):
        source = getattr(cfg, "reference", None)
        reference = None if source is None else _checked(f"{at}.reference", parse_template, source)
        yield LeafTemplates(cfg, at, _checked(f"{at}.input", parse_template, cfg.input), reference)


def compile_grader(cfg: Grader, at: str = "grader", load: LoadPlugin = plugins.load_plugin) -> Callable[[View], Score]:
    """A function that scores one view and never raises. Raises InvalidRequest, with the field's path, for a grader that cannot work,
    and GraderFault for a plug-in that cannot start."""
    grade = _compile(cfg, at, load, is_part=False)

    def score(view: View) -> Score:
        parts: dict[str, float] = {}
        try:
            value, detail = grade(view, "", parts)
        except GraderFault as fault:
            return Score(math.nan, parts, str(fault), fault.kind)
        except Exception as error:  # noqa: BLE001 - whatever a grader raises is reported as its fault, never as a score
            return Score(math.nan, parts, f"{type(error).__name__}: {error}"[:2000], "raised")
        return Score(value, parts, detail=detail)

    return score


_Compiled = Callable[[View, str, dict[str, float]], tuple[float, dict[str, Any]]]


def _compile(cfg: Grader, at: str, load: LoadPlugin, *, is_part: bool) -> _Compiled:
    if isinstance(cfg, Multi):
        return _compile_multi(cfg, at, load)
    if not isinstance(cfg, Leaf):
        raise InvalidRequest(f"{at}: graders of type {cfg.type!r} are not carried out", param=f"{at}.type")
    if cfg.if_missing == "skip" and not is_part:
        raise InvalidRequest(f"{at}.if_missing 'skip' has a meaning only inside 'multi'; use 'error'", param=f"{at}.if_missing")
    grade = _compile_leaf(cfg, at, load)

    def run(view: View, name: str, parts: dict[str, float]) -> tuple[float, dict[str, Any]]:
        try:
            value, detail = grade(view)
        except OutputNotJson as error:
            return 0.0, {"fault": str(error)}
        return check_value(value), detail

    return run


def _compile_multi(cfg: Multi, at: str, load: LoadPlugin) -> _Compiled:
    compiled = {name: _compile(part, f"{at}.graders.{name}", load, is_part=True) for name, part in cfg.graders.items()}
    skippable = {name for name, part in cfg.graders.items() if isinstance(part, Leaf) and part.if_missing == "skip"}
    if cfg.calculate_output is not None:
        combine = _checked(f"{at}.calculate_output", parse_formula, cfg.calculate_output, set(cfg.graders))
    else:
        weights = cfg.weights or {}

        def combine(scores: Any) -> float:
            return math.fsum(weights[name] * score for name, score in scores.items())

    def run(view: View, prefix: str, parts: dict[str, float]) -> tuple[float, dict[str, Any]]:
        scores: dict[str, float] = {}
        details: dict[str, Any] = {}
        for name, grade in compiled.items():
            try:
                value, detail = grade(view, f"{prefix}{name}.", parts)
            except MissingField as missing:
                if name not in skippable:
                    raise GraderFault(missing.kind, f"grader {prefix}{name}: {missing}") from None
                details[name] = {"skipped": str(missing)}
                continue
            except GraderFault as fault:
                raise GraderFault(fault.kind, f"grader {prefix}{name}: {fault}") from None
            scores[name] = parts[prefix + name] = value
            details[name] = detail
        if not scores:
            raise MissingField("none of the graders applies to this row")
        return check_value(combine({**dict.fromkeys(skippable, 0.0), **scores})), details

    return run


def check_value(value: Any) -> float:
    """A score as a float. Raises GraderFault for anything that is not one finite number of sane size."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GraderFault("not_a_number", f"the grader returned {_describe(value)} instead of one number")
    if not math.isfinite(value):
        raise GraderFault("not_a_number", f"the grader returned {value}")
    if abs(value) > MAX_SCORE:
        raise GraderFault("not_a_number", f"the grader returned {value:.3g}; scores lie within +-{MAX_SCORE:g}")
    return float(value)


def _describe(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"{len(value)} values"
    return f"a {type(value).__name__} ({str(value)[:60]!r})"


def _checked(at: str, build: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return build(*arguments)
    except ValueError as error:
        raise InvalidRequest(f"{at}: {error}", param=at) from None


def _compile_leaf(cfg: Leaf, at: str, load: LoadPlugin) -> Grade:
    if isinstance(cfg, Plugin):
        grade = load(cfg)
        return lambda view: (grade(view.item, view.output_text), {})
    if isinstance(cfg, Remote | ScoreModel):
        return lambda view: outside.answer_of(view, at)
    (templates,) = leaves(cfg, at)
    render, reference = templates.input.render, templates.reference
    if reference is not None:
        return _compile_comparison(cfg, render, reference.render_value if isinstance(cfg, Math) else reference.render)
    if isinstance(cfg, Regex):
        pattern = _checked(f"{at}.pattern", text.compile_pattern, cfg)
        return lambda view: (text.regex(cfg, pattern, render(view)), {})
    if isinstance(cfg, JsonSchema):
        first_fault = _checked(f"{at}.json_schema", compile_schema, cfg.json_schema)
        return lambda view: shape.json_check(cfg, first_fault, render(view))
    if isinstance(cfg, Length):
        return lambda view: shape.length(cfg, render(view), view)
    if isinstance(cfg, Format):
        return lambda view: (shape.format_check(cfg, render(view)), {})
    assert isinstance(cfg, Repetition)
    return lambda view: shape.repetition(cfg, render(view))


def _compile_comparison(cfg: Leaf, render: Callable[[View], str], reference: Callable[[View], str]) -> Grade:
    if isinstance(cfg, StringCheck):
        return lambda view: (text.string_check(cfg, render(view), reference(view)), {})
    if isinstance(cfg, TextSimilarity):
        return lambda view: (text.text_similarity(cfg, render(view), reference(view)), {})
    from grpo_engine.grader import mathematics

    if isinstance(cfg, NumberCheck):
        return lambda view: mathematics.number_check(cfg, render(view), reference(view))
    assert isinstance(cfg, Math)
    return lambda view: mathematics.math_check(cfg, render(view), reference(view))
