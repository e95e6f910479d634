"""A job's own names for the published checkpoints it starts from or is measured against.

Hard links below `inputs/model` and `inputs/reference`, made when the job is created: retention, or a person, may delete the
checkpoint afterwards and harms no job. The engine verifies them against their manifest at the start of every attempt.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.member import MEMBER_NAME
from jobs.artifacts import Artifacts, fsync_dir

CHECKPOINT_ID = re.compile(r"ftckpt-[A-Za-z0-9_-]{1,64}")
REFERENCE_PREFIX = "checkpoint:"
MANIFEST = "manifest.json"

Role = Literal["model", "reference"]
PARAMS: dict[Role, str] = {"model": "model", "reference": "method.grpo.reference.source"}


@dataclass(frozen=True)
class WeightsInput:
    """A checkpoint that a new job gets links to."""

    role: Role
    checkpoint_id: str
    directory: Path
    members: tuple[str, ...]
    """Its files without the manifest."""


def checkpoint_ids(spec: dict[str, Any]) -> dict[Role, str]:
    """Which checkpoints a resolved spec names, by what they are for."""
    found: dict[Role, str] = {}
    source = str(spec["method"]["grpo"]["reference"]["source"])
    if CHECKPOINT_ID.fullmatch(spec["model"]):
        found["model"] = spec["model"]
    if source.startswith(REFERENCE_PREFIX):
        found["reference"] = source.removeprefix(REFERENCE_PREFIX)
    return found


def dispatch_paths(spec: dict[str, Any]) -> dict[str, str | None]:
    """`model_from` and `reference_from` of a dispatch, relative to the job directory."""
    named = checkpoint_ids(spec)
    return {f"{role}_from": f"inputs/{role}" if role in named else None for role in PARAMS}


def link_weights(artifacts: Artifacts, job_id: str, weights: Sequence[WeightsInput]) -> None:
    """Give the job its own names for the files: hard links, or copies across file systems.

    Raises InvalidRequest when a file has gone since it was checked, OSError when the disk refuses.
    """
    for source in weights:
        target = artifacts.job_dir(job_id) / "inputs" / source.role
        target.mkdir(parents=True)
        for member in (*source.members, MANIFEST):
            if MEMBER_NAME.fullmatch(member) is None:
                raise InvalidRequest(f"checkpoint {source.checkpoint_id} lists a file it cannot have", param=PARAMS[source.role])
            _link(source, target, member)
        for directory in {(target / member).parent for member in source.members} | {target, target.parent, target.parent.parent}:
            fsync_dir(directory)


def _link(source: WeightsInput, target: Path, member: str) -> None:
    path = target / member
    path.parent.mkdir(exist_ok=True)
    try:
        os.link(source.directory / member, path)
    except FileNotFoundError:
        message = f"checkpoint {source.checkpoint_id} was deleted meanwhile ({member} is gone); name another"
        raise InvalidRequest(message, param=PARAMS[source.role]) from None
    except OSError:
        shutil.copyfile(source.directory / member, path)
        with path.open("rb") as stream:
            os.fsync(stream.fileno())
