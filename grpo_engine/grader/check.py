"""Checks at submit: a grader that cannot work, or a template that the rows cannot fill, is refused before anything trains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from grpo_engine.contract.error import InvalidRequest, NotImplementedYet
from grpo_engine.contract.grader import Grader, Math, Multi, NumberCheck, Plugin, unsupported_graders
from grpo_engine.grader.compiled import Leaf, compile_grader, leaves
from grpo_engine.grader.mathematics import unusable_reference
from grpo_engine.grader.outside import Means, check_outside
from grpo_engine.grader.plugin import installed_plugins
from grpo_engine.grader.sample import GraderFault, MissingField, Sample, View
from grpo_engine.grader.template import NOT_ONE, Path, Template, find_in_row
from grpo_engine.rows.report import Row

GRADER = "method.grpo.grader"
_WHAT = {"not a number": "is not a number", NOT_ONE: "must name one value"}
"""What is said of a reference, by its problem."""


def check_grader(cfg: Grader, at: str = GRADER, *, plugins: Iterable[str] | None = None, means: Means | None = None) -> None:
    """Raise InvalidRequest (NotImplementedYet for what is described and not carried out) with the field's path in `param`.

    `plugins` names the plug-ins that the workers have; None = those installed here. `means`: what graders that leave the process
    may use; None = nothing.
    """
    for param, remedy in unsupported_graders(cfg, at):
        raise NotImplementedYet(f"{param} is not implemented in this version; {remedy}", param=param)
    _check_plugins(cfg, at, set(installed_plugins() if plugins is None else plugins))
    check_outside(cfg, at, means or Means())
    compile_grader(cfg, at, load=lambda plugin: lambda item, output_text: 0.0)


def _check_plugins(cfg: Grader, at: str, known: set[str]) -> None:
    if isinstance(cfg, Multi):
        for name, part in cfg.graders.items():
            _check_plugins(part, f"{at}.graders.{name}", known)
    elif isinstance(cfg, Plugin) and cfg.plugin not in known:
        names = ", ".join(sorted(known)) or "none"
        raise InvalidRequest(f"{at}.plugin {cfg.plugin!r} is not installed; installed are: {names}", param=f"{at}.plugin")


def check_templates(cfg: Grader, rows: Sequence[Row], at: str = GRADER) -> None:
    """Raise InvalidRequest when a template names a field that rows lack, or a reference that is blank in some.

    The message names the field, how many rows lack it, the first of their lines, and the columns there are. A grader with
    `if_missing: skip` is refused only when no row has its field.
    """
    for leaf in leaves(cfg, at):
        for name, template in (("input", leaf.input), ("reference", leaf.reference)):
            if template is not None:
                for path in template.item_paths:
                    _check_path(path, rows, f"{leaf.at}.{name}", may_lack=leaf.cfg.if_missing == "skip")
        if leaf.reference is not None and not any(isinstance(part, Path) and part.root == "sample" for part in leaf.reference.parts):
            _check_references(leaf.cfg, leaf.reference, rows, f"{leaf.at}.reference")


def _check_path(path: Path, rows: Sequence[Row], param: str, *, may_lack: bool) -> None:
    lines = [row.line for row in rows if find_in_row(path, row.item) is None]
    if not lines or (may_lack and len(lines) < len(rows)):
        return
    columns = sorted({name for row in rows[:1000] for name in row.item})
    found = ", ".join(repr(name) for name in columns[:20])
    raise InvalidRequest(
        f"{param} names {{{{{path.text}}}}}, which {_rows_text(lines, len(rows))} missing or null; "
        f"the file has the columns {found}: correct the template, the rows, or data.reference_field",
        param=param,
    )


def _check_references(cfg: Leaf, reference: Template, rows: Sequence[Row], param: str) -> None:
    """Refuse references that are blank, or that the grader could not compare with anything: each would be a fault in every step."""
    lines: dict[str, list[int]] = {}
    for row in rows:
        try:
            view = View(Sample(row.item, ""))
            text = reference.render_value(view) if isinstance(cfg, Math) else reference.render(view)
        except MissingField:
            continue
        except GraderFault:
            lines.setdefault(NOT_ONE, []).append(row.line)
            continue
        problem = "blank" if not text.strip() else unusable_reference(cfg, text) if isinstance(cfg, Math | NumberCheck) else None
        if problem is not None:
            lines.setdefault(problem, []).append(row.line)
    for problem, found in lines.items():
        what = _WHAT.get(problem, "is empty")
        raise InvalidRequest(f"{param} {what}, as {_rows_text(found, len(rows))} {problem}; correct it or remove the lines", param=param)


def _rows_text(lines: list[int], total: int) -> str:
    shown = ", ".join(str(line) for line in lines[:5])
    more = ", ..." if len(lines) > 5 else ""
    return f"in {len(lines)} of {total} rows (line{'s' if len(lines) > 1 else ''} {shown}{more}) is"
