"""One record to one row: where the prompt is, where the reference is, in each accepted format.

Sources of the formats: OpenAI reinforcement fine-tuning (`messages`), TRL dataset formats (`prompt`), the GSM8K and MATH data
sets, verl's data preparation (`prompt`, `reward_model.ground_truth`). Tools and images in messages are left out and refused.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from typing import Any

from grpo_engine.contract.data import DataConfig
from grpo_engine.rows.boxed import last_boxed
from grpo_engine.rows.report import Row

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_GSM8K_ANSWER = re.compile(r"####[ \t]*(\S[^\n]*)")


class BadRow(ValueError):
    """Why a record cannot be a row: the field, and a sentence with the remedy."""

    def __init__(self, field: str | None, message: str) -> None:
        super().__init__(message)
        self.field = field


def to_row(line: int, record: dict[str, Any], data: DataConfig) -> tuple[Row, str]:
    """The row and the format it was read as. Raises BadRow."""
    kind = data.format if data.format != "auto" else _detect(record, data)
    messages, text = _prompt(record, kind, data)
    reference = _reference(record, kind, data)
    item = record if reference is None else {**record, "reference_answer": reference}
    if messages is not None and data.chat_template == "none":
        text, messages = _as_text(messages), None
    _check_encodable(text if messages is None else "".join(message["content"] for message in messages))
    _check_columns(record)
    return Row(line=line, messages=messages, text=text, item=item), kind


def at_path(record: Mapping[str, Any], path: str) -> Any:
    """The value at a dotted path; a column whose own name holds the dots wins. None when it is not there."""
    if path in record:
        return record[path]
    here: Any = record
    for part in path.split("."):
        if not isinstance(here, Mapping) or part not in here:
            return None
        here = here[part]
    return here


def is_blank(text: str) -> bool:
    """Whether a text shows nothing: blanks and invisible signs (zero-width spaces, a stray byte order mark)."""
    return all(character.isspace() or unicodedata.category(character) == "Cf" for character in text)


def _detect(record: dict[str, Any], data: DataConfig) -> str:
    if data.prompt_field is not None:
        return "prompt"
    if record.get("messages") is not None:
        return "messages"
    if record.get("prompt") is not None:
        is_verl = isinstance(record["prompt"], list) and (record.get("reward_model") is not None or "data_source" in record)
        return "verl" if is_verl and data.reference_field is None else "prompt"
    if "question" in record and ("answer" in record or data.reference_field is not None):
        return "gsm8k"
    if "problem" in record:
        return "math"
    for name in ("prompt", "messages"):
        if name in record:
            raise BadRow(name, f"{name!r} is null; give the prompt")
    found = ", ".join(repr(name) for name in list(record)[:12]) or "none"
    raise BadRow(None, f"no prompt: found the columns {found}; name the prompt's column in data.prompt_field")


def _prompt(record: dict[str, Any], kind: str, data: DataConfig) -> tuple[list[dict[str, str]] | None, str | None]:
    """(messages, None) or (None, text)."""
    field = data.prompt_field or {"messages": "messages", "gsm8k": "question", "math": "problem"}.get(kind, "prompt")
    value = at_path(record, field)
    if value is None:
        raise BadRow(field, f"{field!r} is missing or null; give the prompt")
    if isinstance(value, list):
        return _messages(value, field), None
    if not isinstance(value, str):
        raise BadRow(field, f"{field!r} holds a {type(value).__name__}; give text or a list of messages")
    if kind == "messages" and data.prompt_field is None:
        raise BadRow(field, f"{field!r} is text; give a list of messages, or name the column in data.prompt_field")
    if is_blank(value):
        raise BadRow(field, f"{field!r} is empty; give the prompt or remove the line")
    should_be_user = data.prompt_as == "user" or (data.prompt_as == "auto" and kind in ("gsm8k", "math"))
    return ([{"role": "user", "content": value}], None) if should_be_user else (None, value)


def _messages(value: list[Any], field: str) -> list[dict[str, str]]:
    if not value:
        raise BadRow(field, f"{field!r} is an empty list; give at least one user message")
    messages = [_message(message, f"{field}[{index}]") for index, message in enumerate(value)]
    if messages[-1]["role"] != "user":
        raise BadRow(
            f"{field}[{len(messages) - 1}].role",
            f"the last of {field!r} is from {messages[-1]['role']!r}; end with the user message, and move an answer to 'reference_answer'",
        )
    if is_blank(messages[-1]["content"]):
        raise BadRow(f"{field}[{len(messages) - 1}].content", f"the last message of {field!r} is empty; give the prompt or remove the line")
    return messages


def _message(message: Any, path: str) -> dict[str, str]:
    if not isinstance(message, dict):
        raise BadRow(path, f"{path} is not an object; give role and content")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise BadRow(f"{path}.role", f"{path}.role is {role!r}; use one of {', '.join(ROLES)}")
    if message.get("tool_calls") or message.get("function_call"):
        raise BadRow(f"{path}.tool_calls", f"{path} calls tools, which are not supported; remove the line")
    return {"role": ROLES[role], "content": _content(message.get("content"), f"{path}.content")}


def _content(content: Any, path: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRow(path, f"{path} is {'null or missing' if content is None else type(content).__name__}; give text")
    texts = []
    for index, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") not in ("text", "input_text") or not isinstance(part.get("text"), str):
            raise BadRow(f"{path}[{index}]", f"{path}[{index}] is not a text part; only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def _as_text(messages: list[dict[str, str]]) -> str:
    if any(message["role"] == "assistant" for message in messages):
        raise BadRow("messages", "data.chat_template is 'none' and the row has assistant messages; use 'model', or give the prompt as text")
    return "\n\n".join(message["content"] for message in messages if message["content"])


def _check_columns(record: dict[str, Any]) -> None:
    """Raise BadRow for a column that graders and logs could not write as JSON in UTF-8."""
    for name, value in record.items():
        try:
            json.dumps({name: value}, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            shown = ascii(name)
            raise BadRow(shown[1:-1], f"{shown} holds half of a surrogate pair, which is not text; remove it") from None
        except RecursionError:
            raise BadRow(name, f"{name!r} is nested too deeply; flatten it") from None


def _check_encodable(text: str | None) -> None:
    try:
        (text or "").encode("utf-8")
    except UnicodeEncodeError:
        raise BadRow("prompt", "the prompt holds half of a surrogate pair, which is not text; remove it") from None


def _reference(record: dict[str, Any], kind: str, data: DataConfig) -> Any:
    """What becomes `item.reference_answer`, or None to leave the record as it is."""
    if data.reference_field is not None:
        value = at_path(record, data.reference_field)
        if value is None:
            raise BadRow(data.reference_field, f"{data.reference_field!r} is missing or null; it is data.reference_field, so give it")
        if isinstance(value, str) and is_blank(value):
            raise BadRow(data.reference_field, f"{data.reference_field!r} is empty; it is data.reference_field, so give it")
        return _gsm8k_gold(value, data.reference_field) if kind == "gsm8k" and _is_gsm8k_gold(value) else value
    if kind == "gsm8k":
        return _gsm8k_gold(record.get("answer"), "answer")
    if kind == "math":
        return _math_gold(record)
    if kind == "verl":
        value = at_path(record, "reward_model.ground_truth")
        if value is None or (isinstance(value, str) and is_blank(value)):
            raise BadRow("reward_model.ground_truth", "reward_model.ground_truth is missing or empty; add it or set data.reference_field")
        return value
    return None


def _is_gsm8k_gold(value: Any) -> bool:
    return isinstance(value, str) and "####" in value


def _gsm8k_gold(value: Any, field: str) -> Any:
    """The text after the last `####` of a GSM8K solution."""
    found = _GSM8K_ANSWER.findall(value) if isinstance(value, str) else []
    if not found:
        raise BadRow(
            field,
            f"{field!r} has no '#### answer' as GSM8K rows do; add it, or name the columns in data.prompt_field and data.reference_field",
        )
    return str(found[-1]).strip()


def _math_gold(record: dict[str, Any]) -> Any:
    """MATH's gold: the `answer` column where there is one, else the last box of `solution`."""
    answer = record.get("answer")
    if answer is not None and str(answer).strip():
        return answer
    solution = record.get("solution")
    boxed = last_boxed(solution) if isinstance(solution, str) else None
    if boxed is None or not boxed.strip():
        raise BadRow("solution", "'solution' has no \\boxed{answer} and there is no 'answer'; add one, or set data.reference_field")
    return boxed.strip()
