"""HTTP/1.1 as uvicorn speaks it, with a limit on how long a client may take over the head of a request.

uvicorn waits without limit for the first head of a connection and for the rest of one that has begun, so a few
hundred clients that send a byte a second ("slowloris") hold every place of `limit_concurrency` and everybody else
gets 503. Here a head must be whole within `HEAD_TIMEOUT_S` from the opening of the connection or from its first byte,
however many bytes trickle in; and when more than `MOST_OWING` connections owe one, those that have owed it the
longest are closed, so that clients that come again at once do not hold all places either. Bodies have limits of their
own (middleware.py), answers have `send_timeout_s` (sse.py), and connections between two requests have uvicorn's
`timeout_keep_alive`.
"""

from __future__ import annotations

import asyncio
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0
MOST_OWING = 500
GRACE_S = 1.0


class HeadDeadline(H11Protocol):
    """One connection of the server; a process has one server."""

    head_timeout_s: ClassVar[float] = HEAD_TIMEOUT_S
    most_owing: ClassVar[int] = MOST_OWING
    owing: ClassVar[dict[HeadDeadline, asyncio.TimerHandle]] = {}
    """Connections that owe a head, the longest first, with the timer that ends each."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """The client owes a head from now on."""
        super().connection_made(transport)
        self._follow_head()

    def data_received(self, data: bytes) -> None:
        """Some bytes came: of a head, of a body, or of a next request that waits for its turn."""
        super().data_received(data)
        self._follow_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nobody owes anything any more."""
        self._owes_nothing()
        super().connection_lost(exc)

    def _follow_head(self) -> None:
        if self.conn.their_state is not h11.IDLE or self.transport.is_closing():
            self._owes_nothing()
        elif self not in self.owing:
            self.owing[self] = self.loop.call_later(self.head_timeout_s, self._refuse, f"within {self.head_timeout_s:g} s")
            self._make_room()

    def _make_room(self) -> None:
        """A client that sends its head at once is done within milliseconds: only those slower than `GRACE_S` are in the way."""
        late = self.loop.time() + self.head_timeout_s - GRACE_S
        for oldest, timer in list(self.owing.items())[: max(0, len(self.owing) - self.most_owing)]:
            if timer.when() > late:
                break
            oldest._refuse("before many other clients came")

    def _owes_nothing(self) -> None:
        timer = self.owing.pop(self, None)
        if timer is not None:
            timer.cancel()

    def _refuse(self, when: str) -> None:
        self._owes_nothing()
        if self.transport.is_closing():
            return
        text = f"the head of the request was not whole {when}\n".encode()
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text)), (b"connection", b"close")]
        for event in (h11.Response(status_code=408, headers=headers, reason=b"Request Timeout"), h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self.transport.close()
