"""One server with the scripted engine for all tests that leave it whole, and one with the real engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.ground import Ground, ground


@pytest.fixture(scope="session")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A server whose engine is scripted: an attempt takes milliseconds. Tests leave every part running."""
    with ground(tmp_path_factory.mktemp("yard")) as server:
        yield server


@pytest.fixture(scope="module")
def field(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    """A server with the real engine on a tiny random model. Tests leave every part running."""
    with ground(tmp_path_factory.mktemp("field"), scripted=False) as server:
        yield server
