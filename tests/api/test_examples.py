"""The examples for other systems say what the server understands: the Airflow DAG's requests and conditions, played on a server."""

from __future__ import annotations

import importlib.util
import json
import sys
import types
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hand, Server, upload

EXAMPLES = Path(__file__).parents[2] / "examples"


class Task:
    """An operator or sensor as far as the example uses one."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.followers: list[Task] = []

    def __rshift__(self, other: Task) -> Task:
        self.followers.append(other)
        return other


class AirflowFailException(Exception):
    """Stands for Airflow's."""


class Dag:
    """Stands for Airflow's."""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings

    def __enter__(self) -> Dag:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def dag(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The example, loaded with stand-ins for what it imports of Airflow."""
    stand_ins: dict[str, dict[str, Any]] = {
        "airflow": {}, "airflow.providers": {}, "airflow.providers.http": {}, "airflow.providers.http.operators": {},
        "airflow.providers.http.sensors": {}, "airflow.exceptions": {"AirflowFailException": AirflowFailException},
        "airflow.providers.http.operators.http": {"HttpOperator": Task}, "airflow.providers.http.sensors.http": {"HttpSensor": Task},
        "airflow.sdk": {"DAG": Dag},
    }  # fmt: skip
    for name, content in stand_ins.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    found = importlib.util.spec_from_file_location("airflow_dag", EXAMPLES / "airflow_dag.py")
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


def test_the_airflow_example_submits_once_and_waits_for_the_outcome(
    dag: types.ModuleType, client: httpx.Client, hand: Hand, server: Server
) -> None:
    submit, wait = dag.submit.settings, dag.wait.settings
    assert dag.submit.followers == [dag.wait]
    assert submit["data"].startswith("{% raw %}")
    job = json.loads(submit["data"].removeprefix("{% raw %}").removesuffix("{% endraw %}"))
    assert job == dag.JOB
    body = json.dumps({**job, "model": "tiny", "training_file": upload(client, b'{"prompt": "1+1=", "reference_answer": "2"}\n' * 8)})
    address = "/" + submit["endpoint"].replace("{{ dag_run.run_id | urlencode }}", "manual__2026-01-01T00%3A00%3A00%2B00%3A00")
    first, second = (client.request(submit["method"], address, content=body, headers=submit["headers"]) for _ in range(2))
    assert (first.status_code, second.status_code) == (201, 200)
    job_id = submit["response_filter"](first)
    assert submit["response_filter"](second) == job_id

    asked = "/" + wait["endpoint"].replace("{{ ti.xcom_pull(task_ids='submit') }}", job_id)
    assert client.request(wait["method"], asked).status_code == 404  # what HttpSensor takes for "not yet"
    hand.start(job_id)
    assert client.request(wait["method"], asked).status_code == 404
    hand.finish(job_id)
    assert wait["response_check"](client.request(wait["method"], asked)) is True


def test_the_airflow_example_fails_with_the_job(dag: types.ModuleType, client: httpx.Client) -> None:
    job = {**dag.JOB, "model": "tiny", "training_file": upload(client, b'{"prompt": "1+1=", "reference_answer": "2"}\n' * 8)}
    job_id = client.post("/v1/fine_tuning/jobs", json=job).json()["id"]
    client.post(f"/v1/fine_tuning/jobs/{job_id}/cancel").raise_for_status()
    with pytest.raises(AirflowFailException, match="cancelled"):
        dag.has_succeeded(client.get(f"/v1/fine_tuning/jobs/{job_id}/outcome"))
