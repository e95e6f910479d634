"""The grader `score_model`: a sequence classifier in a killable process of its own, asked one completion at a time.

This side is torch-free; `grpo_engine/reward_model.py` is the other. One text at a time, without padding: a score depends on the
text alone, and a process that hangs or dies costs the completion it was reading.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from grpo_engine.contract.classifier import ScoreModel
from grpo_engine.contract.error import InvalidRequest
from grpo_engine.grader.classifier_input import classifier_templates
from grpo_engine.grader.outside import Means, ModelPlaces, fault
from grpo_engine.grader.process import DeadlinePassed, GraderProcess, ProcessDied
from grpo_engine.grader.sample import MAX_SCORE, GraderFault, Sample, Score, View
from grpo_engine.grader.wire import encode

MODULE = "grpo_engine.reward_model"
LOAD_LIMIT_S = 600.0
"""Reading weights, from the Hub at worst, may take no longer."""
MAX_DEATHS = 3
"""Processes lost one after the other in one step before the rest of it is given up."""
_HEAD = "ForSequenceClassification"
_SHOWN_LABELS = 16


def check_classifier(cfg: ScoreModel, at: str, places: ModelPlaces | None) -> None:
    """Raise InvalidRequest for a classifier that cannot work here, without loading it. What only the Hub knows is not found out."""
    classifier_templates(cfg, at)
    if places is None:
        raise InvalidRequest(f"{at}: no classifier can be loaded here; use another grader", param=f"{at}.model")
    if places.find is None:
        return
    try:
        folder = places.find(cfg.model)
    except InvalidRequest as error:
        raise InvalidRequest(
            f"{at}.model: score_model runs a sequence classifier (reward model) of this server: {error.message}; a judge model that is "
            "sampled goes behind a remote grader",
            param=f"{at}.model",
        ) from error
    if folder is not None:
        label_number(cfg, labels_of(folder, cfg.model, at), at)
        if not isinstance(cfg.input, str) and not _has_chat_template(folder):
            raise InvalidRequest(_no_template(cfg.model), param=f"{at}.input")


def labels_of(folder: Path, name: str, at: str) -> list[str]:
    """The labels by number. Raises InvalidRequest when config.json names no classification head."""
    try:
        config: Any = json.loads((folder / "config.json").read_bytes())
        found = [str(one) for one in config.get("architectures") or []]
        names = {int(number): str(label) for number, label in (config.get("id2label") or {}).items()}
        count = len(names) or int(config.get("num_labels", 2))
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise InvalidRequest(f"{at}.model: {name!r} has no config.json that can be read; repair it", param=f"{at}.model") from error
    if not any(one.endswith(_HEAD) for one in found):
        what = ", ".join(found) or "nothing"
        raise InvalidRequest(
            f"{at}.model: {name!r} has no classification head (its architectures are {what}); name a model of a class ...{_HEAD}",
            param=f"{at}.model",
        )
    return [names.get(number, f"LABEL_{number}") for number in range(count)]


def label_number(cfg: ScoreModel, labels: Sequence[str], at: str) -> int:
    """Whose logit counts. Raises InvalidRequest."""
    shown = ", ".join(f"{number} {name!r}" for number, name in enumerate(labels[:20]))
    param = f"{at}.label"
    if cfg.label is None and len(labels) > 1:
        raise InvalidRequest(f"{param}: {cfg.model!r} has {len(labels)} labels; name the one that counts: {shown}", param=param)
    if cfg.activation == "softmax" and len(labels) == 1:
        raise InvalidRequest(f"{at}.activation: softmax over one label is always 1; use sigmoid or none", param=f"{at}.activation")
    if isinstance(cfg.label, str) and cfg.label in labels:
        return list(labels).index(cfg.label)
    number = 0 if cfg.label is None else cfg.label
    if isinstance(number, str) or number >= len(labels):
        raise InvalidRequest(f"{param}: {cfg.model!r} has no label {cfg.label!r}; it has {shown}", param=param)
    return number


def score_of(cfg: ScoreModel, logits: Sequence[float], number: int) -> float:
    """The score by the settings. Raises GraderFault for logits that are not numbers."""
    if not all(math.isfinite(logit) for logit in logits):
        raise GraderFault("not_a_number", f"the classifier's logit is {next(one for one in logits if not math.isfinite(one))}")
    value = logits[number]
    if cfg.activation == "sigmoid":
        value = 1.0 / (1.0 + math.exp(-value)) if value >= 0 else math.exp(value) / (1.0 + math.exp(value))
    elif cfg.activation == "softmax":
        largest = max(logits)
        value = math.exp(value - largest) / math.fsum(math.exp(logit - largest) for logit in logits)
    value = cfg.scale * value + cfg.shift
    if cfg.clip is not None:
        value = min(max(value, cfg.clip[0]), cfg.clip[1])
    if cfg.pass_threshold is not None:
        value = float(value >= cfg.pass_threshold)
    if not abs(value) <= MAX_SCORE:
        raise GraderFault("not_a_number", f"the classifier's score is {value:.3g}; scores lie within +-{MAX_SCORE:g}")
    return value


class Classifier:
    """One classifier in one process, started when first needed. Safe to call from several threads; they take turns."""

    def __init__(self, cfg: ScoreModel, at: str, means: Means) -> None:
        """Raises InvalidRequest when it cannot work here."""
        check_classifier(cfg, at, means.models)
        assert means.models is not None, "check_classifier refuses it"
        self._cfg, self._at, self._places = cfg, at, means.models
        self._templates = classifier_templates(cfg, at)
        self._turn = threading.Lock()
        self._process: GraderProcess | None = None
        self._sha256: str | None = None
        self._labels: list[str] = []
        self._number = 0

    def start(self) -> str:
        """Load it. Returns the SHA-256 of its weights. Raises InvalidRequest naming the field."""
        with self._turn:
            self._load()
        assert self._sha256 is not None, "_load sets it"
        return self._sha256

    def close(self) -> None:
        """End the process."""
        with self._turn:
            self._drop()

    def score(self, samples: Sequence[Sample]) -> list[Score]:
        """One score a sample, in order. After MAX_DEATHS processes lost in a row the rest is a fault."""
        scores: list[Score] = []
        deaths = 0
        with self._turn:
            for sample in samples:
                if deaths == MAX_DEATHS:
                    scores.append(fault("crashed", f"{MAX_DEATHS} processes of the classifier were lost in a row: {scores[-1].error}"))
                    scores += scores[-1:] * (len(samples) - len(scores))
                    break
                scores.append(self._score(sample))
                deaths = deaths + 1 if scores[-1].kind in ("timeout", "crashed") else 0
        return scores

    def _score(self, sample: Sample) -> Score:
        limit_s = self._cfg.timeout_s
        try:
            asked = self._templates.fill(View(sample))
            process = self._load()
            told = json.loads(process.ask(encode({"read": asked}), limit_s))
            if "problem" in told:
                return fault("raised", f"the classifier: {told['problem']}")
            logits = [float(logit) for logit in told["logits"]]
            detail = {"num_tokens": told["num_tokens"], "is_truncated": told["is_truncated"]}
            detail["logits"] = dict(zip(self._labels[:_SHOWN_LABELS], logits, strict=False))
            return Score(score_of(self._cfg, logits, self._number), detail=detail)
        except GraderFault as problem:
            return fault(problem.kind, str(problem))
        except InvalidRequest as problem:
            return fault("crashed", f"the classifier cannot be loaded again: {problem.message}")
        except DeadlinePassed:
            self._drop()
            return fault("timeout", f"the classifier gave no answer within {limit_s:g} s and was ended")
        except (ProcessDied, OSError) as death:
            self._drop()
            return fault("crashed", f"the classifier: {death}")

    def _load(self) -> GraderProcess:
        if self._process is not None:
            return self._process
        cfg, param = self._cfg, f"{self._at}.model"
        request = {
            "model": cfg.model,
            "cache_dir": str(self._places.cache_dir),
            "model_dir": None if self._places.model_dir is None else str(self._places.model_dir),
            "device": cfg.device,
            "max_tokens": cfg.max_tokens,
            "truncate": cfg.truncate,
        }
        try:
            self._process = GraderProcess(module=MODULE)
            told = json.loads(self._process.ask(encode({"load": request}), LOAD_LIMIT_S))
        except (DeadlinePassed, ProcessDied, OSError) as error:
            self._drop()
            raise InvalidRequest(f"{param}: {cfg.model!r} could not be loaded: {error}", param=param) from error
        try:
            self._take(told, param)
        except InvalidRequest:
            self._drop()
            raise
        return self._process

    def _take(self, told: dict[str, Any], param: str) -> None:
        if "problem" in told:
            raise InvalidRequest(f"{param}: {told['problem']}", param=param)
        if not isinstance(self._cfg.input, str) and not told["has_chat_template"]:
            raise InvalidRequest(_no_template(self._cfg.model), param=f"{self._at}.input")
        self._labels = told["labels"]
        self._number = label_number(self._cfg, self._labels, self._at)
        if self._sha256 not in (None, told["sha256"]):
            raise InvalidRequest(f"{param}: the weights of {self._cfg.model!r} have changed since the run loaded them", param=param)
        self._sha256 = told["sha256"]

    def _drop(self) -> None:
        if self._process is not None:
            self._process.kill()
        self._process = None


def _has_chat_template(folder: Path) -> bool:
    if (folder / "chat_template.jinja").exists() or (folder / "chat_template.json").exists():
        return True
    try:
        return bool(json.loads((folder / "tokenizer_config.json").read_bytes()).get("chat_template"))
    except (OSError, ValueError, AttributeError):
        return False


def _no_template(name: str) -> str:
    return f"the tokenizer of {name!r} has no chat template for messages; give input as a text (and input_pair as the second)"
