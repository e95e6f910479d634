"""The pool: a grader that raises, hangs, dies or returns nonsense costs its own sample and nobody else's."""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader import ProcessPool, Sample, check_grader, installed_plugins, make_grader
from tests.engine.grader.build import grader, score

MISBEHAVE = {"type": "plugin", "plugin": "misbehave"}
DEADLINE_S = 1.5


def wait_until(holds: Callable[[], bool], limit_s: float = 30.0) -> None:
    end = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < end, "the condition did not come true in time"
        threading.Event().wait(0.02)


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def run(raw: dict[str, object], texts: list[str], deadline_s: float = DEADLINE_S) -> list[object]:
    with make_grader(grader(raw), processes=1, deadline_s=deadline_s) as ready:
        return [answer.kind or answer.value for answer in ready.score([Sample({}, text) for text in texts])]


def test_installed_plugins_are_found_without_importing_them(plugins: Path) -> None:
    assert {"length", "say", "misbehave", "broken", "lazy"} <= set(installed_plugins())
    assert "grader_plugins" not in sys.modules


def test_a_plugin_scores_and_gets_its_config(plugins: Path) -> None:
    assert score({"type": "plugin", "plugin": "length", "config": {"factor": 3}}, "abcd").value == 12.0


def test_a_plugin_that_is_not_installed_is_refused_with_those_that_are(plugins: Path) -> None:
    with pytest.raises(InvalidRequest, match="misbehave") as caught:
        check_grader(grader({"type": "plugin", "plugin": "nope"}), "g")
    assert caught.value.param == "g.plugin"


def test_the_workers_plugins_decide_when_they_are_named() -> None:
    check_grader(grader({"type": "plugin", "plugin": "elsewhere"}), plugins=["elsewhere"])
    with pytest.raises(InvalidRequest, match="elsewhere"):
        check_grader(grader({"type": "plugin", "plugin": "nope"}), plugins=["elsewhere"])


@pytest.mark.parametrize(("name", "words"), [("broken", "no licence"), ("lazy", "not a function")])
def test_a_plugin_that_cannot_start_is_a_fault_of_every_sample(plugins: Path, name: str, words: str) -> None:
    answer = score({"type": "plugin", "plugin": name}, "x")
    assert math.isnan(answer.value)
    assert words in (answer.error or "")


def test_only_one_finite_number_of_sane_size_is_a_score(plugins: Path) -> None:
    asked = ["none", "text", "true", "nan", "inf", "huge", "list", "two", "over", "int", "half", "edge"]
    with make_grader(grader({"type": "plugin", "plugin": "say"}), processes=1) as ready:
        answers = dict(zip(asked, ready.score([Sample({"say": word}, "") for word in asked]), strict=True))
    assert [answer.value for answer in answers.values()][-3:] == [1.0, 0.5, 1e6]
    for word in asked[:-3]:
        assert math.isnan(answers[word].value)
        assert answers[word].kind == "not_a_number"
    assert "1 values" in (answers["list"].error or "")


def test_what_goes_wrong_is_named_and_the_next_sample_is_graded(plugins: Path) -> None:
    texts = ["fine", "raise", "exit", "system_exit", "deep", "memory", "print", "fine"]
    assert run(MISBEHAVE, texts, deadline_s=30.0) == [1.0, "raised", "crashed", "crashed", "raised", "raised", 1.0, 1.0]


def test_a_hung_sample_is_ended_and_the_process_replaced(plugins: Path) -> None:
    assert run(MISBEHAVE, ["hang", "spin", "hold", "fine"]) == ["timeout", "timeout", "timeout", 1.0]


def test_a_hanging_caller_delays_nobody_for_longer_than_a_sample(plugins: Path) -> None:
    pool = ProcessPool(1)
    slow = make_grader(grader(MISBEHAVE), pool=pool, deadline_s=DEADLINE_S)
    quick = make_grader(grader({"type": "plugin", "plugin": "length"}), pool=pool)
    assert quick.score([Sample({}, "warm")])[0].value == 4.0
    done: list[str] = []
    hanging = threading.Thread(target=lambda: done.extend(answer.kind or "" for answer in slow.score([Sample({}, "hang")] * 5)))
    hanging.start()
    assert quick.score([Sample({}, "now")])[0].value == 3.0
    assert len(done) < 5
    hanging.join()
    assert done == ["timeout"] * 5
    assert pool.num_replaced == 5
    pool.close()


def test_answers_come_in_the_order_of_the_samples_from_many_threads(plugins: Path) -> None:
    with make_grader(grader({"type": "plugin", "plugin": "length"}), processes=2) as ready:
        results: dict[int, list[float]] = {}

        def ask(offset: int) -> None:
            results[offset] = [answer.value for answer in ready.score([Sample({}, "x" * (offset + n)) for n in range(20)])]

        threads = [threading.Thread(target=ask, args=(offset,)) for offset in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert results == {offset: [float(offset + n) for n in range(20)] for offset in range(16)}


def test_a_large_row_and_a_large_completion_pass_through(plugins: Path) -> None:
    text = "é\n\x00" * 200_000
    with make_grader(grader({"type": "plugin", "plugin": "length"}), processes=1) as ready:
        assert ready.score([Sample({"essay": text}, text)])[0].value == len(text)


def test_a_completion_past_all_bounds_is_a_fault() -> None:
    answer = score({"type": "string_check", "reference": "x"}, "x" * 1_000_001)
    assert math.isnan(answer.value)
    assert "1000000" in (answer.error or "")


def test_closing_ends_the_processes_and_answers_who_waits(plugins: Path) -> None:
    ready = make_grader(grader(MISBEHAVE), processes=2, deadline_s=600.0)
    answers: list[str | None] = []
    waiting = threading.Thread(target=lambda: answers.extend(answer.kind for answer in ready.score([Sample({}, "hang")] * 6)))
    waiting.start()
    wait_until(lambda: len(ready.pids) == 2)
    pids = ready.pids
    ready.close()
    waiting.join()
    assert answers == ["crashed"] * 6
    assert all(is_gone(pid) for pid in pids)
    ready.close()


def test_no_samples_start_no_process() -> None:
    with make_grader(grader({"type": "math"})) as ready:
        assert ready.score([]) == []
        assert ready.pids == []


def test_cheap_graders_start_no_process() -> None:
    with make_grader(grader({"type": "string_check", "reference": "x"})) as ready:
        assert ready.score([Sample({}, "x")])[0].value == 1.0
        assert ready.pids == []


PARENT = """
import sys, threading
from tests.engine.grader.build import grader
from grpo_engine.grader import Sample, make_grader
ready = make_grader(grader({"type": "plugin", "plugin": "misbehave"}), processes=2, deadline_s=600.0)
threading.Thread(target=ready.score, args=([Sample({}, sys.argv[1]), Sample({}, "fine"), Sample({}, sys.argv[1])],), daemon=True).start()
while len(ready.pids) < 2:
    threading.Event().wait(0.02)
print(*ready.pids, flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("what_they_do", ["hang", "hold"])
def test_processes_end_with_a_parent_that_is_killed(plugins: Path, what_they_do: str) -> None:
    root = Path(__file__).resolve().parents[3]
    environment = {**os.environ, "PYTHONPATH": f"{plugins}:{root}"}
    parent = subprocess.Popen([sys.executable, "-c", PARENT, what_they_do], stdout=subprocess.PIPE, cwd=root, env=environment)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 2
    assert not any(is_gone(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_grader_processes_never_load_torch() -> None:
    code = (
        "import sys, grpo_engine.grader.child; from grpo_engine.grader.mathematics.symbolic import warm_up; warm_up();"
        "print([name for name in ('torch', 'transformers', 'pyarrow') if name in sys.modules])"
    )
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"
