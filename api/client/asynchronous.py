"""The same client for asyncio: `async with AsyncGrpo() as client: job = await client.create_job(spec)`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from api.client import sse
from api.client.calls import JOBS, Call, at, given, once
from api.client.errors import ApiError, ClientError, ServerUnreachable
from api.client.sse import ServerEvent
from api.client.studies_async import AsyncStudies
from api.client.sync import CSV_STEPS, DEFAULT_URL
from api.client.transport import (
    LONGEST_RETRY_AFTER_S,
    MAX_RETRIES,
    RETRY_STATUSES,
    STREAM_TIMEOUT_S,
    Answer,
    Patience,
    is_loopback,
    is_worth_repeating,
    key_header,
    read_answer,
    retry_after,
    sendable,
    server_address,
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


class AsyncGrpo(AsyncStudies):
    """A GRPO server, asynchronously. `patience_s` is how long streams and waits bear a server that does not answer."""

    def __init__(
        self, base_url: str = DEFAULT_URL, api_key: str | None = None, *, timeout_s: float = 60.0, patience_s: float = 60.0
    ) -> None:
        headers = key_header(api_key)
        self.base_url = server_address(base_url)
        self._patience_s = patience_s
        timeout = httpx.Timeout(timeout_s, connect=5.0)
        self._http = httpx.AsyncClient(base_url=self.base_url, headers=headers, timeout=timeout, trust_env=not is_loopback(base_url))

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> AsyncGrpo:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def create_job(self, spec: Mapping[str, Any], *, idempotency_key: str | None = None) -> Job:
        """Submit a job. `spec` is the JSON body as a mapping."""
        return await self._ask(Job, "POST", JOBS, json=dict(spec), headers=once(idempotency_key))

    async def job(self, job_id: str, *, wait_s: float | None = None) -> Job:
        """The job; with `wait_s` answers when its state changes, at the latest after so many seconds (60 at most)."""
        return await self._ask(Job, "GET", at(JOBS, job_id), params=given(wait=wait_s))

    async def jobs(self, *, limit: int = 20, after: str | None = None, status: str | None = None) -> Page[Job]:
        """A page of jobs, newest first."""
        return await self._ask(Page[Job], "GET", JOBS, params=given(limit=limit, after=after, status=status))

    async def cancel(self, job_id: str) -> Job:
        """End the job now."""
        return await self._ask(Job, "POST", at(JOBS, job_id, "cancel"))

    async def pause(self, job_id: str) -> Job:
        """Finish the step, checkpoint, free the worker."""
        return await self._ask(Job, "POST", at(JOBS, job_id, "pause"))

    async def resume(self, job_id: str) -> Job:
        """Go on from the checkpoint."""
        return await self._ask(Job, "POST", at(JOBS, job_id, "resume"))

    async def wait(self, job_id: str) -> Job:
        """Return when the job has ended; bears a restart of the server. Bound it with `asyncio.timeout`."""
        patience = Patience(self._patience_s)
        while True:
            try:
                job = await self.job(job_id, wait_s=30.0)
            except ServerUnreachable as error:
                await asyncio.sleep(patience.next_pause(error))
                continue
            patience.restore()
            if job.is_terminal:
                return job

    async def metrics(
        self, job_id: str, names: list[str] | None = None, *, step_from: int | None = None, step_to: int | None = None
    ) -> list[MetricRow]:
        """Telemetry in step order, all pages."""
        rows: list[MetricRow] = []
        while True:
            params = given(names=names, global_step_from=step_from, global_step_to=step_to, limit=1000)
            page = await self._ask(MetricPage, "GET", at(JOBS, job_id, "metrics"), params=params)
            rows += page.data
            if not page.has_more:
                return rows
            step_from = page.data[-1].step + 1

    async def metrics_csv(self, job_id: str, names: list[str] | None = None) -> str:
        """The same as CSV text. Raises ClientError for a job of more than 10 000 steps unless the names are given."""
        text, step_from = "", 1
        while True:
            params = given(names=names, limit=CSV_STEPS, global_step_from=step_from)
            response = await self._request("GET", at(JOBS, job_id, "metrics"), params=params, headers={"accept": "text/csv"})
            text += response.text if not text else response.text.partition("\n")[2]
            if response.headers.get("x-has-more") != "true":
                return text
            if names is None:
                raise ClientError(
                    f"job {job_id} has more than {CSV_STEPS} steps; name the metrics to write, so that all rows have the same columns"
                )
            step_from = int(text.rstrip("\r\n").rpartition("\n")[2].partition(",")[0]) + 1

    async def events(self, job_id: str, *, limit: int = 100, after: str | None = None, order: str = "asc") -> Page[JobEvent]:
        """What happened to the job."""
        return await self._ask(Page[JobEvent], "GET", at(JOBS, job_id, "events"), params=given(limit=limit, after=after, order=order))

    def stream_metrics(self, job_id: str) -> AsyncIterator[ServerEvent]:
        """`step.completed`, `run.rewound` and at last `job.finished`, from the first step on; ends with the job."""
        return self._stream(at(JOBS, job_id, "metrics", "stream"))

    def stream_events(self, job_id: str) -> AsyncIterator[ServerEvent]:
        """Life cycle and engine events, from the first on; ends with the job."""
        return self._stream(at(JOBS, job_id, "events", "stream"))

    async def logs(self, job_id: str, *, tail: int = 1000, attempt: int | None = None) -> str:
        """The last lines the engine printed."""
        return (await self._request("GET", at(JOBS, job_id, "logs"), params=given(tail=tail, attempt=attempt))).text

    def stream_logs(self, job_id: str, *, tail: int = 1000) -> AsyncIterator[ServerEvent]:
        """`log` events as the engine prints: `attempt` and a piece of `text`, from the last `tail` lines on; ends with the job."""
        return self._stream(at(JOBS, job_id, "logs", "stream"), params={"tail": tail})

    async def control(self, job_id: str) -> ControlSettings:
        """What can be changed while the job runs."""
        return await self._ask(ControlSettings, "GET", at(JOBS, job_id, "control"))

    async def set_control(
        self, job_id: str, *, beta: float | None = None, target: float | None = None, learning_rate: float | None = None
    ) -> ControlCommand:
        """Change beta, the target KL or the learning rate from the next step boundary on."""
        body = given(beta=beta, target=target, learning_rate=learning_rate)
        return await self._ask(ControlCommand, "PATCH", at(JOBS, job_id, "control"), json=body)

    async def checkpoints(self, job_id: str, *, limit: int = 100) -> list[Checkpoint]:
        """Published checkpoints, newest first."""
        return (await self._ask(Page[Checkpoint], "GET", at(JOBS, job_id, "checkpoints"), params={"limit": limit})).data

    async def upload(self, path: Path) -> File:
        """Upload a training file; the server checks every row."""
        content = await asyncio.to_thread(path.read_bytes)
        return await self._ask(File, "POST", "/v1/files", data={"purpose": "fine-tune"}, files={"file": (path.name, content)})

    async def read_file(self, file_id: str) -> AsyncIterator[bytes]:
        """The bytes of an uploaded file, as they come. Raises ServerUnreachable when the connection breaks."""
        try:
            async with self._http.stream("GET", at("/v1/files", file_id, "content")) as response:
                if not response.is_success:
                    await response.aread()
                    raise ApiError.from_response(response)
                async for piece in response.aiter_bytes():
                    yield piece
        except httpx.TransportError as error:
            raise ServerUnreachable(self.base_url, error) from error

    async def files(self, *, limit: int = 100) -> list[File]:
        """Uploaded files, newest first."""
        return (await self._ask(Page[File], "GET", "/v1/files", params={"limit": limit})).data

    async def delete_file(self, file_id: str) -> Deleted:
        """Forget a file; jobs made from it keep their own copy."""
        return await self._ask(Deleted, "DELETE", at("/v1/files", file_id))

    async def models(self) -> list[Model]:
        """Models a job may start from."""
        return (await self._ask(Page[Model], "GET", "/v1/models")).data

    async def send(self, call: Call[Answer]) -> Answer:
        """Send one request and read its answer. Raises ApiError, ServerUnreachable, UnknownAnswer, CannotSend."""
        return await self._ask(call.kind, call.method, call.path, **call.options)

    async def _ask(self, kind: type[Answer], method: str, path: str, **request: Any) -> Answer:
        return read_answer(kind, await self._request(method, path, **request), self.base_url)

    async def _request(self, method: str, path: str, **request: Any) -> httpx.Response:
        for attempt in range(MAX_RETRIES + 1):
            try:
                with sendable():
                    response = await self._http.request(method, path, **request)
            except httpx.TransportError as error:
                if attempt == MAX_RETRIES or not is_worth_repeating(error, method, request):
                    raise ServerUnreachable(self.base_url, error) from error
                await asyncio.sleep(0.5 * 2**attempt)
                continue
            if response.is_success:
                return response
            if response.status_code not in RETRY_STATUSES or attempt == MAX_RETRIES:
                break
            await asyncio.sleep(min(retry_after(response, 0.5 * 2**attempt), LONGEST_RETRY_AFTER_S))
        raise ApiError.from_response(response)

    async def _stream(self, path: str, **request: Any) -> AsyncIterator[ServerEvent]:
        last_id: str | None = None
        patience = Patience(self._patience_s)
        timeout = httpx.Timeout(STREAM_TIMEOUT_S, connect=5.0)
        while True:
            headers = {} if last_id is None else {"last-event-id": last_id}
            failure: Exception = ServerUnreachable(self.base_url, ConnectionError("the stream broke off"))
            try:
                async with self._http.stream("GET", path, headers=headers, timeout=timeout, **request) as response:
                    if response.status_code == httpx.codes.NO_CONTENT:
                        return
                    if not response.is_success:
                        await response.aread()
                        raise ApiError.from_response(response)
                    reader = sse.Reader()
                    async for line in response.aiter_lines():
                        event = reader.feed(line)
                        if event is sse.END:
                            return
                        if event is not None:
                            patience.restore()
                            last_id = event.id or last_id
                            yield event
            except httpx.TransportError as error:
                failure = ServerUnreachable(self.base_url, error)
            except ApiError as error:
                if error.status not in RETRY_STATUSES:
                    raise
                failure = error
            await asyncio.sleep(patience.next_pause(failure))
