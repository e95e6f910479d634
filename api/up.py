"""`grpo up`: the embedded server until Ctrl-C."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rich.console import Console
from rich.markup import escape

from api.client.sync import DEFAULT_URL
from api.embedded.stack import Stack
from jobs.settings import Settings, is_redis_given

TEND_S = 0.2


class Interrupts:
    """Counts Ctrl-C, SIGTERM and a closed terminal instead of dying of them. The first asks, the second hurries."""

    def __init__(self) -> None:
        self.count = 0

    @property
    def is_asked(self) -> bool:
        """Somebody wants it to end."""
        return self.count >= 1

    def is_hurried(self) -> bool:
        """Somebody wants it to end now."""
        return self.count >= 2

    @contextmanager
    def counted(self) -> Iterator[None]:
        """While inside, signals are counted."""

        def count(signum: int, frame: FrameType | None) -> None:
            self.count += 1

        before = {number: signal.signal(number, count) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def running_stack(settings: Settings, console: Console) -> Iterator[tuple[Stack, Interrupts]]:
    """The embedded server, ready for jobs; stopped in order afterwards.

    Raises StackFailed, DataDirBusy, NoEmbeddedRedis, or KeyboardInterrupt when the start is interrupted.
    """
    interrupts = Interrupts()
    with interrupts.counted():
        stack = Stack(
            settings, lambda words: console.print(words, highlight=False, soft_wrap=True, markup=False), is_redis_given=is_redis_given()
        )
        console.print(f"starting the server in {stack.settings.data_dir} ...", highlight=False, soft_wrap=True, markup=False)
        if not stack.start(lambda: interrupts.is_asked):
            raise KeyboardInterrupt
        try:
            yield stack, interrupts
        finally:
            console.print("stopping ...", highlight=False)
            stack.stop(interrupts.is_hurried)
            console.print("stopped", highlight=False)


def tend_until(stack: Stack, is_over: Callable[[], bool]) -> None:
    """Keep the children alive until something happens."""
    while not is_over():
        stack.tend()
        time.sleep(TEND_S)


def _address_hint(url: str) -> str:
    return "" if url == DEFAULT_URL else f"[bold]Client[/bold]     export GRPO_BASE_URL={url}\n"


def up(settings: Settings, console: Console) -> None:
    """Run the embedded server until it is interrupted."""
    with running_stack(settings, console) as (stack, interrupts):
        console.print(
            f"[bold]API[/bold]        {stack.url}/v1/fine_tuning/jobs\n"
            f"[bold]Dashboard[/bold]  {stack.url}/\n"
            f"[bold]Data[/bold]       {escape(str(stack.settings.data_dir))}\n"
            f"[bold]Logs[/bold]       {escape(str(stack.logs))}\n"
            f"{_address_hint(stack.url)}Ctrl-C stops everything.",
            highlight=False,
            soft_wrap=True,
        )
        tend_until(stack, lambda: interrupts.is_asked)
