"""The right to send that a call of a tool function has, and what is seen of what the function does with it."""

from __future__ import annotations

from concurrent.futures import Future

import httpx

from rowmill_tool_gateway.http_port import MaySend


class Right:
    """The right to send of one call of a function, and what is seen of what it did. ``used``: one of its requests may have been sent. ``elsewhere``:
    it may have done something of which nothing is seen. ``asking``: how many of its requests are under way. ``unopened``: what was raised for those
    whose connection never opened. It ends with the call: what the author's code asks for later is not sent.
    """

    def __init__(self, may_send: MaySend, *, elsewhere: bool) -> None:
        self.used = False
        self.elsewhere = elsewhere
        self.asking = 0
        self.unopened: list[Exception] = []
        self._may_send = may_send
        self.over = False
        self._carried: set[Future[httpx.Response]] = set()

    def __call__(self) -> bool:
        if self.over or not self._may_send():
            return False
        self.used = True
        return True

    def carries(self, under_way: Future[httpx.Response]) -> None:
        """A thread waits for this request, which is given up when the call ends."""
        self._carried.add(under_way)
        under_way.add_done_callback(self._carried.discard)
        if self.over:
            under_way.cancel()

    def end(self) -> None:
        """The call is over."""
        self.over = True
        for under_way in list(self._carried):
            under_way.cancel()
