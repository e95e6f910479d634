"""`grpo up`: one terminal, one directory, one Ctrl-C."""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
import redis

from api.embedded.lock import DataDirBusy, DataDirLock
from api.embedded.stack import Stack, StackFailed
from api.embedded.valkey import EmbeddedValkey
from jobs.settings import Settings
from tests.cli.terminal import Terminal, grpo
from tests.stack import wait_for

Open = Callable[..., Terminal]


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Open]:
    opened: list[Terminal] = []

    def start(*arguments: str) -> Terminal:
        opened.append(Terminal(*arguments, cwd=tmp_path))
        return opened[-1]

    yield start
    for one in opened:
        one.close()


def test_it_serves_restarts_what_dies_refuses_a_second_start_and_leaves_nothing(terminal: Open, tmp_path: Path) -> None:
    up = terminal("up", "--port", "0")
    found = re.search(r"API +(http://127\.0\.0\.1:\d+)/v1", up.wait_for("Ctrl-C stops everything"))
    assert found is not None
    url = found[1]
    assert httpx.get(f"{url}/readyz", timeout=10).json()["status"] == "ready"
    assert len(up.family()) >= 5  # valkey, api, dispatcher, worker and its pool child

    second = grpo("up", "--port", "0", cwd=tmp_path)
    assert second.returncode == 1
    assert f"pid {up.process.pid}" in second.stderr
    assert "--data-dir" in second.stderr

    up.child("-m api").kill()
    up.wait_for("api ended (SIGKILL); starting it again in 1 s")
    up.wait_for("api is started again")
    wait_for(lambda: _is_ready(url), "the API to answer again")

    up.family()
    up.interrupt()
    assert up.end() == 0
    assert up.family() == []
    assert "stopped" in up.text()


def test_a_killed_server_takes_its_parts_along(terminal: Open, tmp_path: Path) -> None:
    up = terminal("up", "--port", "0")
    up.wait_for("Ctrl-C stops everything")
    up.family()
    up.process.kill()
    up.process.wait()
    wait_for(lambda: not up.family(), "the parts to follow")
    DataDirLock(tmp_path / ".grpo", "http://elsewhere").release()


def test_an_interrupted_start_leaves_nothing(terminal: Open) -> None:
    up = terminal("up", "--port", "0")
    up.wait_for("starting the server")
    wait_for(up.family, "the first part")
    up.interrupt()
    assert up.end() in (0, 130)
    assert up.family() == []


def test_a_busy_port_is_named_with_the_flag_that_moves_it(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        answer = grpo("up", "--port", str(port), cwd=tmp_path)
    assert answer.returncode == 1
    assert f"port {port}" in answer.stderr
    assert "--port" in answer.stderr
    assert not (tmp_path / ".grpo").exists()


def test_a_data_directory_that_is_a_file_is_named_with_the_flag(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(StackFailed, match=r"taken cannot be used .* --data-dir"):
        Stack(Settings(data_dir=tmp_path / "taken", port=0), say=print)


def test_a_misspelt_setting_stops_the_start(tmp_path: Path) -> None:
    answer = grpo("up", cwd=tmp_path, GRPO_DATADIR="x")
    assert answer.returncode == 1
    assert "GRPO_DATA_DIR" in answer.stderr


def test_the_lock_is_free_once_its_holder_is_gone(tmp_path: Path) -> None:
    first = DataDirLock(tmp_path, "http://127.0.0.1:1")
    with pytest.raises(DataDirBusy, match=r"http://127\.0\.0\.1:1"):
        DataDirLock(tmp_path, "http://127.0.0.1:2")
    first.release()
    DataDirLock(tmp_path, "http://127.0.0.1:3").release()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/readyz", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("name", ["with space", "[b]*?", "q\"uo'te\\", "[a]\\b", "é\tü"])
def test_the_embedded_redis_reads_its_settings_from_any_directory(tmp_path: Path, name: str) -> None:
    """Valkey takes its path for a pattern and would start without a password, open to all, where none fits."""
    valkey = EmbeddedValkey(tmp_path / name)
    process = subprocess.Popen(valkey.command, stdout=subprocess.DEVNULL)
    try:
        with redis.Redis.from_url(valkey.url) as client:
            wait_for(lambda: _answers(client), "Valkey on its own port")
            found = client.config_get("dir", "requirepass")
        assert found["dir"] == str(tmp_path / name)
        assert found["requirepass"]
    finally:
        process.kill()
        process.wait()


def _answers(client: redis.Redis) -> bool:
    try:
        return bool(client.ping())
    except redis.ConnectionError:
        return False
