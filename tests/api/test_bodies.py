"""Bodies, headers and errors at the wire: every refusal is a 4xx in the one format, and never a 5xx."""

from __future__ import annotations

import asyncio
import http.client
import json
import socket
import subprocess
import sys
from dataclasses import replace

import httpx
import pytest
from fastapi import APIRouter
from starlette.types import Message, Receive, Scope, Send

from api.middleware import BodyLimit, RequestStalled
from api.sse import StreamLimits
from grpo_engine.contract.error import GrpoError
from jobs.settings import Settings
from tests.api.conftest import Server, create, spec, upload
from tests.api.test_strict_json import REFUSED

JOBS = "/v1/fine_tuning/jobs"
JSON = {"content-type": "application/json"}

ROUTES = [
    ("POST", JOBS),
    ("POST", f"{JOBS}/validate"),
    ("PUT", f"{JOBS}/by-key/k"),
    ("PATCH", f"{JOBS}/JOB/control"),
    ("POST", f"{JOBS}/JOB/fork"),
    ("POST", f"{JOBS}/JOB/guardrails/replay"),
    ("POST", f"{JOBS}/JOB/checkpoints/ftckpt-1/promote"),
    ("POST", "/v1/webhook_endpoints"),
    ("POST", "/v1/webhook_endpoints/whe-1"),
    ("POST", "/v1/webhook_endpoints/whe-1/rotate_secret"),
    ("POST", "/v1/webhook_endpoints/whe-1/test"),
    ("POST", "/v1/fine_tuning/alpha/graders/run"),
    ("POST", "/v1/fine_tuning/alpha/graders/validate"),
]


def test_nothing_that_is_not_strict_json_gets_in_anywhere(client: httpx.Client) -> None:
    job_id = create(client)
    before = client.get(JOBS).json()["data"]
    for method, route in ROUTES:
        path = route.replace("JOB", job_id)
        for name, body, status, _ in REFUSED:
            answer = client.request(method, path, content=body, headers=JSON)
            assert answer.status_code == status, (path, name)
            strict_problem(answer)
            assert answer.json()["error"]["param"], (path, name)
        for text in ('"text"', "7", "null", "[]", "true"):
            answer = client.request(method, path, content=text, headers=JSON)
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, "body"), (path, text)
    assert client.get(JOBS).json()["data"] == before


def strict_problem(answer: httpx.Response) -> None:
    problem = json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} on the wire"))
    assert set(problem) == {"type", "title", "status", "detail", "instance", "error"}
    assert set(problem["error"]) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/problem+json"
    assert answer.headers["x-request-id"]


@pytest.mark.parametrize(
    "kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/json; charset=utf-16", "application/jsonx"]
)
def test_json_comes_as_application_json_only(client: httpx.Client, kind: str | None) -> None:
    answer = client.post(JOBS, content=b"{}", headers={} if kind is None else {"content-type": kind})
    assert answer.status_code == 415
    assert answer.json()["error"]["param"] == "content-type"


@pytest.mark.parametrize("coding", ["gzip", "br", "identity, gzip", "x"])
def test_a_compressed_body_is_415_and_not_read_as_if_it_were_plain(shared_client: httpx.Client, coding: str) -> None:
    headers = {"content-encoding": coding}
    form = {"file": ("a.jsonl", b'{"prompt": "1"}\n')}
    for answer in (
        shared_client.post(f"{JOBS}/validate", json=spec("file-none"), headers=headers),
        shared_client.post("/v1/files", files=form, data={"purpose": "fine-tune"}, headers=headers),
    ):
        assert (answer.status_code, answer.json()["error"]["param"]) == (415, "content-encoding")
        assert answer.headers["accept-encoding"] == "identity"


def test_a_plain_body_may_say_that_it_is(shared_client: httpx.Client) -> None:
    answer = shared_client.post(f"{JOBS}/validate", json=spec("file-none"), headers={"content-encoding": "identity"})
    assert answer.json()["error"]["param"] == "training_file"


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        (JOBS, "GET, POST"),
        ("/v1/files", "GET, POST"),
        ("/v1/files/file-1", "DELETE, GET"),
        ("/v1/files/file-1/content", "GET, HEAD"),
        (f"{JOBS}/ftjob-1/control", "GET, PATCH"),
        (f"{JOBS}/ftjob-1/checkpoints/ftckpt-1/pin", "DELETE, POST"),
        ("/v1/webhook_endpoints/whe-1", "DELETE, GET, POST"),
        ("/healthz", "GET"),
    ],
)
def test_a_405_lists_every_method_of_the_path(shared_client: httpx.Client, path: str, methods: str) -> None:
    answer = shared_client.request("TRACE", path)
    assert (answer.status_code, answer.headers["allow"]) == (405, methods)
    assert methods in answer.json()["detail"]


NULS = [
    ("GET", f"{JOBS}/%00", 404, "job_id"),
    ("POST", f"{JOBS}/ftjob-%001/cancel", 404, "job_id"),
    ("GET", f"{JOBS}/ftjob-1/checkpoints/a%00", 404, "checkpoint_id"),
    ("DELETE", "/v1/files/%00", 404, "file_id"),
    ("PUT", f"{JOBS}/by-key/a%00b", 422, "key"),
    ("GET", f"{JOBS}?after=%00", 422, "after"),
    ("GET", f"{JOBS}?metadata[a]=%00", 422, "metadata[a]"),
    ("GET", f"{JOBS}?metadata[%00]=a", 422, "metadata[]"),
    ("GET", "/v1/files?purpose=%00", 422, "purpose"),
    ("GET", "/v1/fine_tuning/compare?jobs=%00", 422, "jobs"),
]


def test_a_nul_in_an_address_never_reaches_the_database(api_settings: Settings, limits: StreamLimits, postgres_url: str) -> None:
    """On PostgreSQL, which refuses it in any text; SQLite finds nothing."""
    running = Server(replace(api_settings, database_url=postgres_url), limits)
    try:
        with running.client() as client:
            for method, path, status, param in NULS:
                answer = client.request(method, path, json=spec("file-1") if method == "PUT" else None)
                assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), (method, path)
                strict_problem(answer)
    finally:
        running.stop()


def test_an_unknown_id_that_cannot_be_printed_is_named(shared_client: httpx.Client) -> None:
    assert shared_client.get(f"{JOBS}/a%0d%0ab").json()["error"]["param"] == "job_id"


def test_unicode_labels_come_back_byte_for_byte(client: httpx.Client) -> None:
    labels = {"rtl": "\u202eשלום", "emoji": "👩‍👩‍👧", "nfc": "é", "nfd": "e\u0301", "long": "x" * 512}
    body = {**spec(upload(client)), "metadata": labels}
    assert client.post(JOBS, json=body).json()["metadata"] == labels
    assert client.post(JOBS, json={**body, "metadata": {"long": "x" * 10_000}}).json()["error"]["param"] == "metadata.long"


def test_a_json_body_of_20_mb_is_413_and_the_server_goes_on(client: httpx.Client) -> None:
    answer = client.post(JOBS, content=b" " * 20_000_000, headers=JSON)
    assert answer.status_code == 413
    assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == ("payload_too_large", "body")
    assert client.get(JOBS).status_code == 200


def test_the_cap_counts_bytes_and_not_what_a_header_says(server: Server) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    chunks = (b" " * 65_536 for _ in range(40))
    connection.request("POST", JOBS, body=chunks, headers=JSON, encode_chunked=True)
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"] == "payload_too_large"
    connection.close()


def test_a_body_just_below_the_cap_is_read(client: httpx.Client, server: Server) -> None:
    body = json.dumps(spec("file-none")).encode()
    padded = body + b" " * (server.settings.body_limit_bytes - len(body))
    assert client.post(JOBS, content=padded, headers=JSON).json()["error"]["param"] == "training_file"


def test_numbers_that_are_none_in_headers_are_no_defect(client: httpx.Client) -> None:
    for count in (b"\xb2", b"9" * 5000, b"", b"-1"):
        answer = client.post(JOBS, json=spec("file-none"), headers={b"x-stainless-retry-count": count})
        assert answer.json()["error"]["param"] == "training_file"


def test_a_boundary_too_long_for_the_parser_is_refused(client: httpx.Client, server: Server) -> None:
    answer = client.post("/v1/files", content=b"x", headers={"content-type": f"multipart/form-data; boundary={'x' * 500}"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "file")
    assert list(server.settings.data_dir.glob("files/.incoming*")) == []


def test_a_parameter_given_twice_is_refused_and_a_list_is_not(client: httpx.Client) -> None:
    answer = client.get(f"{JOBS}?limit=1&limit=2")
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "limit")
    assert client.get(f"{JOBS}?metadata[a]=1&metadata[a]=2").json()["error"]["param"] == "metadata[a]"
    assert client.get(f"{JOBS}/{create(client)}/metrics?names=reward/mean&names=beta/applied").status_code == 200


def test_more_labels_than_a_job_can_have_are_refused(client: httpx.Client) -> None:
    answer = client.get(JOBS, params={f"metadata[k{n}]": "v" for n in range(17)})
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, "metadata[k16]")


def test_a_key_as_long_as_the_body_is_not_answered_in_full(client: httpx.Client) -> None:
    answer = client.post(JOBS, json={**spec("file-none"), "k" * 900_000: 1})
    assert answer.status_code == 422
    assert len(answer.content) < 20_000
    assert answer.json()["error"]["param"].startswith("kkk")


@pytest.mark.parametrize(
    "path",
    [
        f"{JOBS}/..%2f..%2fetc%2fpasswd",
        f"{JOBS}/%252e%252e",
        f"{JOBS}/..%5c..%5c",
        f"{JOBS}/ftjob-a%00b",
        f"{JOBS}/%23",
        f"{JOBS}/ftjob-1/checkpoints/..%2f..%2f/content",
        "/v1/files/..%2f..%2fgrpo.db/content",
        "/v1/files/%2fetc%2fpasswd",
        "/v1/nothing",
        "/v1/fine_tuning/jobs/",
    ],
)
def test_odd_paths_are_404(client: httpx.Client, path: str) -> None:
    answer = client.get(path)
    assert answer.status_code == 404
    strict_problem(answer)


def test_an_overlong_id_and_a_wrong_method_are_4xx(client: httpx.Client) -> None:
    assert client.get(f"{JOBS}/{'x' * 5000}").status_code == 422
    answer = client.put(JOBS, json={})
    assert answer.status_code == 405
    assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]
    strict_problem(answer)


def test_the_clients_request_id_is_kept_when_it_is_plain(client: httpx.Client) -> None:
    assert client.get("/healthz", headers={"x-request-id": "trace-1.a"}).headers["x-request-id"] == "trace-1.a"
    assert client.get("/healthz", headers={"x-request-id": "a b"}).headers["x-request-id"].startswith("req_")


def test_a_defect_is_a_500_in_the_same_format_and_in_the_log(
    server: Server, client: httpx.Client, caplog: pytest.LogCaptureFixture
) -> None:
    router = APIRouter()

    @router.get("/broken")
    def broken() -> None:
        raise RuntimeError("the reason")

    server.app.include_router(router)
    answer = client.get("/broken", headers={"x-request-id": "find-me"})
    assert answer.status_code == 500
    assert "the reason" not in answer.text
    assert answer.headers["x-should-retry"] == "false"
    strict_problem(answer)
    assert any("find-me" in record.getMessage() and record.exc_info for record in caplog.records)


def test_a_half_sent_body_creates_nothing(server: Server, client: httpx.Client) -> None:
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(f"POST {JOBS} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 500\r\n\r\n{{".encode())
    assert client.get(JOBS).json()["data"] == []


def test_the_api_loads_no_torch() -> None:
    code = "import sys, api.app; print([name for name in ('torch', 'transformers', 'worker') if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_the_openapi_document_names_every_route_and_resolves(client: httpx.Client) -> None:
    document = client.get("/openapi.json").json()
    text = json.dumps(document)
    assert JOBS in document["paths"]
    names = set(document["components"]["schemas"])
    refs = {part.split('"')[0] for part in text.split('"$ref": "#/components/schemas/')[1:]}
    assert refs <= names
    assert "JobSpec" in names
    assert "HTTPValidationError" not in names


def test_errors_have_a_status_and_a_code_of_their_own() -> None:
    def family(kind: type[GrpoError]) -> list[type[GrpoError]]:
        return [kind, *(member for child in kind.__subclasses__() for member in family(child))]

    for kind in family(GrpoError):
        assert 400 <= kind.status <= 599
        assert kind.code


def test_a_body_that_stalls_is_408_and_a_long_answer_is_not() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await receive()
        with pytest.raises(RequestStalled) as caught:
            await receive()
        assert caught.value.status == 408

    async def waits(scope: Scope, receive: Receive, send: Send) -> None:
        assert (await receive())["more_body"] is False
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(receive(), 0.2)

    def receiver(*messages: Message) -> Receive:
        left = list(messages)

        async def receive() -> Message:
            return left.pop(0) if left else await asyncio.Future()

        return receive

    async def send(message: Message) -> None:
        raise AssertionError(message)

    scope: Scope = {"type": "http", "method": "POST", "path": JOBS, "headers": []}
    half = {"type": "http.request", "body": b"{", "more_body": True}
    whole = {"type": "http.request", "body": b"{}", "more_body": False}
    asyncio.run(BodyLimit(app, limit=100, file_limit=100, stall_s=0.05)(scope, receiver(half), send))
    asyncio.run(BodyLimit(waits, limit=100, file_limit=100, stall_s=0.05)(scope, receiver(whole), send))
