"""What a grader that leaves the process may use, by this server's settings."""

from __future__ import annotations

import json

from grpo_engine.contract.grader import RemotePolicy
from grpo_engine.grader import Means
from jobs.settings import Settings


def means_of(settings: Settings) -> Means:
    """For checks and for trying a grader; a worker has its own settings."""
    allowed = settings.remote_graders()
    return Means(None if allowed is None else RemotePolicy.model_validate_json(json.dumps(allowed)))
