"""What a grader that leaves the process may use, by this server's settings."""

from __future__ import annotations

import json
from pathlib import Path

from api.catalogue import find_model
from api.deps import Services
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.grader import RemotePolicy
from grpo_engine.grader import Means, ModelPlaces


def means_of(services: Services, *, should_load: bool = False) -> Means:
    """For checks, and with `should_load` for trying a grader here: nothing is fetched from the Hub then. A worker has its own settings."""
    settings = services.settings
    allowed = settings.remote_graders()

    def find(name: str) -> Path | None:
        found = find_model(name, settings.model_dir, allow_hub=settings.allow_hub)
        if found.kind == "builtin":
            raise InvalidRequest(f"{name!r} is a language model without a classification head", param="model")
        if found.kind == "local" and settings.model_dir is not None:
            return (settings.model_dir / name).resolve()
        if should_load:
            raise InvalidRequest(f"{name!r} is on the Hub, and only workers fetch from there; put it below GRPO_MODEL_DIR to try it",
                                 param="model")  # fmt: skip
        return None

    return Means(
        None if allowed is None else RemotePolicy.model_validate_json(json.dumps(allowed)),
        ModelPlaces(services.artifacts.cache_dir, settings.model_dir, find),
    )
