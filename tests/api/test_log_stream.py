"""The engine's log as it is written: each byte once and in order, through shortenings, attempts and broken connections."""

from __future__ import annotations

import json
import os
from pathlib import Path

import httpx
import pytest

from api.client import ApiError, Grpo
from api.log_tail import Place, begin, is_ahead, parse_place, read_on
from tests.api.conftest import Hand, Server, create, event
from tests.api.test_client_commands import Shell
from tests.api.test_streams import Frame, frames, read
from worker.engine import cap_log

JOBS = "/v1/fine_tuning/jobs"


def say(server: Server, job_id: str, attempt: int, words: bytes) -> Path:
    path = server.app.state.services.artifacts.log_path(job_id, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as log:
        log.write(words)
    found: Path = path
    return found


def texts(found: list[Frame]) -> str:
    return "".join(frame.data["text"] for frame in found if frame.event == "log")


def test_it_goes_on_through_attempts_until_the_job_ends(client: httpx.Client, server: Server, hand: Hand) -> None:
    job_id = create(client)
    first = hand.start(job_id)
    say(server, job_id, first, b"one\ntwo\nthree\n")
    with client.stream("GET", f"{JOBS}/{job_id}/logs/stream", params={"tail": 2}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        coming = (frame for frame in frames(answer.iter_lines()) if frame.event)
        assert next(coming).data == {"attempt": 1, "text": "two\nthree\n"}
        say(server, job_id, first, b"12%\r\xe2")
        assert next(coming).data == {"attempt": 1, "text": "12%\r"}, "a piece of a line, and of the euro sign nothing yet"
        say(server, job_id, first, b"\x82\xac \xe2")
        assert next(coming).data == {"attempt": 1, "text": "€ "}
        hand.finish(job_id, "queued")
        second = hand.start(job_id)
        assert next(coming).data == {"attempt": 1, "text": "\ufffd"}, "its engine is gone: nothing will complete it"
        say(server, job_id, second, b"four\n")
        assert next(coming).data == {"attempt": 2, "text": "four\n"}
        hand.finish(job_id)
        last = next(coming)
        assert (last.event, last.data) == ("message", "[DONE]")


def test_any_id_goes_on_without_gap_or_repeat(client: httpx.Client, server: Server, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    whole = "".join(f"Zeile {n} ä\u2028€\x85\n" for n in range(60_000))
    say(server, job_id, epoch, whole.encode())
    hand.finish(job_id)
    path = f"{JOBS}/{job_id}/logs/stream"
    found = read(client, path, f"{epoch}-0-0")
    assert len(found) > 3
    assert texts(found) == whole
    seen = ""
    for frame in found[:-1]:
        seen += frame.data["text"]
        assert frame.id is not None
        if frame.id == found[-2].id:
            assert client.get(path, headers={"last-event-id": frame.id}).status_code == 204
        else:
            assert seen + texts(read(client, path, frame.id)) == whole
    assert texts(read(client, path))[-11:] == whole[-11:]
    with Grpo(server.url) as grpo:
        assert "".join(one.data["text"] for one in grpo.stream_logs(job_id, tail=3)) == "\n".join(whole.split("\n")[-4:])


def test_a_place_that_no_log_has_reached_is_refused(client: httpx.Client, server: Server, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    say(server, job_id, epoch, b"12345\n")
    for place in ("x", "1-0", "1-0-7", "1-9-1", "0-0-0", "2-0-0", "1-0--1", "1-0-1-1", "9" * 40):
        answer = client.get(f"{JOBS}/{job_id}/logs/stream", headers={"last-event-id": place})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "last-event-id"), place
    assert client.get(f"{JOBS}/{job_id}/logs/stream", params={"tail": -1}).json()["error"]["param"] == "tail"
    assert client.get(f"{JOBS}/ftjob-none/logs/stream").status_code == 404


def test_a_log_shortened_while_it_is_read_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(b"".join(b"line %d\n" % n for n in range(1000)))
    seen, place = begin(path, 1, 5)
    assert seen == ""
    seen, place = read_on(path, place, is_last=False)
    assert seen == "".join(f"line {n}\n" for n in range(995, 1000))
    with path.open("ab") as log:
        log.write(b"unread\n")
    dropped = cap_log(path, 100, 64)
    with path.open("ab") as log:
        log.write(b"after\n")
    text, place = read_on(path, place, is_last=False)
    unread, mark, after = text.splitlines()
    assert (unread, after) == ("unread", "after")
    assert f"{dropped} bytes dropped" in mark
    assert (place.dropped, place.offset) == (dropped, path.stat().st_size)
    assert read_on(path, place, is_last=False) == ("", place)

    with path.open("ab") as log:
        log.write(b"x" * 200 + b"\n")
    again = cap_log(path, 100, 8)
    with path.open("ab") as log:
        log.write(b"y" * 400 + b"\n")
    assert path.stat().st_size > place.offset, "by its length alone the log looks like the one that was read"
    text, _ = read_on(path, place, is_last=False)
    assert text.startswith("xxxxxxx\n[log shortened: ")
    assert f"{again} bytes dropped" in text, "what is lost is said"
    assert text.endswith("y" * 400 + "\n")


def test_between_the_two_moments_of_shortening_a_reader_waits(tmp_path: Path) -> None:
    path = tmp_path / "engine.log"
    path.write_bytes(b"line\n" * 50)
    _, place = read_on(path, begin(path, 1, 1)[1], is_last=False)
    os.truncate(path, 0)
    assert read_on(path, place, is_last=False) == ("", place)
    path.unlink()
    assert read_on(path, place, is_last=False) == ("", place)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("secret\n")
    path = tmp_path / "engine.log"
    path.symlink_to(tmp_path / "secret")
    assert begin(path, 1, 9) == ("", Place(1, 0, 0))
    assert read_on(path, Place(1, 0, 0), is_last=True) == ("", Place(1, 0, 0))
    assert is_ahead(path, Place(1, 0, 1))


@pytest.mark.parametrize("text", ["", "1", "1-2", "1-2-3-4", "a-b-c", "1-2-²", "1-2-" + "9" * 17, " 1-2-3", "-1-2-3"])
def test_what_is_no_place(text: str) -> None:
    assert parse_place(text) is None
    assert parse_place(str(Place(1, 2, 3))) == Place(1, 2, 3)


def test_the_command_follows_to_the_end(server: Server, hand: Hand, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(server.url, monkeypatch)
    with server.client() as client:
        job_id = create(client)
    first = hand.start(job_id)
    say(server, job_id, first, b"one\ntwo\n")
    hand.finish(job_id, "queued")
    say(server, job_id, hand.start(job_id), b"three\nfour")
    hand.finish(job_id, "failed")
    assert shell("logs", job_id, "-f", "--tail", "1") == "four"
    lines = [json.loads(line) for line in shell("logs", job_id, "--follow", "--json").splitlines()]
    assert lines == [{"object": "fine_tuning.job.log", "job_id": job_id, "attempt": 2, "text": "three\nfour"}]
    assert shell("logs", job_id, "-f", "--attempt", "1", code=1) == ""
    with Grpo(server.url) as grpo, pytest.raises(ApiError, match="no job"):
        next(grpo.stream_logs("ftjob-none"))


def test_any_words_of_an_event_reach_a_reader_that_splits_text_as_unicode_does(client: httpx.Client, server: Server, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    words = "a\u2028b\u2029c\x85d\x0be\x1cf €"
    hand.ingest(job_id, event(epoch, 1, "grader.failed", None, reason=words))
    hand.finish(job_id)
    with Grpo(server.url) as grpo:
        assert words in [one.data["data"].get("reason") for one in grpo.stream_events(job_id)]


def test_many_last_lines_come_in_pieces_that_a_slow_reader_can_take(client: httpx.Client, server: Server, hand: Hand) -> None:
    job_id = create(client)
    epoch = hand.start(job_id)
    path = say(server, job_id, epoch, b"".join(b"line %d\n" % n for n in range(200_000)))
    cap_log(path, 1000, 600_000)
    say(server, job_id, epoch, b"".join(b"after %d\n" % n for n in range(60_000)))
    hand.finish(job_id)
    found = [frame for frame in read(client, f"{JOBS}/{job_id}/logs/stream", None) if frame.event == "log"]
    assert texts(found).splitlines() == [f"after {n}" for n in range(59_000, 60_000)]
    found = [frame for frame in read(client, f"{JOBS}/{job_id}/logs/stream?tail=100000") if frame.event == "log"]
    assert max(len(frame.data["text"]) for frame in found) <= 256 * 1024
    lines = texts(found).splitlines()
    assert (len(lines), lines[-1]) == (100_000, "after 59999")
    assert sum("log shortened" in line for line in lines) == 1
    assert lines[0].startswith("line 1")
    first = next(frame for frame in found if frame.id is not None)
    assert texts(read(client, f"{JOBS}/{job_id}/logs/stream", first.id)) == texts(found[found.index(first) + 1 :])
