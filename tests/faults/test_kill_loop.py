"""Thirty random kills on the real server. `make soak` does two hundred."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.kill_loop import VICTIMS, kill_loop

pytestmark = pytest.mark.faults


def test_thirty_random_kills_leave_every_oracle_true(tmp_path: Path) -> None:
    hit = kill_loop(tmp_path, kills=30, seed=random.SystemRandom().randrange(2**32))
    assert sum(hit.values()) == 30
    assert set(hit) <= set(VICTIMS)
