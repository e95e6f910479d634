"""The API on a real port, under uvicorn in a thread of this process."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import httpx
import uvicorn

from api.app import create_app
from api.sse import StreamLimits
from jobs.settings import Settings


class Server:
    """Listens from the start; may be stopped, and started again on the same port."""

    def __init__(self, settings: Settings, limits: StreamLimits) -> None:
        self.settings = settings
        self._limits = limits
        self.port = 0
        self.start()

    def start(self) -> None:
        """Listen and wait until it does."""
        self.app = create_app(self.settings, limits=self._limits)
        config = uvicorn.Config(
            self.app, host="127.0.0.1", port=self.port, log_level="warning", timeout_graceful_shutdown=1, ws="none", lifespan="on"
        )
        self._uvicorn = uvicorn.Server(config)
        self._thread = threading.Thread(target=lambda: asyncio.run(self._uvicorn.serve()), daemon=True)
        self._thread.start()
        deadline = time.monotonic() + 20
        while not self._uvicorn.started:
            assert self._thread.is_alive()
            assert time.monotonic() < deadline
            self._thread.join(0.01)
        self.port = self._uvicorn.servers[0].sockets[0].getsockname()[1]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def open_streams(self) -> int:
        """Event streams open now."""
        count: int = self.app.state.services.slots.open
        return count

    def client(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=30, **options)

    def stop(self) -> None:
        """Close every connection and the port."""
        self._uvicorn.should_exit = True
        self._thread.join(20)
        assert not self._thread.is_alive()
