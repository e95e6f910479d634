"""`grpo graders`: try a grader before spending a training run on it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from api.client.errors import ClientError
from api.client.sync import DEFAULT_URL, Grpo
from api.client.terminal import Json, Key, Url, load_object, parse_json, print_json, reading, say

app = typer.Typer(name="graders", help="Try a grader on a sample.", no_args_is_help=True)

GraderFile = Annotated[Path, typer.Argument(help="Grader as JSON, or a job whose method.grpo.grader it is.", exists=True, dir_okay=False)]


@app.command("run")
def run(
    grader: GraderFile,
    sample: Annotated[str, typer.Option(help="What the model is supposed to have written.")],
    item: Annotated[str, typer.Option(help="""The row of the training file, as JSON, such as '{"reference_answer": "4"}'.""")] = "{}",
    as_json: Json = False,
    url: Url = DEFAULT_URL,
    api_key: Key = None,
) -> None:
    """Score one completion. Exit code 1 when the grader gives no number."""
    row = parse_json(item, "--item")
    if not isinstance(row, dict):
        raise ClientError("--item holds no JSON object")
    with Grpo(url, api_key) as client:
        found = client.run_grader(_grader(grader), sample, row)
    shown = found.model_dump(mode="json")
    if as_json:
        print_json(shown)
    else:
        say(f"reward {reading(shown['reward'])}" + "".join(f"  {name} {reading(part)}" for name, part in shown["sub_rewards"].items()))
        if message := shown["metadata"].get("errors", {}).get("message"):
            say(f"no number: {message}")
    raise typer.Exit(1 if shown["reward"] is None else 0)


@app.command("validate")
def validate(grader: GraderFile, as_json: Json = False, url: Url = DEFAULT_URL, api_key: Key = None) -> None:
    """Check that a grader is well formed."""
    with Grpo(url, api_key) as client:
        found = client.check_grader(_grader(grader))
    if as_json:
        print_json(found.model_dump(mode="json"))
    else:
        say(f"valid: a {found.grader['type']} grader")


def _grader(path: Path) -> dict[str, object]:
    content = load_object(path)
    if "method" not in content:
        return content
    method = content["method"]
    grpo = method.get("grpo") if isinstance(method, dict) else None
    grader = grpo.get("grader") if isinstance(grpo, dict) else None
    if not isinstance(grader, dict):
        raise ClientError(f"{path} is a job without method.grpo.grader")
    return grader
