"""`grpo keys`: making, listing and revoking API keys, straight in the database of this deployment."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from api.own_ledger import own_ledger
from jobs.scopes import SCOPES

if TYPE_CHECKING:
    from jobs.ledger import ApiKeyRecord

app = typer.Typer(help="Make, list and revoke API keys. With the first key the server stops answering without one.", no_args_is_help=True)
console = Console()

DataDir = Annotated[Path | None, typer.Option(help="Directory of the server's data. [default: ./.grpo or GRPO_DATA_DIR]")]
_DAY_S = 86400


@app.command("create")
def create(
    name: Annotated[str, typer.Argument(help="What the key is for; shown as the actor of changes.")],
    scope: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SCOPES)}; repeat for more. [default: admin]")] = None,
    expires_in_days: Annotated[float | None, typer.Option(min=0.001, max=36_500, help="Days until it expires. [default: never]")] = None,
    data_dir: DataDir = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")] = False,
) -> None:
    """Make a key and print it, this once."""
    if not name.strip():
        raise typer.BadParameter("a key needs a name that says what it is for", param_hint="name")
    expires_at = None if expires_in_days is None else time.time() + expires_in_days * _DAY_S
    with own_ledger(data_dir) as ledger:
        record, secret = ledger.create_api_key(name=name, scopes=scope or ["admin"], expires_at=expires_at)
    if as_json:
        typer.echo(json.dumps({"id": record.id, "name": record.name, "scopes": record.scopes, "key": secret}))
    else:
        typer.echo(secret)
        Console(stderr=True).print("Keep it: it is not shown again. Clients read it from GRPO_API_KEY.", highlight=False)


@app.command("list")
def list_keys(data_dir: DataDir = None) -> None:
    """List the keys, without their secrets."""
    with own_ledger(data_dir) as ledger:
        records = ledger.list_api_keys()
    table = Table(Column("id", no_wrap=True), "name", "scopes", "made", "last used", "state")
    for record in records:
        table.add_row(
            record.id, escape(record.name), " ".join(record.scopes), _when(record.created_at), _when(record.last_used_at), _state(record)
        )
    console.print(table)


@app.command("revoke")
def revoke(key_id: Annotated[str, typer.Argument(help="Its id, the part between the underscores.")], data_dir: DataDir = None) -> None:
    """Close a key for good."""
    with own_ledger(data_dir) as ledger:
        record = ledger.revoke_api_key(key_id)
    typer.echo(f"key {record.id} ({record.name}) opens nothing any more")


def _when(at: float | None) -> str:
    return "never" if at is None else datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%d %H:%M UTC")


def _state(record: ApiKeyRecord) -> str:
    if record.revoked_at is not None:
        return f"revoked {_when(record.revoked_at)}"
    if record.expires_at is not None:
        return ("expired " if record.expires_at <= time.time() else "until ") + _when(record.expires_at)
    return "valid"
