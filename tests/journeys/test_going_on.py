"""From one job to the next: go on from its weights, measure against them, watch a held-out file, read what was sampled."""

from __future__ import annotations

import httpx

from api.client.download import choose
from tests.stack import LiveStack, job_spec


def test_a_second_job_goes_on_from_the_first_and_is_watched(server: LiveStack) -> None:
    training_file, held_out = server.upload(rows=16), server.upload(rows=4)
    first = server.client.create_job(job_spec(training_file, num_steps=2))
    assert server.client.wait(first.id, timeout_s=120).status == "succeeded"
    checkpoint = choose(server.client.checkpoints(first.id), None)

    # The first job's checkpoint is the second one's model and reference. It may go as soon as the job is accepted.
    spec = {**job_spec(training_file, num_steps=2), "model": checkpoint.id, "validation_file": held_out}
    grpo = spec["method"]["grpo"]
    grpo["reference"] = {"source": f"checkpoint:{checkpoint.id}"}
    grpo["evaluation"] = {"every": 2, "max_prompts": 4}
    second = server.client.create_job(spec)
    httpx.delete(f"{server.url}/v1/fine_tuning/jobs/{first.id}/checkpoints/{checkpoint.id}").raise_for_status()
    done = server.client.wait(second.id, timeout_s=120)
    assert done.status == "succeeded", done.error

    # Policy and reference begin as the same weights, so the KL of step 1 is 0.
    rows = server.client.metrics(second.id)
    assert rows[0].metrics["kl/ref/k3/mean"] == 0.0
    assert [("eval/reward_mean" in row.metrics) for row in rows] == [False, True]
    evaluated = [event.data["after_step"] for event in server.client.events(second.id).data if event.event == "evaluation.completed"]
    assert evaluated == [0, 2]

    # What was sampled can be read, with the reward that step 2 reports.
    page = httpx.get(f"{server.url}/v1/fine_tuning/jobs/{second.id}/rollouts", params={"step": 2, "limit": 1000}).raise_for_status().json()
    rewards = [one["reward"] for one in page["data"]]
    assert page["num_completions"] == len(rewards)
    assert abs(sum(rewards) / len(rewards) - rows[1].metrics["reward/mean"]) < 1e-9
    assert all(len(one["token_kl"]) == one["num_tokens"] for one in page["data"])
