"""`grpo checkpoints, promote, pin, discard`: a job's published checkpoints, and which of them are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from api.client.display import size
from api.client.download import choose
from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import JobId, Json, Key, Url, reading, show, table
from grpo_engine.contract.view import Checkpoint

CheckpointName = Annotated[str, typer.Argument(metavar="CHECKPOINT", help="Id, name or step.")]


def checkpoints(job_id: JobId, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """List a job's published checkpoints, newest first."""
    with Grpo(url, api_key) as client:
        found = client.checkpoints(job_id)
    rows = [(one.id, str(one.step_number), *_earned(one), size(one.bytes), _standing(one)) for one in found]
    table(("checkpoint", "step", "kl/ref", "reward", "size", ""), rows, found, as_json)


def promote(
    job_id: JobId,
    checkpoint: CheckpointName,
    max_ref_kl: Annotated[float | None, typer.Option(min=0, help="KL to the reference at most this, nats per token.")] = None,
    min_reward: Annotated[float | None, typer.Option(help="Mean reward at least this.")] = None,
    max_beta: Annotated[float | None, typer.Option(min=0, help="Beta at most this.")] = None,
    min_step: Annotated[int | None, typer.Option(min=1, help="Step at least this.")] = None,
    note: Annotated[str | None, typer.Option(help="Why.")] = None,
    withdraw: Annotated[bool, typer.Option("--withdraw", help="Take the promotion back; the checkpoint stays pinned.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Promote a checkpoint if it passes every gate that is given; at least one is."""
    bounds = {"max_ref_kl": max_ref_kl, "min_reward": min_reward, "max_beta": max_beta, "min_step": min_step}
    gates = {name: bound for name, bound in bounds.items() if bound is not None}
    with Grpo(url, api_key) as client:
        chosen = choose(client.checkpoints(job_id), checkpoint)
        if withdraw:
            show(client.withdraw_promotion(job_id, chosen.id), as_json, f"{chosen.id} is no longer promoted; it stays pinned")
        else:
            passed = ", ".join(f"{name} {bound:g}" for name, bound in gates.items())
            show(client.promote(job_id, chosen.id, gates, note=note), as_json, f"{chosen.id} is promoted and pinned; it passed {passed}")


def pin(
    job_id: JobId,
    checkpoint: CheckpointName,
    off: Annotated[bool, typer.Option("--off", help="Leave it to retention again.")] = False,
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Keep a checkpoint whatever the job's retention says."""
    with Grpo(url, api_key) as client:
        chosen = choose(client.checkpoints(job_id), checkpoint)
        if off:
            show(client.unpin(job_id, chosen.id), as_json, f"{chosen.id} is left to retention")
        else:
            show(client.pin(job_id, chosen.id), as_json, f"{chosen.id} is kept until it is unpinned")


def discard(job_id: JobId, checkpoint: CheckpointName, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Delete a checkpoint for good. A pinned one is refused."""
    with Grpo(url, api_key) as client:
        chosen = choose(client.checkpoints(job_id), checkpoint)
        show(client.delete_checkpoint(job_id, chosen.id), as_json, f"{chosen.id} is gone")


COMMANDS: dict[str, Callable[..., None]] = {"checkpoints": checkpoints, "promote": promote, "pin": pin, "discard": discard}


def _earned(one: Checkpoint) -> tuple[str, str]:
    metrics = one.model_dump()["metrics"]
    return reading(metrics.get("ref_kl")), reading(metrics.get("reward"))


def _standing(one: Checkpoint) -> str:
    return "promoted" if one.promotion is not None else "pinned" if one.pinned else ""
