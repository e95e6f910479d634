"""Uploads: kept byte for byte when every line is a row, refused with the line's number otherwise, and gone without a trace."""

from __future__ import annotations

import http.client
import io
from dataclasses import replace

import httpx
import pytest

from api.sse import StreamLimits
from jobs.settings import Settings
from tests.api.conftest import ROWS, Server, jsonl, upload

FILES = "/v1/files"
FORM = {"purpose": "fine-tune"}


def post(client: httpx.Client, content: bytes, name: str = "rows.jsonl", form: dict[str, str] | None = None) -> httpx.Response:
    return client.post(FILES, files={"file": (name, content)}, data=FORM if form is None else form)


def left_behind(server: Server) -> list[str]:
    return [path.name for path in (server.settings.data_dir / "files").iterdir()]


def test_an_upload_comes_back_byte_for_byte(client: httpx.Client) -> None:
    content = jsonl(ROWS).replace(b"\n", b"\r\n")
    answer = post(client, content, "sums é.jsonl")
    file = answer.json()
    assert answer.status_code == 200
    assert file["object"] == "file"
    assert file["bytes"] == len(content)
    assert file["filename"] == "sums é.jsonl"
    assert file["purpose"] == "fine-tune"
    assert file["status"] == "processed"
    assert file["rows"] == len(ROWS)
    assert client.get(f"{FILES}/{file['id']}").json() == file
    got = client.get(f"{FILES}/{file['id']}/content")
    assert got.content == content
    assert got.headers["etag"] == f'"{file["sha256"]}"'


def test_head_tells_what_a_download_would_be(client: httpx.Client) -> None:
    path = f"{FILES}/{upload(client)}/content"
    for headers, status in (({}, 200), ({"range": "bytes=0-9"}, 206), ({"range": "bytes=999999-"}, 416)):
        head, got = client.head(path, headers=headers), client.get(path, headers=headers)
        assert (head.status_code, got.status_code, head.content) == (status, status, b"")
        for name in ("content-length", "content-type", "etag", "accept-ranges", "content-range"):
            assert head.headers.get(name) == got.headers.get(name), name
    assert client.head(f"{FILES}/file-none/content").status_code == 404


MALFORMED = jsonl(ROWS[:16]) + b'{"prompt": "17 + 17 = ", "answer": \n' + jsonl(ROWS[17:])

BAD: list[tuple[str, bytes, str]] = [
    ("a malformed line 17", MALFORMED, "line 17"),
    ("nothing", b"", "empty"),
    ("blank lines", b"\n\n  \n", "empty"),
    ("an array", b'[{"prompt": "a"}]', "array"),
    ("gzip", b"\x1f\x8b\x08\x00abc", "gzip"),
    ("NaN", b'{"prompt": "a", "x": NaN}\n', "line 1"),
    ("invalid UTF-8", jsonl(ROWS[:2]) + b'{"prompt": "\xff"}\n', "line 3"),
    ("a number on a line", jsonl(ROWS[:1]) + b"7\n", "line 2"),
]


@pytest.mark.parametrize(("content", "words"), [row[1:] for row in BAD], ids=[row[0] for row in BAD])
def test_a_bad_file_is_refused_by_line_and_nothing_is_kept(client: httpx.Client, server: Server, content: bytes, words: str) -> None:
    answer = post(client, content)
    assert answer.status_code == 422, answer.text
    assert answer.json()["error"]["param"] == "file"
    assert words in answer.json()["detail"]
    assert client.get(FILES).json()["data"] == []
    assert left_behind(server) == []


@pytest.mark.parametrize(
    ("form", "param"), [({}, "purpose"), ({"purpose": "assistants"}, "purpose"), ({"purpose": "fine-tune", "x": "1"}, "x")]
)
def test_a_bad_form_names_its_part(client: httpx.Client, server: Server, form: dict[str, str], param: str) -> None:
    assert post(client, jsonl(ROWS), form=form).json()["error"]["param"] == param
    assert left_behind(server) == []


def test_other_content_types_and_broken_forms_are_4xx(client: httpx.Client, server: Server) -> None:
    assert client.post(FILES, content=b"{}", headers={"content-type": "application/json"}).status_code == 415
    broken = client.post(FILES, content=b"--x\r\nnonsense", headers={"content-type": "multipart/form-data; boundary=x"})
    assert broken.status_code == 422
    assert client.post(FILES, data=FORM, files={"other": ("a.jsonl", jsonl(ROWS))}).status_code == 422
    assert left_behind(server) == []


def test_an_upload_beyond_the_cap_is_413_while_it_streams(api_settings: Settings, limits: StreamLimits) -> None:
    small = Server(replace(api_settings, file_limit_bytes=200_000), limits)
    try:
        connection = http.client.HTTPConnection("127.0.0.1", small.port, timeout=30)
        head = b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.jsonl"\r\n\r\n'
        body = io.BytesIO(head + b"x" * 1_000_000)
        headers = {"content-type": "multipart/form-data; boundary=x"}
        connection.request("POST", FILES, body=iter(lambda: body.read(50_000), b""), headers=headers, encode_chunked=True)
        answer = connection.getresponse()
        assert answer.status == 413
        answer.read()
        connection.close()
        assert left_behind(small) == []
        with small.client() as client:
            assert post(client, jsonl(ROWS)).status_code == 200
    finally:
        small.stop()


def test_a_larger_upload_than_a_json_body_may_be(client: httpx.Client) -> None:
    content = jsonl([{"prompt": "x" * 1000, "answer": "1"}] * 3000)
    assert len(content) > 3_000_000
    assert post(client, content).json()["rows"] == 3000


def test_an_upload_that_breaks_off_leaves_nothing(server: Server, client: httpx.Client) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.putrequest("POST", FILES)
    connection.putheader("content-type", "multipart/form-data; boundary=x")
    connection.putheader("content-length", "100000")
    connection.endheaders(b'--x\r\ncontent-disposition: form-data; name="file"; filename="a"\r\n\r\nabc')
    connection.close()
    assert client.get(FILES).json()["data"] == []
    from tests.api.conftest import eventually

    eventually(lambda: left_behind(server) == [])


def test_ranges(client: httpx.Client) -> None:
    path = f"{FILES}/{upload(client, jsonl(ROWS))}/content"
    whole = client.get(path).content
    for header, expected in (
        ("bytes=0-9", whole[:10]),
        ("bytes=10-", whole[10:]),
        ("bytes=-5", whole[-5:]),
        ("bytes=5-99999999", whole[5:]),
    ):
        part = client.get(path, headers={"range": header})
        assert (part.status_code, part.content) == (206, expected), header
        assert part.headers["content-range"].endswith(f"/{len(whole)}")
    bomb = "bytes=" + ",".join(f"{n}-{n + 1}" for n in range(0, 60, 2))
    for header in (f"bytes={len(whole)}-", "bytes=9-3", "bytes=-0", "bytes=a-b", "bytes=0-1,4-5", bomb):
        refused = client.get(path, headers={"range": header})
        assert refused.status_code == 416, header
        assert refused.headers["content-range"] == f"bytes */{len(whole)}"
    for ignored in ("lines=1-2", "bytesx=0-9"):
        got = client.get(path, headers={"range": ignored})
        assert (got.status_code, got.content) == (200, whole), ignored
    changed = client.get(path, headers={"range": "bytes=0-9", "if-range": '"other"'})
    assert (changed.status_code, changed.content) == (200, whole)


def test_list_pages_and_delete(client: httpx.Client) -> None:
    ids = [upload(client) for _ in range(3)]
    first = client.get(FILES, params={"limit": 2}).json()
    assert [file["id"] for file in first["data"]] == [ids[2], ids[1]]
    assert first["has_more"] is True
    assert [file["id"] for file in client.get(FILES, params={"after": first["last_id"]}).json()["data"]] == [ids[0]]
    assert client.delete(f"{FILES}/{ids[0]}").status_code == 200
    assert client.get(f"{FILES}/{ids[0]}").status_code == 404
    assert client.delete(f"{FILES}/{ids[0]}").status_code == 404
