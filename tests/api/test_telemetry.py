"""Metrics, logs, control, graders, models, readiness: reading what a job does and changing it."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.conftest import Hand, Server, create, event, eventually, step_event
from worker.engine import cap_log

JOBS = "/v1/fine_tuning/jobs"
KL = "kl/ref/k3/mean"


@pytest.fixture
def job(client: httpx.Client, hand: Hand) -> str:
    job_id = create(client)
    epoch = hand.start(job_id)
    odd = {2: math.nan, 3: math.inf, 4: -math.inf}
    hand.ingest(job_id, *(step_event(epoch, n, n, **({"loss/total": odd[n]} if n in odd else {})) for n in range(1, 11)))
    return job_id


class TestMetrics:
    def test_rows_in_step_order_with_odd_numbers_spelled(self, client: httpx.Client, job: str) -> None:
        answer = client.get(f"{JOBS}/{job}/metrics")
        page = json.loads(answer.content, parse_constant=lambda name: pytest.fail(f"{name} on the wire"))
        assert [row["step"] for row in page["data"]] == list(range(1, 11))
        assert page["data"][0]["metrics"][KL] == 0.01
        assert "loss/total" not in page["data"][0]["metrics"]
        spelled = [row["metrics"]["loss/total"]["nonfinite"] for row in page["data"][1:4]]
        assert spelled == ["nan", "inf", "-inf"]
        assert isinstance(page["data"][0]["logged_at"], int)

    def test_names_and_ranges(self, client: httpx.Client, job: str) -> None:
        page = client.get(f"{JOBS}/{job}/metrics", params={"names": f"{KL},reward/mean", "global_step_from": 3, "global_step_to": 5}).json()
        assert [row["step"] for row in page["data"]] == [3, 4, 5]
        assert set(page["data"][0]["metrics"]) == {KL, "reward/mean"}
        page = client.get(f"{JOBS}/{job}/metrics", params={"limit": 4}).json()
        assert (len(page["data"]), page["has_more"]) == (4, True)
        page = client.get(f"{JOBS}/{job}/metrics", params={"logged_at_from": 1_700_000_009}).json()
        assert [row["step"] for row in page["data"]] == [9, 10]

    def test_an_unknown_name_is_named_with_the_nearest(self, client: httpx.Client, job: str) -> None:
        answer = client.get(f"{JOBS}/{job}/metrics", params={"names": "kl/ref/k3/men"})
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == "names"
        assert KL in answer.json()["detail"]

    def test_csv(self, client: httpx.Client, job: str) -> None:
        answer = client.get(f"{JOBS}/{job}/metrics", params={"names": f"{KL},loss/total"}, headers={"accept": "text/csv"})
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        assert answer.headers["content-type"].startswith("text/csv")
        assert [row["loss/total"] for row in rows[:5]] == ["", "nan", "inf", "-inf", ""]
        assert float(rows[6][KL]) == 0.07

    def test_accept_chooses_the_format_of_rows_and_of_buckets(self, client: httpx.Client, job: str) -> None:
        chosen = {
            "text/csv": "text/csv",
            "TEXT/CSV": "text/csv",
            "text/*": "text/csv",
            "text/csv; charset=utf-8": "text/csv",
            "text/csv, */*": "text/csv",
            "text/csv;q=0.5, application/json;Q=0.4": "text/csv",
            "text/csv;q=0.4, application/json;q=0.5": "application/json",
            "text/csv;q=0, */*": "application/json",
            "text/csv;q=0, text/*": "application/json",
            "text/csv;q=0": "application/json",
            "text/csv;q=2": "application/json",
            "application/json, text/csv": "application/json",
            "*/*": "application/json",
            "x-text/csv": "application/json",
            "text/html": "application/json",
            "": "application/json",
        }
        for accept, kind in chosen.items():
            for params in ("", f"?names={KL}", "?resolution=3"):
                answer = client.get(f"{JOBS}/{job}/metrics{params}", headers={"accept": accept})
                assert answer.headers["content-type"].startswith(kind), (accept, params)
                assert answer.headers["vary"] == "accept"

    def test_two_accept_lines_are_one_header(self, client: httpx.Client, job: str) -> None:
        answer = client.get(f"{JOBS}/{job}/metrics", headers=[("accept", "application/json;q=0.1"), ("accept", "text/csv")])
        assert answer.headers["content-type"].startswith("text/csv")

    def test_buckets_as_csv(self, client: httpx.Client, job: str) -> None:
        params: dict[str, str | int] = {"names": f"loss/total,{KL},reward/std", "resolution": 3}
        thinned = client.get(f"{JOBS}/{job}/metrics", params=params).json()["data"]
        answer = client.get(f"{JOBS}/{job}/metrics", params=params, headers={"accept": "text/csv"})
        rows = list(csv.DictReader(io.StringIO(answer.text)))
        shown = [(series["name"], series["unit"], bucket) for series in thinned for bucket in series["buckets"]]
        assert [row["name"] for row in rows] == [KL, KL, KL, "loss/total"]
        for row, (name, unit, bucket) in zip(rows, shown, strict=True):
            assert (row["name"], row["unit"]) == (name, unit)
            assert [int(row[key]) for key in ("step_from", "step_to", "count")] == [bucket[k] for k in ("step_from", "step_to", "count")]
        assert [float(row["last"]) for row in rows[:3]] == [0.04, 0.08, 0.1]
        assert (rows[1]["min_step"], rows[1]["min"], rows[1]["max_step"], rows[1]["max"]) == ("5", "0.05", "8", "0.08")
        assert [rows[3][key] for key in ("first", "last", "min_step", "min", "max_step", "max")] == ["nan", "-inf", "", "", "", ""]

    def test_resolution_thins_and_keeps_extremes(self, client: httpx.Client, job: str) -> None:
        shown = client.get(f"{JOBS}/{job}/metrics", params={"names": KL, "resolution": 3}).json()
        assert shown["sampled"] is True
        series = shown["data"][0]
        assert (series["name"], series["unit"]) == (KL, "nats/token")
        assert [(bucket["step_from"], bucket["step_to"], bucket["count"]) for bucket in series["buckets"]] == [
            (1, 4, 4),
            (5, 8, 4),
            (9, 10, 2),
        ]
        assert series["buckets"][1]["min"] == {"step": 5, "value": 0.05}
        assert series["buckets"][1]["max"] == {"step": 8, "value": 0.08}

    def test_integrity(self, client: httpx.Client, hand: Hand, job: str) -> None:
        shown = client.get(f"{JOBS}/{job}/metrics/integrity").json()
        assert (shown["num_steps"], shown["missing_steps"], shown["is_complete"], shown["ingest_lag"]) == (10, [], True, 0)
        hand.publish(job, step_event(1, 11, 11), step_event(1, 12, 12))
        assert client.get(f"{JOBS}/{job}/metrics/integrity").json()["ingest_lag"] == 2
        hand.ingest(job, step_event(1, 11, 13))
        shown = client.get(f"{JOBS}/{job}/metrics/integrity").json()
        assert (shown["missing_steps"], shown["is_complete"]) == ([11, 12], False)


class TestControl:
    def test_a_change_is_numbered_and_answered_by_the_engine(self, client: httpx.Client, hand: Hand, job: str) -> None:
        before = client.get(f"{JOBS}/{job}/control")
        assert before.json()["beta"] == 0.04
        answer = client.patch(f"{JOBS}/{job}/control", json={"beta": 0.1}, headers={"if-match": before.headers["etag"]})
        assert answer.status_code == 202
        assert (answer.json()["number"], answer.json()["status"], answer.json()["actor"]) == (1, "pending", "local")
        assert answer.headers["etag"] != before.headers["etag"]
        applied = {"command": 1, "effective_step": 11, "old": {"beta": 0.04}, "new": {"beta": 0.1}, "actor": "local"}
        hand.ingest(job, event(1, 11, "control.applied", 11, **applied))
        command = client.get(f"{JOBS}/{job}/control").json()["commands"][0]
        assert (command["status"], command["effective_step"], command["old"]) == ("applied", 11, {"beta": 0.04})

    def test_before_the_first_step_the_settings_are_those_posted(self, client: httpx.Client) -> None:
        rule = {"rule": "deadband", "value": 0.3, "target": 0.05, "update_every": 1, "ema_decay": None}
        shown = client.get(f"{JOBS}/{create(client, beta=rule, optimizer={'learning_rate': 2e-5})}/control").json()
        assert (shown["beta"], shown["target"], shown["learning_rate"], shown["commands"]) == (0.3, 0.05, 2e-5, [])

    def test_if_match_guards_against_a_change_in_between(self, client: httpx.Client, job: str) -> None:
        etag = client.get(f"{JOBS}/{job}/control").headers["etag"]
        assert client.patch(f"{JOBS}/{job}/control", json={"beta": 0.1}, headers={"if-match": etag}).status_code == 202
        late = client.patch(f"{JOBS}/{job}/control", json={"beta": 0.2}, headers={"if-match": etag})
        assert (late.status_code, late.json()["error"]["code"]) == (412, "precondition_failed")
        assert len(client.get(f"{JOBS}/{job}/control").json()["commands"]) == 1

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({}, "beta"),
            ({"beta": -1}, "beta"),
            ({"bta": 1}, "bta"),
            ({"learning_rate": 0}, "learning_rate"),
            ({"target": 0.1}, "target"),
            ({"beta": "0.1"}, "beta"),
        ],
    )
    def test_a_bad_change_names_its_field(self, client: httpx.Client, job: str, body: dict[str, Any], param: str) -> None:
        answer = client.patch(f"{JOBS}/{job}/control", json=body)
        assert answer.status_code == 422
        assert answer.json()["error"]["param"] == param

    @pytest.mark.parametrize(("beta", "status"), [(0.009, 422), (0.01, 202), (0.5, 202), (0.51, 422), (0, 422)])
    def test_beta_stays_inside_the_bounds_of_its_rule(self, client: httpx.Client, beta: float, status: int) -> None:
        rule = {"rule": "ppo", "value": 0.04, "target": 0.1, "min": 0.01, "max": 0.5}
        job_id = create(client, beta=rule)
        answer = client.patch(f"{JOBS}/{job_id}/control", json={"beta": beta})
        assert answer.status_code == status
        assert status == 202 or answer.json()["error"]["param"] == "beta"
        assert len(client.get(f"{JOBS}/{job_id}/control").json()["commands"]) == (status == 202)

    def test_without_a_reference_beta_stays_0(self, client: httpx.Client) -> None:
        job_id = create(client, beta=0)
        answer = client.patch(f"{JOBS}/{job_id}/control", json={"beta": 0.1})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "reference_not_loaded")
        assert answer.headers["x-should-retry"] == "false"

    def test_a_finished_job_changes_no_more(self, client: httpx.Client) -> None:
        job_id = create(client)
        client.post(f"{JOBS}/{job_id}/cancel")
        assert client.patch(f"{JOBS}/{job_id}/control", json={"beta": 0.1}).status_code == 409


class TestLogs:
    def test_the_tail_of_an_attempts_log(self, client: httpx.Client, server: Server, job: str) -> None:
        path = server.settings.data_dir / "jobs" / job / "attempts" / "1" / "engine.log"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(b"line %d\n" % n for n in range(1000)) + b"odd \xff byte\n")
        answer = client.get(f"{JOBS}/{job}/logs", params={"tail": 2})
        assert answer.text == "line 999\nodd \ufffd byte\n"
        assert answer.headers["x-attempt"] == "1"
        assert client.get(f"{JOBS}/{job}/logs", params={"attempt": 2}).status_code == 404

    def test_a_shortened_log_goes_on_where_its_older_part_ends(self, client: httpx.Client, server: Server, job: str) -> None:
        path = server.settings.data_dir / "jobs" / job / "attempts" / "1" / "engine.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"".join(b"line %d\n" % n for n in range(200_000)))
        dropped = cap_log(path, 10_000, 96)
        with path.open("ab") as log:
            log.write(b"after\n")
        answer = client.get(f"{JOBS}/{job}/logs")
        *older, mark, after = answer.text.splitlines()
        assert older == [f"line {n}" for n in range(199_992, 200_000)]
        assert f"{dropped} bytes dropped" in mark
        assert after == "after"
        assert int(answer.headers["x-log-bytes"]) == 96 + path.stat().st_size
        assert client.get(f"{JOBS}/{job}/logs", params={"tail": 3}).text.splitlines() == [older[-1], mark, "after"]
        path.unlink()
        assert client.get(f"{JOBS}/{job}/logs", params={"tail": 1}).text == "line 199999\n", "between the two moments of shortening"

    def test_a_link_planted_as_the_older_part_is_not_followed(self, client: httpx.Client, server: Server, job: str, tmp_path: Path) -> None:
        (tmp_path / "secret").write_text("secret\n")
        path = server.settings.data_dir / "jobs" / job / "attempts" / "1" / "engine.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("plain\n")
        path.with_name("engine.log.1").symlink_to(tmp_path / "secret")
        assert client.get(f"{JOBS}/{job}/logs").text == "plain\n"

    def test_before_the_first_attempt_there_is_none(self, client: httpx.Client) -> None:
        assert client.get(f"{JOBS}/{create(client)}/logs").status_code == 404


class TestGraders:
    RUN = "/v1/fine_tuning/alpha/graders/run"

    def test_a_score(self, client: httpx.Client) -> None:
        grader = {
            "type": "multi",
            "graders": {
                "exact": {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"},
                "bare": {"type": "regex", "pattern": "^[0-9]+$"},
            },
            "weights": {"exact": 0.7, "bare": 0.3},
        }
        answer = client.post(self.RUN, json={"grader": grader, "model_sample": "5", "item": {"answer": "4"}})
        assert answer.status_code == 200, answer.text
        assert answer.json()["reward"] == pytest.approx(0.3)
        assert answer.json()["sub_rewards"] == {"exact": 0.0, "bare": 1.0}
        assert answer.json()["metadata"]["errors"]["invalid_variable_error"] is False

    def test_a_missing_field_is_an_error_and_never_a_zero(self, client: httpx.Client) -> None:
        grader = {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}
        answer = client.post(self.RUN, json={"grader": grader, "model_sample": "4", "item": {}}).json()
        assert answer["reward"] is None
        assert answer["metadata"]["errors"]["invalid_variable_error"] is True
        assert "item.answer" in answer["metadata"]["errors"]["message"]

    def test_validate_echoes_defaults_and_names_what_is_wrong(self, client: httpx.Client) -> None:
        path = "/v1/fine_tuning/alpha/graders/validate"
        good = {"type": "regex", "pattern": "a+"}
        assert client.post(path, json={"grader": good}).json()["grader"]["input"] == "{{sample.output_text}}"
        bad = client.post(path, json={"grader": {"type": "regex", "pattern": "(?=a)"}})
        assert (bad.status_code, bad.json()["error"]["param"]) == (422, "grader.pattern")
        assert client.post(path, json={"grader": {"type": "python", "source": "import os"}}).status_code == 422

    def test_a_regex_bomb_is_linear(self, client: httpx.Client) -> None:
        grader = {"type": "regex", "pattern": "(a+)+$"}
        assert client.post(self.RUN, json={"grader": grader, "model_sample": "a" * 50_000 + "!"}).json()["reward"] == 0.0


def faults(answer: httpx.Response) -> dict[str, str]:
    return {name: words for name, words in answer.json()["checks"].items() if words != "ok"}


class TestModelsAndHealth:
    def test_models(self, client: httpx.Client) -> None:
        listed = client.get("/v1/models").json()
        assert {"smollm2-135m-instruct", "tiny"} <= {model["id"] for model in listed["data"]}
        assert client.get("/v1/models/tiny").json()["kind"] == "local"
        assert client.get("/v1/models/none").status_code == 404

    def test_presets(self, client: httpx.Client) -> None:
        names = {card["name"] for card in client.get("/v1/presets").json()["data"]}
        assert {"recipe_fixed", "recipe_adaptive", "deepseekmath_2024"} <= names

    def test_readiness_names_what_is_missing(self, client: httpx.Client, hand: Hand) -> None:
        assert client.get("/healthz").json() == {"status": "ok"}
        waiting = client.get("/readyz")
        assert waiting.status_code == 503
        assert "grpo worker" in waiting.json()["checks"]["worker"]
        hand.live.worker_heartbeat("worker-1", {"host": "here", "queues": ["grpo-cpu"]})
        assert list(faults(client.get("/readyz"))) == ["dispatcher"]
        hand.live.dispatcher_heartbeat({"pid": 1})
        ready = client.get("/readyz")
        assert (ready.status_code, ready.json()["status"], ready.json()["warnings"]) == (200, "ready", [])

    def test_a_queue_nobody_serves_is_flagged_and_the_server_is_ready_for_others(self, client: httpx.Client, hand: Hand) -> None:
        job_id = create(client, resources={"gpus": 1})
        hand.live.worker_heartbeat("worker-1", {"host": "here", "queues": ["grpo-cpu"]})
        hand.live.dispatcher_heartbeat({"pid": 1})
        ready = client.get("/readyz")
        assert ready.status_code == 200
        assert "1 job waits: no live worker serves grpo-gpu" in ready.json()["warnings"][0]
        assert "no live worker serves grpo-gpu" in client.get(f"{JOBS}/{job_id}").json()["queue"]["note"]

        def is_served() -> bool:
            hand.live.worker_heartbeat("worker-2", {"host": "there", "queues": ["grpo-cpu", "grpo-gpu"]})
            is_quiet = client.get("/readyz").json()["warnings"] == []
            return is_quiet and client.get(f"{JOBS}/{job_id}").json()["queue"]["note"] is None

        eventually(is_served)

    def test_prometheus(self, client: httpx.Client, job: str) -> None:
        text = client.get("/metrics").text
        assert 'grpo_jobs{state="running"} 1.0' in text
        assert f'grpo_job_beta{{job="{job}"}} 0.04' in text
        assert f'grpo_job_step{{job="{job}"}} 10.0' in text
        assert "grpo_redis_up 1.0" in text
