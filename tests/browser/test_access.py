"""Access: axe-core on every view in both themes, phone width, keyboard."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from jobs.lifecycle import State
from tests.browser.completions import keep_rollouts
from tests.browser.stage import OpenPage, Stage

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect

VIEWS = {
    "jobs": ("#/jobs", "6 jobs"),
    "running": ("#/jobs/{running}", "live"),
    "failed": ("#/jobs/{failed}", "The job failed (nonfinite)."),
    "compare": ("#/compare?jobs={done},{failed}", "β is fixed until somebody changes it."),
    "new": ("#/new?from={running}", "The server would accept this job:"),
    "rollouts": ("#/jobs/{running}/rollouts", "KL of a token, nats:"),
    "fork": ("#/jobs/{running}/fork", "What changes"),
    "sweeps": ("#/sweeps", "No sweeps yet."),
    "new sweep": ("#/sweeps/new?from={running}", "The server would accept all 2 jobs:"),
}


@pytest.fixture
def jobs(jobs: dict[str, str], stage: Stage) -> dict[str, str]:
    """The furnished house, with completions of a step of the running job."""
    keep_rollouts(stage.ledger, jobs["running"], 3)
    return jobs


@pytest.fixture(scope="session")
def axe() -> str:
    """The text of axe.min.js, from the npm package axe-core."""
    name = os.environ.get("AXE_SCRIPT")
    if name is None:
        pytest.skip("AXE_SCRIPT is not set; npm install --prefix DIR axe-core, then AXE_SCRIPT=DIR/node_modules/axe-core/axe.min.js")
    path = Path(name)
    assert path.is_file(), f"AXE_SCRIPT names {name}, which is not there; npm install --prefix DIR axe-core"
    return path.read_text()


def opened(open_page: OpenPage, jobs: dict[str, str], view: str, **options: Any) -> Any:
    fragment, sign = VIEWS[view]
    page = open_page(fragment.format(**jobs), **options)
    expect(page.get_by_text(sign, exact=False).first).to_be_visible()
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing(open_page: OpenPage, jobs: dict[str, str], axe: str, view: str, scheme: str) -> None:
    page = opened(open_page, jobs, view, scheme=scheme)
    for summary in page.locator("main summary").all():
        summary.evaluate("summary => { summary.parentElement.open = true; }")
    page.evaluate(axe)
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice']})")
    problems = [(item["id"], item["help"], [node["html"][:200] for node in item["nodes"][:3]]) for item in found["violations"]]
    assert problems == []


@pytest.mark.parametrize("view", VIEWS)
def test_a_phone_shows_everything_without_scrolling_sideways(open_page: OpenPage, jobs: dict[str, str], view: str) -> None:
    page = opened(open_page, jobs, view, width=375, scheme="dark")
    assert page.evaluate("document.documentElement.scrollWidth") <= 375
    assert page.get_by_role("navigation", name="Pages").evaluate("nav => nav.scrollWidth <= nav.clientWidth")


def test_everything_is_reached_by_key(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = opened(open_page, jobs, "jobs")
    page.keyboard.press("Tab")
    expect(page.get_by_role("link", name="Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.get_by_role("main")).to_be_focused()
    for _ in range(3):
        page.keyboard.press("Tab")
    expect(page.get_by_label("Search")).to_be_focused()
    page.get_by_role("link", name="sums-steered").focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="sums-steered")).to_be_visible()


def test_a_dialog_keeps_the_focus_and_escape_leaves_it(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = opened(open_page, jobs, "running")
    cancel = page.get_by_role("button", name="Cancel …")
    cancel.focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("button", name="Leave it as it is")).to_be_focused()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_be_hidden()
    expect(cancel).to_be_focused()


def test_a_change_of_status_is_announced(open_page: OpenPage, jobs: dict[str, str], stage: Stage) -> None:
    page = opened(open_page, jobs, "running")
    stage.ledger.request(jobs["running"], "cancel")
    stage.end(jobs["running"], State.CANCELLED, "Cancelled by request.")
    expect(page.locator("#announcer")).to_have_text("The job is cancelled.")
