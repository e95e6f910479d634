"""Reading kept completions: one compressed file a step, a page of its lines at a time."""

from __future__ import annotations

import io
from pathlib import Path

import zstandard
from pydantic import ValidationError

from grpo_engine.contract.error import Conflict
from grpo_engine.contract.rollout import KeptCompletion

_HEADER_BYTES = 18
"""A zstd frame header is never longer."""


class RolloutsDamaged(Conflict):
    """The file on disk is not one the engine wrote."""

    code = "rollouts_damaged"


def read_rollouts(path: Path, *, after: int = -1, limit: int = 20) -> tuple[list[KeptCompletion], int]:
    """Completions with an index above `after`, at most `limit`, and how many the step has.

    Raises FileNotFoundError, or RolloutsDamaged (409) for a file that cannot be read.
    """
    found: list[KeptCompletion] = []
    total = num_bytes = 0
    with path.open("rb") as file:
        try:
            expected = zstandard.get_frame_parameters(file.read(_HEADER_BYTES)).content_size
            file.seek(0)
            for index, line in enumerate(io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file))):
                total, num_bytes = total + 1, num_bytes + len(line)
                if after < index <= after + limit:
                    found.append(KeptCompletion.model_validate_json(line))
        except (zstandard.ZstdError, ValidationError) as error:
            raise _damaged(path) from error
    if num_bytes != expected:  # a cut frame ends without an error
        raise _damaged(path)
    return found, total


def _damaged(path: Path) -> RolloutsDamaged:
    return RolloutsDamaged(f"the completions kept in {path.name} cannot be read; the file is damaged", param="step")
