"""The client without a server: words for people, streams line by line, downloads that check what they got."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from api.client import ApiError, ClientError, Grpo, ServerUnreachable
from api.client.display import sparkline, step_line
from api.client.download import choose, download
from api.client.errors import CannotSend, DownloadDamaged, UnknownAnswer
from api.client.gauge import Gauge
from api.client.sse import END, ServerEvent, parse
from api.client.terminal import table
from api.complaint import complain
from grpo_engine.contract.view import Checkpoint, CheckpointFile
from tests.cli.terminal import grpo
from tests.conftest import free_port


def test_a_server_that_is_down_is_answered_with_the_command_that_starts_one(tmp_path: Path) -> None:
    answer = grpo("list", "--url", f"http://127.0.0.1:{free_port()}", cwd=tmp_path)
    assert answer.returncode == 1
    assert "grpo up" in answer.stderr
    assert "Traceback" not in answer.stderr


def test_wrong_usage_is_exit_code_2(tmp_path: Path) -> None:
    assert grpo("submit", "missing.json", cwd=tmp_path).returncode == 2
    assert grpo("fly", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize("content", ["not json", "[]"])
def test_a_job_file_that_is_none_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "job.json").write_text(content)
    answer = grpo("submit", "job.json", cwd=tmp_path)
    assert answer.returncode == 1
    assert "job.json" in answer.stderr


def test_a_server_that_stays_away_ends_a_stream_when_patience_is_over() -> None:
    with Grpo(f"http://127.0.0.1:{free_port()}", patience_s=0.3) as client, pytest.raises(ServerUnreachable):
        next(client.stream_metrics("ftjob-x"))


def test_an_answer_that_is_no_error_object_is_quoted() -> None:
    error = ApiError.from_response(httpx.Response(502, text="<h1>Bad gateway</h1>"))
    assert (error.status, error.code) == (502, "unknown")
    assert "Bad gateway" in error.message


def test_the_openai_base_url_is_taken_too() -> None:
    with Grpo("http://127.0.0.1:1/v1/") as client:
        assert client.base_url == "http://127.0.0.1:1"


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "localhost", "ftp://x", "http://", "http://[", "http://a:b", ""])
def test_an_address_that_is_none_is_named(url: str) -> None:
    with pytest.raises(CannotSend, match=r"http://127\.0\.0\.1:8000"):
        Grpo(url)


def test_what_no_request_can_hold_is_said_before_anything_is_sent() -> None:
    with pytest.raises(CannotSend, match="key"):
        Grpo(api_key="grpo_a\nb")
    with Grpo(f"http://127.0.0.1:{free_port()}", patience_s=0.0) as client:
        for call in (
            lambda: client.set_control("ftjob-1", beta=float("nan")),
            lambda: client.create_job({"seed": float("inf")}),
            lambda: client.create_job({}, idempotency_key="\u2603"),
            lambda: client.job("ftjob-\0"),
            lambda: next(client.stream_events("ftjob-\0")),
        ):
            with pytest.raises(CannotSend):
                call()


def test_another_server_at_the_address_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    with Grpo() as client:
        elsewhere = httpx.MockTransport(lambda _: httpx.Response(200, text="<html>hello</html>"))
        monkeypatch.setattr(client, "_http", httpx.Client(base_url=client.base_url, transport=elsewhere))
        with pytest.raises(UnknownAnswer, match="GRPO_BASE_URL"):
            client.jobs()


def test_brackets_are_words_and_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    complain("pattern [a-z]+ in betas[1] of /tmp/[/x]")
    assert "pattern [a-z]+ in betas[1] of /tmp/[/x]" in capsys.readouterr().err
    table(("name",), [("[red]x[/y]" + "z" * 300,)], [], as_json=False)
    assert "[red]x[/y]" + "z" * 300 in capsys.readouterr().out


def test_a_stream_is_read_event_by_event() -> None:
    lines = [": hb", "id: 1-1", "event: step.completed", 'data: {"step": 1}', "", ": degraded", "data: [DONE]", "", "data: 1", ""]
    assert list(parse(lines)) == [ServerEvent("1-1", "step.completed", {"step": 1}), END]


@given(st.lists(st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3), max_size=5))
def test_any_json_survives_the_stream(items: list[dict[str, str]]) -> None:
    lines: list[str] = []
    for number, item in enumerate(items):
        lines += [f"id: {number}", "event: x", f"data: {json.dumps(item)}", ""]
    assert [event.data for event in parse(lines)] == items


def test_a_step_reads_in_one_line() -> None:
    metrics = {
        "kl/ref/k3/mean": 0.13124, "beta/applied": 0.06, "beta/action": 1, "reward/mean": 0.341,
        "completion/length_mean": 21.4, "time/step_s": 9.81,
    }  # fmt: skip
    words = " ".join(step_line(7, 25, metrics, "k3").plain.split())
    assert words == "step 7/25 kl/ref k3 0.1312 beta 0.0600 raised reward 0.341 length 21.4 9.8 s"


def test_what_a_step_did_not_measure_is_a_dash_and_nan_says_so() -> None:
    words = " ".join(step_line(1, 9, {"reward/mean": {"value": None, "nonfinite": "nan"}}, "k3").plain.split())
    assert words == "step 1/9 kl/ref k3 - beta - reward nan length - - s"


def test_a_narrow_terminal_gets_a_step_in_eighty_columns() -> None:
    metrics = {"kl/ref/k3/mean": 0.13, "beta/applied": 0.06, "beta/action": 1, "reward/mean": 0.341, "time/step_s": 120.0}
    assert len(step_line(1000, 1000, metrics, "k3", width=80).plain) <= 80


def test_a_curve_shows_gaps_and_extremes() -> None:
    assert sparkline([0.0, 1.0, None, float("nan"), 0.5], 8) == "▁█  ▅"
    assert sparkline([1.0, 1.0], 8) == "▁▁"
    assert sparkline([], 8) == ""
    assert sparkline([0.0, 1.0], 8, "ascii") == "_#"
    assert sparkline([1e308, -1e308], 2) in ("█▁", "▁▁")


@given(st.lists(st.one_of(st.none(), st.floats()), max_size=60), st.integers(min_value=1, max_value=50))
def test_a_curve_fits_its_room_whatever_was_measured(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == min(width, len(values))


def test_the_gauge_fits_forty_columns_and_forgets_what_a_rewind_supersedes() -> None:
    gauge = Gauge(4, "k3")
    for step in (1, 2, 3):
        gauge.add(step, {"kl/ref/k3/mean": 0.1 * step, "beta/applied": 0.04, "reward/mean": 0.5, "time/step_s": 2.0})
    gauge.rewind(1)
    with (screen := Console(width=40, color_system=None)).capture() as capture:
        screen.print(gauge)
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 40
    assert " ".join(lines[0].split()).startswith("1/4")
    assert "25%" in lines[0]
    assert "0:00:06 left" in lines[0]
    assert lines[1].split()[-1] == "0.1"


def test_a_lost_answer_is_asked_for_again_only_where_twice_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    seen: list[tuple[str, str | None]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append((request.method, request.headers.get("idempotency-key")))
        raise httpx.RemoteProtocolError("the connection was closed", request=request)

    with Grpo() as client:
        monkeypatch.setattr(client, "_http", httpx.Client(base_url=client.base_url, transport=httpx.MockTransport(answer)))
        for call, tries in (
            (lambda: client.fork("ftjob-1"), 4),
            (lambda: client.jobs(), 4),
            (lambda: client.set_control("j", beta=1.0), 1),
        ):
            seen.clear()
            with pytest.raises(ServerUnreachable):
                call()
            assert len(seen) == tries
            assert len(set(seen)) == 1


class Shelf(Grpo):
    """A server's files, cut off where the script says."""

    def __init__(self, files: dict[str, bytes], cut_after: int | None = None) -> None:
        super().__init__()
        self._files = files
        self._cut_after = cut_after
        self.starts: list[int] = []

    def read_checkpoint_file(self, checkpoint: Checkpoint, name: str, start: int = 0) -> Iterator[bytes]:
        self.starts.append(start)
        content = self._files[name][start:]
        if self._cut_after is not None:
            yield content[: self._cut_after]
            self._cut_after = None
            raise httpx.ReadError("the line was cut")
        yield content


def listed(files: dict[str, bytes], **changes: Any) -> Checkpoint:
    members = [CheckpointFile(name=name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest()) for name, data in files.items()]
    fields: dict[str, Any] = {
        "id": "ftckpt-1", "created_at": 1, "fine_tuned_model_checkpoint": "ftckpt-1", "fine_tuning_job_id": "ftjob-1",
        "step_number": 10, "metrics": {}, "name": "step-000010", "bytes": 1, "files": members,
    }  # fmt: skip
    return Checkpoint(**{**fields, **changes})


FILES = {"model.safetensors": bytes(range(256)) * 40, "config.json": b"{}", "empty.txt": b"", "adapter/adapter_config.json": b"{}"}


def test_a_download_goes_on_where_it_was_cut(tmp_path: Path) -> None:
    with Shelf(FILES, cut_after=1000) as shelf:
        with pytest.raises(ServerUnreachable):
            download(shelf, listed(FILES), tmp_path)
        download(shelf, listed(FILES), tmp_path)
    assert shelf.starts[:2] == [0, 1000]
    assert {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == FILES


def test_a_finished_download_is_not_fetched_again(tmp_path: Path) -> None:
    with Shelf(FILES) as shelf:
        download(shelf, listed(FILES), tmp_path)
        shelf.starts.clear()
        download(shelf, listed(FILES), tmp_path)
        assert shelf.starts == []


def test_a_damaged_download_is_thrown_away(tmp_path: Path) -> None:
    with Shelf({**FILES, "config.json": b"[]"}) as shelf, pytest.raises(DownloadDamaged, match=r"config\.json"):
        download(shelf, listed(FILES), tmp_path)
    assert not list(tmp_path.glob("config.json*"))


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    for name in ("../evil", "adapter/../../evil", "/evil", "a/b/evil"):
        with Shelf({name: b"x"}) as shelf, pytest.raises(DownloadDamaged):
            download(shelf, listed({name: b"x"}), tmp_path / "in")
    assert not (tmp_path / "evil").exists()


def test_checkpoints_are_chosen_by_id_name_or_step() -> None:
    old, new = listed({}), listed({}, id="ftckpt-2", step_number=20, name="step-000020")
    assert choose([old, new], None) is new
    assert [choose([old, new], wanted) for wanted in ("ftckpt-1", "step-000010", "10")] == [old] * 3
    with pytest.raises(ClientError, match="ftckpt-2"):
        choose([old, new], "30")
    with pytest.raises(ClientError, match="no published checkpoint"):
        choose([], None)
