"""Graders that look at the shape of a completion: length, format, repetition, json_schema."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from grpo_engine.contract.grader import Format, JsonSchema, Length, Repetition
from grpo_engine.grader.sample import View, strict_json

_FENCE = re.compile(r"\s*```(?:json)?[ \t]*\r?\n(.*)\r?\n[ \t]*```\s*", re.DOTALL | re.IGNORECASE)


def length(cfg: Length, text: str, view: View) -> tuple[float, dict[str, Any]]:
    """The score, and what was counted in which unit."""
    count, detail = _measure(cfg, text, view)
    outside = max(cfg.target_min - count, count - cfg.target_max, 0)
    value = 1.0 if outside == 0 else max(0.0, 1.0 - outside / cfg.falloff) if cfg.falloff else 0.0
    return value, {"counted": count, "unit": cfg.unit, **detail}


def _measure(cfg: Length, text: str, view: View) -> tuple[int, dict[str, Any]]:
    if cfg.unit == "characters":
        return len(text), {}
    if cfg.unit == "words":
        return len(text.split()), {}
    tokens = view.extras.get("num_tokens")
    if isinstance(tokens, int) and not isinstance(tokens, bool) and tokens >= 0:
        return tokens, {}
    return -(-len(text.encode("utf-8", "replace")) // 4), {"is_estimate": True, "estimate": "UTF-8 bytes / 4, for want of a tokenizer"}


def format_check(cfg: Format, text: str) -> float:
    """1.0 when the text is the tags in order, each opened and closed once, blanks between them and nothing else."""
    position = 0
    for tag in cfg.tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if text.count(opening) != 1 or text.count(closing) != 1:
            return 0.0
        start, end = text.find(opening), text.find(closing)
        if text[position:start].strip() or start < position or end < start:
            return 0.0
        position = end + len(closing)
    return float(not text[position:].strip())


def repetition(cfg: Repetition, text: str) -> tuple[float, dict[str, Any]]:
    """Minus the share of word n-grams that came before; 0 for a text shorter than one n-gram."""
    words = text.casefold().split()
    total = len(words) - cfg.ngram + 1
    if total <= 0:
        return 0.0, {"repeated_share": 0.0}
    unique = len({tuple(words[start : start + cfg.ngram]) for start in range(total)})
    share = 1.0 - unique / total
    return cfg.max_penalty * share, {"repeated_share": share}


def json_check(cfg: JsonSchema, first_fault: Callable[[Any], str | None], text: str) -> tuple[float, dict[str, Any]]:
    """Strict JSON of the required kind that fits the schema. The whole text must be JSON; one fence around it only if allowed."""
    if cfg.allow_fence:
        fenced = _FENCE.fullmatch(text)
        text = fenced.group(1) if fenced else text
    try:
        value = strict_json(text)
    except ValueError as error:
        return 0.0, {"fault": f"not JSON: {error}"}
    required = {"object": dict, "array": list}.get(cfg.require)
    if required is not None and not isinstance(value, required):
        return 0.0, {"fault": f"not an {cfg.require}"}
    fault = first_fault(value)
    return (1.0, {}) if fault is None else (0.0, {"fault": fault})
