"""The Python client. `Grpo().create_job(spec)` and so on; every answer is a contract view.

Talks HTTP and nothing else. A create carries an Idempotency-Key, so repeating it after a lost answer makes no second
job. Streams reconnect where they broke off.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from api.client import sse
from api.client.calls import JOBS, Call, at, given, once
from api.client.errors import ApiError, ClientError, ServerUnreachable
from api.client.sse import ServerEvent
from api.client.studies import Studies
from api.client.transport import (
    LONGEST_RETRY_AFTER_S,
    MAX_RETRIES,
    RETRY_STATUSES,
    STREAM_TIMEOUT_S,
    Answer,
    Opened,
    Patience,
    is_loopback,
    is_worth_repeating,
    key_header,
    read_answer,
    retry_after,
    sendable,
    server_address,
    unbroken,
)
from grpo_engine.contract.view import (
    Checkpoint,
    ControlCommand,
    ControlSettings,
    Deleted,
    File,
    Job,
    JobEvent,
    MetricPage,
    MetricRow,
    Model,
    Page,
)

DEFAULT_URL = "http://127.0.0.1:8000"
CSV_STEPS = 10_000
"""Steps of one page of CSV, the most the server gives."""


class Grpo(Studies):
    """A GRPO server. Use it as a context manager, or call `close`.

    `patience_s` is how long streams and waits bear a server that does not answer, for example while it restarts.
    """

    def __init__(
        self, base_url: str = DEFAULT_URL, api_key: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 60.0
    ) -> None:
        headers = key_header(api_key)
        self.base_url = server_address(base_url)
        self._patience_s = patience_s
        self._http = httpx.Client(
            base_url=self.base_url, headers=headers, timeout=httpx.Timeout(timeout_s, connect=5.0), trust_env=not is_loopback(base_url)
        )

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def __enter__(self) -> Grpo:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # Jobs

    def create_job(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit a job. `spec` is the JSON body as a mapping."""
        return self._ask(Job, "POST", JOBS, json=dict(spec), headers=once(idempotency_key))

    def job(self, job_id: str, *, wait_s: float | None = None) -> Job:
        """The job; with `wait_s` answers when its state changes, at the latest after so many seconds (60 at most)."""
        params = {} if wait_s is None else {"wait": wait_s}
        return self._ask(Job, "GET", at(JOBS, job_id), params=params)

    def jobs(self, *, limit: int = 20, after: str | None = None, status: str | None = None) -> Page[Job]:
        """A page of jobs, newest first."""
        return self._ask(Page[Job], "GET", JOBS, params=given(limit=limit, after=after, status=status))

    def cancel(self, job_id: str) -> Job:
        """End the job now."""
        return self._ask(Job, "POST", at(JOBS, job_id, "cancel"))

    def pause(self, job_id: str) -> Job:
        """Finish the step, checkpoint, free the worker."""
        return self._ask(Job, "POST", at(JOBS, job_id, "pause"))

    def resume(self, job_id: str) -> Job:
        """Go on from the checkpoint."""
        return self._ask(Job, "POST", at(JOBS, job_id, "resume"))

    def wait(self, job_id: str, *, timeout_s: float | None = None) -> Job:
        """Block until the job has ended. Raises TimeoutError; bears a restart of the server."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        patience = Patience(self._patience_s)
        while True:
            left = 30.0 if deadline is None else min(30.0, deadline - time.monotonic())
            if left <= 0:
                raise TimeoutError(f"job {job_id} has not ended after {timeout_s} s")
            try:
                job = self.job(job_id, wait_s=left)
            except ServerUnreachable as error:
                patience.bear(error)
                continue
            patience.restore()
            if job.is_terminal:
                return job

    # Telemetry

    def metrics(
        self, job_id: str, names: list[str] | None = None, *, step_from: int | None = None, step_to: int | None = None
    ) -> list[MetricRow]:
        """Telemetry in step order, all pages."""
        rows: list[MetricRow] = []
        while True:
            params = given(names=names, global_step_from=step_from, global_step_to=step_to, limit=1000)
            page = self._ask(MetricPage, "GET", at(JOBS, job_id, "metrics"), params=params)
            rows += page.data
            if not page.has_more:
                return rows
            step_from = page.data[-1].step + 1

    def metrics_csv(self, job_id: str, names: list[str] | None = None) -> str:
        """The same as CSV text. Raises ClientError for a job of more than 10 000 steps unless the names are given."""
        text, step_from = "", 1
        while True:
            params = given(names=names, limit=CSV_STEPS, global_step_from=step_from)
            response = self._request("GET", at(JOBS, job_id, "metrics"), params=params, headers={"accept": "text/csv"})
            text += response.text if not text else response.text.partition("\n")[2]
            if response.headers.get("x-has-more") != "true":
                return text
            if names is None:
                raise ClientError(
                    f"job {job_id} has more than {CSV_STEPS} steps; name the metrics to write, so that all rows have the same columns"
                )
            step_from = int(text.rstrip("\r\n").rpartition("\n")[2].partition(",")[0]) + 1

    def events(self, job_id: str, *, limit: int = 100, after: str | None = None, order: str = "asc") -> Page[JobEvent]:
        """What happened to the job."""
        return self._ask(Page[JobEvent], "GET", at(JOBS, job_id, "events"), params=given(limit=limit, after=after, order=order))

    def stream_metrics(self, job_id: str) -> Iterator[ServerEvent]:
        """`step.completed`, `run.rewound` and at last `job.finished`, from the first step on; ends with the job."""
        return self._stream(at(JOBS, job_id, "metrics", "stream"))

    def stream_events(self, job_id: str) -> Iterator[ServerEvent]:
        """Life cycle and engine events, from the first on; ends with the job."""
        return self._stream(at(JOBS, job_id, "events", "stream"))

    def logs(self, job_id: str, *, tail: int = 1000, attempt: int | None = None) -> str:
        """The last lines the engine printed."""
        return self._request("GET", at(JOBS, job_id, "logs"), params=given(tail=tail, attempt=attempt)).text

    def stream_logs(self, job_id: str, *, tail: int = 1000) -> Iterator[ServerEvent]:
        """`log` events as the engine prints: `attempt` and a piece of `text`, from the last `tail` lines on; ends with the job."""
        return self._stream(at(JOBS, job_id, "logs", "stream"), params={"tail": tail})

    # Control

    def control(self, job_id: str) -> ControlSettings:
        """What can be changed while the job runs."""
        return self._ask(ControlSettings, "GET", at(JOBS, job_id, "control"))

    def set_control(
        self, job_id: str, *, beta: float | None = None, target: float | None = None, learning_rate: float | None = None
    ) -> ControlCommand:
        """Change beta, the target KL or the learning rate from the next step boundary on."""
        body = given(beta=beta, target=target, learning_rate=learning_rate)
        return self._ask(ControlCommand, "PATCH", at(JOBS, job_id, "control"), json=body)

    # Checkpoints, files, models

    def checkpoints(self, job_id: str, *, limit: int = 100) -> list[Checkpoint]:
        """Published checkpoints, newest first."""
        return self._ask(Page[Checkpoint], "GET", at(JOBS, job_id, "checkpoints"), params={"limit": limit}).data

    def read_checkpoint_file(self, checkpoint: Checkpoint, name: str, start: int = 0) -> Iterator[bytes]:
        """The bytes of one file from `start` on."""
        path = at(JOBS, checkpoint.fine_tuning_job_id, "checkpoints", checkpoint.id, "content")
        headers = {"range": f"bytes={start}-"} if start else {}
        with self._open("GET", path, params={"file": name}, headers=headers) as response:
            yield from response.iter_bytes()

    def upload(self, path: Path) -> File:
        """Upload a training file; the server checks every row."""
        with path.open("rb") as stream:
            return self._ask(File, "POST", "/v1/files", data={"purpose": "fine-tune"}, files={"file": (path.name, stream)})

    def read_file(self, file_id: str) -> Iterator[bytes]:
        """The bytes of an uploaded file, as they come. Raises ServerUnreachable when the connection breaks."""
        with self._open("GET", at("/v1/files", file_id, "content")) as response:
            yield from unbroken(response, self.base_url)

    def files(self, *, limit: int = 100) -> list[File]:
        """Uploaded files, newest first."""
        return self._ask(Page[File], "GET", "/v1/files", params={"limit": limit}).data

    def delete_file(self, file_id: str) -> Deleted:
        """Forget a file; jobs made from it keep their own copy."""
        return self._ask(Deleted, "DELETE", at("/v1/files", file_id))

    def models(self) -> list[Model]:
        """Models a job may start from."""
        return self._ask(Page[Model], "GET", "/v1/models").data

    # Plumbing

    def send(self, call: Call[Answer]) -> Answer:
        """Send one request and read its answer. Raises ApiError, ServerUnreachable, UnknownAnswer, CannotSend."""
        return self._ask(call.kind, call.method, call.path, **call.options)

    def _ask(self, kind: type[Answer], method: str, path: str, **request: Any) -> Answer:
        return read_answer(kind, self._request(method, path, **request), self.base_url)

    def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        for attempt in range(MAX_RETRIES + 1):
            try:
                with sendable():
                    response = self._http.request(method, path, **request)
            except httpx.TransportError as error:
                if attempt == MAX_RETRIES or not is_worth_repeating(error, method, request):
                    raise ServerUnreachable(self.base_url, error) from error
                time.sleep(0.5 * 2**attempt)
                continue
            if response.is_success:
                return response
            if response.status_code not in RETRY_STATUSES or attempt == MAX_RETRIES or "files" in request:
                break
            time.sleep(min(retry_after(response, 0.5 * 2**attempt), LONGEST_RETRY_AFTER_S))
        raise ApiError.from_response(response)

    def _open(self, method: str, path: str, **request: Any) -> Opened:
        return Opened(self._http, self.base_url, method, path, request)

    def _stream(self, path: str, **request: Any) -> Iterator[ServerEvent]:
        last_id: str | None = None
        patience = Patience(self._patience_s)
        timeout = httpx.Timeout(STREAM_TIMEOUT_S, connect=5.0)
        while True:
            headers = {} if last_id is None else {"last-event-id": last_id}
            try:
                with self._open("GET", path, headers=headers, timeout=timeout, **request) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    for event in sse.parse(response.iter_lines()):
                        if event is sse.END:
                            return
                        patience.restore()
                        last_id = event.id or last_id
                        yield event
                patience.bear(ServerUnreachable(self.base_url, ConnectionError("the stream broke off")))
            except httpx.TransportError as error:
                patience.bear(ServerUnreachable(self.base_url, error))
            except ServerUnreachable as error:
                patience.bear(error)
            except ApiError as error:
                if error.status not in RETRY_STATUSES:
                    raise
                patience.bear(error)
