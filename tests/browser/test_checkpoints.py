"""Checkpoints in the page: pinned, promoted behind gates, forked with another beta, deleted only when meant."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.stage import OpenPage, Problems, Stage

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect


@pytest.fixture
def job(stage: Stage) -> str:
    """A running job with a checkpoint of step 5."""
    made = stage.job("sums-kept", beta={"rule": "deadband", "value": 0.02, "target": 0.03}, num_steps=40)
    stage.steps(made.id, 1, 6)
    stage.checkpoint(made.id, 5)
    return made.id


@pytest.fixture
def table(open_page: OpenPage, job: str) -> Any:
    return open_page(f"#/jobs/{job}").get_by_role("region", name="Table of checkpoints")


def test_a_pin_keeps_it_and_is_taken_away_only_when_meant(table: Any) -> None:
    page = table.page
    page.get_by_role("button", name="Pin the checkpoint of step 5", exact=True).click()
    expect(table.get_by_text("pinned", exact=True)).to_be_visible()
    expect(page.get_by_role("button", name="Delete the checkpoint of step 5")).to_have_count(0)
    page.get_by_role("button", name="Unpin the checkpoint of step 5").click()
    page.get_by_role("dialog").get_by_role("button", name="Unpin it").click()
    expect(page.get_by_role("button", name="Delete the checkpoint of step 5")).to_be_visible()


def test_promotion_names_the_gate_that_fails_and_then_what_was_passed(table: Any, problems: Problems) -> None:
    page = table.page
    page.get_by_role("button", name="Promote the checkpoint of step 5").click()
    dialog = page.get_by_role("dialog", name="Promote the checkpoint of step 5")
    expect(dialog.get_by_text("It reads 0.021 nats per token")).to_be_visible()
    dialog.get_by_role("button", name="Promote if it passes").click()
    expect(dialog.get_by_text("Give at least one gate;")).to_be_visible()
    dialog.get_by_label("KL at most").fill("0,01")
    dialog.get_by_role("button", name="Promote if it passes").click()
    expect(dialog.get_by_text("ref_kl is 0.021, above the bound 0.01")).to_be_visible()
    expect(dialog.get_by_label("KL at most")).to_have_attribute("aria-invalid", "true")
    dialog.get_by_label("KL at most").fill("0.03")
    dialog.get_by_label("Note").fill("first good one")
    dialog.get_by_role("button", name="Promote if it passes").click()
    expect(table).to_contain_text("KL at most 0.03")
    expect(table).to_contain_text("first good one")
    page.get_by_role("button", name="Withdraw the checkpoint of step 5").click()
    page.get_by_role("dialog").get_by_role("button", name="Withdraw it").click()
    expect(table.get_by_text("pinned", exact=True)).to_be_visible()
    problems.allow("409")


def test_a_fork_takes_another_beta_and_both_jobs_show_the_line(table: Any, stage: Stage, job: str) -> None:
    page = table.page
    page.get_by_role("link", name="Fork from the checkpoint of step 5").click()
    expect(page.get_by_text("The fork starts from the weights after step 5")).to_be_visible()
    beta = page.locator('details.group[data-path="method.grpo.beta"]')
    expect(beta.get_by_label("Rule").locator("option:checked")).to_have_text("as it is (deadband)")
    beta.get_by_label("Rule").select_option("deadband")
    expect(beta.get_by_label("Target", exact=True)).to_have_attribute("placeholder", "0.03")
    beta.get_by_label("Target", exact=True).fill("0.05")
    page.get_by_label("Suffix").fill("wider")
    expect(page.get_by_text("beta.rule = deadband, beta.target = 0.05")).to_be_visible()
    page.get_by_role("button", name="Start the fork").click()
    expect(page.get_by_role("heading", name="wider")).to_be_visible()
    made = stage.ledger.list_jobs().data[0]
    assert '"target":0.05' in re.sub(r"\s", "", made.spec_json)
    page.get_by_role("link", name=job).click()
    expect(page.get_by_role("heading", name="sums-kept")).to_be_visible()
    expect(page.get_by_role("link", name=made.id)).to_be_visible()


def test_a_setting_a_fork_cannot_have_is_refused_at_its_field(table: Any, job: str, problems: Problems) -> None:
    page = table.page
    page.goto(page.url.split("#")[0] + f"#/jobs/{job}/fork")
    page.locator('details.group[data-path="method.grpo.limits"]').get_by_label("Num steps").fill("0")
    page.get_by_role("button", name="Start the fork").click()
    expect(page.get_by_role("alert").filter(has_text="The fork was not made.")).to_be_visible()
    expect(page.get_by_label("Num steps")).to_have_attribute("aria-invalid", "true")
    problems.allow("422")


def test_a_job_without_checkpoints_cannot_be_forked_and_says_so(open_page: OpenPage, stage: Stage) -> None:
    made = stage.job("sums-young")
    page = open_page(f"#/jobs/{made.id}/fork")
    expect(page.get_by_text("There is nothing to fork from yet.")).to_be_visible()
