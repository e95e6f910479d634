"""What a classifier reads of one completion: a text, a pair of texts, or messages, with the templates filled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from grpo_engine.contract.classifier import ClassifierMessage, ScoreModel, TextPart
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader.sample import GraderFault, View
from grpo_engine.grader.template import Path, Template, parse_template

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = ("input_text", "output_text", "text")


@dataclass(frozen=True)
class ClassifierTemplates:
    """The parsed templates of one classifier."""

    turns: tuple[tuple[str | None, Template], ...]
    """Role and text of each message; a turn without a role stands for the messages of a column. Empty for texts."""
    texts: tuple[Template, ...]
    """One text, or two; empty for messages."""

    @property
    def joined(self) -> Template:
        """All of them as one, for checks of the columns they name."""
        return Template(tuple(part for template in (*self.texts, *(text for _, text in self.turns)) for part in template.parts))

    def fill(self, view: View) -> dict[str, Any]:
        """`{"texts": [...]}` or `{"messages": [...]}`. Raises GraderFault."""
        if self.texts:
            return {"texts": [template.render(view) for template in self.texts]}
        messages: list[dict[str, str]] = []
        for role, template in self.turns:
            if role is None:
                messages += _messages_of(template.value(view))
            else:
                messages.append({"role": role, "content": template.render(view)})
        return {"messages": messages}


def classifier_templates(cfg: ScoreModel, at: str) -> ClassifierTemplates:
    """Raises InvalidRequest naming the field."""
    if isinstance(cfg.input, str):
        pair = () if cfg.input_pair is None else (_parsed(cfg.input_pair, f"{at}.input_pair"),)
        found = ClassifierTemplates((), (_parsed(cfg.input, f"{at}.input"), *pair))
    else:
        turns: list[tuple[str | None, Template]] = []
        for number, turn in enumerate(cfg.input):
            place = f"{at}.input[{number}]"
            if isinstance(turn, str):
                turns.append((None, _parsed(turn, place)))
            else:
                turns.append((ROLES[turn.role], _parsed(_source(turn), f"{place}.content")))
        found = ClassifierTemplates(tuple(turns), ())
    reads = [part for part in found.joined.parts if isinstance(part, Path) and part.root == "sample"]
    if any(part.steps[0] == "output_json" for part in reads):
        raise InvalidRequest(
            f"{at}.input: a classifier reads text, use sample.output_text instead of sample.output_json", param=f"{at}.input"
        )
    if not reads:
        raise InvalidRequest(f"{at}.input does not name sample.output_text, so every completion would get the same score; add it",
                             param=f"{at}.input")  # fmt: skip
    return found


def _parsed(source: str, at: str) -> Template:
    try:
        return parse_template(source)
    except ValueError as error:
        raise InvalidRequest(f"{at}: {error}", param=at) from None


def _source(turn: ClassifierMessage) -> str:
    parts = turn.content if isinstance(turn.content, list) else [turn.content]
    return "".join(part.text if isinstance(part, TextPart) else part for part in parts)


def _messages_of(value: Any) -> list[dict[str, str]]:
    """The messages in a column; a text is a user's. Raises GraderFault for anything else."""
    if isinstance(value, str):
        return [{"role": "user", "content": value}]
    if isinstance(value, list) and value:
        return [_message(entry) for entry in value]
    raise GraderFault("invalid_variable", "the column named in input holds neither messages nor text; name one that does")


def _message(entry: Any) -> dict[str, str]:
    role, content = (entry.get("role"), entry.get("content")) if isinstance(entry, Mapping) else (None, None)
    if isinstance(content, list) and all(isinstance(part, Mapping) and part.get("type") in _TEXT_PARTS for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(role, str) or role not in ROLES or not isinstance(content, str):
        raise GraderFault("invalid_variable", "a message of the column named in input has no role and text that a classifier can read")
    return {"role": ROLES[role], "content": content}
