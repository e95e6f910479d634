"""Graders that compare text: string_check, regex, text_similarity."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import re2
from rapidfuzz import fuzz
from rapidfuzz.distance import LCSseq

from grpo_engine.contract.grader import Regex, StringCheck, TextSimilarity

RE2_MAX_MEM = 8 * 2**20
"""Bytes RE2 may use for one pattern's program and automaton."""


def string_check(cfg: StringCheck, text: str, reference: str) -> float:
    """OpenAI's comparison; `like` means that the input contains the reference."""
    match cfg.operation:
        case "eq":
            holds = text == reference
        case "ne":
            holds = text != reference
        case "like":
            holds = reference in text
        case "ilike":
            holds = reference.casefold() in text.casefold()
    return float(holds)


def compile_pattern(cfg: Regex) -> Any:
    """The RE2 program. Raises ValueError with a sentence for a pattern RE2 does not take."""
    flags = "".join({"IGNORECASE": "i", "MULTILINE": "m", "DOTALL": "s"}[flag] for flag in sorted(set(cfg.flags)))
    return compile_re2(f"(?{flags}){cfg.pattern}" if flags else cfg.pattern)


def compile_re2(pattern: str) -> Any:
    """A pattern that searches in linear time. Raises ValueError with a sentence for one RE2 does not take."""
    options = re2.Options()
    options.max_mem = RE2_MAX_MEM
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        reason = error.args[0].decode() if error.args and isinstance(error.args[0], bytes) else str(error)
        hint = "; correct it (its syntax: https://github.com/google/re2/wiki/Syntax)"
        if "(?" in pattern and ("perl operator" in reason or "(?" in reason):
            hint = "; RE2 has no lookaround: for tags in order use the grader type 'format'"
        raise ValueError(f"the pattern is not one that RE2 takes: {reason}{hint}") from None


def is_found(pattern: Any, text: str) -> bool:
    """Whether the pattern is found anywhere. Halves of surrogate pairs, which are no text, are read as `?`."""
    return pattern.search(text.encode("utf-8", "replace").decode("utf-8")) is not None


def regex(cfg: Regex, pattern: Any, text: str) -> float:
    """1.0 when the pattern is found, in time linear in the text."""
    if cfg.match == "full":
        return float(pattern.fullmatch(text.encode("utf-8", "replace").decode("utf-8")) is not None)
    return float(is_found(pattern, text))


def text_similarity(cfg: TextSimilarity, text: str, reference: str) -> float:
    """The metric in [0, 1], or 1.0 and 0.0 on either side of the threshold."""
    metric = cfg.evaluation_metric
    if metric == "fuzzy_match":
        value = fuzz.ratio(text, reference) / 100.0
    elif metric == "gleu":
        value = gleu(_words(text), _words(reference))
    elif metric == "rouge_l":
        words, gold = _words(text), _words(reference)
        value = _f1(LCSseq.similarity(words, gold), len(words), len(gold))
    else:
        value = rouge_n(_words(text), _words(reference), int(metric.removeprefix("rouge_")))
    return value if cfg.pass_threshold is None else float(value >= cfg.pass_threshold)


def rouge_n(words: Sequence[str], gold: Sequence[str], n: int) -> float:
    """F1 of overlapping n-grams (Lin 2004)."""
    ours, theirs = _ngrams(words, n), _ngrams(gold, n)
    return _f1(sum((ours & theirs).values()), sum(ours.values()), sum(theirs.values()))


def gleu(words: Sequence[str], gold: Sequence[str]) -> float:
    """Sentence GLEU: the smaller of precision and recall over all 1- to 4-grams (Wu et al. 2016, section 4.3)."""
    ours, theirs = Counter[tuple[str, ...]](), Counter[tuple[str, ...]]()
    for n in range(1, 5):
        ours += _ngrams(words, n)
        theirs += _ngrams(gold, n)
    longest = max(sum(ours.values()), sum(theirs.values()))
    return sum((ours & theirs).values()) / longest if longest else 0.0


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[start : start + n]) for start in range(len(words) - n + 1))


def _f1(overlap: float, ours: int, theirs: int) -> float:
    return 2.0 * overlap / (ours + theirs) if ours and theirs else 0.0


def _words(text: str) -> list[str]:
    return text.casefold().split()
