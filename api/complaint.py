"""How the command says that something failed."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape


def complain(reason: object) -> None:
    """One line on stderr, word for word: brackets in it are no markup."""
    Console(stderr=True).print(f"[bold red]grpo:[/bold red] {escape(str(reason))}", highlight=False, soft_wrap=True)
