r"""One spelling for mathematics: Unicode, Markdown, LaTeX and plain text are brought to a small LaTeX.

Knows nothing of values: `1{,}000` loses its separator here, `3,5,7` stays as it is.
"""

from __future__ import annotations

import re
import unicodedata

from grpo_engine.rows.boxed import closing_brace

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "“": '"', "”": '"', "’": "'",
    "√": r"\sqrt ", "\u2009": r"\,", "\u202f": r"\,", "\u00a0": " ", "\u2007": r"\,", "，": ",", "（": "(", "）": ")", "％": "%", "º": "°",
}  # fmt: skip
_TABLE = str.maketrans(_SYMBOLS)
_DELIMITERS = ("$", r"\(", r"\)", r"\[", r"\]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mbox|operatorname|bold|bm)\*?\s*\{")
_SEPARATORS = (
    (re.compile(r"(?<=\d)\s*(?:\{,\}|,\s*\\!)\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d)(?:\\,|\\ |\\;|~)(?=\d{3}(?!\d))"), ""),
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]ig+[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|hfill|hskip|mathstrut|phantom\{[^{}]*\})(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|thinspace|medspace|enspace)(?![A-Za-z]))|~", " "),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\\%|(?<=\d)\s+per\s?cent(?![A-Za-z])", "%"),
        (r"^([-+]?[\d.,]+)\s*([€£¥])$", r"\2\1"),
        (r"\\(?:lbrace)(?![A-Za-z])", r"\\{"),
        (r"\\(?:rbrace)(?![A-Za-z])", r"\\}"),
        (r"\\(?:le)(?![A-Za-z])", r"\\leq "),
        (r"\\(?:ge)(?![A-Za-z])", r"\\geq "),
        (r"\\(?:ne)(?![A-Za-z])", r"\\neq "),
        (r"\\(?:varnothing)(?![A-Za-z])", r"\\emptyset "),
        (r"\\frac\s*(\d)\s*(\d)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\d)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\d)(?!\s*\})", r"\1{\2}"),
        (r"\\sqrt\s*(\d+|[A-Za-z](?![A-Za-z]))", r"\\sqrt{\1}"),
        (r"\\sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\*\*", "^"),
        (r"<=|=<", r"\\leq "),
        (r">=", r"\\geq "),
        (r"(?<![\\A-Za-z])sqrt\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])exp\s*\(([^()]*)\)", r"e^{\1}"),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (
            r"(?<![\\A-Za-z])(sin|cos|tan|cot|sec|csc|log|ln|arcsin|arccos|arctan|sinh|cosh|tanh)(?=\s*[({\\0-9^_]|\s+[a-z](?![A-Za-z]))",
            r"\\\1 ",
        ),
        (r"\^\s*\(([^()]*)\)", r"^{\1}"),
        (r"\^\s*(-?\d{2,}|-\d)", r"^{\1}"),
        (r"_\s*\{\s*(\w+)\s*\}", r"_\1"),
        (r"\s+", " "),
    )
)
_BOLD = re.compile(r"(?<![\w)\]}])\*\*|\*\*(?![\w(\\-])")


def clean_markdown(text: str) -> str:
    """Without bold marks, code ticks and block quotes; `2**3` keeps its power."""
    return _BOLD.sub("", text).replace("`", "")


def canonical(text: str) -> str:
    """The small LaTeX of an answer, without delimiters, markup and the full stop after it."""
    text = _outer(_unicode(clean_markdown(text)))
    text = _outer(_unwrap_text(text))
    for pattern, replacement in _SEPARATORS:
        text = pattern.sub(replacement, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    return _outer(text)


def _unicode(text: str) -> str:
    """ASCII and LaTeX for what Unicode has signs of its own for; a vulgar fraction after a digit is a mixed number."""
    if text.isascii():
        return text
    out: list[str] = []
    is_raised = False
    for character in text:
        if character in _SUPERSCRIPTS:
            out.append(("" if is_raised else "^{") + _SUPERSCRIPTS[character])
            is_raised = True
            continue
        if is_raised:
            out.append("}")
            is_raised = False
        if unicodedata.category(character) == "No" and "⁄" in unicodedata.normalize("NFKC", character):
            above, below = unicodedata.normalize("NFKC", character).split("⁄")
            out.append(rf"\frac{{{above}}}{{{below}}}")
        elif unicodedata.category(character) == "Nd" or "\uff01" <= character <= "\uff5e":
            out.append(_SYMBOLS.get(character) or unicodedata.normalize("NFKC", character))
        else:
            out.append(character)
    if is_raised:
        out.append("}")
    return "".join(out).translate(_TABLE)


def _outer(text: str) -> str:
    """Without blanks, maths delimiters, quotes and sentence punctuation around it, and without a pair of braces around all of it."""
    while True:
        before = text
        text = text.strip().rstrip(".,;:").strip()
        for mark in _DELIMITERS:
            if mark == "$" and re.match(r"\$-?[\d.]", text) and not text.endswith("$"):
                continue
            text = text.removeprefix(mark).removesuffix(mark)
        if len(text) > 2 and text[0] == text[-1] and text[0] in '"*':
            text = text[1:-1]
        if text.endswith("\\") and not text.endswith("\\\\"):
            text = text[:-1]
        if text.startswith("{") and closing_brace(text, 0) == len(text) - 1:
            text = text[1:-1]
        if text == before:
            return text


def _unwrap_text(text: str) -> str:
    r"""`\text{13}` is `13`, `35\text{ cm}` is `35 cm`."""
    while match := _TEXT.search(text):
        end = closing_brace(text, match.end() - 1)
        if end is None:
            return text[: match.start()] + " " + text[match.end() :]
        text = f"{text[: match.start()]} {text[match.end() : end]} {text[end + 1 :]}"
    return text
