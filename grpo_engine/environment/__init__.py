"""Environments: rows and grader in one. Torch-free; reasoning-gym itself is loaded in grader processes only.

`write_rows` makes a training file of an environment, `make_environment_grader` scores with the task's own scorer. Rows are made
once, when a job is created, so that no later version of the package and no resume can change them.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_engine.contract.command import Dispatch
from grpo_engine.contract.environment import Environment
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.job import JobSpec
from grpo_engine.grader import GraderPool, Means, make_grader
from grpo_engine.grader.pool import DEFAULT_DEADLINE_S, DEFAULT_SIZE, ProcessPool
from grpo_engine.grader.process import DeadlinePassed, GraderProcess, ProcessDied
from grpo_engine.grader.wire import encode

__all__ = ["held_out", "make_environment_grader", "package_version", "training", "training_grader", "with_environment_files", "write_rows"]

ENVIRONMENT = "method.grpo.environment"
PACKAGE = "reasoning_gym"
BUILD_LIMIT_S = 120.0
"""Making the rows of a job may take no longer."""


def training(spec: JobSpec) -> Environment:
    """The job's environment with its seed filled in."""
    environment = spec.method.grpo.environment
    assert environment is not None, "the job has an environment"
    return environment.model_copy(update={"seed": spec.seed if environment.seed is None else environment.seed})


def held_out(spec: JobSpec) -> Environment | None:
    """The environment of the evaluation: other seeds than any training row has; None without an evaluation.

    reasoning-gym draws row i from seed + i, so the held-out rows begin where the training rows end.
    """
    evaluation, environment = spec.method.grpo.evaluation, training(spec)
    if evaluation is None:
        return None
    assert environment.seed is not None, "training() fills it in"
    return environment.model_copy(update={"seed": environment.seed + environment.size, "size": evaluation.max_prompts})


def training_grader(spec: JobSpec, means: Means) -> GraderPool:
    """What grades the training completions: the job's grader, or its environment's scorer. Raises InvalidRequest."""
    grader = spec.method.grpo.grader
    return make_environment_grader(training(spec)) if grader is None else make_grader(grader, means=means)


def with_environment_files(dispatch: Dispatch, run_dir: Path) -> Dispatch:
    """The dispatch with files of rows: a run started by hand makes them in its directory, the server has made them before.

    Raises InvalidRequest when they cannot be made.
    """
    if dispatch.spec.method.grpo.environment is None:
        return dispatch
    made: dict[str, str] = {}
    for name, environment in (("training_file", training(dispatch.spec)), ("validation_file", held_out(dispatch.spec))):
        if environment is not None and getattr(dispatch, name) is None:
            path = run_dir / f"{name}.jsonl"
            if not path.is_file():
                write_rows(environment, path)
            made[name] = str(path.resolve())
    return dispatch.model_copy(update=made)


def package_version() -> str:
    """Of reasoning-gym. Raises InvalidRequest when it is not installed."""
    if importlib.util.find_spec(PACKAGE) is None:
        raise InvalidRequest(
            "environments need the package reasoning-gym, which is not installed here; install the extra `environments` on the API's host "
            "and the workers', or give a training_file and a grader",
            param=f"{ENVIRONMENT}.type",
        )
    return importlib.metadata.version("reasoning-gym")


def write_rows(environment: Environment, path: Path, *, limit_s: float = BUILD_LIMIT_S) -> None:
    """Write the environment's rows as JSON Lines; the file appears complete or not at all.

    Raises InvalidRequest naming the field for an unknown task, a setting it does not take, or rows that take too long.
    """
    package_version()
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = _ask({"environment": environment.model_dump_json()}, limit_s)["rows"]
    draft = path.with_name(f".{path.name}.{os.getpid()}.{os.urandom(4).hex()}")
    try:
        with draft.open("w", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
            stream.flush()
            os.fsync(stream.fileno())
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def make_environment_grader(
    environment: Environment, *, processes: int = DEFAULT_SIZE, deadline_s: float = DEFAULT_DEADLINE_S, pool: ProcessPool | None = None
) -> GraderPool:
    """The task's own scorer, in grader processes with a deadline for each sample. Raises InvalidRequest when it cannot run here."""
    package_version()
    return GraderPool(environment, pool or ProcessPool(processes), owns_pool=pool is None, deadline_s=deadline_s)


def _ask(request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
    """One answer of a process of its own."""
    process = GraderProcess(is_reproducible=True)
    try:
        answer: dict[str, Any] = json.loads(process.ask(encode(dict(request)), limit_s))
    except DeadlinePassed:
        words = f"its rows could not be made within {limit_s:g} s; lower environment.size or choose easier settings"
        raise InvalidRequest(words, param=f"{ENVIRONMENT}.size") from None
    except ProcessDied as death:
        words = f"its rows could not be made ({death}); lower environment.size or choose easier settings"
        raise InvalidRequest(words, param=f"{ENVIRONMENT}.config") from None
    finally:
        process.kill()
    problem = answer.get("problem")
    if problem is not None:
        raise InvalidRequest(problem["message"], param=f"{ENVIRONMENT}.{problem['field']}")
    return answer
