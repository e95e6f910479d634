"""Composing a job: a form from the server's schema, JSON beside it, the server's verdict while it is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.browser.stage import ROWS, OpenPage, Problems, Stage

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed; pip install playwright")
expect = sync_api.expect


@pytest.fixture
def form(open_page: OpenPage, stage: Stage, problems: Problems) -> Any:
    """The form; the math grader it starts with does not fit the file, which the server says."""
    page = open_page("#/new")
    expect(page.get_by_text("Not yet: method.grpo.grader.reference names {{item.reference_answer}}")).to_be_visible()
    problems.allow("422")
    return page


def group(page: Any, name: str) -> Any:
    return page.locator("details.group").filter(has=page.locator("summary", has_text=name)).first


def accepted(page: Any) -> Any:
    return page.get_by_text("The server would accept this job: 20 usable rows")


def make_valid(page: Any) -> None:
    page.get_by_label("Model (required)").fill("tiny")
    group(page, "Grader").get_by_label("Reference").fill("{{item.answer}}")
    expect(accepted(page)).to_be_visible()


def test_a_job_is_composed_checked_and_created(form: Any, stage: Stage, problems: Problems) -> None:
    create = form.get_by_role("button", name="Create the job")
    expect(create).to_be_disabled()
    expect(group(form, "Grader").get_by_label("Reference")).to_have_attribute("aria-invalid", "true")
    make_valid(form)
    form.get_by_label("Suffix").fill("from-the-form")
    group(form, "Limits").get_by_label("Num steps").fill("7")
    group(form, "Sampling").get_by_label("Temperature").fill("0,9")
    expect(accepted(form)).to_be_visible()
    expect(create).to_be_enabled()
    create.click()
    expect(form.get_by_role("heading", name="from-the-form")).to_be_visible()
    spec = json.loads(stage.ledger.list_jobs().data[0].spec_json)
    assert spec["suffix"] == "from-the-form"
    assert spec["method"]["grpo"]["limits"]["num_steps"] == 7
    assert spec["method"]["grpo"]["sampling"]["temperature"] == 0.9
    assert spec["method"]["grpo"]["beta"] == {"rule": "fixed", "value": 0.02}
    if problems:
        problems.allow("422")


def test_a_rule_is_chosen_and_its_own_settings_appear(form: Any, problems: Problems) -> None:
    make_valid(form)
    beta = group(form, "β")
    beta.get_by_label("Rule").select_option("deadband")
    expect(form.get_by_text("Not yet: method.grpo.beta.value: give exactly one of value and schedule")).to_be_visible()
    beta.get_by_label("Value", exact=True).fill("0.02")
    expect(form.get_by_text("Not yet: method.grpo.beta.target: give exactly one of target and calibration")).to_be_visible()
    beta.get_by_label("Target", exact=True).fill("0.03")
    expect(accepted(form)).to_be_visible()
    form.get_by_text("The job as it would run, after presets and defaults").click()
    expect(form.get_by_label("The job as it would run")).to_contain_text('"low_ratio": 0.8')
    problems.allow("422")


def test_a_preset_is_explained_and_applied(form: Any, problems: Problems) -> None:
    make_valid(form)
    preset = group(form, "Preset")
    preset.get_by_label("Use preset").check()
    preset.get_by_label("Name").select_option("recipe_adaptive")
    expect(preset).to_contain_text("The recipe with a moving beta")
    group(form, "β").get_by_label("Rule").select_option("")
    expect(accepted(form)).to_be_visible()
    form.get_by_text("The job as it would run, after presets and defaults").click()
    expect(form.get_by_label("The job as it would run")).to_contain_text('"rule": "deadband"')
    if problems:
        problems.allow("422")


def test_json_and_form_are_the_same_job(form: Any, problems: Problems) -> None:
    make_valid(form)
    form.get_by_role("button", name="JSON").click()
    editor = form.get_by_label("The job as JSON")
    job = json.loads(editor.input_value())
    assert job["model"] == "tiny"
    editor.fill("{")
    expect(form.get_by_text("This is not JSON yet:")).to_be_visible()
    expect(form.get_by_role("button", name="Create the job")).to_be_disabled()
    job["suffix"] = "typed"
    job["method"]["grpo"]["bta"] = 0.1
    editor.fill(json.dumps(job))
    expect(form.get_by_text("Not yet: unknown key 'method.grpo.bta'; did you mean 'beta'?")).to_be_visible()
    del job["method"]["grpo"]["bta"]
    editor.fill(json.dumps(job))
    expect(accepted(form)).to_be_visible()
    form.get_by_role("button", name="Form").click()
    expect(form.get_by_label("Suffix")).to_have_value("typed")
    problems.allow("422")


def test_a_file_is_uploaded_and_a_bad_one_is_refused_by_line(form: Any, tmp_path: Path, problems: Problems) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n{broken\n')
    upload = form.get_by_label("Upload a file as training file")
    upload.set_input_files(bad)
    expect(form.get_by_text("The file was refused:")).to_contain_text("line 2")
    good = tmp_path / "more-sums.jsonl"
    good.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    upload.set_input_files(good)
    expect(form.get_by_text("more-sums.jsonl was accepted.")).to_be_visible()
    expect(form.get_by_label("Training file", exact=True).locator("option:checked")).to_have_text("more-sums.jsonl, 20 rows")
    make_valid(form)  # the verdicts on the way here have come: none is heard after this
    problems.allow("4")


def test_a_job_is_made_again_from_another(open_page: OpenPage, jobs: dict[str, str]) -> None:
    page = open_page(f"#/jobs/{jobs['running']}")
    page.get_by_role("link", name="New job from these settings").click()
    expect(accepted(page)).to_be_visible()
    expect(group(page, "β").get_by_label("Rule")).to_have_value("deadband")
    expect(group(page, "β").get_by_label("Target", exact=True)).to_have_value("0.03")
