"""API keys in the page: asked for, kept in the tab, refused with a sentence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from jobs.settings import Settings
from tests.browser.stage import LIMITS, OpenPage, Problems, Stage
from tests.server import Server

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect

KEY = "grpo_a_key_of_the_settings"


@pytest.fixture
def server(dashboard_settings: Settings) -> Any:
    """A server that wants a key."""
    running = Server(replace(dashboard_settings, api_key=KEY), LIMITS)
    yield running
    running.stop()


def enter(page: Any, key: str) -> None:
    page.get_by_label("API key", exact=True).fill(key)
    page.get_by_role("button", name="Use this key").click()


def test_a_key_is_asked_for_and_a_wrong_one_is_told(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    page = open_page()
    expect(page.get_by_text("This server asks for an API key.")).to_be_visible()
    enter(page, "grpo_wrong")
    expect(page.get_by_text("The server does not accept this API key.")).to_be_visible()
    enter(page, KEY)
    expect(page.get_by_text("No jobs yet.")).to_be_visible()
    problems.allow("401")


def test_the_key_stays_in_the_tab(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    page = open_page()
    enter(page, KEY)
    expect(page.get_by_text("No jobs yet.")).to_be_visible()
    page.reload()
    expect(page.get_by_text("No jobs yet.")).to_be_visible()
    assert KEY not in page.url
    assert page.context.cookies() == []
    assert page.evaluate("Object.keys(localStorage).length") == 0
    other = page.context.new_page()
    other.goto(page.url)
    expect(other.get_by_text("This server asks for an API key.")).to_be_visible()
    page.get_by_role("button", name="API key").click()
    page.get_by_role("button", name="Forget the key").click()
    expect(page.get_by_text("This server asks for an API key.")).to_be_visible()
    problems.allow("401")


def test_a_job_is_followed_with_a_key(open_page: OpenPage, stage: Stage) -> None:
    job = stage.job("sums-locked")
    stage.steps(job.id, 1, 5)
    page = open_page(f"#/jobs/{job.id}", script=f"sessionStorage.setItem('grpo-api-key', '{KEY}');")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    stage.steps(job.id, 6, 6, **{"reward/mean": 0.4242})
    expect(page.locator(".tiles")).to_contain_text("0.4242")
