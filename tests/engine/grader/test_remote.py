"""The remote grader over real HTTP: what is sent, what is taken for a score, and what never becomes one."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from standardwebhooks import Webhook

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.contract.grader import RemotePolicy
from grpo_engine.grader import Means, Sample, Score, check_grader, make_grader
from grpo_engine.outbound.signature import new_secret
from tests.engine.grader.build import grader
from tests.listener import Heard, Reply, listen


class Service:
    """A grading service that answers as it is told."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.statuses: list[int] = []
        self.headers: dict[str, str] = {}
        self.hold: threading.Event | None = None
        self.answer: Callable[[list[dict[str, Any]]], bytes] = lambda samples: json.dumps(
            {"scores": [len(sample["output_text"]) for sample in samples]}
        ).encode()

    def hear(self, heard: Heard) -> Reply:
        self.got.append((heard.headers, heard.body))
        if self.hold is not None:
            self.hold.wait(20)
        content = self.answer(json.loads(heard.body)["samples"])
        return Reply(content, self.statuses.pop(0) if self.statuses else 200, self.headers)


@pytest.fixture
def service() -> Iterator[Service]:
    state = Service("")
    with listen(state.hear) as address:
        state.url = f"{address}/grade"
        yield state
        if state.hold is not None:
            state.hold.set()


@pytest.fixture
def secret() -> str:
    return new_secret()


@pytest.fixture
def means(service: Service, secret: str, tmp_path: Path) -> Means:
    path = tmp_path / "secret"
    path.write_text(secret + "\n")
    host = service.url.split("/")[2]
    return Means(RemotePolicy(hosts=[host], secret_file=str(path), allow_private=True))


def ask(service: Service, means: Means, texts: list[str], **settings: Any) -> list[Score]:
    raw = {"type": "remote", "url": service.url, "retries": 0, **settings}
    with make_grader(grader(raw), means=means) as ready:
        return ready.score([Sample({"row": number}, text, {"num_tokens": number}) for number, text in enumerate(texts)])


def test_batches_are_signed_and_scores_come_back_in_order(service: Service, means: Means, secret: str) -> None:
    scores = ask(service, means, ["a", "bb", "", "dddd", "eé"], batch_size=2)
    assert [score.value for score in scores] == [1, 2, 0, 4, 2]
    assert sorted(len(json.loads(body)["samples"]) for _, body in service.got) == [1, 2, 2]
    for headers, body in service.got:
        told = Webhook(secret).verify(body, headers)
        assert told["id"] == headers["webhook-id"]
    first = min((json.loads(body)["samples"][0] for _, body in service.got), key=lambda sample: sample["item"]["row"])
    assert first == {"item": {"row": 0}, "output_text": "a", "num_tokens": 0}


def test_one_completion_may_be_answered_with_one_score(service: Service, means: Means) -> None:
    service.answer = lambda samples: b'{"score": 0.5}'
    assert [score.value for score in ask(service, means, ["x", "y"], batch_size=1)] == [0.5, 0.5]
    assert all(math.isnan(score.value) for score in ask(service, means, ["x", "y"], batch_size=2))


def test_it_combines_with_graders_of_both_kinds(service: Service, means: Means) -> None:
    raw = {
        "type": "multi",
        "graders": {
            "far": {"type": "remote", "url": service.url},
            "same": {"type": "string_check", "reference": "aa"},
            "inner": {"type": "multi", "graders": {"far": {"type": "remote", "url": service.url}}, "weights": {"far": 10.0}},
            "alike": {"type": "text_similarity", "reference": "aa"},
        },
        "weights": {"far": 1.0, "same": 100.0, "inner": 1.0, "alike": 0.0},
    }
    with make_grader(grader(raw), means=means, processes=1) as ready:
        (score,) = ready.score([Sample({}, "aa")])
    assert (score.value, score.error) == (122.0, None)
    assert score.parts["inner.far"] == 2.0


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (b"no json", "not JSON"),
        (b'{"scores": [NaN]}', "not JSON"),
        (b"[1.0]", "must be"),
        (b'{"scores": [1.0], "more": 1}', "must be"),
        (b'{"scores": 1.0}', "must be"),
        (b'{"scores": [1.0, 2.0]}', "2 scores for 1"),
        (b'{"scores": ["1.0"]}', "instead of one number"),
        (b'{"scores": [true]}', "instead of one number"),
        (b'{"scores": [null]}', "null"),
        (b'{"scores": [1e308]}', "outside the range"),
        (b'{"scores": [1' + b"0" * 400 + b"]}", "outside the range"),
        (b'{"scores": [' + b" " * 2_000_000 + b"1]}", "longer than"),
        (b"\xff\xfe", "not JSON"),
        (b"", "not JSON"),
    ],
)
def test_what_is_no_score_is_a_fault(service: Service, means: Means, answer: bytes, words: str) -> None:
    service.answer = lambda samples: answer
    (score,) = ask(service, means, ["x"])
    assert math.isnan(score.value)
    assert words in (score.error or "")
    assert len(service.got) == 1, "an answer of the wrong shape is not asked for again"


def test_a_score_outside_the_range_is_a_fault_of_its_completion(service: Service, means: Means) -> None:
    scores = ask(service, means, ["a", "bbbb"], range=[0.0, 2.0])
    assert scores[0].value == 1.0
    assert (scores[1].kind, math.isnan(scores[1].value)) == ("not_a_number", True)


def test_trouble_that_passes_is_tried_again_under_the_same_id(service: Service, means: Means) -> None:
    service.statuses, service.headers = [503, 429], {"retry-after": "0"}
    (score,) = ask(service, means, ["abc"], retries=2)
    assert score.value == 3.0
    assert len({headers["webhook-id"] for headers, _ in service.got}) == 1
    service.statuses = [500, 500]
    (score,) = ask(service, means, ["abc"], retries=1)
    assert "500" in (score.error or "")


@pytest.mark.parametrize("status", [301, 307, 400, 401, 404])
def test_a_refusal_or_a_redirect_is_not_tried_again(service: Service, means: Means, status: int) -> None:
    service.statuses, service.headers = [status], {"location": service.url}
    (score,) = ask(service, means, ["abc"], retries=3)
    assert str(status) in (score.error or "")
    assert len(service.got) == 1


def test_a_service_that_hangs_costs_its_time_limit(service: Service, means: Means) -> None:
    service.hold = threading.Event()
    (score,) = ask(service, means, ["abc"], timeout_s=0.2)
    assert score.kind == "timeout"


@pytest.mark.parametrize(
    ("url", "hosts", "private", "words"),
    [
        ("https://example.org/grade", [], False, "switched off"),
        ("https://example.org/grade", ["other.org"], False, "not among"),
        ("https://example.org:8443/grade", ["example.org"], False, "not among"),
        ("http://example.org/grade", ["example.org"], False, "https"),
        ("https://user:pass@example.org/", ["example.org"], False, "no user name"),
        ("https://example.org.evil.net/", ["example.org"], False, "not among"),
        ("https://169.254.169.254/latest", ["169.254.169.254"], False, "not a public"),
        ("https://[::ffff:10.0.0.1]/", ["::ffff:10.0.0.1"], False, "not a public"),
        ("https://localhost/", ["localhost"], False, "this machine"),
    ],
)
def test_only_public_hosts_the_operator_lists_are_called(url: str, hosts: list[str], private: bool, words: str) -> None:
    means = Means(RemotePolicy(hosts=hosts, secret_file="none", allow_private=private))
    with pytest.raises(InvalidRequest, match=words) as caught:
        check_grader(
            grader({"type": "multi", "graders": {"far": {"type": "remote", "url": url}}, "weights": {"far": 1.0}}), "g", means=means
        )
    assert caught.value.param == "g.graders.far.url"


def test_a_name_that_leads_inside_is_not_called(service: Service, means: Means) -> None:
    """The check of the name passes; where it leads is checked when it is called."""
    assert means.remote is not None
    inside = RemotePolicy(hosts=["localtest.invalid"], secret_file=means.remote.secret_file)
    with make_grader(grader({"type": "remote", "url": "https://localtest.invalid/", "retries": 0}), means=Means(inside)) as ready:
        (score,) = ready.score([Sample({}, "x")])
    assert math.isnan(score.value)
    assert service.got == []


@pytest.mark.parametrize("content", ["", "no secret", "whsec_", "whsec_!!!!"])
def test_without_a_usable_secret_nothing_is_called(service: Service, means: Means, content: str) -> None:
    assert means.remote is not None
    Path(means.remote.secret_file).write_text(content)
    with pytest.raises(InvalidRequest, match="secret") as caught:
        ask(service, means, ["x"])
    assert "!!!!" not in caught.value.message
    assert service.got == []
