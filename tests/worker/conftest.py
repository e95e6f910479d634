"""Fixtures of the foreman's room; after each test no engine may be left."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.worker.room import Room, Valkey


@pytest.fixture(scope="session")
def shared_valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Valkey]:
    valkey = Valkey(tmp_path_factory.mktemp("valkey"))
    yield valkey
    valkey.close()


@pytest.fixture
def room(tmp_path: Path, shared_valkey: Valkey) -> Iterator[Room]:
    """A room on a Valkey shared by the tests that leave it running; each finds it empty."""
    shared_valkey.wipe()
    room = Room(tmp_path, shared_valkey, redis_timeout_s=5.0)
    yield room
    room.close()


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[Valkey]:
    """A Valkey to kill."""
    valkey = Valkey(tmp_path / "valkey")
    yield valkey
    valkey.close()


@pytest.fixture
def fragile_room(tmp_path: Path, own_valkey: Valkey) -> Iterator[Room]:
    """A room on a Valkey of its own."""
    room = Room(tmp_path, own_valkey)
    yield room
    room.close()
