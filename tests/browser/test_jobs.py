"""The list of jobs: what it shows, how it is narrowed, and that it moves by itself."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.browser.stage import OpenPage, Problems, Stage
from tests.server import Server

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect


def row(page: Any, name: str) -> Any:
    return page.get_by_role("row").filter(has=page.get_by_role("link", name=name, exact=True))


def test_each_job_says_where_it_stands(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page()
    expect(page.get_by_text("6 jobs", exact=True)).to_be_visible()
    expect(row(page, "sums-fixed")).to_contain_text("succeeded")
    expect(row(page, "sums-fixed")).to_contain_text("150 of 150 steps")
    expect(row(page, "sums-diverged")).to_contain_text("failed")
    expect(row(page, "sums-diverged")).to_contain_text("nonfinite")
    expect(row(page, "sums-waiting")).to_contain_text("next in the queue")
    expect(row(page, "sums-waiting-too")).to_contain_text("number 2 in the queue")
    expect(row(page, "sums-paused")).to_contain_text("paused")


def test_curves_are_drawn_and_told(open_page: OpenPage, jobs: dict[str, str]) -> None:
    steered = row(open_page(), "sums-steered")
    for name in ("KL", "β", "Reward"):
        expect(steered.get_by_role("img", name=name)).to_be_visible()
    expect(steered.get_by_role("img", name="KL")).to_have_attribute("aria-label", re.compile("target 0.03"))


def test_status_and_search_narrow_the_list_and_stay_in_the_address(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page()
    page.get_by_label("Status").select_option("queued")
    expect(page.get_by_text("2 jobs", exact=True)).to_be_visible()
    page.get_by_label("Search").fill("waiting-too")
    expect(page.get_by_text("1 job", exact=True)).to_be_visible()
    page.reload()
    expect(page.get_by_text("1 job", exact=True)).to_be_visible()
    page.get_by_label("Search").fill("no such thing")
    expect(page.get_by_text("No job matches this filter.")).to_be_visible()
    page.get_by_role("button", name="Show all jobs").click()
    expect(page.get_by_text("6 jobs", exact=True)).to_be_visible()


def test_search_finds_labels(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page("#/jobs?search=team=maths")
    expect(page.get_by_text("1 job", exact=True)).to_be_visible()
    expect(row(page, "sums-fixed")).to_be_visible()


def test_an_empty_list_says_what_to_do(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    page = open_page()
    expect(page.get_by_text("No jobs yet.")).to_be_visible()
    page.get_by_role("main").get_by_role("link", name="New job").last.click()
    expect(page.get_by_role("heading", name="New job")).to_be_visible()
    expect(page.get_by_text("Not yet:")).to_be_visible()
    problems.allow("422")


def test_the_list_moves_without_reload_and_keeps_what_was_ticked(open_page: OpenPage, stage: Stage, jobs: dict[str, str]) -> None:
    page = open_page()
    steered = row(page, "sums-steered")
    expect(steered).to_contain_text("120 of 400 steps")
    steered.get_by_role("checkbox").check()
    stage.steps(jobs["running"], 121, 130)
    stage.job("sums-newest", start=False)
    expect(steered).to_contain_text("130 of 400 steps")
    expect(row(page, "sums-newest")).to_be_visible()
    expect(steered.get_by_role("checkbox")).to_be_checked()


def test_ticked_jobs_are_compared(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page()
    for name in ("sums-steered", "sums-fixed"):
        row(page, name).get_by_role("checkbox").check()
    page.get_by_role("button", name="Compare 2").click()
    expect(page.get_by_role("heading", name="Compare")).to_be_visible()
    numbers = page.get_by_role("region", name="The jobs in numbers")
    expect(numbers.get_by_role("row")).to_have_count(3)
    expect(numbers).to_contain_text("The deadband rule steers towards a target of 0.03 nats per token")
    page.get_by_role("checkbox", name="sums-diverged").check()
    expect(numbers.get_by_role("row")).to_have_count(4)
    page.reload()
    expect(page.get_by_role("region", name="The jobs in numbers").get_by_role("row")).to_have_count(4)


def test_reward_against_kl_is_read_by_key(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page(f"#/compare?jobs={jobs['done']}")
    figure = page.get_by_role("figure").filter(has=page.get_by_role("heading", name="Reward against KL"))
    expect(figure.locator("path.latest")).to_have_count(1)
    figure.get_by_role("group").focus()
    page.keyboard.press("ArrowRight")
    expect(figure.get_by_text("sums-fixed, step 1: KL 0, reward")).to_be_visible()


def test_texts_of_others_are_texts(open_page: OpenPage, stage: Stage) -> None:
    evil = "<img src=x onerror=window.owned=1>"
    job = stage.job("sums-evil", metadata={"note": evil})
    stage.say(job.id, "engine.started", evil)
    page = open_page(f"#/jobs/{job.id}")
    expect(page.get_by_text(evil).first).to_be_visible()
    assert page.evaluate("window.owned") is None
    assert page.locator("main img").count() == 0


def test_a_stopped_server_is_said_and_its_return_noticed(
    open_page: OpenPage, server: Server, jobs: dict[str, str], problems: Problems
) -> None:
    page = open_page()
    expect(page.get_by_text("6 jobs", exact=True)).to_be_visible()
    server.stop()
    banner = page.get_by_role("alert").filter(has_text="The server does not answer. Start it again (grpo up)")
    expect(banner).to_be_visible(timeout=20_000)
    server.start()
    expect(banner).to_be_hidden(timeout=30_000)
    expect(page.get_by_text("6 jobs", exact=True)).to_be_visible()
    problems.allow("net::ERR_")


def test_a_page_opened_while_the_server_is_away_shows_itself_later(
    open_page: OpenPage, server: Server, jobs: dict[str, str], problems: Problems
) -> None:
    page = open_page(f"#/compare?jobs={jobs['done']}")
    expect(page.get_by_text("β is fixed until somebody changes it.")).to_be_visible()
    page.get_by_role("link", name="Jobs", exact=True).click()
    expect(page.get_by_text("6 jobs", exact=True)).to_be_visible()
    server.stop()
    page.get_by_role("link", name="Compare", exact=True).click()
    expect(page.get_by_role("alert").filter(has_text="The server does not answer.")).to_be_visible()
    server.start()
    expect(page.get_by_role("checkbox", name="sums-fixed")).to_be_visible(timeout=40_000)
    expect(page.get_by_role("alert").filter(has_text="The server does not answer.")).to_be_hidden()
    problems.allow("net::ERR_")
