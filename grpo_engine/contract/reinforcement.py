"""OpenAI's `{"type": "reinforcement"}` method, translated to `grpo`."""

from __future__ import annotations

from typing import Any

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.job import BETA_ALIASES

_PLACES: dict[str, tuple[str, str]] = {
    "learning_rate": ("optimizer", "learning_rate"),
    "num_steps": ("limits", "num_steps"),
    "group_size": ("sampling", "group_size"),
    "prompts_per_step": ("sampling", "prompts_per_step"),
    "max_completion_tokens": ("sampling", "max_completion_tokens"),
    "temperature": ("sampling", "temperature"),
    "eval_interval": ("evaluation", "every"),
}


def place_in_reinforcement(param: str, method: dict[str, Any]) -> str:
    """Where a `reinforcement` method spells the field that `translate_reinforcement` put at `param`."""
    section, _, rest = param.removeprefix("method.grpo.").partition(".")
    if section == "grader" or not param.startswith("method.grpo."):
        return param.replace("method.grpo.", "method.reinforcement.", 1)
    body = method.get("reinforcement")
    given = body.get("hyperparameters") if isinstance(body, dict) else None
    names = given if isinstance(given, dict) else {}
    at = "method.reinforcement.hyperparameters"
    if section in ("beta", "kl"):
        name = next((alias for alias in BETA_ALIASES if alias in names), section) if section == "beta" else section
        return f"{at}.{name}.{rest}" if rest else f"{at}.{name}"
    name = next((name for name, place in _PLACES.items() if ".".join(place) == f"{section}.{rest}"), "")
    return f"{at}.{name}" if name in names else param


def translate_reinforcement(method: dict[str, Any]) -> dict[str, Any]:
    """`{"type": "reinforcement", "reinforcement": {grader, hyperparameters}}` as a `grpo` method.

    Beta and KL ride in `hyperparameters` (`beta` or one of its aliases, `kl`). OpenAI's "auto" means our default.
    """
    if "grpo" in method:
        raise InvalidRequest(
            "method.grpo goes with method.type 'grpo'; set the type to it, or give method.reinforcement instead", param="method.grpo"
        )
    unknown = sorted(set(method) - {"type", "reinforcement"})
    if unknown:
        raise InvalidRequest(f"unknown key 'method.{unknown[0]}'; remove it", param=f"method.{unknown[0]}")
    body = method.get("reinforcement")
    if not isinstance(body, dict):
        raise InvalidRequest("method.reinforcement is required; add an object with a grader", param="method.reinforcement")
    unknown = sorted(set(body) - {"grader", "hyperparameters"})
    if unknown:
        path = f"method.reinforcement.{unknown[0]}"
        raise InvalidRequest(f"{path!r} is not supported; remove it", param=path)
    grpo: dict[str, Any] = {}
    if "grader" in body:
        grpo["grader"] = body["grader"]
    hyperparameters = {} if body.get("hyperparameters") is None else body["hyperparameters"]
    if not isinstance(hyperparameters, dict):
        raise InvalidRequest(
            'method.reinforcement.hyperparameters is no object; give one such as {"beta": 0.04}, or leave it out',
            param="method.reinforcement.hyperparameters",
        )
    for key, value in hyperparameters.items():
        path = f"method.reinforcement.hyperparameters.{key}"
        if value == "auto" or (key, value) == ("reasoning_effort", "default"):
            continue
        if key in ("beta", "kl", *BETA_ALIASES):
            grpo[key] = value
        elif key in _PLACES:
            section, name = _PLACES[key]
            grpo.setdefault(section, {})[name] = value
        else:
            places = ", ".join(sorted([*_PLACES, "beta", "kl"]))
            raise InvalidRequest(f"{path!r} has no counterpart here; use one of {places}, or method.type 'grpo'", param=path)
    return {"type": "grpo", "grpo": grpo}
