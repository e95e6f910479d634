"""One server for all journeys that leave it whole."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import LiveStack, live_stack


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    """The whole product, running."""
    with live_stack(tmp_path_factory.mktemp("server")) as running:
        yield running
