"""Start the parts in order, keep them running, stop them in order.

Up: Valkey, API, dispatcher, worker. Down: the worker first, so that a running job saves and its verdict is still taken
in; then dispatcher, API, Valkey.
"""

from __future__ import annotations

import dataclasses
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import httpx

from api.embedded.child import Child, Plan
from api.embedded.lock import DataDirLock
from api.embedded.valkey import EmbeddedValkey, free_port
from jobs.settings import Settings, bare_environment

START_TIMEOUT_S = 60.0
NOTICE_AFTER_S = 3.0
_POLL_S = 0.1


class StackFailed(Exception):
    """The stack cannot start; the message names the part, the reason and the remedy."""


class _Stopped(Exception):
    """Somebody gave up waiting for the start."""


class Stack:
    """The embedded server of one data directory. Use it from the main thread."""

    def __init__(self, settings: Settings, say: Callable[[str], None], *, is_redis_given: bool = False) -> None:
        if settings.port == 0:
            settings = dataclasses.replace(settings, port=free_port())
        _require_free_port(settings.host, settings.port)
        self.url = f"http://{settings.host}:{settings.port}"
        self._say = say
        try:
            self._lock = DataDirLock(settings.data_dir, self.url)
        except OSError as error:
            words = f"{settings.data_dir} cannot be used ({error.strerror}); give another directory with --data-dir"
            raise StackFailed(words) from error
        self._valkey = None if is_redis_given else EmbeddedValkey(settings.data_dir / "valkey")
        if self._valkey is not None:
            settings = dataclasses.replace(settings, redis_url=self._valkey.url)
        self.settings = settings
        self.logs = settings.data_dir / "logs"
        self.children = {plan.name: Child(plan, say) for plan in self._plans()}

    def start(self, should_stop: Callable[[], bool] = lambda: False) -> bool:
        """Start everything and wait until jobs can be accepted and run; False when `should_stop` turned true meanwhile.

        Raises StackFailed. Unless it returns True, nothing is left running.
        """
        try:
            for name, child in self.children.items():
                child.start()
                if name == "valkey":
                    self._wait(self._valkey_answers, "valkey", should_stop)
                elif name == "api":
                    self._wait(lambda: self._get("/healthz").get("status") == "ok", "api", should_stop)
            self._wait(lambda: self._get("/readyz").get("status") == "ready", None, should_stop)
        except _Stopped:
            self.kill()
            return False
        except BaseException:
            self.kill()
            raise
        return True

    def tend(self) -> None:
        """Restart what died. Call it often."""
        for child in self.children.values():
            child.tend()

    def stop(self, is_hurried: Callable[[], bool] = lambda: False) -> None:
        """Stop everything in order. When `is_hurried` turns true the parts are killed instead of waited for."""
        for name in ("worker", "dispatcher", "api", "valkey"):
            child = self.children.get(name)
            if child is None or not child.is_running:
                continue
            child.ask_to_stop()
            begun = time.monotonic()
            notice_at = begun + NOTICE_AFTER_S if name == "worker" else float("inf")
            while child.is_running and time.monotonic() < begun + child.plan.stop_grace_s and not is_hurried():
                if time.monotonic() >= notice_at:
                    self._say("waiting for the worker: a running job ends its step and saves; Ctrl-C again stops it at once")
                    notice_at = float("inf")
                time.sleep(_POLL_S)
            if child.is_running:
                self._say(f"{name} is killed")
                child.kill()
        self._sweep()
        self._lock.release()

    def kill(self) -> None:
        """Stop without waiting for anything."""
        self.stop(is_hurried=lambda: True)

    def _sweep(self) -> None:
        """End engines that a killed worker left behind."""
        command = [sys.executable, "-m", "worker.janitor", str(self.settings.data_dir)]
        subprocess.run(command, env=self._environment(), check=True, capture_output=True)

    def _environment(self) -> dict[str, str]:
        return {**bare_environment(), **self.settings.to_env()}

    def _plans(self) -> list[Plan]:
        settings, environment = self.settings, self._environment()
        modules = {"api": "api", "dispatcher": "jobs.dispatcher", "worker": "worker"}
        graces = {"api": 10.0, "dispatcher": 15.0, "worker": settings.drain_grace_s + settings.cancel_grace_s + 10.0}
        plans = [
            Plan(name, [sys.executable, "-m", module], environment, self.logs / f"{name}.log", graces[name])
            for name, module in modules.items()
        ]
        if self._valkey is not None:
            log = self.logs / "valkey.log"
            plans.insert(0, Plan("valkey", self._valkey.command, bare_environment(), log, 10.0, pass_fds=(self._lock.descriptor,)))
        return plans

    def _valkey_answers(self) -> bool:
        assert self._valkey is not None
        try:
            with socket.create_connection(("127.0.0.1", self._valkey.port), timeout=1.0) as connection:
                connection.sendall(b"PING\r\n")
                return bool(connection.recv(16))
        except OSError:
            return False

    def _get(self, path: str) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = httpx.get(self.url + path, timeout=5.0, trust_env=False).json()
        except (httpx.HTTPError, ValueError):
            return {}
        return answer

    def _wait(self, is_ready: Callable[[], bool], name: str | None, should_stop: Callable[[], bool]) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not is_ready():
            if should_stop():
                raise _Stopped
            for child in self.children.values():
                if child.process is not None and not child.is_running:
                    raise StackFailed(f"{child.plan.name} did not start; the end of {child.plan.log}:\n{child.last_words()}")
            if time.monotonic() > deadline:
                raise StackFailed(self._what_is_missing(name))
            time.sleep(_POLL_S)

    def _what_is_missing(self, name: str | None) -> str:
        if name is not None:
            return f"{name} does not answer after {START_TIMEOUT_S:g} s; see {self.logs / name}.log"
        checks = self._get("/readyz").get("checks", {})
        missing = "; ".join(f"{part}: {words}" for part, words in checks.items() if words != "ok")
        return f"the server is not ready after {START_TIMEOUT_S:g} s: {missing or 'no answer'}; logs are in {self.logs}"


def _require_free_port(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise StackFailed(f"port {port} on {host} cannot be used ({error.strerror}); choose another with --port") from None
