"""Looking back at runs: rules replayed over their metrics, curves side by side, the frontier, promotion behind gates."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.api.conftest import Hand, Server, create, event, step_event
from tests.api.test_checkpoints import FILES, publish

JOBS = "/v1/fine_tuning/jobs"
COMPARE = "/v1/fine_tuning/compare"
KL = "kl/ref/k3/mean"
FILE = {"name": "config.json", "bytes": 2, "sha256": "0" * 64}


@pytest.fixture
def risen(client: httpx.Client, hand: Hand) -> str:
    """A job whose KL rises by 0.01 a step."""
    job_id = create(client, limits={"num_steps": 30})
    epoch = hand.start(job_id)
    hand.ingest(job_id, *(step_event(epoch, n, n) for n in range(1, 21)))
    return job_id


class TestReplay:
    def test_the_jobs_own_rules(self, client: httpx.Client, risen: str) -> None:
        shown = client.post(f"{JOBS}/{risen}/guardrails/replay", json={}).json()
        assert (shown["num_steps"], shown["last_step"]) == (20, 20)
        fired = [told for told in shown["data"] if told["detector"] == "kl_out_of_control"]
        assert [(told["step"], told["kind"]) for told in fired] == [(13, "fired")]
        assert "would have fired at step 13" in fired[0]["message"]

    def test_other_thresholds_and_a_guardrail(self, client: httpx.Client, risen: str) -> None:
        rules = {
            "diagnostics": {"kl_out_of_control": {"kl": 0.05, "updates": 1}},
            "guardrails": [{"detector": "kl_out_of_control", "action": "stop", "consecutive": 2}],
        }
        shown = client.post(f"{JOBS}/{risen}/guardrails/replay", json=rules).json()["data"]
        mine = [(told["step"], told["kind"]) for told in shown if told["detector"] == "kl_out_of_control"]
        assert mine == [(6, "fired"), (7, "acted")]

    def test_a_rewound_stretch_counts_once(self, client: httpx.Client, hand: Hand, risen: str) -> None:
        hand.ingest(risen, event(1, 21, "run.rewound", None, to_step=5))
        assert client.post(f"{JOBS}/{risen}/guardrails/replay", json={}).json()["num_steps"] == 5

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"diagnostics": {"kl_out_of_contrl": {}}}, "diagnostics.kl_out_of_contrl"),
            ({"diagnostics": {"kl_out_of_control": {"kl": -1}}}, "diagnostics.kl_out_of_control.kl"),
            ({"guardrails": [{"detector": "collapse", "action": "shrug"}]}, "guardrails[0].action.type"),
            ({"rules": []}, "rules"),
        ],
    )
    def test_a_bad_rule_names_its_field(self, client: httpx.Client, risen: str, body: dict[str, Any], param: str) -> None:
        answer = client.post(f"{JOBS}/{risen}/guardrails/replay", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)


def save(hand: Hand, job_id: str, seq: int, step: int, ref_kl: float | None, reward: float | None) -> None:
    data = {"name": f"step-{step:06d}", "step": step, "kind": "published", "files": [FILE], "bytes": 2, "ref_kl": ref_kl, "reward": reward}
    hand.ingest(job_id, event(1, seq, "checkpoint.saved", step, **data))


class TestCompare:
    def test_by_step_and_by_kl(self, client: httpx.Client, hand: Hand, risen: str) -> None:
        other = create(client)
        hand.start(other)
        hand.ingest(other, step_event(1, 1, 1, **{KL: 0.5, "reward/mean": 0.9}), step_event(1, 2, 2, **{KL: float("nan")}))
        shown = client.get(COMPARE, params={"jobs": f"{risen},{other}", "names": "reward/mean"}).json()
        assert [job["job_id"] for job in shown["data"]] == [risen, other]
        assert [point["x"] for point in shown["data"][0]["series"][0]["points"]] == list(range(1, 21))
        shown = client.get(COMPARE, params={"jobs": [risen, other], "align": "kl", "names": "reward/mean"}).json()
        assert shown["data"][0]["kl_metric"] == KL
        assert shown["data"][1]["series"][0]["points"] == [{"step": 1, "x": 0.5, "value": 0.9}]

    def test_without_names_kl_reward_and_beta(self, client: httpx.Client, risen: str) -> None:
        series = client.get(COMPARE, params={"jobs": risen}).json()["data"][0]["series"]
        assert [one["name"] for one in series] == [KL, "reward/mean", "beta/applied"]

    def test_thinning_is_said_and_keeps_the_ends(self, client: httpx.Client, risen: str) -> None:
        shown = client.get(COMPARE, params={"jobs": risen, "names": KL, "limit": 4}).json()
        series = shown["data"][0]["series"][0]
        assert shown["sampled"] is True
        assert series["num_points"] == 20
        assert [point["step"] for point in series["points"]] == [1, 7, 14, 20]

    def test_the_frontier_holds_what_nothing_beats(self, client: httpx.Client, hand: Hand) -> None:
        first, second = create(client), create(client)
        hand.start(first)
        hand.start(second)
        save(hand, first, 1, 1, 0.01, 0.2)
        save(hand, first, 2, 2, 0.05, 0.6)
        save(hand, second, 1, 1, 0.04, 0.5)
        save(hand, second, 2, 2, 0.06, 0.55)
        save(hand, second, 3, 3, None, 0.9)
        points = client.get(COMPARE, params={"jobs": f"{first},{second}"}).json()["frontier"]
        assert [(point["ref_kl"], point["is_on_frontier"]) for point in points] == [
            (0.01, True), (0.04, True), (0.05, True), (0.06, False), (None, False),
        ]  # fmt: skip

    def test_what_cannot_be_compared_is_named(self, client: httpx.Client, risen: str) -> None:
        for params, status, param in (
            ({"jobs": f"{risen},ftjob-none"}, 404, "jobs"),
            ({"jobs": ","}, 422, "jobs"),
            ({}, 422, "jobs"),
            ({"jobs": risen, "names": "kl/nothing"}, 422, "names"),
            ({"jobs": risen, "align": "time"}, 422, "align"),
        ):
            answer = client.get(COMPARE, params=params)
            assert (answer.status_code, answer.json()["error"]["param"]) == (status, param)


class TestPromotion:
    @pytest.fixture
    def saved(self, client: httpx.Client, hand: Hand, server: Server) -> str:
        """Path of a checkpoint with ref_kl 0.02 and no reward."""
        job_id = create(client)
        publish(hand, server, job_id, hand.start(job_id), 1, 5)
        return f"{JOBS}/{job_id}/checkpoints/{client.get(f'{JOBS}/{job_id}/checkpoints').json()['data'][0]['id']}"

    def test_gates_that_hold_promote_and_pin(self, client: httpx.Client, saved: str) -> None:
        answer = client.post(f"{saved}/promote", json={"gates": {"max_ref_kl": 0.02, "min_step": 5}, "note": "good"})
        assert answer.status_code == 200, answer.text
        shown = client.get(saved).json()
        assert shown == answer.json()
        assert (shown["pinned"], shown["promotion"]["gates"]) == (True, {"max_ref_kl": 0.02, "min_step": 5.0})
        listed = {model["id"]: model["promoted_at"] for model in client.get("/v1/models").json()["data"]}
        assert listed[shown["id"]] == shown["promotion"]["promoted_at"]
        assert client.delete(saved).status_code == 409
        assert client.delete(f"{saved}/pin").status_code == 409
        assert client.delete(f"{saved}/promote").json()["promotion"] is None
        assert client.delete(f"{saved}/pin").json()["pinned"] is False
        job = saved.partition("/checkpoints")[0]
        told = [one["event"] for one in client.get(f"{job}/events").json()["data"]]
        assert told[:3] == ["checkpoint.unpinned", "checkpoint.demoted", "checkpoint.promoted"]
        assert client.delete(saved).status_code == 200

    @pytest.mark.parametrize(
        ("gates", "param", "words"),
        [
            ({"max_ref_kl": 0.01}, "gates.max_ref_kl", ("0.02", "0.01", "above")),
            ({"min_reward": 0.5}, "gates.min_reward", ("no reading",)),
            ({"min_step": 6}, "gates.min_step", ("5", "6", "below")),
        ],
    )
    def test_a_gate_that_fails_names_reading_and_bound(
        self, client: httpx.Client, saved: str, gates: dict[str, float], param: str, words: tuple[str, ...]
    ) -> None:
        answer = client.post(f"{saved}/promote", json={"gates": gates})
        assert (answer.status_code, answer.json()["error"]["code"], answer.json()["error"]["param"]) == (409, "gate_failed", param)
        assert all(word in answer.json()["detail"] for word in words)
        assert client.get(saved).json()["promotion"] is None

    def test_a_damaged_checkpoint_is_not_promoted(self, client: httpx.Client, server: Server, saved: str) -> None:
        job_id = saved.split("/")[4]
        folder = server.settings.data_dir / "jobs" / job_id / "attempts" / "1" / "checkpoints" / "step-000005"
        (folder / "tokenizer.json").write_bytes(b"x" * len(FILES["tokenizer.json"]))
        answer = client.post(f"{saved}/promote", json={"gates": {"max_ref_kl": 1}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "checkpoint_damaged")

    def test_pins_are_harmless_to_repeat_and_gates_are_required(self, client: httpx.Client, saved: str) -> None:
        for _ in range(2):
            assert client.post(f"{saved}/pin").json()["pinned"] is True
        for _ in range(2):
            assert client.delete(f"{saved}/pin").json()["pinned"] is False
        assert client.post(f"{saved}/promote", json={}).json()["error"]["param"] == "gates"
        assert client.post(f"{saved}/promote", json={"gates": {}}).status_code == 422
