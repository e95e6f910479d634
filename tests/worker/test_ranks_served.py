"""A job of two processes through the whole server: to its end, and cancelled in the middle."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.stack import LiveStack, job_spec, live_stack, wait_for

pytestmark = pytest.mark.faults
TWO = {"device": "cpu", "precision": "fp32", "cpu_ranks": 2}
DEADLINE_S = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveStack]:
    with live_stack(tmp_path_factory.mktemp("served")) as stack:
        yield stack


def test_a_job_of_two_processes_succeeds(server: LiveStack) -> None:
    job_id = server.client.create_job(job_spec(server.upload(), num_steps=3, resources=TWO)).id
    wait_for(lambda: server.client.job(job_id).is_terminal, "the end of the job", DEADLINE_S)
    job = server.client.job(job_id)
    assert job.status == "succeeded", job.error
    assert server.steps(job_id) == [1, 2, 3]
    assert server.engines(job_id) == []


def test_cancelled_in_the_middle_leaves_no_process(server: LiveStack) -> None:
    job_id = server.client.create_job(job_spec(server.upload(), num_steps=100_000, resources=TWO)).id
    wait_for(lambda: server.steps(job_id), "the first step", DEADLINE_S)
    assert len(server.engines(job_id)) == 3, "two ranks and the process that started them"
    server.client.cancel(job_id)
    wait_for(lambda: server.client.job(job_id).is_terminal, "the cancel", DEADLINE_S)
    assert server.client.job(job_id).status == "cancelled"
    wait_for(lambda: not server.engines(job_id), "the ranks to be gone", 20)
