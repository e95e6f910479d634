"""Graders that the operator installed: entry points of the group `grpo.graders`.

An entry point names a factory `factory(config) -> grade`, where `config` is the job's `config` object and
`grade(item, output_text) -> float` scores one completion. It runs only in the grader processes, under the deadline.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from grpo_engine.contract.grader import Plugin
from grpo_engine.grader.sample import GraderFault

GROUP = "grpo.graders"
Grade = Callable[[Mapping[str, Any], str], Any]


def installed_plugins() -> list[str]:
    """Names of the installed plug-ins; nothing is imported."""
    return sorted({point.name for point in importlib.metadata.entry_points(group=GROUP)})


def load_plugin(cfg: Plugin) -> Grade:
    """The plug-in's grade function. Raises GraderFault when it is not installed or its factory fails."""
    points = [point for point in importlib.metadata.entry_points(group=GROUP) if point.name == cfg.plugin]
    if not points:
        names = ", ".join(installed_plugins()) or "none"
        raise GraderFault("raised", f"the grader plug-in {cfg.plugin!r} is not installed here; installed are: {names}")
    try:
        grade = points[0].load()(dict(cfg.config))
    except Exception as error:
        raise GraderFault("raised", f"the grader plug-in {cfg.plugin!r} cannot start: {type(error).__name__}: {error}") from error
    if not callable(grade):
        raise GraderFault("raised", f"the factory of the grader plug-in {cfg.plugin!r} returned a {type(grade).__name__}, not a function")
    return grade  # type: ignore[no-any-return]
