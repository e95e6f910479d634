"""Units after a number: they are dropped, except that two known units that differ are two different answers."""

from __future__ import annotations

import re

_FAMILIES = (
    "cm centimeter centimeters centimetre centimetres", "mm millimeter millimeters millimetre millimetres",
    "m meter meters metre metres", "km kilometer kilometers kilometre kilometres", "in inch inches", "ft foot feet", "yd yard yards",
    "mi mile miles", "g gram grams", "kg kilogram kilograms", "mg milligram milligrams", "lb lbs pound pounds", "oz ounce ounces",
    "s sec secs second seconds", "min mins minute minutes", "h hr hrs hour hours", "day days", "week weeks", "month months",
    "year years", "l L liter liters litre litres", "ml mL milliliter milliliters", "° degree degrees deg", "rad radian radians",
    "cent cents", "currency dollar dollars usd", "mph", "N", "J", "W", "V", "Hz", "Pa", "°C", "°F", "K",
)  # fmt: skip
_KNOWN = {name: family.split()[0] for family in _FAMILIES for name in family.split()}
_UNIT = re.compile(
    r"(?P<body>.*[\d)}%!])(?P<gap>\s*)(?P<unit>°\s*[CF]?|[A-Za-z][A-Za-z]*(?:[ ./][A-Za-z]+)*)\.?(?P<power>\s*\^\s*\{?[23]\}?)?"
)
_NOT_UNITS = frozenset({"and", "or", "not", "to", "mod", "pi", "sin", "cos", "tan", "log", "ln", "exp", "sqrt", "x", "y", "z"})


def split_unit(text: str) -> tuple[str, str | None]:
    """(number, unit) of `35 cm`; (text, None) when what follows is no unit. A lone letter must be a known unit and stand apart."""
    match = _UNIT.fullmatch(text)
    if match is None:
        return text, None
    unit = re.sub(r"\s", "", match["unit"]) if match["unit"].startswith("°") else match["unit"]
    words = re.split(r"[ ./]", unit)
    if any(word.lower() in _NOT_UNITS for word in words):
        return text, None
    known = known_unit(unit)
    is_attached = not match["gap"]
    if (known is None and (is_attached or len(words[0]) < 2)) or (is_attached and len(unit) == 1 and unit != "°"):
        return text, None
    return match["body"], unit + (re.sub(r"[\s{}]", "", match["power"]) if match["power"] else "")


def known_unit(unit: str) -> str | None:
    """The family's name of a unit, with its power; None for a word that is no known unit."""
    name, _, power = unit.partition("^")
    family = _KNOWN.get(name) or _KNOWN.get(name.lower() if len(name) > 1 else name)
    return None if family is None else family + power


def units_conflict(one: str | None, other: str | None) -> bool:
    """Whether both sides carry known units and these differ."""
    if one is None or other is None:
        return False
    first, second = known_unit(one), known_unit(other)
    return first is not None and second is not None and first != second
