"""The remote grader: signed POSTs of batches to a service the operator allows, several at once, each within its time.

Nothing a service says becomes a score unless it is one finite number a completion, in the range; everything else is a fault of the
batch. Redirects are not followed, no proxy is used, and the answer is read up to a megabyte.
"""

from __future__ import annotations

import functools
import json
import secrets
import ssl
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpcore

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.grader import Remote, RemotePolicy
from grpo_engine.grader.outside import Means, fault
from grpo_engine.grader.sample import MAX_SCORE, Sample, Score, strict_json
from grpo_engine.grader.wire import encode
from grpo_engine.outbound import signature
from grpo_engine.outbound.address import AddressRefused, check_url
from grpo_engine.outbound.connection import GuardedBackend

AT_ONCE = 4
"""Requests of one grader that run together."""
ANSWER_BYTES = 2**20
REQUEST_BYTES = 16 * 2**20
TOTAL_S = 300.0
"""All batches of one step together may take no longer; what is not scored by then is a fault."""
_MAX_PAUSE_S = 5.0


class _Again(Exception):
    """The try failed in a way that may pass."""

    def __init__(self, message: str, pause_s: float | None = None) -> None:
        super().__init__(message)
        self.pause_s = pause_s


class _Refused(Exception):
    """The service's answer cannot be used; asking again would not help."""


@dataclass(frozen=True)
class _Batch:
    body: str
    identity: str
    size: int


def check_remote(cfg: Remote, at: str, policy: RemotePolicy | None) -> None:
    """Raise InvalidRequest when the operator does not allow this address."""
    param = f"{at}.url"
    if policy is None or not policy.hosts:
        raise InvalidRequest(
            "remote graders are switched off here; the operator allows hosts in GRPO_REMOTE_GRADER_HOSTS, or use another grader",
            param=param,
        )
    try:
        check_url(cfg.url, allow_private=policy.allow_private)
    except AddressRefused as error:
        raise InvalidRequest(f"{param}: {error}", param=param) from error
    parts = urlsplit(cfg.url)
    host = (parts.hostname or "").lower()
    port = parts.port or (443 if parts.scheme == "https" else 80)
    if (f"{host}:{port}" if port != 443 else host) not in {entry.lower().removesuffix(":443") for entry in policy.hosts}:
        allowed = ", ".join(policy.hosts)
        raise InvalidRequest(f"{param}: {host} on port {port} is not among the hosts the operator allows: {allowed}", param=param)


class RemoteService:
    """One service, asked in batches. Safe to call from several threads."""

    def __init__(self, cfg: Remote, at: str, means: Means, trust: ssl.SSLContext | None = None) -> None:
        """Raises InvalidRequest when the address is not allowed or the operator's secret cannot be read."""
        check_remote(cfg, at, means.remote)
        assert means.remote is not None, "check_remote refuses it"
        self._cfg = cfg
        self._policy = means.remote
        self._keys = read_secrets(Path(means.remote.secret_file), f"{at}.url")
        self._trust = trust or _system_trust()

    def start(self) -> None:
        """Nothing to prepare."""

    def close(self) -> None:
        """Nothing is kept between calls."""

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order."""
        end = time.monotonic() + TOTAL_S
        batches = list(_batches(samples, self._cfg.batch_size))
        with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="remote-grader") as threads:
            answers = threads.map(lambda batch: self._scores(batch, end), batches)
            return [score for answer in answers for score in answer]

    def _scores(self, batch: _Batch, end: float) -> list[Score]:
        problem = fault("raised", "")
        for number in range(self._cfg.retries + 1):
            left = min(self._cfg.timeout_s, end - time.monotonic())
            if left <= 0:
                problem = fault("timeout", f"the remote grader did not score the step within {TOTAL_S:g} s")
                break
            try:
                return self._ask(batch, time.monotonic() + left)
            except (_Refused, AddressRefused) as error:
                problem = fault("raised", f"the remote grader: {error}")
                break
            except (httpcore.TimeoutException, TimeoutError):
                problem, pause_s = fault("timeout", f"the remote grader gave no answer within {left:g} s"), None
            except _Again as error:
                problem, pause_s = fault("raised", f"the remote grader: {error}"), error.pause_s
            except (httpcore.NetworkError, httpcore.ProtocolError, OSError) as error:
                problem, pause_s = fault("raised", f"the remote grader: {type(error).__name__}: {error}"), None
            if number < self._cfg.retries:
                time.sleep(min(pause_s if pause_s is not None else 0.25 * 2**number, _MAX_PAUSE_S, max(0.0, end - time.monotonic())))
        return [problem] * batch.size

    def _ask(self, batch: _Batch, deadline: float) -> list[Score]:
        if len(batch.body) > REQUEST_BYTES:
            raise _Refused(f"the request would take more than {REQUEST_BYTES // 2**20} MiB; lower batch_size")
        headers = {
            "content-type": "application/json",
            "content-length": str(len(batch.body)),
            "user-agent": "grpo-server",
            "accept": "application/json",
            **signature.headers(batch.identity, int(time.time()), batch.body, self._keys),
        }
        backend = GuardedBackend(deadline, allow_private=self._policy.allow_private)
        with (
            httpcore.ConnectionPool(ssl_context=self._trust, network_backend=backend, retries=0, max_connections=1) as pool,
            pool.stream("POST", self._cfg.url, headers=list(headers.items()), content=batch.body.encode()) as answer,
        ):
            if answer.status == 429 or answer.status >= 500:
                raise _Again(f"it answered {answer.status}", _retry_after(answer.headers))
            if answer.status != 200:
                more = "; redirects are not followed" if 300 <= answer.status < 400 else ""
                raise _Refused(f"it answered {answer.status}{more}")
            body = b""
            for chunk in answer.iter_stream():
                body += chunk
                if len(body) > ANSWER_BYTES:
                    raise _Refused(f"its answer is longer than {ANSWER_BYTES // 2**20} MiB")
        return [self._checked(value) for value in _values(body, batch.size)]

    def _checked(self, value: Any) -> Score:
        if value is None:
            return fault("raised", "the remote grader could not score the completion (null)")
        if isinstance(value, bool) or not isinstance(value, int | float):
            return fault("not_a_number", f"the remote grader returned a {type(value).__name__} instead of one number")
        low, high = self._cfg.range or (-MAX_SCORE, MAX_SCORE)
        if not max(low, -MAX_SCORE) <= value <= min(high, MAX_SCORE):
            return fault("not_a_number", f"the remote grader returned {json.dumps(value)[:20]}, outside the range [{low:g}, {high:g}]")
        return Score(float(value))


@functools.cache
def _system_trust() -> ssl.SSLContext:
    """The system's certificate authorities; reading them takes a good part of a second."""
    return ssl.create_default_context()


def read_secrets(path: Path, param: str) -> list[str]:
    """The signing secrets of a file. Raises InvalidRequest without showing them."""
    try:
        keys = [line.strip() for line in path.read_text(encoding="ascii").splitlines() if line.strip()]
        for key in keys:
            signature.headers("check", 0, "", [key])
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the secret of remote graders cannot be read ({type(error).__name__}); the operator names its file in "
            "GRPO_REMOTE_GRADER_SECRET_FILE, on the API's host and the workers'",
            param=param,
        ) from None
    if not keys or not all(key.startswith(signature.PREFIX) and len(key) >= 40 for key in keys):
        raise InvalidRequest(f"the secret file of remote graders must hold one {signature.PREFIX}... a line; write it anew", param=param)
    return keys


def _batches(samples: Sequence[Sample], size: int) -> Iterator[_Batch]:
    for start in range(0, len(samples), size):
        part = samples[start : start + size]
        rows = [{"item": dict(one.item), "output_text": one.output_text, "num_tokens": one.extras.get("num_tokens")} for one in part]
        identity = f"grade_{secrets.token_hex(12)}"
        yield _Batch(encode({"id": identity, "samples": rows}).decode("ascii"), identity, len(part))


def _values(body: bytes, count: int) -> list[Any]:
    """The scores of an answer. Raises _Refused for any other shape."""
    try:
        found = strict_json(body.decode("utf-8"))
    except (ValueError, json.JSONDecodeError) as error:
        raise _Refused(f"its answer is not JSON ({str(error)[:100]})") from None
    if isinstance(found, dict) and set(found) == {"score"} and count == 1:
        return [found["score"]]
    if not isinstance(found, dict) or set(found) != {"scores"} or not isinstance(found["scores"], list):
        raise _Refused('its answer must be {"scores": [...]} and nothing else (or {"score": x} for one completion)')
    if len(found["scores"]) != count:
        raise _Refused(f"it returned {len(found['scores'])} scores for {count} completions")
    return list(found["scores"])


def _retry_after(headers: list[tuple[bytes, bytes]]) -> float | None:
    text = next((value for name, value in headers if name.lower() == b"retry-after"), b"")
    return float(text) if text.isdigit() and len(text) < 7 else None
