"""Named defaults with their sources. Keys given in the job win over the preset."""

from __future__ import annotations

from typing import Any


def apply_preset(raw: dict[str, Any]) -> dict[str, Any]:
    """The raw job with its preset's values below the job's own."""
    return raw
