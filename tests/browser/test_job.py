"""The page of one job: live curves, zoom, control, history, files."""

from __future__ import annotations

import re
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.lifecycle import State
from tests.browser.stage import OpenPage, Problems, Stage
from tests.server import Server

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect


@pytest.fixture
def running(open_page: OpenPage, jobs: dict[str, str]) -> Any:
    """The page of the running job, following."""
    page = open_page(f"#/jobs/{jobs['running']}")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible()
    return page


def tile(page: Any, name: str) -> Any:
    return page.locator(".tiles > div").filter(has=page.get_by_text(name, exact=True))


def chart(page: Any, name: str) -> Any:
    return page.get_by_role("figure").filter(has=page.get_by_role("heading", name=name))


def table_steps(figure: Any) -> list[int]:
    """The steps in the chart's table of values, opened anew."""
    summary = figure.get_by_text("Values as a table")
    if figure.get_by_role("table").count():
        summary.click()
    summary.click()
    figure.get_by_role("table").wait_for()
    return [int(text.replace(",", "")) for text in figure.get_by_role("rowheader").all_inner_texts()]


def test_curves_band_alarm_and_actions_are_there(running: Any) -> None:
    kl = chart(running, "KL to the reference")
    for estimator in ("k1", "k2", "k3 (this job's)", "abs"):
        expect(kl.get_by_role("button", name=estimator)).to_be_visible()
    expect(kl).to_contain_text("Shaded: the target band.")
    expect(kl).to_contain_text("step 90: kl_out_of_control")
    for name in ("β", "Reward", "Losses", "Gradient norm", "Entropy", "Completion length", "Shares", "Step time by phase"):
        expect(chart(running, name).first).to_be_visible()
    expect(chart(running, "Reward").first).to_contain_text("format")


def test_new_steps_arrive_without_reload(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    stage.steps(jobs["running"], 121, 125, **{"reward/mean": 0.123456})
    expect(tile(running, "Reward")).to_contain_text("0.1235")
    expect(running.get_by_text("step 125 of 400")).to_be_visible()


def test_standing_still_loses_nothing(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    running.get_by_role("button", name="Stand still").click()
    expect(running.get_by_role("status").filter(has_text="standing still")).to_be_visible()
    before = tile(running, "Reward").inner_text()
    stage.steps(jobs["running"], 121, 140, **{"reward/mean": 0.654321})
    ask = "path => fetch(path).then(answer => answer.json()).then(job => job.progress.step)"
    assert running.evaluate(ask, f"/v1/fine_tuning/jobs/{jobs['running']}") == 140
    assert tile(running, "Reward").inner_text() == before
    running.get_by_role("button", name="Follow again").click()
    expect(tile(running, "Reward")).to_contain_text("0.6543")
    assert table_steps(chart(running, "Reward").first)[-1] == 140


def eventually(page: Any, condition: Callable[[], bool]) -> None:
    """Let the page live until something outside it holds."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "the condition never held"
        page.wait_for_timeout(50)


def test_a_hidden_tab_holds_no_connection_and_catches_up(running: Any, server: Server, stage: Stage, jobs: dict[str, str]) -> None:
    eventually(running, lambda: server.open_streams == 1)
    turn = """value => {
      Object.defineProperty(document, "hidden", {value, configurable: true});
      document.dispatchEvent(new Event("visibilitychange"));
    }"""
    running.evaluate(turn, True)
    eventually(running, lambda: server.open_streams == 0)
    stage.steps(jobs["running"], 121, 125, **{"reward/mean": 0.246810})
    running.evaluate(turn, False)
    expect(tile(running, "Reward")).to_contain_text("0.2468")
    assert table_steps(chart(running, "Reward").first)[-1] == 125


def test_a_restarted_server_is_followed_on(running: Any, server: Server, stage: Stage, jobs: dict[str, str], problems: Problems) -> None:
    server.stop()
    expect(running.get_by_role("status").filter(has_text="connection lost, trying again")).to_be_visible()
    stage.steps(jobs["running"], 121, 123, **{"reward/mean": 0.135791})
    server.start()
    expect(tile(running, "Reward")).to_contain_text("0.1358", timeout=40_000)
    assert table_steps(chart(running, "Reward").first)[-1] == 123
    problems.allow("net::ERR_")


def test_zoom_by_dragging_is_kept_while_steps_arrive(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    kl = chart(running, "KL to the reference")
    stageel = kl.get_by_role("slider")
    stageel.scroll_into_view_if_needed()
    box = stageel.bounding_box()
    running.mouse.move(box["x"] + box["width"] * 0.5, box["y"] + 100)
    running.mouse.down()
    running.mouse.move(box["x"] + box["width"] * 0.75, box["y"] + 110, steps=4)
    running.mouse.up()
    whole = running.get_by_role("button", name="Show the whole run")
    expect(whole).to_be_visible()
    zoomed = table_steps(kl)
    assert zoomed[0] > 30
    assert zoomed[-1] < 110
    stage.steps(jobs["running"], 121, 130)
    expect(running.get_by_text("step 130 of 400")).to_be_visible()
    expect(whole).to_be_visible()
    assert table_steps(kl) == zoomed
    whole.click()
    steps = table_steps(kl)
    assert (steps[0], steps[-1]) == (1, 130)


def test_a_chart_is_read_and_zoomed_by_key(running: Any) -> None:
    slider = chart(running, "KL to the reference").get_by_role("slider")
    slider.focus()
    running.keyboard.press("Home")
    expect(slider).to_have_attribute("aria-valuetext", re.compile(r"^step 1: k3 \(this job's\) 0,"))
    running.keyboard.press("ArrowRight")
    expect(slider).to_have_attribute("aria-valuenow", "2")
    running.keyboard.press("End")
    running.keyboard.press("+")
    expect(running.get_by_role("button", name="Show the whole run")).to_be_visible()
    running.keyboard.press("0")
    expect(running.get_by_role("button", name="Show the whole run")).to_be_hidden()


def test_a_line_is_hidden_by_its_legend(running: Any) -> None:
    kl = chart(running, "KL to the reference")
    kl.get_by_role("button", name="k1").click()
    expect(kl.get_by_role("button", name="k1")).to_have_attribute("aria-pressed", "false")
    expect(kl.get_by_role("slider")).not_to_have_attribute("aria-valuetext", re.compile("k1 "))


def test_a_rewind_takes_back_what_followed(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    stage.say(jobs["running"], "run.rewound", "continues after step 100", data={"to_step": 100})
    stage.steps(jobs["running"], 101, 102, **{"reward/mean": 0.111111})
    expect(tile(running, "Reward")).to_contain_text("0.1111")
    assert table_steps(chart(running, "Reward").first)[-1] == 102


def test_a_change_of_beta_shows_the_step_it_takes_effect_at(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    control = running.get_by_role("region", name="Control")
    control.get_by_label("β").fill("0,03")
    control.get_by_role("button", name="Apply at the next step").click()
    changes = control.get_by_role("list", name="Changes asked for")
    expect(changes).to_contain_text("β 0.03: waits for the next step boundary")
    data = {"command": 1, "effective_step": 121, "old": {"beta": 0.02}, "new": {"beta": 0.03}, "actor": "local"}
    stage.say(jobs["running"], "control.applied", "beta 0.02 -> 0.03", step=121, data=data)
    expect(changes).to_contain_text("β 0.03: in effect from step 121")


def test_a_large_change_is_asked_for_twice(running: Any) -> None:
    control = running.get_by_role("region", name="Control")
    changes = control.get_by_role("list", name="Changes asked for")
    control.get_by_label("β").fill("0.9")
    control.get_by_role("button", name="Apply at the next step").click()
    dialog = running.get_by_role("dialog", name="Is this change meant?")
    expect(dialog).to_contain_text("times as much")
    running.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(changes).to_contain_text("None asked for yet.")
    control.get_by_role("button", name="Apply at the next step").click()
    dialog.get_by_role("button", name="Apply it").click()
    expect(changes).to_contain_text("β 0.9: waits for the next step boundary")


def test_what_is_no_number_is_said_at_the_field(running: Any) -> None:
    control = running.get_by_role("region", name="Control")
    control.get_by_label("Learning rate").fill("fast")
    control.get_by_role("button", name="Apply at the next step").click()
    expect(control.get_by_text("“fast” is not a number; write it like 0.02 or 1e-6.")).to_be_visible()
    expect(control.get_by_label("Learning rate")).to_have_attribute("aria-invalid", "true")


def test_a_refusal_of_the_server_is_said_at_the_field(running: Any, problems: Problems) -> None:
    control = running.get_by_role("region", name="Control")
    control.get_by_label("β").fill("0")
    control.get_by_role("button", name="Apply at the next step").click()
    running.get_by_role("button", name="Apply it").click()
    expect(control.get_by_text("an adaptive rule cannot leave beta 0; give a positive value")).to_be_visible()
    problems.allow("422")


def test_settings_changed_by_another_are_not_overwritten(running: Any, stage: Stage, jobs: dict[str, str], problems: Problems) -> None:
    control = running.get_by_role("region", name="Control")
    expect(control.get_by_text("now 0.02", exact=False).first).to_be_visible()
    stage.ledger.add_command(jobs["running"], kind="set", beta=0.05, actor="somebody")
    control.get_by_label("β").fill("0.03")
    control.get_by_role("button", name="Apply at the next step").click()
    expect(control.get_by_text("Somebody else changed the settings meanwhile.")).to_be_visible()
    expect(control.get_by_role("list", name="Changes asked for")).to_contain_text("somebody")
    control.get_by_role("button", name="Apply at the next step").click()
    expect(control.get_by_role("list", name="Changes asked for")).to_contain_text("β 0.03: waits")
    problems.allow("412")


def test_pause_and_resume(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    running.get_by_role("button", name="Pause").click()
    expect(running.get_by_text("finishes its step, saves a checkpoint and frees its slot").first).to_be_visible()
    stage.end(jobs["running"], State.PAUSED, "Paused by request.")
    expect(running.get_by_text("The job is paused.").first).to_be_visible()
    running.get_by_role("button", name="Resume").click()
    expect(running.locator(".badge").filter(has_text="queued")).to_be_visible()


def test_cancel_is_asked_for_twice(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    running.get_by_role("button", name="Cancel …").click()
    dialog = running.get_by_role("dialog", name="Cancel this job?")
    dialog.get_by_role("button", name="Leave it as it is").click()
    assert stage.ledger.get_job(jobs["running"]).state is State.RUNNING
    running.get_by_role("button", name="Cancel …").click()
    running.get_by_role("dialog").get_by_role("button", name="Cancel the job").click()
    expect(running.get_by_text("The job is being cancelled.").first).to_be_visible()
    assert stage.ledger.get_job(jobs["running"]).state is State.STOPPING
    stage.end(jobs["running"], State.CANCELLED, "Cancelled by request.")
    expect(running.get_by_text("The job was cancelled.").first).to_be_visible()
    expect(running.get_by_text("The job has ended, so nothing can be changed any more.")).to_be_visible()
    expect(running.get_by_role("status").filter(has_text="complete")).to_be_visible()


def test_events_and_log_are_shown(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    events = running.get_by_role("list", name="Events, newest first")
    expect(events).to_contain_text("engine started on cpu in fp32")
    stage.say(jobs["running"], "grader.failed", "2 of 32 completions were not graded", step=120, level="warn")
    expect(events).to_contain_text("Warning: 2 of 32 completions were not graded")
    running.get_by_label("Show").select_option("warn")
    expect(events).not_to_contain_text("engine started")
    running.get_by_text("Show the last lines").click()
    expect(running.get_by_label("Engine log, last lines")).to_contain_text("step 120")


@pytest.mark.parametrize("has_key", [False, True])
def test_a_checkpoint_is_downloaded(open_page: OpenPage, jobs: dict[str, str], tmp_path: Path, has_key: bool) -> None:
    script = "delete window.showSaveFilePicker;" + ("sessionStorage.setItem('grpo-api-key', 'any');" if has_key else "")
    page = open_page(f"#/jobs/{jobs['running']}", script=script)
    with page.expect_download() as started:
        page.get_by_role("button", name="Download the checkpoint of step 100").click()
    target = tmp_path / "checkpoint.tar"
    started.value.save_as(target)
    with tarfile.open(target) as archive:
        names = [Path(name).name for name in archive.getnames()]
    assert "model.safetensors" in names


def test_deleting_a_checkpoint_is_asked_for_twice(running: Any) -> None:
    running.get_by_role("button", name="Delete the checkpoint of step 100").click()
    running.get_by_role("dialog").get_by_role("button", name="Delete the weights").click()
    expect(running.get_by_role("region", name="Checkpoints").last).to_contain_text("None published yet.")


def test_a_failed_job_says_why_and_what_to_do(open_page: OpenPage, jobs: dict[str, str]) -> None:
    alert = open_page(f"#/jobs/{jobs['failed']}").get_by_role("alert").filter(has_text="The job failed (nonfinite).")
    expect(alert).to_contain_text("the loss was not finite in 3 steps in a row")
    expect(alert).to_contain_text("Lower the learning rate or raise β")


def test_a_job_that_is_not_there(open_page: OpenPage, stage: Stage, problems: Problems) -> None:
    page = open_page("#/jobs/ftjob-nothing")
    expect(page.get_by_role("heading", name="No such job")).to_be_visible()
    problems.allow("404")


def test_a_waiting_job_comes_alive(open_page: OpenPage, stage: Stage, jobs: dict[str, str]) -> None:
    page = open_page(f"#/jobs/{jobs['queued']}")
    expect(page.get_by_text("next in the queue", exact=False).first).to_be_visible()
    stage.start(jobs["queued"])
    stage.steps(jobs["queued"], 1, 3, **{"reward/mean": 0.25})
    expect(tile(page, "Reward")).to_contain_text("0.25")
    expect(page.locator(".badge").filter(has_text="running")).to_be_visible()


def test_ten_thousand_steps_open_thinned_and_zoom_in_fully(open_page: OpenPage, stage: Stage) -> None:
    job = stage.job("sums-long", num_steps=20_000)
    stage.long_run(job.id, 10_000)
    page = open_page(f"#/jobs/{job.id}")
    expect(page.get_by_role("status").filter(has_text="live")).to_be_visible(timeout=60_000)
    kl = chart(page, "KL to the reference")
    steps = table_steps(kl)
    assert (steps[0], steps[-1]) == (1, 10_000)
    slider = kl.get_by_role("slider")
    slider.focus()
    page.keyboard.press("Home")
    for _ in range(5):
        page.keyboard.press("+")
    eventually(page, lambda: table_steps(kl) == list(range(1, 11)))
    page.keyboard.press("0")
    slider.focus()
    stage.steps(job.id, 10_001, 10_002, **{"reward/mean": 0.777777})
    expect(tile(page, "Reward")).to_contain_text("0.7778")


def test_following_many_steps_keeps_the_heap(running: Any, stage: Stage, jobs: dict[str, str]) -> None:
    """Once the curves are full (series.js, LIMIT) steps come and go; benchmarks/dashboard_memory.py looks for ten minutes."""
    devtools = running.context.new_cdp_session(running)

    def heap_after(last: int) -> float:
        expect(running.get_by_text(f"step {last:,} of 400")).to_be_visible(timeout=60_000)
        for _ in range(3):
            devtools.send("HeapProfiler.collectGarbage")
        return float(devtools.send("Runtime.getHeapUsage")["usedSize"])

    for first in range(121, 2521, 400):
        stage.steps(jobs["running"], first, first + 399)
    early = heap_after(2520)
    for first in range(2521, 4521, 400):
        stage.steps(jobs["running"], first, first + 399)
    grown = heap_after(4520) - early
    assert grown < 500_000, f"{grown:.0f} bytes for 2000 steps beyond those a curve keeps"
