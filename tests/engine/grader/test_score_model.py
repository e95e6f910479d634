"""Classifiers as graders: tiny random ones, loaded by transformers as any would be.

Most tests answer requests in this process, which has torch already; the tests at the end have the real, killable one.
"""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from grpo_engine.contract.error import InvalidRequest, NotImplementedYet
from grpo_engine.grader import GraderPool, Means, ModelPlaces, Sample, check_grader, check_templates, classifier, make_grader
from grpo_engine.grader.classifier import MAX_DEATHS, score_of
from grpo_engine.grader.process import DeadlinePassed
from grpo_engine.grader.wire import encode
from grpo_engine.rows import Row
from tests.engine.grader.build import Here, grader
from tests.tiny import make_classifier, make_model

CHAT = [{"role": "user", "content": "{{item.question}}"}, {"role": "assistant", "content": "{{sample.output_text}}"}]
TEXTS = ("4", "five", "", "naïve 数", "4" * 60)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory: `one` label, `three` labels and no chat template, `language` without a head."""
    root = tmp_path_factory.mktemp("models")
    make_classifier(root / "one", "TINY")
    make_classifier(root / "three", "TINY_GPT2", num_labels=3)
    make_model(root / "language")
    return root


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load classifiers in this process."""
    monkeypatch.setattr(classifier, "GraderProcess", Here)


def means(models: Path, find: Any = None) -> Means:
    return Means(models=ModelPlaces(models / "cache", models, find))


def raw(**settings: Any) -> dict[str, Any]:
    return {"type": "score_model", "model": "one", "input": CHAT, **settings}


def samples(*texts: str) -> list[Sample]:
    return [Sample({"question": "2+2?"}, text) for text in texts]


def opened(models: Path, **settings: Any) -> GraderPool:
    return make_grader(grader(raw(**settings)), means=means(models))


def logits(folder: Path, text: str, **settings: Any) -> list[float]:
    """What transformers itself says of one text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    module = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        found: list[float] = module(**tokenizer(text, return_tensors="pt", **settings)).logits[0].tolist()
    return found


@pytest.fixture
def chat(models: Path, here: None) -> Iterator[GraderPool]:
    with opened(models) as ready:
        yield ready


def test_messages_go_through_the_classifiers_template(chat: GraderPool, models: Path) -> None:
    scores = chat.score(samples(*TEXTS))
    tokenizer = AutoTokenizer.from_pretrained(models / "one")
    for text, score in zip(TEXTS, scores, strict=True):
        turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": text}]
        expected = logits(models / "one", tokenizer.apply_chat_template(turns, tokenize=False), add_special_tokens=False)
        assert score.error is None
        assert score.value == pytest.approx(expected[0], abs=1e-6)
    assert len({score.value for score in scores}) == len(TEXTS)
    assert scores[0].detail["is_truncated"] is False


def test_a_score_depends_on_the_text_alone(chat: GraderPool) -> None:
    together = chat.score(samples(*TEXTS))
    alone = [chat.score(samples(text))[0] for text in TEXTS]
    assert [score.value for score in together] == [score.value for score in alone]


def test_a_missing_column_is_a_fault_and_a_long_text_too(chat: GraderPool) -> None:
    missing, long = chat.score([Sample({}, "4"), Sample({"question": "?"}, "4" * 300)])
    assert (missing.kind, long.kind) == ("invalid_variable", "raised")
    assert math.isnan(missing.value)
    assert math.isnan(long.value)
    assert "more than the 256" in (long.error or "")


@pytest.mark.usefixtures("here")
def test_settings_of_a_classifier_with_several_labels(models: Path) -> None:
    """A pair of texts, a label by name, softmax, and an affine map; the same with a threshold, and cut short."""
    pair = {"model": "three", "input": "{{item.question}}", "input_pair": "{{sample.output_text}}"}
    raw_logits = logits(models / "three", "2+2?", text_pair="4")
    probability = math.exp(raw_logits[2]) / sum(math.exp(logit) for logit in raw_logits)
    parts = {
        "logit": raw(**pair, label=2),
        "share": raw(**pair, label="LABEL_2", activation="softmax", scale=2.0, shift=-1.0),
        "passed": raw(**pair, label=2, pass_threshold=raw_logits[2] - 0.1),
    }
    whole = {"type": "multi", "graders": parts, "calculate_output": "logit + share + passed"}
    with make_grader(grader(whole), means=means(models)) as ready:
        (score,) = ready.score(samples("4"))
    assert score.parts == pytest.approx({"logit": raw_logits[2], "share": 2 * probability - 1, "passed": 1.0}, abs=1e-6)
    assert score.value == pytest.approx(sum(score.parts.values()))


@pytest.mark.parametrize(("side", "kept"), [("start", "89"), ("end", "01")])
@pytest.mark.usefixtures("here")
def test_a_text_cut_short_says_so(models: Path, side: str, kept: str) -> None:
    settings = {"model": "three", "input": "{{sample.output_text}}", "label": 0}
    with opened(models, **settings, max_tokens=2, truncate=side) as ready:
        (score,) = ready.score(samples("0123456789"))
    assert score.value == pytest.approx(logits(models / "three", kept)[0], abs=1e-6)
    assert score.detail["is_truncated"] is True
    assert score.detail["num_tokens"] == 2


@pytest.mark.parametrize(
    ("column", "turns"),
    [
        ("2+2?", [{"role": "user", "content": "2+2?"}]),
        ([{"role": "developer", "content": [{"type": "text", "text": "Add."}]}, {"role": "user", "content": "2+2?"}],
         [{"role": "system", "content": "Add."}, {"role": "user", "content": "2+2?"}]),
    ],
)  # fmt: skip
def test_a_column_of_messages_stands_for_them(models: Path, chat: GraderPool, column: Any, turns: list[dict[str, str]]) -> None:
    told = [*turns, {"role": "assistant", "content": "4"}]
    text = AutoTokenizer.from_pretrained(models / "one").apply_chat_template(told, tokenize=False)
    with opened(models, input=["{{item.messages}}", CHAT[1]]) as ready:
        good, bad = ready.score([Sample({"messages": column}, "4"), Sample({"messages": [{"role": "tool", "content": "x"}]}, "4")])
    assert good.value == pytest.approx(logits(models / "one", text, add_special_tokens=False)[0], abs=1e-6)
    assert bad.kind == "invalid_variable"


@pytest.mark.usefixtures("here")
def test_weights_that_give_no_number_are_a_fault(tmp_path: Path) -> None:
    make_classifier(tmp_path / "one", "TINY", broken=True)
    with opened(tmp_path) as ready:
        (score,) = ready.score(samples("4"))
    assert score.kind == "not_a_number"
    assert math.isnan(score.value)


@pytest.mark.parametrize(
    ("settings", "param", "words"),
    [
        ({"model": "../one"}, "grader.model", "must lie below"),
        ({"model": "language"}, "grader.model", "lacks weights of a sequence classifier"),
        ({"model": "three", "label": 0}, "grader.input", "no chat template"),
        ({"model": "three", "input": "{{sample.output_text}}"}, "grader.label", "has 3 labels"),
        ({"label": "good"}, "grader.label", "has no label 'good'"),
        ({"activation": "softmax"}, "grader.activation", "always 1"),
        ({"device": "cuda"}, "grader.model", "set device to cpu"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_classifier_that_cannot_work_is_refused(
    models: Path, settings: dict[str, Any], param: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with opened(models, **settings) as ready, pytest.raises(InvalidRequest) as caught:
        ready.start()
    assert caught.value.param == param
    assert words in caught.value.message


@pytest.mark.parametrize(
    ("settings", "param", "words"),
    [
        ({"model": "language"}, "g.model", "no classification head"),
        ({"model": "three", "label": 3}, "g.label", "has no label 3"),
        ({"model": "three", "label": 1}, "g.input", "no chat template"),
        ({"model": "gpt-4o"}, "g.model", "behind a remote grader"),
        ({"input": "{{item.question}}"}, "g.input", "same score"),
        ({"input": "{{sample.output_json.a}}"}, "g.input", "output_text"),
        ({"input": [{"role": "user", "content": "{{nope}}{{sample.output_text}}"}]}, "g.input[0].content", "unknown variable"),
        ({"sampling_params": {"temperature": 0}}, "g.sampling_params", "nothing is sampled"),
        ({"range": [1, 5]}, "g.range", "use clip"),
    ],
)
def test_what_can_be_known_is_said_when_a_job_is_created(models: Path, settings: dict[str, Any], param: str, words: str) -> None:
    def find(name: str) -> Path:
        if not (models / name).is_dir():
            raise InvalidRequest(f"model {name!r} is not known", param="model")
        return models / name

    with pytest.raises(InvalidRequest) as caught:
        check_grader(grader(raw(**settings)), "g", means=means(models, find))
    assert caught.value.param == param
    assert words in caught.value.message
    assert isinstance(caught.value, NotImplementedYet) == (param in ("g.sampling_params", "g.range"))


@pytest.mark.parametrize("settings", [{"clip": [1.0, 0.0]}, {"input_pair": "x"}, {"scale": 0.0}])
def test_settings_that_contradict_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(settings))):
        grader(raw(**settings))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"activation": "sigmoid"}, 1 / (1 + math.exp(-3.0))),
        ({"activation": "sigmoid", "scale": -1.0}, -1 / (1 + math.exp(-3.0))),
        ({"clip": [-1.0, 2.0]}, 2.0),
        ({"scale": 0.5, "shift": 1.0}, 2.5),
        ({"clip": [0.0, 1.0], "pass_threshold": 1.0}, 1.0),
    ],
)
def test_from_logit_to_score(settings: dict[str, Any], expected: float) -> None:
    assert score_of(grader(raw(**settings)), [3.0], 0) == pytest.approx(expected)  # type: ignore[arg-type]


def test_extreme_logits_do_not_overflow() -> None:
    for logit in (-1e5, 1e5):
        assert score_of(grader(raw(activation="sigmoid")), [logit], 0) == float(logit > 0)  # type: ignore[arg-type]
        assert score_of(grader(raw(label=0, activation="softmax")), [logit, 0.0], 0) == float(logit > 0)  # type: ignore[arg-type]


def test_columns_it_names_are_checked_in_every_row(models: Path) -> None:
    rows = [Row(1, None, "x", {"question": "1"}), Row(2, None, "x", {"q": "1"})]
    with pytest.raises(InvalidRequest, match=r"question.*line 2"):
        check_templates(grader(raw()), rows)


def test_openai_messages_are_read_as_they_are() -> None:
    turns = [{"type": "message", "role": "user", "content": {"type": "input_text", "text": "{{item.question}} {{sample.output_text}}"}}]
    check = grader(raw(input=turns)).model_dump_json()
    assert json.loads(check)["input"][0]["content"]["text"].startswith("{{item")


@pytest.mark.slow
def test_a_process_that_hangs_or_dies_costs_its_completion(models: Path) -> None:
    """A stopped process is past its deadline, a killed one dead; the next completion gets a new one."""
    with opened(models, timeout_s=2.0) as ready:
        digest = ready.start()
        (one,) = ready._scorers.values()
        assert isinstance(one, classifier.Classifier)
        assert one._process is not None
        os.kill(one._process.pid, signal.SIGSTOP)
        late, alive = ready.score(samples("4", "5"))
        os.kill(one._process.pid, signal.SIGKILL)
        dead, again = ready.score(samples("4", "5"))
        assert (late.kind, dead.kind) == ("timeout", "crashed")
        assert again.value == alive.value
        assert ready.start() == digest


@pytest.mark.usefixtures("here")
def test_after_three_processes_lost_in_a_row_the_rest_is_given_up(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(self: Here, line: bytes, deadline_s: float) -> bytes:
        if b'"read"' in line:
            raise DeadlinePassed
        return encode(self._server.serve(json.loads(line)))

    monkeypatch.setattr(Here, "ask", late)
    with opened(models) as ready:
        scores = ready.score(samples(*"12345"))
    assert [score.kind for score in scores] == ["timeout"] * MAX_DEATHS + ["crashed"] * 2


@pytest.mark.usefixtures("here")
def test_weights_that_change_under_a_run_are_noticed(tmp_path: Path) -> None:
    make_classifier(tmp_path / "one", "TINY")
    with opened(tmp_path) as ready:
        first = ready.start()
        ready.close()
        make_classifier(tmp_path / "one", "TINY", seed=1)
        (score,) = ready.score(samples("4"))
    assert score.kind == "crashed"
    assert "have changed" in (score.error or "")
    with opened(tmp_path) as ready:
        assert ready.start() != first
