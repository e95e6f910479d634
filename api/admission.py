"""May this job run here? Everything that can be known before it is accepted, so that nothing is half created.

Model, files, rows, grader templates and disk are checked in this order; each refusal names its field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from api.catalogue import find_model, require_disk
from api.deps import Services
from api.environments import admit_environment
from api.files import training_path
from api.grader_means import means_of
from api.weights import base_model, find_weights
from grpo_engine.contract.error import InvalidRequest, NotFound
from grpo_engine.contract.intake import named_as_written, resolve_spec
from grpo_engine.contract.job import JobSpec
from grpo_engine.grader import check_grader, check_templates
from grpo_engine.rows import Row, read_rows
from jobs.weights import WeightsInput

_NAMED_MODEL = "model:"
_GOLD = "method.grpo.evaluation.grader"
_READ_WHOLE_BYTES = 64 * 2**20
_FIRST_ROWS = 50_000
"""Of a larger file only so many rows are read here; the engine reads them all and names the line it cannot use."""


@dataclass(frozen=True)
class Admission:
    """A job that may be created."""

    spec: JobSpec
    training_path: Path | None
    validation_path: Path | None
    weights: tuple[WeightsInput, ...]
    """Checkpoints the job starts from or is measured against, compared with their SHA-256."""
    num_rows: int
    disk_bytes: int | None
    """Estimate of what its checkpoints take; null while the model's size is unknown."""


RowsRead = dict[tuple[str, str, str], tuple[Path, list[Row], int]]
"""Files read by (param, upload id, how they are read)."""


def admit(
    raw: dict[str, Any],
    services: Services,
    *,
    inherited: Mapping[str, Path] | None = None,
    read: RowsRead | None = None,
    promised_bytes: int = 0,
) -> Admission:
    """`inherited`: contents by upload id, for files whose upload may be gone. `read` remembers files from one job to the next,
    `promised_bytes` is what jobs admitted together with this one take of the disk.

    Raises InvalidRequest or InsufficientStorage naming the field in `param`, as the body spells it.
    """
    spec = resolve_spec(raw)
    with named_as_written(raw):
        return _admit(spec, services, _Files(services, inherited or {}, {} if read is None else read), promised_bytes)


def _admit(spec: JobSpec, services: Services, files: _Files, promised_bytes: int) -> Admission:
    settings = services.settings
    weights = find_weights(spec, services)
    started_from = next((source for source in weights if source.role == "model"), None)
    if started_from is not None:
        model = base_model(started_from)
    else:
        model = find_model(spec.model, settings.model_dir, allow_hub=settings.allow_hub)
    named = spec.method.grpo.reference.source
    if named.startswith(_NAMED_MODEL):
        _require_model(named.removeprefix(_NAMED_MODEL), services)
    grader = spec.method.grpo.grader
    if grader is not None:
        check_grader(grader, means=means_of(services))
    path, num_rows = None, 0
    if spec.training_file is not None:
        path, rows, num_rows = files.rows(spec, "training_file", spec.training_file)
        if grader is not None:
            check_templates(grader, rows)
    if spec.method.grpo.environment is not None:
        path, held_out, num_rows = admit_environment(spec, services)
    else:
        held_out = _admit_held_out(spec, files)
    needed = require_disk(spec, model, services.artifacts.free_bytes() - promised_bytes, settings.min_free_bytes)
    return Admission(spec, path, held_out, weights, num_rows, needed)


def _require_model(name: str, services: Services) -> None:
    """Raises InvalidRequest when no job could load this reference."""
    try:
        find_model(name, services.settings.model_dir, allow_hub=services.settings.allow_hub)
    except InvalidRequest as error:
        raise InvalidRequest(error.message, param="method.grpo.reference.source") from error


def _admit_held_out(spec: JobSpec, files: _Files) -> Path | None:
    """The validation file's content; its rows must fill the templates of the grader that reads them."""
    grpo = spec.method.grpo
    if spec.validation_file is None or grpo.evaluation is None:
        return None
    if grpo.evaluation.grader is not None:
        check_grader(grpo.evaluation.grader, _GOLD, means=means_of(files.services))
    path, rows, _ = files.rows(spec, "validation_file", spec.validation_file)
    if grpo.evaluation.grader is not None:
        check_templates(grpo.evaluation.grader, rows, _GOLD)
    elif grpo.grader is not None:
        try:
            check_templates(grpo.grader, rows)
        except InvalidRequest as error:
            raise InvalidRequest(f"validation_file: {error.message}", param="validation_file") from error
    return path


@dataclass(frozen=True)
class _Files:
    """Reads what a job names."""

    services: Services
    inherited: Mapping[str, Path]
    read: RowsRead

    def rows(self, spec: JobSpec, param: str, file_id: str) -> tuple[Path, list[Row], int]:
        """Path, rows (of a large file the first), and how many there are. Raises InvalidRequest."""
        key = (param, file_id, spec.method.grpo.data.model_dump_json())
        if key not in self.read:
            self.read[key] = self._rows(spec, param, file_id)
        return self.read[key]

    def _rows(self, spec: JobSpec, param: str, file_id: str) -> tuple[Path, list[Row], int]:
        if (own := self.inherited.get(file_id)) is not None and own.is_file():
            limit = None if own.stat().st_size <= _READ_WHOLE_BYTES else _FIRST_ROWS
            kept = read_rows(own, spec.method.grpo.data, filename=own.name, limit=limit, param=param).rows
            return own, kept, len(kept)
        try:
            record = self.services.ledger.get_file(file_id)
        except NotFound:
            raise InvalidRequest(f"{param} {file_id!r} does not exist; upload a file and use its id", param=param) from None
        path = training_path(self.services, record)
        if not path.is_file():
            raise InvalidRequest(f"the content of {param} {file_id!r} is gone; upload it again", param=param)
        limit = None if record.bytes <= _READ_WHOLE_BYTES else _FIRST_ROWS
        rows = read_rows(path, spec.method.grpo.data, filename=record.filename, limit=limit, param=param).rows
        return path, rows, record.rows or len(rows)
