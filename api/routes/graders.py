"""/v1/fine_tuning/alpha/graders: try a grader on a sample before spending a training run on it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import APIRouter
from pydantic import Field
from starlette.responses import JSONResponse, Response

from api.auth import requires
from api.buckets import spelled
from api.deps import BodyDep, ServicesDep
from api.grader_means import means_of
from api.openapi import json_request
from api.present import answer
from grpo_engine.contract.base import Strict
from grpo_engine.contract.error import Unavailable
from grpo_engine.contract.grader import Grader
from grpo_engine.contract.intake import validate as validate_body
from grpo_engine.contract.view import GraderRun
from grpo_engine.grader import GraderPool, Score, check_grader, make_grader

_CLASSIFIERS = threading.Lock()
_TURN_LIMIT_S = 60.0
router = APIRouter(prefix="/v1/fine_tuning/alpha/graders", tags=["graders"])


class RunRequest(Strict):
    """A grader and one sample."""

    grader: Grader
    model_sample: Annotated[str, Field(max_length=1_000_000)]
    item: dict[str, Any] = Field(default_factory=dict)
    """The dataset row."""


class ValidateRequest(Strict):
    """A grader."""

    grader: Grader


@router.post("/run", response_model=GraderRun, openapi_extra=json_request(RunRequest))
@requires("submit")
def run(body: BodyDep, services: ServicesDep) -> Response:
    """Score one sample. A grader that gives no number answers with reward null and says why in `metadata.errors`."""
    asked = validate_body(RunRequest, body)
    means = means_of(services, should_load=True)
    check_grader(asked.grader, "grader", means=means)
    started = time.perf_counter()
    with make_grader(asked.grader, pool=services.grader_pool, means=means) as grader, _turn(grader):
        grader.start()
        score = grader.score([(asked.item, asked.model_sample, {})])[0]
    metadata = {
        "name": asked.grader.name,
        "type": asked.grader.type,
        "errors": _errors(score),
        "execution_time": time.perf_counter() - started,
        "scores": {name: spelled(value) for name, value in score.parts.items()},
        "detail": score.detail,
        "token_usage": None,
        "sampled_model_name": None,
    }
    parts = {name: None if math.isnan(value) else value for name, value in score.parts.items()}
    shown = GraderRun(reward=None if math.isnan(score.value) else score.value, sub_rewards=parts, metadata=metadata)
    return answer(shown)


@router.post("/validate", openapi_extra=json_request(ValidateRequest))
@requires("submit")
def validate(body: BodyDep, services: ServicesDep) -> Response:
    """Whether the grader is well formed; echoes it with its defaults."""
    asked = validate_body(ValidateRequest, body)
    check_grader(asked.grader, "grader", means=means_of(services))
    return JSONResponse({"grader": asked.grader.model_dump(mode="json")})


@contextmanager
def _turn(grader: GraderPool) -> Iterator[None]:
    """One request at a time holds classifiers in memory; the others wait a while. Raises Unavailable."""
    if not grader.has_classifier:
        yield
        return
    if not _CLASSIFIERS.acquire(timeout=_TURN_LIMIT_S):
        raise Unavailable("another request is trying a score_model grader, and one is loaded at a time; try again")
    try:
        yield
    finally:
        grader.close()
        _CLASSIFIERS.release()


def _errors(score: Score) -> dict[str, Any]:
    """OpenAI's flags; `message` is ours."""
    kind = score.kind
    return {
        "formula_parse_error": kind == "formula",
        "invalid_variable_error": kind == "invalid_variable",
        "model_grader_parse_error": False,
        "model_grader_refusal_error": False,
        "model_grader_server_error": False,
        "model_grader_server_error_details": None,
        "other_error": kind in ("raised", "crashed", "not_a_number"),
        "python_grader_runtime_error": False,
        "python_grader_runtime_error_details": None,
        "python_grader_server_error": False,
        "python_grader_server_error_type": None,
        "sample_parse_error": False,
        "truncated_observation_error": False,
        "unresponsive_reward_error": kind == "timeout",
        "message": score.error,
    }
