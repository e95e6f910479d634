"""Completions of a step as the engine keeps them, for a job of the stage."""

from __future__ import annotations

import json
import random
from typing import Any

import zstandard

from jobs.ledger import Ledger

ANSWERS = (
    "Let me think. 17 + 25 is 42.\nSo the answer is 42",
    "17 + 25 = 42",
    "The answer is 41, because 17 and 25 make 41.",
    "I am sure it is forty-two, written 42.",
)


def keep_rollouts(ledger: Ledger, job_id: str, step: int, **changes: Any) -> None:
    """Two prompts with four completions each; `changes` are written into every line, None takes a key away."""
    job = ledger.get_job(job_id)
    path = ledger.artifacts.rollouts_path(job_id, job.epoch, step)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [{**line(index, step), **changes} for index in range(8)]
    text = "".join(json.dumps({key: value for key, value in one.items() if value is not None}) + "\n" for one in lines)
    path.write_bytes(zstandard.ZstdCompressor().compress(text.encode()))


def line(index: int, step: int) -> dict[str, Any]:
    """One completion; the reward is 1 for the first of each prompt and falls by a quarter."""
    noise = random.Random(step * 100 + index)
    text = ANSWERS[index % 4]
    tokens = [*pieces(text), "<|im_end|>"]
    kl = [abs(noise.gauss(0, 0.02)) * (20 if token.strip() in ("42", "41", "forty") else 1) for token in tokens]
    return {
        "index": index, "row": index // 4,
        "prompt": f"<|im_start|>user\nWhat is 17 + {25 + index // 4}?<|im_end|>\n<|im_start|>assistant\n",
        "completion": text, "num_prompt_tokens": 21, "num_tokens": len(tokens), "is_truncated": index % 4 == 3,
        "reward": 1 - 0.25 * (index % 4), "parts": {"exact": float(index % 4 < 2), "format": 0.5}, "advantage": 1.2 - 0.8 * (index % 4),
        "kl": sum(kl) / len(kl), "token_ids": [100 + place for place in range(len(tokens))], "token_texts": tokens,
        "token_logprobs": [-abs(noise.gauss(0, 1)) for _ in tokens], "token_kl": kl,
    }  # fmt: skip


def pieces(text: str) -> list[str]:
    """Words with the space before them, like a tokenizer's."""
    found: list[str] = []
    for character in text:
        if not found or character in " \n.," or found[-1] == "\n":
            found.append(character)
        else:
            found[-1] += character
    return found
