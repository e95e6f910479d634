"""Jobs on an environment, and graders that ask a service, over HTTP against one server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from standardwebhooks import Webhook

from api.sse import StreamLimits
from grpo_engine.outbound.signature import new_secret
from jobs.settings import Settings
from tests.api.conftest import upload, write_model
from tests.conftest import ValkeyServer
from tests.listener import Heard, Reply, listen
from tests.server import Server
from tests.tiny import make_classifier

JOBS = "/v1/fine_tuning/jobs"
GRADERS = "/v1/fine_tuning/alpha/graders"
TASK: dict[str, Any] = {"type": "reasoning_gym", "name": "chain_sum", "config": {"max_terms": 2, "max_digits": 1}, "size": 12, "seed": 3}


class Receiver:
    """A grading service on loopback: a completion's score is its length."""

    def __init__(self) -> None:
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.secret = new_secret()
        self.host = ""

    def hear(self, heard: Heard) -> Reply:
        self.got.append((heard.headers, heard.body))
        scores = [len(sample["output_text"]) for sample in json.loads(heard.body)["samples"]]
        return Reply(json.dumps({"scores": scores}).encode())


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    state = Receiver()
    with listen(state.hear) as address:
        state.host = address.removeprefix("http://")
        yield state


@pytest.fixture(scope="module")
def shared_server(tmp_path_factory: pytest.TempPathFactory, valkey_session: ValkeyServer, receiver: Receiver) -> Iterator[Server]:
    """With the receiver as the one host that remote graders may be called on."""
    root = tmp_path_factory.mktemp("environments")
    (root / "secret").write_text(receiver.secret + "\n")
    chosen = Settings.from_env(
        {
            "GRPO_DATA_DIR": str(root / "data"),
            "REDIS_URL": valkey_session.url,
            "GRPO_MODEL_DIR": str(write_model(root / "models")),
            "GRPO_MIN_FREE_BYTES": "0",
            "GRPO_REMOTE_GRADER_HOSTS": receiver.host,
            "GRPO_REMOTE_GRADER_SECRET_FILE": str(root / "secret"),
            "GRPO_REMOTE_GRADER_ALLOW_PRIVATE": "true",
        }
    )
    running = Server(chosen.resolved(), StreamLimits(heartbeat_s=0.2, poll_s=0.05))
    yield running
    running.stop()


@pytest.fixture
def patient(shared_server: Server) -> Iterator[httpx.Client]:
    """Each making of rows loads the package in a process of its own, which takes seconds, on a busy machine many."""
    with shared_server.client() as opened:
        opened.timeout = httpx.Timeout(300)
        yield opened


def body(grpo: dict[str, Any], **beside: Any) -> dict[str, Any]:
    return {"model": "tiny", "method": {"type": "grpo", "grpo": {"limits": {"num_steps": 10}, **grpo}}, **beside}


@pytest.mark.slow
def test_a_job_on_an_environment_has_its_rows_made_when_it_is_created(shared_server: Server, patient: httpx.Client) -> None:
    wanted = body({"environment": TASK, "evaluation": {"every": 5, "max_prompts": 4}})
    checked = patient.post(f"{JOBS}/validate", json=wanted)
    assert (checked.status_code, checked.json()["rows"]) == (200, 12), checked.text
    made = patient.post(JOBS, json=wanted)
    assert made.status_code == 201, made.text
    job = made.json()
    assert (job["training_file"], job["validation_file"]) == (None, None)
    assert job["method"]["grpo"]["environment"] == {**TASK, "answer": "auto"}
    inputs = shared_server.settings.data_dir / "jobs" / job["id"] / "inputs"
    rows = {path.stem: [json.loads(line) for line in path.read_text().splitlines()] for path in inputs.iterdir()}
    assert {name: len(found) for name, found in rows.items()} == {"training": 12, "validation": 4}
    assert all({"messages", "question", "answer", "metadata"} <= set(row) for row in rows["training"])
    assert rows["training"][0]["question"] not in {row["question"] for row in rows["validation"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"name": "chain_sums"}, "name", "did you mean chain_sum"),
        ({"config": {"max_term": 2}}, "config.max_term", "did you mean max_terms"),
    ],
)
def test_what_the_task_does_not_take_is_refused_by_its_field(
    patient: httpx.Client, changes: dict[str, Any], param: str, words: str
) -> None:
    before = patient.get(JOBS).json()["data"]
    answer = patient.post(JOBS, json=body({"environment": {**TASK, "config": {}, **changes}}))
    assert answer.status_code == 422, answer.text
    error = answer.json()["error"]
    assert error["param"] == f"method.grpo.environment.{param}"
    assert words in error["message"]
    assert patient.get(JOBS).json()["data"] == before


@pytest.mark.parametrize(
    ("grpo", "beside", "param"),
    [
        ({"environment": TASK, "grader": {"type": "math"}}, {}, "method.grpo.grader"),
        ({"environment": TASK}, {"training_file": "file-1"}, "training_file"),
        ({"environment": {**TASK, "seed": -1}}, {}, "method.grpo.environment.seed"),
        ({"environment": {**TASK, "type": "gym"}}, {}, "method.grpo.environment.type"),
    ],
)
def test_what_an_environment_excludes_is_refused(
    shared_client: httpx.Client, grpo: dict[str, Any], beside: dict[str, Any], param: str
) -> None:
    answer = shared_client.post(JOBS, json=body(grpo, **beside))
    assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.text


def test_a_remote_grader_is_tried_over_http(shared_client: httpx.Client, receiver: Receiver) -> None:
    receiver.got.clear()
    remote = {"type": "remote", "name": "far", "url": f"http://{receiver.host}/grade"}
    asked = {"grader": remote, "model_sample": "12345", "item": {"answer": "5"}}
    answer = shared_client.post(f"{GRADERS}/run", json=asked)
    assert answer.status_code == 200, answer.text
    assert (answer.json()["reward"], answer.json()["metadata"]["errors"]["message"]) == (5.0, None)
    ((headers, sent),) = receiver.got
    assert Webhook(receiver.secret).verify(sent, headers)["samples"] == [
        {"item": {"answer": "5"}, "output_text": "12345", "num_tokens": None}
    ]


def test_a_job_with_a_remote_grader_is_admitted_without_a_call(shared_client: httpx.Client, receiver: Receiver) -> None:
    receiver.got.clear()
    remote = {"type": "remote", "url": f"http://{receiver.host}/grade"}
    wanted = body({"grader": remote}, training_file=upload(shared_client))
    assert shared_client.post(JOBS, json=wanted).status_code == 201
    assert receiver.got == []


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/grade", "https://example.org/grade"])
def test_a_host_the_operator_does_not_list_is_refused_by_its_field(shared_client: httpx.Client, url: str) -> None:
    remote = {"type": "remote", "url": url}
    for path, asked, param in (
        (f"{GRADERS}/run", {"grader": remote, "model_sample": "x"}, "grader.url"),
        (f"{GRADERS}/validate", {"grader": remote}, "grader.url"),
        (JOBS, body({"grader": remote}, training_file=upload(shared_client)), "method.grpo.grader.url"),
    ):
        answer = shared_client.post(path, json=asked)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.text


@pytest.fixture
def judge(shared_server: Server) -> dict[str, Any]:
    """A reward model beside the model that is trained."""
    models = shared_server.settings.model_dir
    assert models is not None
    if not (models / "judge").exists():
        make_classifier(models / "judge")
    return {"type": "score_model", "model": "judge", "input": [{"role": "user", "content": "{{item.question}}: {{sample.output_text}}"}]}


def test_a_classifier_is_looked_for_before_anything_is_loaded(shared_client: httpx.Client, judge: dict[str, Any]) -> None:
    def told(**settings: Any) -> httpx.Response:
        return shared_client.post(f"{GRADERS}/validate", json={"grader": {**judge, **settings}})

    assert told().json()["grader"]["truncate"] == "refuse"
    for model, words in (("tiny", "no classification head"), ("nobody", "is not known"), ("../judge", "is not known")):
        answer = told(model=model)
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "grader.model"
        assert words in answer.json()["error"]["message"]
    assert told(label=1).json()["error"]["param"] == "grader.label"
    assert told(sampling_params={"temperature": 0.0}).json()["error"]["code"] == "not_implemented"
    assert told(model="organisation/on-the-hub").status_code == 200
    tried = shared_client.post(f"{GRADERS}/run", json={"grader": {**judge, "model": "organisation/on-the-hub"}, "model_sample": "4"})
    assert "put it below GRPO_MODEL_DIR" in tried.json()["error"]["message"]


@pytest.mark.slow
def test_a_classifier_is_tried_by_itself_and_among_others(patient: httpx.Client, judge: dict[str, Any]) -> None:
    asked = {"grader": judge, "model_sample": "4", "item": {"question": "2+2"}}
    alone = patient.post(f"{GRADERS}/run", json=asked).json()
    parts = {"judge": judge, "right": {"type": "string_check", "reference": "4"}}
    several = {**asked, "grader": {"type": "multi", "graders": parts, "calculate_output": "judge + 10 * right"}}
    assert patient.post(f"{GRADERS}/run", json=several).json()["reward"] == pytest.approx(alone["reward"] + 10)
    unread = patient.post(f"{GRADERS}/run", json={**asked, "item": {}}).json()
    assert unread["reward"] is None
    assert unread["metadata"]["errors"]["invalid_variable_error"] is True
