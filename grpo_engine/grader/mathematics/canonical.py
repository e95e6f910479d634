r"""One spelling for mathematics: Unicode, Markdown, LaTeX and plain text are brought to a small LaTeX.

Knows nothing of values: `1{,}000` loses its separator here, `3,5,7` stays as it is.
"""

from __future__ import annotations

import re
import unicodedata

from grpo_engine.rows.boxed import closing_brace, matching_braces

_SUPERSCRIPTS = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SYMBOLS = {
    "−": "-", "–": "-", "‐": "-", "‑": "-", "﹣": "-", "×": r"\times ", "⋅": r"\cdot ", "·": r"\cdot ", "∙": r"\cdot ", "÷": "/",
    "∕": "/", "⁄": "/", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "≠": r"\neq ", "±": r"\pm ", "∪": r"\cup ",
    "∩": r"\cap ", "∈": r"\in ", "∅": r"\emptyset ", "θ": r"\theta ", "α": r"\alpha ", "β": r"\beta ", "“": '"', "”": '"', "’": "'",
    "√": r"\sqrt ", "\u2009": r"\,", "\u202f": r"\,", "\u00a0": " ", "\u2007": r"\,", "，": ",", "（": "(", "）": ")", "％": "%", "º": "°",
    "≈": r"\approx ", "…": r"\ldots ", "‒": "-",
}  # fmt: skip
_TABLE = str.maketrans(_SYMBOLS)
_SUBSCRIPTS = dict(zip("₀₁₂₃₄₅₆₇₈₉", "0123456789", strict=True))
CURRENCY_SIGNS = "€£¥₹₩₽₺₫฿"
_LONG_DASH = re.compile(r"(?<![\w)\]}])[—―](?=\d)")
_BASE_WORDS = {
    "two": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7, "eight": 8, "nine": 9, "ten": 10, "eleven": 11, "twelve": 12,
    "sixteen": 16,
}  # fmt: skip
_DELIMITERS = ("$", r"\(", r"\)", r"\[", r"\]")
_TEXT = re.compile(r"\\(?:text|textbf|textit|textrm|texttt|mathrm|mathbf|mathit|mathsf|mbox|operatorname|bold|bm)\*?\s*\{")
_SEPARATORS = (
    (re.compile(r"(?<=\d)\s*(?:\{,\}|,\s*\\!)\s*(?=\d{3}(?!\d))"), ""),
    (re.compile(r"(?<=\d)(?:\\[,;: ]|~|_)(?=\d{3}(?!\d))"), ""),
)
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right|[bB]ig+[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|limits|hfill|hskip|mathstrut|phantom\{[^{}]*\})(?![A-Za-z])", ""),
        (r"\\[dtc]frac(?![A-Za-z])", r"\\frac"),
        (r"(?<!\\)\\(?:[,;:! ]|(?:quad|qquad|thinspace|medspace|enspace)(?![A-Za-z]))|~", " "),
        (r"\^\s*\{?\s*\\(?:circ|degree)\s*\}?|\\degree(?![A-Za-z])", "°"),
        (r"\\%|(?<=\d)\s*(?:per\s?cent(?:age)?|pct)(?![A-Za-z])", "%"),
        (rf"^([-+]?[\d.,]+)\s*([{CURRENCY_SIGNS}])$", r"\2\1"),
        (r"(?<=\d)\s*(?:\^\s*)?\{?\s*(?:st|nd|rd|th)\s*\}?$", ""),
        (r"(?<=\d)\s*([AaPp])\.?\s?[Mm]\.?$", r" \1m"),
        (r"\\(?:dots|cdots|dotsc|dotsb)(?![A-Za-z])", r"\\ldots "),
        (r"(?<=\d)\.(\d*)\s*(?:\\ldots|\.\.\.)\s*$", r".\1"),
        (r"^\s*(?:\\(?:approx|simeq|sim)(?![A-Za-z])|~|=|\*\s|•)\s*", ""),
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
        (r"(?<![\\A-Za-z])sqrt\s*(\d+)", r"\\sqrt{\1}"),
        (r"(?<![\\A-Za-z])cbrt\s*\(([^()]*)\)", r"\\sqrt[3]{\1}"),
        (r"(?<![\\A-Za-z])abs\s*\(([^()]*)\)", r"|\1|"),
        (r"(?<![\\A-Za-z])a(sin|cos|tan)\s*(?=\()", r"\\arc\1 "),
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
_BASE_WORD = re.compile(rf"(?<=\d)_({'|'.join(_BASE_WORDS)})(?![A-Za-z])")
_BOLD = re.compile(r"(?<![\w)\]}])\*\*|\*\*(?![\w(\\-])")

_STRUCK = re.compile(r"~~[^~\n]+~~")
_UNDERLINED = re.compile(r"(?<!\w)__([^_\n]+)__(?!\w)")
_LINE_MARK = re.compile(r"^[ \t]*(?:>[ \t]+)+(?=\S)|^[ \t]*#{1,3}[ \t]+", re.MULTILINE)


_NEGATIVE = re.compile(r"\b[Nn]egative[ \t]+(?=\$?\\?\$?\d)|(?:(?<=is)|(?<=are)|(?<=[=:>])|^)[ \t]*\b[Mm]inus[ \t]+(?=\d)", re.MULTILINE)


def signs_in_words(text: str) -> str:
    """`negative 5` is -5, and so is `minus 5` where no number stands before it."""
    if "egative" not in text and "inus" not in text:
        return text
    return _NEGATIVE.sub(" -", text)


def clean_markdown(text: str) -> str:
    """Without bold and heading marks, code ticks, block quotes and struck-out text; `2**3` keeps its power and `#### 5` its mark."""
    if "~~" in text:
        text = _STRUCK.sub("", text)
    return _UNDERLINED.sub(r"\1", _LINE_MARK.sub("", _BOLD.sub("", text))).replace("`", "")


_REVERSED_INTERVAL = re.compile(r"(?=\]|.*\[$)([\[\]])([^\[\]]+,[^\[\]]+)([\[\]])")
"""An interval with a bracket turned outwards; the usual `[a,b]` is none."""


def canonical(text: str) -> str:
    """The small LaTeX of an answer, without delimiters, markup and the full stop after it."""
    text = _outer(_unicode(clean_markdown(signs_in_words(text))))
    text = _outer(_unwrap_text(text.replace(r"\text{,}", "{,}")))
    for pattern, replacement in _SEPARATORS:
        text = pattern.sub(replacement, text)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _outer(_BASE_WORD.sub(lambda match: f"_{_BASE_WORDS[match[1]]}", text))
    return _open_ends(text)


def _open_ends(text: str) -> str:
    r"""`]2,\infty[` as ISO 80000-2 writes open ends, in round brackets."""
    found = _REVERSED_INTERVAL.fullmatch(text)
    if found is None:
        return text
    return ("(" if found[1] == "]" else "[") + found[2] + (")" if found[3] == "[" else "]")


def _unicode(text: str) -> str:
    """ASCII and LaTeX for what Unicode has signs of its own for; a vulgar fraction after a digit is a mixed number."""
    if text.isascii():
        return text
    out: list[str] = []
    is_raised = False
    for character in _LONG_DASH.sub("-", text):
        if unicodedata.category(character) == "Cf":
            continue
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
        elif character in _SUBSCRIPTS:
            out.append("_" + _SUBSCRIPTS[character])
        elif unicodedata.category(character) == "No":
            out.append(unicodedata.normalize("NFKC", character))
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
    r"""`\text{13}` is `13`, `35\text{ cm}` is `35 cm`. What follows a `\text{` that is never closed stays as it is. Linear time."""
    while matches := list(_TEXT.finditer(text)):
        pairs = matching_braces(text)
        blanks: list[tuple[int, int]] = []
        for match in matches:
            end = pairs.get(match.end() - 1)
            if end is None:
                break
            blanks += [match.span(), (end, end + 1)]
        if not blanks:
            return _blanked(text, [matches[0].span()])
        text = _blanked(text, blanks)
    return text


def _blanked(text: str, spans: list[tuple[int, int]]) -> str:
    """With one blank in place of each span."""
    pieces, at = [], 0
    for start, end in sorted(spans):
        pieces.append(text[at:start])
        at = end
    return " ".join([*pieces, text[at:]])
