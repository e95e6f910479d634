r"""Where the answer stands in a completion.

The order of `auto`, after the reasoning block is cut off: the last `<answer>` tag narrows the text; then the last complete
`\boxed{}`; the last `#### ` line; the last "answer is" or "answer:"; the whole text when it is nothing but a value; the last
formula or number; a short text as it stands. A box that is never closed, with no complete one before it, is no answer.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass

from grpo_engine.grader.mathematics.canonical import CURRENCY_SIGNS, canonical, clean_markdown, signs_in_words
from grpo_engine.grader.mathematics.units import split_known_unit
from grpo_engine.grader.mathematics.value import is_value
from grpo_engine.rows.boxed import has_box, last_boxed

_REASONING = ("think", "thinking", "reasoning")
_HASH = re.compile(r"####[ \t]*(\S[^\n]*)")
_PHRASE = re.compile(
    r"\b(?:final[ \t]+(?:answer|result|choice)|answer|result|(?:correct|right|best)[ \t]+(?:option|choice))\b[ \t]*"
    r"(?:is(?!n't|[ \t]+not\b)|are(?!n't)|equals|was|=|:)+[ \t]*:?"
    r"|\bfinal[ \t]+answer[ \t]*(?=\n)",
    re.IGNORECASE,
)
_SPAN = re.compile(
    r"\$\$(?P<a>[^$]{1,2000})\$\$|\$(?!\s)(?P<b>[^$\n]*[^$\n\s])\$(?!\d)"
    r"|\\\((?P<c>(?:[^\\\n]|\\[^\[\]()\n]){1,2000})\\\)|\\\[(?P<d>(?:[^\\]|\\[^\[\]()]){1,2000})\\\]"
)
NUMBER = re.compile(
    r"(?P<sign>(?<![\w)\]}.,%])[-+])?(?P<currency>\\?\$|["
    + CURRENCY_SIGNS
    + r"])?(?P<inner>(?<=[$"
    + CURRENCY_SIGNS
    + r"])-)?(?<![\w.^_])(?<!\d,)"
    r"(?P<body>\d{1,3}(?:,\d{3}){1,12}(?!,?\d)(?:\.\d+)?|\d+(?:\.\d+)?(?:[eE][-+]?\d{1,4}(?!\w))?|\.\d+)(?P<over>\s?/\s?\d+)?(?P<percent>\s?\\?%)?"
)
_LETTER = re.compile(r"\s*(?:(?:option|choice|Option|Choice)\s+)?(?:\(([A-Z])\)|([A-Z])[.)](?:\s|$)|([A-Z])$)")
_OTHER_LETTER = re.compile(r"\([A-H]\)|(?<![\w'])[B-H](?![\w'])")
_LABEL = re.compile(r"(?:the\s+)?(?:final\s+)?(?:answer|result)\s*(?:is|=|:)+\s*:?\s*", re.IGNORECASE)
_PROSE_WORD = re.compile(
    r"(?<![\\A-Za-z])(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|ln|exp|mod|and|or|begin|end|[pbv]?matrix)(?![A-Za-z]))[A-Za-z]{2,}(?![A-Za-z])"
)
_SENTENCE_END = re.compile(r"[.!?;](?:\s|$)|[,;]?\s(?:because|since|so|as|where|which)\s")
_JOINED = re.compile(r"\s*(?:,|and|or|,\s*and|,\s*or)\s*")
_END_TOKEN = re.compile(r"<\|[A-Za-z_]{2,32}\|>|</s>|<eos>|<pad>|<end_of_turn>")
_LONGEST_END_TOKEN = 40
_MAX_SHORT = 64
_MAX_SEGMENT = 500


@dataclass(frozen=True)
class Found:
    """An answer and how it was found."""

    text: str
    how: str


def extract(text: str, how: str) -> Found | None:
    """The answer of a completion, or None when it has none."""
    text = _without_end_tokens(text)
    if how == "none":
        return Found(text, how)
    visible = clean_markdown(signs_in_words(after_reasoning(text)))
    if how.startswith("xml:"):
        inside = last_tag(visible, how.removeprefix("xml:"))
        return None if inside is None else _inside_tag(inside, how)
    if how == "boxed":
        return _found(last_boxed(visible), how)
    if how == "hash":
        hashed = _last_hash(visible)
        return None if hashed is None else Found(_hash_answer(hashed), how)
    if how == "last_number":
        return _found(last_number(visible), how)
    tagged = last_tag(visible, "answer")
    if tagged is None and "<answer>" in visible:  # opened and never closed: the completion says that its answer begins here
        tagged = visible.rpartition("<answer>")[2]
    return _auto(visible) if tagged is None else _inside_tag(tagged, "xml:answer")


def _without_end_tokens(text: str) -> str:
    """Without a model's own marks at the end of a completion copied from elsewhere. What is trained here has none."""
    for _ in range(64):
        end = text.rstrip() if text[-1:].isspace() else text
        start = end.rfind("<", max(0, len(end) - _LONGEST_END_TOKEN)) if end.endswith(">") else -1
        if start < 0 or not _END_TOKEN.fullmatch(end, start):
            break
        text = end[:start]
    return text


def extract_reference(text: str) -> str:
    """The reference itself: a whole solution is cut down to its last box or its `####` line, "The answer is 42." to 42."""
    boxed = last_boxed(text)
    if boxed is not None:
        return boxed
    hashed = _last_hash(text)
    if hashed is not None:
        return hashed
    label = _LABEL.match(text.strip())
    return text.strip()[label.end() :].removesuffix(".") or text if label else text


def after_reasoning(text: str) -> str:
    """What follows the last reasoning block; nothing when the block is never closed."""
    for tag in _REASONING:
        end = text.rfind(f"</{tag}>")
        if end >= 0:
            text = text[end + len(tag) + 3 :]
        elif f"<{tag}>" in text:
            return text[: text.find(f"<{tag}>")]
    return text


def last_number(text: str) -> str | None:
    """The last number of a text, with its sign, separators, currency and percent sign."""
    last = _last_match(NUMBER, text)
    return None if last is None else _number_text(last)


def _auto(text: str) -> Found | None:
    if has_box(text):
        return _found(last_boxed(text), "boxed")
    hashed = _last_hash(text)
    if hashed is not None:
        return Found(_hash_answer(hashed), "hash")
    for match in reversed(list(_PHRASE.finditer(text))):
        phrase = _pick(_what_follows(text, match.end()))
        if phrase is not None:
            return Found(phrase, "phrase")
    return _last_resort(text)


def _what_follows(text: str, start: int) -> str:
    """The rest of the line, or the next line with anything on it when there is no more than signs."""
    rest = text[start : start + _MAX_SEGMENT].partition("\n")[0]
    if rest.strip(" .*"):
        return rest
    line_end = text.find("\n", start)
    return "" if line_end < 0 else text[line_end : line_end + 2 * _MAX_SEGMENT].lstrip().partition("\n")[0]


def _inside_tag(inside: str, how: str) -> Found | None:
    found = _auto(inside)
    return None if found is None else Found(found.text, how)


def _last_resort(text: str) -> Found | None:
    whole = text.strip()
    if not whole:
        return None
    if len(whole) <= 4 * _MAX_SHORT and (is_value(whole) or _is_formula(whole)):
        return Found(_joined_spans(whole) or whole, "whole")
    if len(whole) <= _MAX_SHORT and (letter := _LETTER.match(whole)):
        if _OTHER_LETTER.search(whole, letter.end()):
            return None
        return Found(next(group for group in letter.groups() if group), "letter")
    span, number, bare = _last_span(text), _last_match(NUMBER, text), _last_bare_latex(text)
    if span is not None and (number is None or span[1] >= number.end()):
        return Found(span[0], "formula")
    if bare is not None:
        return Found(bare, "formula")
    if number is not None:
        return Found(_number_text(number), "last_number")
    return Found(whole, "whole") if len(whole) <= _MAX_SHORT and "\n" not in whole else None


def _pick(segment: str) -> str | None:
    """The answer at the beginning of what follows "the answer is"."""
    segment = segment[:_MAX_SEGMENT].strip().strip("*").strip()
    if not segment:
        return None
    joined = _joined_spans(segment)
    if joined is not None:
        return joined
    end = _SENTENCE_END.search(segment)
    sentence = segment[: end.start()] if end else segment
    if is_value(sentence) or _is_formula(sentence):
        return sentence
    if letter := _LETTER.match(segment):
        return next(group for group in letter.groups() if group)
    number = NUMBER.search(sentence)
    return _number_text(number) if number else sentence.strip() or None


def _joined_spans(segment: str) -> str | None:
    """The formula at the beginning, with those joined to it by commas, "and" or "or"."""
    spans = list(_SPAN.finditer(segment))
    if not spans or segment[: spans[0].start()].strip(" :~≈(") or _is_currency(segment):
        return None
    texts = [_span_text(spans[0])]
    for before, after in itertools.pairwise(spans):
        if not _JOINED.fullmatch(segment[before.end() : after.start()]):
            break
        texts.append(_span_text(after))
    return ",".join(texts)


def _is_formula(text: str) -> bool:
    """One line of signs, symbols and numbers without prose and without a label such as `A:`."""
    if re.match(r"[A-Za-z]+\s*:", text):
        return False
    text = split_known_unit(text)[0]
    return "\n" not in text and any(character.isdigit() or character in "\\π" for character in text) and _PROSE_WORD.search(text) is None


def _is_currency(segment: str) -> bool:
    return re.match(r"\$\d[\d,.]*(?:\s|$)", segment) is not None


def _last_bare_latex(text: str) -> str | None:
    """LaTeX without delimiters in the last line: what follows the last prose word and the last equals sign."""
    line = text.strip().rsplit("\n", 1)[-1]
    if "\\" not in line:
        return None
    start = 0
    for match in _PROSE_WORD.finditer(line):
        start = match.end()
    tail = line[start:].rsplit("=", 1)[-1].strip(" .:,;$")
    return tail if "\\" in tail and len(tail) <= _MAX_SEGMENT and canonical(tail) else None


def _last_span(text: str) -> tuple[str, int] | None:
    """The last formula, with those joined before it, and where it ends."""
    texts: list[str] = []
    previous = None
    for match in _SPAN.finditer(text):
        if previous is None or not _JOINED.fullmatch(text[previous.end() : match.start()]):
            texts.clear()
        texts.append(_span_text(match))
        previous = match
    return None if previous is None else (",".join(texts), previous.end())


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _span_text(match: re.Match[str]) -> str:
    return next(group for group in match.groups() if group is not None)


def _number_text(match: re.Match[str]) -> str:
    sign = match["sign"] or match["inner"] or ""
    return sign + match["body"] + (match["over"] or "") + (match["percent"] or "").strip()


def last_tag(text: str, tag: str) -> str | None:
    """What the last closed `<tag>` holds; None without one."""
    end = text.rfind(f"</{tag}>")
    if end < 0:
        return None
    start = text.rfind(f"<{tag}>", 0, end)
    return None if start < 0 else text[start + len(tag) + 2 : end]


def _last_hash(text: str) -> str | None:
    found = _HASH.findall(text)
    return str(found[-1]).strip() if found else None


def _hash_answer(line: str) -> str:
    """What follows `####`, without a label before it ("Answer: 72") and a remark after it ("72, which is the sum")."""
    line = _LABEL.sub("", line) or line
    if is_value(line) or _is_formula(line):
        return line
    number = NUMBER.match(line)
    if number and re.match(r"[,;.]?\s*(?:,|;|\.\s|\(|because|since|so|as|where|which)", line[number.end() :]) and _PROSE_WORD.search(line):
        return _number_text(number)
    return line


def _found(text: str | None, how: str) -> Found | None:
    return None if text is None else Found(text, how)
