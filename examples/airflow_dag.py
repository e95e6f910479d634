"""An Airflow DAG that trains a model on a GRPO server and fails when the job does.

It needs `apache-airflow-providers-http` and an HTTP connection `grpo` (host: the server's address, extra: the header
`{"Authorization": "Bearer grpo_..."}` where the server has keys). Nothing of the server is installed beside Airflow.

A task that Airflow runs again submits no second job: the key in the address is the DAG run's. The sensor asks for the outcome,
which is 404 until the job has ended; HttpSensor takes a 404 for "not yet".
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from airflow.exceptions import AirflowFailException
from airflow.providers.http.operators.http import HttpOperator
from airflow.providers.http.sensors.http import HttpSensor
from airflow.sdk import DAG

JOB = {
    "model": "smollm2-135m-instruct",
    "training_file": "file-...",
    "method": {
        "type": "grpo",
        "grpo": {
            "beta": 0.04,
            "grader": {"type": "string_check", "reference": "{{item.reference_answer}}", "operation": "eq"},
            "limits": {"num_steps": 25},
        },
    },
}
"""What to train; upload the file once with `grpo files --upload rows.jsonl`."""


def job_id(response: Any) -> str:
    """The id for the tasks that follow."""
    return str(response.json()["id"])


def has_succeeded(response: Any) -> bool:
    """True for a job that succeeded; one that did not fails the task for good, in the server's words."""
    outcome = response.json()
    if outcome["status"] != "succeeded":
        reason = (outcome["error"] or {}).get("message") or outcome["status_reason"]
        raise AirflowFailException(f"job {outcome['job_id']} {outcome['status']}: {reason}")
    return True


with DAG(dag_id="grpo_training", start_date=datetime(2026, 1, 1), schedule=None, catchup=False) as dag:
    submit = HttpOperator(
        task_id="submit",
        http_conn_id="grpo",
        method="PUT",
        endpoint="v1/fine_tuning/jobs/by-key/{{ dag_run.run_id | urlencode }}",
        # Airflow reads templates in `data`; the grader's own braces must reach the server.
        data="{% raw %}" + json.dumps(JOB) + "{% endraw %}",
        headers={"Content-Type": "application/json"},
        response_filter=job_id,
        retries=3,
    )
    wait = HttpSensor(
        task_id="wait",
        http_conn_id="grpo",
        method="GET",
        endpoint="v1/fine_tuning/jobs/{{ ti.xcom_pull(task_ids='submit') }}/outcome",
        response_check=has_succeeded,
        poke_interval=60,
        mode="reschedule",
    )
    submit >> wait
