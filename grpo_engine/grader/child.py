"""A grader process: reads one JSON request a line, answers one JSON line, ends when its parent does.

Torch-free. Whatever graders print goes to standard error, so it cannot disturb the answers. The parent kills the process when
a sample passes its deadline; memory is capped here.
"""

from __future__ import annotations

import json
import queue
import resource
import signal
import threading
from collections.abc import Callable
from typing import Any

from pydantic import TypeAdapter

from grpo_engine.contract.environment import Environment
from grpo_engine.contract.error import GrpoError
from grpo_engine.contract.grader import Grader, Math
from grpo_engine.grader.compiled import compile_grader, leaves
from grpo_engine.grader.mathematics.symbolic import warm_up
from grpo_engine.grader.sample import GraderFault, Sample, Score, View
from grpo_engine.grader.served import answer, die_with_parent, private_stdout, read_requests
from grpo_engine.grader.wire import score_to_wire

MEMORY_LIMIT_BYTES = 4 * 2**30
Compiled = Callable[[View], Score]


def main() -> None:
    """Serve until standard input ends."""
    answers = private_stdout()
    die_with_parent()
    _limit_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    requests: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=read_requests, args=(requests,), daemon=True).start()
    graders: dict[str, Compiled] = {}
    answer(answers, {"ready": True})
    while True:
        answer(answers, _serve(json.loads(requests.get()), graders))


def _serve(request: dict[str, Any], graders: dict[str, Compiled]) -> dict[str, Any]:
    if "environment" in request:
        return _environment_rows(request["environment"])
    if "config" in request:
        graders[request["grader"]] = _compile(request["config"])
        return {"compiled": request["grader"]}
    sample = Sample(request["item"], request["output_text"], request["extras"])
    return score_to_wire(graders[request["grader"]](View(sample)))


def _compile(config: str) -> Compiled:
    adapter: TypeAdapter[Grader | Environment] = TypeAdapter(Grader | Environment)
    cfg = adapter.validate_json(config)
    try:
        if isinstance(cfg, Environment):
            from grpo_engine.environment.tasks import compile_environment

            return compile_environment(cfg)
        if any(isinstance(leaf.cfg, Math) for leaf in leaves(cfg, "grader")):
            warm_up()
        return compile_grader(cfg)
    except (GrpoError, GraderFault) as error:
        failed = Score(float("nan"), error=str(error), kind="raised")
        return lambda view: failed


def _environment_rows(config: str) -> dict[str, Any]:
    from grpo_engine.environment.tasks import Problem, rows_of

    try:
        return {"rows": rows_of(Environment.model_validate_json(config))}
    except Problem as problem:
        return {"problem": {"field": problem.field, "message": str(problem)}}


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_LIMIT_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


if __name__ == "__main__":
    main()
