"""Units after a number: they are dropped, except that two known units that differ are two different answers."""

from __future__ import annotations

import re

_FAMILIES = (
    "cm centimeter centimeters centimetre centimetres", "mm millimeter millimeters millimetre millimetres",
    "m meter meters metre metres", "km kilometer kilometers kilometre kilometres", "in inch inches", "ft foot feet", "yd yard yards",
    "mi mile miles", "g gram grams", "kg kilogram kilograms", "mg milligram milligrams", "lb lbs pound pounds", "oz ounce ounces",
    "s sec secs second seconds", "min mins minute minutes", "h hr hrs hour hours", "day days", "week weeks", "month months",
    "year years", "l L liter liters litre litres", "ml mL milliliter milliliters", "° degree degrees deg", "rad radian radians",
    "cent cents", "currency dollar dollars usd", "mi/h mph", "km/h kmh kph", "unit units", "N", "J", "W", "V", "Hz", "Pa", "°C", "°F", "K",
)  # fmt: skip
_KNOWN = {name: family.split()[0] for family in _FAMILIES for name in family.split()}
_POWER = r"\s*\^\s*(?:\{\s*-?[123]\s*\}|-?[123])"
_UNIT = re.compile(
    r"(?P<body>.*(?:[\d)}%!]|\\pi))(?P<gap>\s*)"
    rf"(?P<unit>°\s*[CF]?|[A-Za-z]+(?:(?:{_POWER})?(?:\s*[/·]\s*|\.\s?|\s)[A-Za-z]+)*)\.?(?P<power>{_POWER})?"
)
_AFTER_FORMULA = re.compile(
    rf"(?P<body>.*?\S)\s+(?P<unit>(?:(?:sq|cu)\.?\s+|(?:square|cubic)\s+)?[A-Za-z]+(?:\s*/\s*[A-Za-z]+|\s+per\s+[A-Za-z]+)?)\.?(?P<power>{_POWER})?"
)
_NOT_UNITS = frozenset({"and", "or", "not", "to", "mod", "pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "x", "y", "z"})
_SQUARED = {"square": "^2", "sq": "^2", "cubic": "^3", "cu": "^3"}


def split_unit(text: str) -> tuple[str, str | None]:
    """(number, unit) of `35 cm`; (text, None) when what follows is no unit. A lone letter must be a known unit and stand apart."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return text, None
    unit = re.sub(r"\s", "", match["unit"]) if match["unit"].startswith("°") else match["unit"]
    words = re.findall(r"[A-Za-z]+", unit)
    if any(word.lower() in _NOT_UNITS for word in words):
        return text, None
    known = known_unit(unit)
    is_attached = not match["gap"]
    if (known is None and (is_attached or len(words[0]) < 2)) or (is_attached and len(unit) == 1 and unit != "°"):
        return text, None
    return match["body"], unit + _squeezed(match["power"])


def split_known_unit(text: str) -> tuple[str, str | None]:
    r"""(formula, unit) of `24\pi cm^2`; (text, None) unless a known unit stands apart behind it.

    After a formula with variables a lone letter is a variable, never a unit.
    """
    match = _AFTER_FORMULA.fullmatch(text)
    if match is None or known_unit(match["unit"]) is None or match["body"][-1] in "+-*/^=<>,(":
        return text, None
    has_variables = re.search(r"[A-Za-z]", re.sub(r"\\[A-Za-z]+", "", match["body"])) is not None
    if has_variables and len(match["unit"]) == 1:
        return text, None
    return match["body"], match["unit"] + _squeezed(match["power"])


def known_unit(unit: str) -> str | None:
    """The family's name of a unit, with its power; None for a word that is no known unit. `m/s` and `square cm` are known."""
    whole = _KNOWN.get(unit)
    if whole is not None:
        return whole
    names = []
    for part in re.split(r"\s*/\s*|\s+per\s+", unit):
        words = re.sub(r"[{}]", "", re.sub(r"\s*\^\s*", "^", part)).replace(".", " ").split()
        power = _SQUARED.get(words[0].lower(), "") if len(words) == 2 else ""
        if not words or len(words) > (2 if power else 1):
            return None
        name, caret, own_power = words[-1].partition("^")
        family = _KNOWN.get(name) or _KNOWN.get(name.lower() if len(name) > 1 else name)
        if family is None:
            return None
        names.append(family + power + caret + own_power)
    return "/".join(names)


def _squeezed(power: str | None) -> str:
    return re.sub(r"[\s{}]", "", power) if power else ""


def units_conflict(one: str | None, other: str | None) -> bool:
    """Whether both sides carry known units and these differ."""
    if one is None or other is None:
        return False
    first, second = known_unit(one), known_unit(other)
    return first is not None and second is not None and first != second
