"""Jobs on an environment: its rows are made when such a job is admitted, and kept for the next that asks for the same.

Each job then has its own link of the file, as of an upload, so that nothing later changes what it trains on.
"""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

from api.deps import Services
from api.grader_means import means_of
from grpo_engine.contract.environment import Environment
from grpo_engine.contract.job import JobSpec
from grpo_engine.environment import held_out, package_version, training, write_rows
from grpo_engine.grader import check_grader, check_templates
from grpo_engine.rows import read_rows

_GOLD = "method.grpo.evaluation.grader"
_KEPT = 32
"""Files of rows kept for other jobs."""
_AT_ONCE = threading.Semaphore(2)
"""Each making of rows has a process of its own, of some 150 MB."""


def admit_environment(spec: JobSpec, services: Services) -> tuple[Path, Path | None, int]:
    """Files of the training rows and of the held-out rows, and how many the former are. Raises InvalidRequest naming the field."""
    gold = None if spec.method.grpo.evaluation is None else spec.method.grpo.evaluation.grader
    if gold is not None:
        check_grader(gold, _GOLD, means=means_of(services))
    environment, kept_apart = training(spec), held_out(spec)
    path = _file(environment, services)
    validation = None if kept_apart is None else _file(kept_apart, services)
    if gold is not None and validation is not None:
        check_templates(gold, read_rows(validation, spec.method.grpo.data).rows, _GOLD)
    return path, validation, environment.size


def _file(environment: Environment, services: Services) -> Path:
    directory = services.artifacts.cache_dir / "environments"
    wanted = f"{package_version()} {environment.model_dump_json(exclude={'answer'})}"
    path = directory / f"{hashlib.sha256(wanted.encode()).hexdigest()}.jsonl"
    with _AT_ONCE:
        if not path.is_file():
            write_rows(environment, path)
            _prune(directory, path)
    return path


def _prune(directory: Path, just_made: Path) -> None:
    """Keep the newest files; a job that is being created from an older one has seconds to take its link."""
    files = sorted((file for file in directory.glob("*.jsonl") if file != just_made), key=lambda file: file.stat().st_mtime)
    for file in files[: max(0, len(files) + 1 - _KEPT)]:
        file.unlink(missing_ok=True)
