"""Completions: what each earned, which of its tokens left the reference, and how it differs from another."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.completions import keep_rollouts
from tests.browser.stage import OpenPage, Problems, Stage

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect


@pytest.fixture
def job(stage: Stage) -> str:
    """A job at step 12 whose steps 11 and 12 have completions."""
    made = stage.job("sums-read", num_steps=40)
    stage.steps(made.id, 1, 12)
    for step in (11, 12):
        keep_rollouts(stage.ledger, made.id, step)
    return made.id


def entries(page: Any) -> Any:
    return page.get_by_role("list", name="Completions").get_by_role("button")


def detail(page: Any) -> Any:
    return page.get_by_role("region", name="The chosen completion")


def test_a_completion_shows_what_it_earned_and_where_it_left_the_reference(open_page: OpenPage, job: str) -> None:
    page = open_page(f"#/jobs/{job}/rollouts")
    expect(page.get_by_label("Step", exact=True)).to_have_value("12")
    expect(entries(page)).to_have_count(8)
    one = detail(page)
    expect(one.get_by_role("heading", name="Completion 1", exact=True)).to_be_visible()
    expect(one.get_by_role("table", name="Parts of the grader")).to_contain_text("exact")
    expect(one.get_by_label("Prompt")).to_contain_text("What is 17 + 25?")
    expect(page.get_by_text("KL of a token, nats:")).to_be_visible()
    text = one.get_by_role("group", name="Completion, token by token")
    strongest = text.locator(".k5, .k4").first
    expect(strongest).to_have_text(" 42")
    strongest.hover()
    expect(one.get_by_role("status")).to_have_text(
        re.compile(r"^Token \d+ of 17, “42”, id \d+: KL [\d.]+ nats, log-probability −[\d.]+ \([\d.]+ %\)\.$")
    )
    text.focus()
    page.keyboard.press("Home")
    expect(one.get_by_role("status")).to_contain_text("Token 1 of 17, “Let”")
    page.keyboard.press("ArrowRight")
    expect(one.get_by_role("status")).to_contain_text("Token 2 of 17")
    page.keyboard.press("k")
    expect(one.get_by_role("status")).to_contain_text("“42”")
    page.keyboard.press("Escape")
    expect(one.get_by_role("status")).to_contain_text("17 tokens, mean KL")


def test_the_list_is_ordered_filtered_and_walked_and_all_of_it_is_in_the_address(open_page: OpenPage, job: str) -> None:
    page = open_page(f"#/jobs/{job}/rollouts?step=12")
    expect(entries(page)).to_have_count(8)
    page.get_by_label("Order").select_option("low")
    expect(entries(page).first).to_contain_text("reward 0.25")
    page.get_by_label("Reward from").fill("0,5")
    expect(entries(page)).to_have_count(6)
    expect(entries(page).first).to_contain_text("reward 0.5")
    page.get_by_label("to", exact=True).fill("0.8")
    expect(page.get_by_text("4 of 8 completions, mean reward 0.625.")).to_be_visible()
    entries(page).first.click()
    page.get_by_role("button", name="Next completion").click()
    chosen = page.get_by_role("list", name="Completions").locator("[aria-current]")
    expect(chosen).to_have_count(1)
    text = chosen.inner_text()
    page.reload()
    expect(page.get_by_role("list", name="Completions").locator("[aria-current]")).to_have_text(text, use_inner_text=True)
    expect(entries(page)).to_have_count(4)
    page.get_by_label("Reward from").fill("7")
    expect(page.get_by_text("No completion has such a reward; widen the filter.")).to_be_visible()
    expect(detail(page)).to_be_hidden()


def test_steps_are_walked_and_one_that_is_not_kept_says_so(open_page: OpenPage, job: str, problems: Problems) -> None:
    page = open_page(f"#/jobs/{job}/rollouts")
    expect(entries(page)).to_have_count(8)
    expect(page.get_by_role("button", name="Later step")).to_be_disabled()
    page.get_by_role("button", name="Earlier step").click()
    expect(page).to_have_url(re.compile("step=11"))
    expect(entries(page)).to_have_count(8)
    box = page.get_by_label("Step", exact=True)
    box.fill("3")
    box.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("the completions of step 3 are not kept")
    box.fill("three")
    box.press("Enter")
    expect(page.get_by_text("“three” is no step; write a whole number from 1 on.")).to_be_visible()
    page.get_by_role("button", name="Latest").click()
    expect(box).to_have_value("12")
    expect(entries(page)).to_have_count(8)
    problems.allow("404")


def test_differences_from_a_sibling_are_shown_and_how_to_ask_the_reference(open_page: OpenPage, job: str) -> None:
    page = open_page(f"#/jobs/{job}/rollouts?step=12&completion=3&against=1")
    one = detail(page)
    expect(one.get_by_text("In a new job or a fork set telemetry.rollouts_reference_every to 10: every tenth step")).to_be_visible()
    changes = one.get_by_role("region", name="Differences")
    expect(changes.locator("del").first).to_have_text("17 +")
    expect(changes.locator("ins").first).to_contain_text("The answer is 41, because")
    one.get_by_label("Differences from").select_option("nothing")
    expect(changes).to_be_hidden()


def test_differences_from_the_references_own_answer_are_shown_first(open_page: OpenPage, stage: Stage) -> None:
    made = stage.job("sums-asked", num_steps=40, telemetry={"rollouts_reference_every": 5})
    stage.steps(made.id, 1, 11)
    same = {"completion": "17 + 25 = 42", "num_tokens": 7, "is_truncated": False, "num_same_tokens": 0}
    keep_rollouts(stage.ledger, made.id, 10, reference=same)
    keep_rollouts(stage.ledger, made.id, 11)
    page = open_page(f"#/jobs/{made.id}/rollouts?step=10")
    one = detail(page)
    choice = one.get_by_label("Differences from")
    expect(choice.locator("option:checked")).to_have_text("the reference’s own answer")
    expect(one.get_by_text("They part at the first token. The reference’s answer has 7 tokens.")).to_be_visible()
    changes = one.get_by_role("region", name="Differences")
    expect(changes.locator("ins").first).to_contain_text("Let me think.")
    choice.select_option("nothing")
    page.get_by_role("button", name="Next completion").click()
    expect(changes).to_be_hidden()
    one.get_by_label("Differences from").select_option("reference")
    expect(one.get_by_text("Both are the same text.")).to_be_visible()
    page.get_by_role("button", name="Later step").click()
    expect(one.get_by_text("The reference is asked every 5 steps (telemetry.rollouts_reference_every), not at step 11.")).to_be_visible()


def test_redacted_completions_show_their_numbers_only(open_page: OpenPage, stage: Stage, job: str) -> None:
    stage.steps(job, 13, 13)
    keep_rollouts(stage.ledger, job, 13, prompt=None, completion=None, token_ids=None, token_texts=None)
    page = open_page(f"#/jobs/{job}/rollouts")
    expect(entries(page).first).to_contain_text("text not kept")
    expect(detail(page)).to_contain_text("This job keeps no prompt and no text")


def test_the_page_of_a_job_leads_to_the_step_pointed_at(open_page: OpenPage, job: str) -> None:
    page = open_page(f"#/jobs/{job}")
    slider = page.get_by_role("slider").first
    slider.focus()
    expect(slider).to_have_attribute("aria-valuenow", "12")
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    page.get_by_role("link", name="Rollouts of step 11").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value("11")


def test_a_job_without_steps_says_when_to_come_back(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    made = stage.job("sums-fresh")
    page = open_page(f"#/jobs/{made.id}/rollouts")
    expect(page.get_by_text("No step is complete yet; come back after the first.")).to_be_visible()
    problems.allow("404")
