"""Sweeps: all members or none, what they share, errors where they were written, and one view over all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.frontier import best_of, frontier
from grpo_engine.contract.sweep import MAX_MEMBERS, merge_patch
from jobs.ledger import open_ledger
from jobs.rebuild import rebuild
from jobs.settings import Settings
from tests.api.conftest import Hand, Server, event, spec, step_event, upload

SWEEPS, JOBS = "/v1/fine_tuning/sweeps", "/v1/fine_tuning/jobs"
DEADBAND = {"rule": "deadband", "value": 0.02, "target": 0.05}
FILE = {"name": "config.json", "bytes": 2, "sha256": "0" * 64}


def body(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    """Three members: two numbers, and a controller."""
    variants = [{"beta": 0.01}, {"beta": 0.1}, {"name": "controller", "beta": DEADBAND}]
    return {"name": "betas", "spec": spec(upload(client)), "variants": variants, **changes}


def make(client: httpx.Client, **changes: Any) -> dict[str, Any]:
    answer = client.post(SWEEPS, json=body(client, **changes))
    assert answer.status_code == 201, answer.text
    made: dict[str, Any] = answer.json()
    return made


def num_jobs(client: httpx.Client) -> int:
    return len(client.get(JOBS, params={"limit": 100}).json()["data"])


class TestCreate:
    def test_members_differ_in_the_variant_and_in_nothing_else(self, client: httpx.Client) -> None:
        made = make(client)
        assert made["id"].startswith("ftsweep-")
        assert [(one["number"], one["name"]) for one in made["data"]] == [(1, "beta=0.01"), (2, "beta=0.1"), (3, "controller")]
        jobs = [client.get(f"{JOBS}/{one['job_id']}").json() for one in made["data"]]
        assert [job["resolved"]["beta"]["rule"] for job in jobs] == ["fixed", "fixed", "deadband"]
        assert [job["resolved"]["beta"].get("value") for job in jobs] == [0.01, 0.1, 0.02]
        rest = [{**job["resolved"], "beta": None} for job in jobs]
        assert rest[0] == rest[1] == rest[2]
        assert len({(job["model"], job["training_file"], job["seed"]) for job in jobs}) == 1
        assert [job["lineage"]["sweep"] for job in jobs] == [{"id": made["id"], "member": one["name"]} for one in made["data"]]
        assert (made["status"], made["is_terminal"], made["frontier"], made["best"]) == ("queued", False, [], None)
        listed = client.get(JOBS, params={"order": "asc"}).json()["data"]
        assert [job["id"] for job in listed] == [one["job_id"] for one in made["data"]]

    def test_the_compare_link_works(self, client: httpx.Client) -> None:
        made = make(client)
        compared = client.get(made["compare"]).json()["data"]
        assert [job["job_id"] for job in compared] == [one["job_id"] for one in made["data"]]

    def test_overrides_are_merge_patches(self, client: httpx.Client) -> None:
        base = spec(upload(client), kl={"estimator": "k2"}, optimizer={"learning_rate": 1e-5})
        variants = [
            {"overrides": {"method": {"grpo": {"kl": {"direction": "ref_policy"}, "optimizer": None}}}},
            {"beta": 0.2, "overrides": {"suffix": "second", "metadata": {"arm": "b"}}},
            {"overrides": {"method": {"grpo": {"kl_coef": 0.3}}}},
        ]
        made = make(client, spec=base, variants=variants)
        jobs = [client.get(f"{JOBS}/{one['job_id']}").json() for one in made["data"]]
        assert [job["resolved"]["kl"]["estimator"] for job in jobs] == ["k2", "k2", "k2"]
        assert [job["resolved"]["kl"]["direction"] for job in jobs] == ["ref_policy", "policy_ref", "policy_ref"]
        assert [job["resolved"]["optimizer"]["learning_rate"] for job in jobs] == [1e-6, 1e-5, 1e-5]
        assert [job["resolved"]["beta"]["value"] for job in jobs] == [0.04, 0.2, 0.3]
        assert (jobs[1]["user_provided_suffix"], jobs[1]["metadata"]) == ("second", {"arm": "b"})
        assert [one["name"] for one in made["data"]] == ["variant-1", "variant-2", "variant-3"]

    def test_a_base_in_openais_words(self, client: httpx.Client) -> None:
        grader = {"type": "string_check", "reference": "{{item.answer}}", "operation": "eq"}
        method = {"type": "reinforcement", "reinforcement": {"grader": grader, "hyperparameters": {"kl_coef": 0.5}}}
        made = make(
            client, spec={"model": "tiny", "training_file": upload(client), "method": method}, variants=[{"beta": 0}, {"beta": 0.1}]
        )
        jobs = [client.get(f"{JOBS}/{one['job_id']}").json() for one in made["data"]]
        assert [job["resolved"]["beta"]["value"] for job in jobs] == [0.0, 0.1]

    def test_the_same_key_makes_one_sweep(self, client: httpx.Client) -> None:
        headers, wanted = {"idempotency-key": "s-1"}, body(client)
        first, second = (client.post(SWEEPS, json=wanted, headers=headers) for _ in range(2))
        assert (first.status_code, second.status_code) == (201, 200)
        assert (second.headers["idempotency-replayed"], second.json()["id"]) == ("true", first.json()["id"])
        assert num_jobs(client) == 3
        for path, other in ((SWEEPS, {**wanted, "name": "other"}), (JOBS, wanted["spec"])):
            refused = client.post(path, json=other, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (422, "idempotency_key_reused")
        assert num_jobs(client) == 3

    @pytest.mark.parametrize(
        ("changes", "param"),
        [
            ({"variants": [{"beta": 0.1}, {"beta": -1}]}, "variants[1].beta"),
            ({"variants": [{"beta": 0.1}, {"beta": {"rule": "deadband", "value": 0.1, "targt": 1}}]}, "variants[1].beta.targt"),
            ({"variants": [{"beta": 0.1}, {"beta": {"rule": "fixd"}}]}, "variants[1].beta.rule"),
            ({"variants": [{"beta": 0.1}, {"overrides": {"method": {"grpo": {"bta": 1}}}}]}, "variants[1].overrides.method.grpo.bta"),
            ({"variants": [{"beta": 0.1}, {"overrides": {"seed": 1}}]}, "variants[1].overrides.seed"),
            ({"variants": [{"beta": 0.1}, {"overrides": {"model": "other"}}]}, "variants[1].overrides.model"),
            (
                {"variants": [{"beta": 0.1}, {"overrides": {"method": {"grpo": {"sampling": {"prompts_per_step": 2}}}}}]},
                "variants[1].overrides.method.grpo.sampling.prompts_per_step",
            ),
            (
                {"variants": [{"beta": 0.1}, {"overrides": {"method": {"grpo": {"reference": {"source": "base"}}}}}]},
                "variants[1].overrides.method.grpo.reference",
            ),
            ({"variants": [{"beta": 0.1}, {"beta": 0.2, "overrides": {"method": {"grpo": {"kl_coef": 0.1}}}}]}, "variants[1].beta"),
            ({"variants": [{"beta": 0.1}, {"beta": 0.2, "overrides": {"method": "x"}}]}, "variants[1].overrides.method"),
            ({"variants": [{"beta": 0.1}, {"name": "empty"}]}, "variants[1].beta"),
            ({"variants": [{"beta": 0.1}, {"beta": 0.1}]}, "variants[1].name"),
            ({"variants": [{"beta": 0.1}]}, "variants"),
            ({"variants": [{"beta": number / 100} for number in range(MAX_MEMBERS + 1)]}, "variants"),
            ({"variants": [{"beta": 0.1, "nam": "x"}, {"beta": 0.2}]}, "variants[0].nam"),
            ({"spec": {}}, "spec.model"),
            ({"spec": []}, "spec"),
            ({"sepc": {}}, "sepc"),
            ({"name": ""}, "name"),
        ],
    )
    def test_a_wrong_field_is_named_where_it_was_written_and_nothing_is_made(
        self, client: httpx.Client, changes: dict[str, Any], param: str
    ) -> None:
        answer = client.post(SWEEPS, json=body(client, **changes))
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, param), answer.json()["detail"]
        assert num_jobs(client) == 0

    def test_a_wrong_base_is_named_below_spec(self, client: httpx.Client, server: Server) -> None:
        for change, param in (({"training_file": "file-none"}, "spec.training_file"), ({"metadata": {"a": 1}}, "spec.metadata.a")):
            answer = client.post(SWEEPS, json=body(client, spec={**spec(upload(client)), **change}))
            assert (answer.status_code, answer.json()["error"]["param"]) == (422, param)
        answer = client.post(SWEEPS, json=body(client, spec={**spec(upload(client)), "resources": {"gpus": 1}}))
        assert "unknown key 'spec.resources'; did you mean 'method.grpo.resources'?" in answer.json()["detail"]
        assert list((server.settings.data_dir / "jobs").iterdir()) == []

    def test_a_preset_may_not_change_what_is_shared(self, client: httpx.Client) -> None:
        base = spec(upload(client), sampling={"group_size": 4})
        variants = [{"beta": 0.1}, {"overrides": {"method": {"grpo": {"preset": {"name": "deepseekmath_2024"}}}}}]
        answer = client.post(SWEEPS, json={"spec": base, "variants": variants})
        assert (answer.status_code, answer.json()["error"]["param"]) == (422, "variants[1].overrides")
        assert "method.grpo.sampling.prompts_per_step" in answer.json()["detail"]

    def test_together_they_must_fit_the_disk(self, client: httpx.Client, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
        wanted = body(client)
        needed = client.post(f"{JOBS}/validate", json=wanted["spec"]).json()["disk_bytes_needed"]
        assert needed > 0
        monkeypatch.setattr(server.app.state.services.artifacts, "free_bytes", lambda: int(2.5 * needed))
        answer = client.post(SWEEPS, json=wanted)
        assert answer.status_code == 507
        assert answer.json()["error"]["param"] == "spec.method.grpo.checkpoints.keep"
        assert num_jobs(client) == 0


class TestSteering:
    def test_all_members_at_once_and_twice(self, client: httpx.Client, hand: Hand) -> None:
        made = make(client)
        ids = [one["job_id"] for one in made["data"]]
        hand.start(ids[0])
        for _ in range(2):
            shown = client.post(f"{SWEEPS}/{made['id']}/pause").json()
            assert [one["phase"] for one in shown["data"]] == ["pausing", "paused", "paused"]
        for _ in range(2):
            shown = client.post(f"{SWEEPS}/{made['id']}/resume").json()
            assert [one["status"] for one in shown["data"]][1:] == ["queued", "queued"]
        for _ in range(2):
            shown = client.post(f"{SWEEPS}/{made['id']}/cancel").json()
            assert [one["phase"] for one in shown["data"]] == ["cancelling", "terminal", "terminal"]
        hand.finish(ids[0], "cancelled")
        assert client.get(f"{SWEEPS}/{made['id']}").json()["status"] == "cancelled"
        refused = client.post(f"{SWEEPS}/{made['id']}/resume")
        assert (refused.status_code, refused.headers["x-should-retry"]) == (409, "false")

    def test_members_that_have_ended_are_left_alone(self, client: httpx.Client, hand: Hand) -> None:
        made = make(client)
        first = made["data"][0]["job_id"]
        hand.start(first)
        hand.finish(first)
        shown = client.post(f"{SWEEPS}/{made['id']}/cancel").json()
        assert [one["status"] for one in shown["data"]] == ["succeeded", "cancelled", "cancelled"]
        assert shown["is_terminal"] is True

    def test_an_unknown_sweep_is_a_404_that_names_it(self, client: httpx.Client) -> None:
        for call in (client.get(f"{SWEEPS}/ftsweep-none"), client.post(f"{SWEEPS}/ftsweep-none/cancel")):
            assert (call.status_code, call.json()["error"]["param"]) == (404, "sweep_id")


class TestReading:
    def test_last_readings_and_the_frontier_over_all_members(self, client: httpx.Client, hand: Hand) -> None:
        made = make(client)
        ids = [one["job_id"] for one in made["data"]]
        for job_id, ref_kl, reward in zip(ids, (0.09, 0.02, 0.05), (0.7, 0.4, 0.3), strict=True):
            hand.start(job_id)
            saved = {"name": "step-000002", "step": 2, "kind": "published", "files": [FILE], "bytes": 2, "ref_kl": ref_kl, "reward": reward}
            readings = {"kl/ref/k3/mean": ref_kl, "reward/mean": reward}
            hand.ingest(job_id, step_event(1, 1, 1), step_event(1, 2, 2, **readings), event(1, 3, "checkpoint.saved", 2, **saved))
        shown = client.get(f"{SWEEPS}/{made['id']}").json()
        assert [(one["ref_kl"], one["reward"], one["progress"]["step"]) for one in shown["data"]] == [
            (0.09, 0.7, 2), (0.02, 0.4, 2), (0.05, 0.3, 2),
        ]  # fmt: skip
        assert [(point["job_id"], point["is_on_frontier"]) for point in shown["frontier"]] == [
            (ids[1], True), (ids[2], False), (ids[0], True),
        ]  # fmt: skip
        assert (shown["best"]["job_id"], shown["status"]) == (ids[0], "running")
        assert [one["best"] is not None for one in shown["data"]] == [True, True, False]

    def test_pages(self, client: httpx.Client) -> None:
        made = [make(client, variants=[{"beta": 0.1}, {"beta": 0.2}])["id"] for _ in range(3)]
        first = client.get(SWEEPS, params={"limit": 2}).json()
        rest = client.get(SWEEPS, params={"limit": 2, "after": first["last_id"]}).json()
        assert [one["id"] for one in first["data"] + rest["data"]] == made[::-1]
        assert (first["has_more"], rest["has_more"]) == (True, False)
        assert client.get(SWEEPS, params={"after": "ftsweep-none"}).json()["error"]["param"] == "after"

    def test_a_rebuilt_database_knows_the_sweep(self, client: httpx.Client, server: Server, tmp_path: Path) -> None:
        made = make(client)
        alone = client.post(JOBS, json=spec(upload(client))).json()["id"]
        other = Settings(data_dir=server.settings.data_dir, database_url=f"sqlite:///{tmp_path / 'new.db'}").resolved()
        fresh = open_ledger(other)
        try:
            assert rebuild(fresh).problems == []
            record = fresh.get_sweep(made["id"])
            assert [(member.number, member.name, member.job_id) for member in record.members] == [
                (one["number"], one["name"], one["job_id"]) for one in made["data"]
            ]
            assert (record.name, record.request["spec"]) == ("betas", made["spec"])
            assert int(record.created_at) == made["created_at"]
            assert fresh.lineages([alone])[alone].sweep is None
        finally:
            fresh.close()

    def test_a_rebuild_says_which_sweep_is_not_whole(self, client: httpx.Client, server: Server, tmp_path: Path) -> None:
        made = make(client)
        server.app.state.services.artifacts.remove_job_dir(made["data"][1]["job_id"])
        fresh = open_ledger(Settings(data_dir=server.settings.data_dir, database_url=f"sqlite:///{tmp_path / 'new.db'}").resolved())
        try:
            assert rebuild(fresh).problems == [f"{made['id']}: 2 of its 3 jobs were found"]
        finally:
            fresh.close()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)


@given(target=json_values, patch=json_values)
def test_a_merge_patch_is_that_of_rfc_7396(target: Any, patch: Any) -> None:
    """The pseudo code of section 2, as far as no `type` or `rule` is in play."""

    def apply(target: Any, patch: Any) -> Any:
        if not isinstance(patch, dict):
            return patch
        result = dict(target) if isinstance(target, dict) else {}
        for name, value in patch.items():
            if value is None:
                result.pop(name, None)
            else:
                result[name] = apply(result.get(name), value)
        return result

    before = json.dumps(target)
    assert merge_patch(target, patch) == apply(target, patch)
    assert json.dumps(target) == before


def test_nothing_measured_has_no_best() -> None:
    assert best_of(frontier([])) is None
