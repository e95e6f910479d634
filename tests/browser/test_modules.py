"""The page's pure modules, run where they run: in the browser."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.browser.stage import OpenPage

pytestmark = pytest.mark.browser


def run(page: Any, module: str, body: str) -> Any:
    """Evaluate `body` with the module's exports in `m`."""
    return json.loads(page.evaluate(f"async () => JSON.stringify(await (async (m) => {{ {body} }})(await import('/static/{module}')))"))


def test_a_series_keeps_its_extremes_and_its_size(open_page: OpenPage) -> None:
    body = """
      const series = new m.Series(800);
      for (let step = 1; step <= 100000; step += 1) series.append(step, step === 4321 ? 99 : step === 70000 ? -99 : Math.sin(step));
      return [series.length <= 800, Math.max(...series.values), Math.min(...series.values), series.steps[0], series.lastStep,
        series.steps.every((step, index) => index === 0 || step > series.steps[index - 1])];"""
    assert run(open_page(), "series.js", body) == [True, 99, -99, 1, 100000, True]


def test_a_repeated_step_supersedes_what_followed(open_page: OpenPage) -> None:
    body = """
      const series = new m.Series();
      for (const step of [1, 2, 3, 4]) series.append(step, step);
      series.append(3, 30);
      series.truncate(2);
      series.append(3, 300);
      return [series.steps, series.values, series.at(2.5), series.nearest(2.6)];"""
    assert run(open_page(), "series.js", body) == [[1, 2, 3], [1, 2, 300], 2, 2]


def test_thinning_survives_values_that_are_no_numbers(open_page: OpenPage) -> None:
    body = """
      const series = new m.Series(80);
      for (let step = 1; step <= 500; step += 1) series.append(step, step % 3 ? NaN : step);
      return [series.length <= 80, series.lastStep, series.values.some(Number.isNaN),
        Math.max(...series.values.filter(Number.isFinite))];"""
    assert run(open_page(), "series.js", body) == [True, 500, True, 498]


def test_events_are_cut_from_any_pieces(open_page: OpenPage) -> None:
    text = ': hb\nid: 1-2\nevent: step.completed\ndata: {"a":\ndata: 1}\n\n: hb\nid: 1-3\r\ndata: x\r\n\r\nevent: only\n\ndata: [DONE]\n\n'
    body = f"""
      const found = [];
      for (let size = 1; size <= 7; size += 1) {{
        const parser = new m.EventParser();
        const text = {json.dumps(text)};
        const events = [];
        for (let at = 0; at < text.length; at += size) events.push(...parser.feed(text.slice(at, at + size)));
        found.push(JSON.stringify(events));
      }}
      return [new Set(found).size, JSON.parse(found[0])];"""
    kinds, events = run(open_page(), "sse.js", body)
    assert kinds == 1
    assert events == [
        {"id": "1-2", "event": "step.completed", "data": '{"a":\n1}'},
        {"id": "1-3", "event": "message", "data": "x"},
        {"id": "1-3", "event": "message", "data": "[DONE]"},
    ]


def test_ticks_are_round_and_inside(open_page: OpenPage) -> None:
    body = """return [m.ticks(0, 1, 4), m.ticks(-0.013, 0.041, 4), m.logTicks(0.002, 30, 5), m.limits([3, NaN, 3], {}),
      m.limits([], {isLog: true})];"""
    assert run(open_page(), "axes.js", body) == [
        [0, 0.5, 1], [0, 0.02, 0.04], [0.01, 0.1, 1, 10], [2.7, 3.3], [0.001, 1],
    ]  # fmt: skip


def test_numbers_read_like_numbers(open_page: OpenPage) -> None:
    body = """return [m.number(0.0123456), m.number(0), m.number(-2.5), m.number(1e-6), m.number(12345678), m.number(null),
      m.number({value: null, nonfinite: "nan"}), m.number({value: null, nonfinite: "-inf"}), m.duration(3725), m.bytes(1234567)];"""
    assert run(open_page(), "format.js", body) == [
        "0.01235", "0", "−2.5", "1e−6", "1.23e7", "–", "not a number", "−∞", "1 h 2 min", "1.23 MB",
    ]  # fmt: skip


def test_a_document_holds_only_what_was_set(open_page: OpenPage) -> None:
    body = """
      const job = {method: {grpo: {}}};
      m.setAt(job, ["method", "grpo", "beta", "value"], 0.02);
      m.setAt(job, ["method", "grpo", "kl", "estimator"], "k1");
      m.setAt(job, ["method", "grpo", "beta", "value"], undefined);
      m.setAt(job, ["metadata", "a"], undefined);
      return [job, m.typedNumber("0,5"), m.typedNumber("1e-6"), m.typedNumber(""), m.typedNumber("x")];"""
    job, comma, exponent, word = [item for item in run(open_page(), "schema.js", body) if item is not None]
    assert job == {"method": {"grpo": {"kl": {"estimator": "k1"}}}}
    assert (comma, exponent, word) == (0.5, 1e-6, "x")
