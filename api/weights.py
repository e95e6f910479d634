"""Checkpoints as the beginning of a job, or as its reference: found by id, every byte compared, before the job is accepted."""

from __future__ import annotations

import json

from api.catalogue import BaseModel, checkpoint_model
from api.deps import Services
from api.download import open_file
from grpo_engine.contract.error import InvalidRequest, NotFound
from grpo_engine.contract.job import JobSpec
from jobs.ledger.records import CheckpointRecord
from jobs.weights import MANIFEST, PARAMS, WeightsInput, checkpoint_ids


def find_weights(spec: JobSpec, services: Services) -> tuple[WeightsInput, ...]:
    """The checkpoints the spec names. Raises InvalidRequest naming the field for one that is unknown, damaged or not published."""
    found = []
    for role, checkpoint_id in checkpoint_ids(json.loads(spec.model_dump_json(include={"model", "method"}))).items():
        record = _find(services, checkpoint_id, PARAMS[role])
        _compare(services, record, PARAMS[role])
        directory = services.artifacts.checkpoint_dir(record.job_id, record.epoch, record.name)
        found.append(WeightsInput(role, record.id, directory, tuple(member["name"] for member in record.files)))
    return tuple(found)


def base_model(weights: WeightsInput) -> BaseModel:
    """What the catalogue would say about the checkpoint."""
    return checkpoint_model(weights.checkpoint_id, weights.directory)


def _find(services: Services, checkpoint_id: str, param: str) -> CheckpointRecord:
    try:
        record = services.ledger.get_checkpoint(checkpoint_id)
    except NotFound:
        message = f"there is no checkpoint {checkpoint_id!r}, or it was deleted; GET /v1/models lists those there are"
        raise InvalidRequest(message, param=param) from None
    if record.kind != "published":
        raise InvalidRequest(f"checkpoint {record.id} is a resume state, not published weights; name a published one", param=param)
    return record


def _compare(services: Services, record: CheckpointRecord, param: str) -> None:
    """Every file has its size and SHA-256, and the manifest is there."""
    damaged = f"checkpoint {record.id} is damaged: {{}} is not what was written; name another"
    if record.damaged:
        raise InvalidRequest(damaged.format("a file"), param=param)
    for member in (*record.files, {"name": MANIFEST}):
        path = services.artifacts.checkpoint_file(record.job_id, record.epoch, record.name, member["name"])
        try:
            opened = open_file(path, member["name"])
        except NotFound:
            services.ledger.mark_checkpoint(record.id, damaged=True)
            raise InvalidRequest(damaged.format(member["name"]), param=param) from None
        with opened.file:
            is_intact = "sha256" not in member or services.verified.is_intact(opened, member["bytes"], member["sha256"])
        if not is_intact:
            services.ledger.mark_checkpoint(record.id, damaged=True)
            raise InvalidRequest(damaged.format(member["name"]), param=param)
