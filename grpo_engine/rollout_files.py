"""What was sampled, kept for reading: `rollouts/step-000001.jsonl.zst`, one line a completion (contract/rollout.py).

A file is there whole or not at all. Bounded by `telemetry.rollouts_keep`; with `rollouts_redact` no text and no token is
written. Nothing here touches the training: a write that fails is told to the caller and forgotten.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import zstandard
from torch import Tensor

from grpo_engine.batch import Completion
from grpo_engine.contract.event import encode_nonfinite
from grpo_engine.contract.job import GrpoConfig
from grpo_engine.contract.rollout import KeptCompletion, ReferenceAnswer, rollout_name, rollout_step
from grpo_engine.contract.view_base import Number
from grpo_engine.step import StepResult, is_due
from grpo_engine.step_metrics import token_kl

ROLLOUTS_DIR = "rollouts"


class RolloutFiles:
    """Writes the rollouts of one attempt and deletes its oldest."""

    def __init__(self, run_dir: Path, grpo: GrpoConfig, tokenizer: Any) -> None:
        self._directory = run_dir / ROLLOUTS_DIR
        self._grpo = grpo
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def keep(self, result: StepResult) -> str | None:
        """Write the step's completions when they are due. Returns what went wrong, or None."""
        cfg = self._grpo.telemetry
        if not is_due(cfg.rollouts_every, result.step):
            return None
        try:
            self._directory.mkdir(exist_ok=True)
            self._write(self._directory / rollout_name(result.step), "".join(f"{line}\n" for line in self._lines(result)))
            for step in self._steps()[: -cfg.rollouts_keep]:
                (self._directory / rollout_name(step)).unlink(missing_ok=True)
        except OSError as error:
            return f"the rollouts of step {result.step} could not be kept: {error}"
        return None

    def rewind(self, step: int) -> str | None:
        """Forget the steps after `step`: they are done anew. Returns what went wrong, or None."""
        try:
            for later in self._steps():
                if later > step:
                    (self._directory / rollout_name(later)).unlink()
        except OSError as error:
            return f"rollouts of superseded steps could not be deleted: {error}"
        return None

    def _steps(self) -> list[int]:
        """Steps that have a file, ascending."""
        if not self._directory.is_dir():
            return []
        return sorted(step for path in self._directory.iterdir() if (step := rollout_step(path.name)) is not None)

    def _write(self, path: Path, text: str) -> None:
        temporary = path.with_name(f".{path.name}.tmp")
        try:
            with temporary.open("wb") as file:
                file.write(zstandard.ZstdCompressor(level=3).compress(text.encode()))
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise

    def _lines(self, result: StepResult) -> Iterator[str]:
        kl_BT = None if result.tensors is None else token_kl(result.tensors, self._grpo.kl)
        logprob_BT = None if result.tensors is None else result.tensors.old_logprob_BT
        advantage_B = None if result.advantages is None else result.advantages.advantage_PG.flatten().tolist()
        is_open = not self._grpo.telemetry.rollouts_redact
        answers = result.reference_answers
        for index, (prompt, completion) in enumerate(result.rollout.rows):
            count = len(completion.token_ids)
            kl = _row(kl_BT, index, count)
            mean_kl = None if kl_BT is None else float(kl_BT[index, :count].mean())
            answer = None if answers is None else _answer(answers[index], completion)
            kept = KeptCompletion.model_construct(
                index=index,
                row=prompt.row,
                prompt=prompt.text if is_open else None,
                completion=completion.text if is_open else None,
                num_prompt_tokens=len(prompt.token_ids),
                num_tokens=count,
                is_truncated=completion.is_truncated,
                reward=completion.reward,
                parts=dict(completion.parts),
                advantage=None if advantage_B is None else advantage_B[index],
                kl=mean_kl,
                token_ids=completion.token_ids if is_open else None,
                token_texts=[self._text_of(token) for token in completion.token_ids] if is_open else None,
                token_logprobs=_row(logprob_BT, index, count),
                token_kl=kl,
            )
            yield json.dumps(
                encode_nonfinite(dict(kept) | {"reference": answer}), separators=(",", ":"), allow_nan=False, ensure_ascii=False
            )

    def _text_of(self, token: int) -> str:
        if token not in self._texts:
            self._texts[token] = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        return self._texts[token]


def _answer(answer: Completion, completion: Completion) -> dict[str, Any]:
    """The reference's answer beside the policy's."""
    pairs = zip(answer.token_ids, completion.token_ids, strict=False)
    return ReferenceAnswer(
        completion=answer.text,
        num_tokens=len(answer.token_ids),
        is_truncated=answer.is_truncated,
        num_same_tokens=sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)),
    ).model_dump()


def _row(value_BT: Tensor | None, index: int, count: int) -> list[Number] | None:
    """The first `count` numbers of a row, to seven digits: what telemetry compares, in half the space."""
    if value_BT is None:
        return None
    return [float(f"{value:.7g}") for value in value_BT[index, :count].to("cpu", torch.float64).tolist()]
