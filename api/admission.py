"""May this job run here? Everything that can be known before it is accepted, so that nothing is half created.

Model, training file, rows, grader templates and disk are checked in this order; each refusal names its field.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.catalogue import find_model, require_disk
from api.deps import Services
from api.files import training_path
from grpo_engine.contract.error import InvalidRequest, NotFound
from grpo_engine.contract.intake import resolve_spec
from grpo_engine.contract.job import JobSpec
from grpo_engine.grader import check_grader, check_templates
from grpo_engine.rows import Row, read_rows

_READ_WHOLE_BYTES = 64 * 2**20
_FIRST_ROWS = 50_000
"""Of a larger file only so many rows are read here; the engine reads them all and names the line it cannot use."""


@dataclass(frozen=True)
class Admission:
    """A job that may be created."""

    spec: JobSpec
    training_path: Path | None
    num_rows: int
    disk_bytes: int | None
    """Estimate of what its checkpoints take; null while the model's size is unknown."""


def admit(raw: dict[str, Any], services: Services) -> Admission:
    """Raises InvalidRequest or InsufficientStorage naming the field in `param`."""
    spec = resolve_spec(raw)
    settings = services.settings
    model = find_model(spec.model, settings.model_dir, allow_hub=settings.allow_hub)
    grader = spec.method.grpo.grader
    if grader is not None:
        check_grader(grader)
    path, num_rows = None, 0
    if spec.training_file is not None:
        path, rows, num_rows = _training_rows(spec, spec.training_file, services)
        if grader is not None:
            check_templates(grader, rows)
    needed = require_disk(spec, model, services.artifacts.free_bytes(), settings.min_free_bytes)
    return Admission(spec, path, num_rows, needed)


def _training_rows(spec: JobSpec, file_id: str, services: Services) -> tuple[Path, list[Row], int]:
    try:
        record = services.ledger.get_file(file_id)
    except NotFound:
        raise InvalidRequest(f"training_file {file_id!r} does not exist; upload a file and use its id", param="training_file") from None
    path = training_path(services, record)
    if not path.is_file():
        raise InvalidRequest(f"the content of training_file {file_id!r} is gone; upload it again", param="training_file")
    limit = None if record.bytes <= _READ_WHOLE_BYTES else _FIRST_ROWS
    rows = read_rows(path, spec.method.grpo.data, filename=record.filename, limit=limit).rows
    return path, rows, record.rows or len(rows)
