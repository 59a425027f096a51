"""Answers to callers, gathered into pages per reply queue. A page of calls is done when each of its answers was handed to the broker."""

from __future__ import annotations

from typing import Protocol

import structlog

from rowmill.runtime.gathering import Gatherer
from rowmill_contracts.envelope import PAGE_BYTES, PAGE_ROWS, Message
from rowmill_contracts.tools import CallOutcome, ToolResults
from rowmill_tool_gateway.flights import Call, Page

log = structlog.get_logger()

KEPT_QUEUES = 64
"""Gatherers kept for reply queues; more than there are executors at a time."""

Answer = tuple[CallOutcome, Page]


class Replies(Protocol):
    """What the bus does for answers."""

    async def send_reply(self, reply_to: str, message: Message, *, correlation_id: str = "") -> None: ...


class Answers:
    """Sends each call's outcome once. A lost answer is asked for again by who waits for it, so nothing is kept here."""

    def __init__(self, replies: Replies, *, gather: float) -> None:
        self._replies = replies
        self._gather = gather
        self._gatherers: dict[str, Gatherer[Answer]] = {}

    def answer(self, call: Call, outcome: CallOutcome) -> None:
        """Answer a call; one that was answered already stays so."""
        if call.answered:
            return
        call.answered = True
        self._gatherer(call.page.reply_to).add((outcome, call.page))

    async def drain(self) -> None:
        for gatherer in list(self._gatherers.values()):
            await gatherer.drain()

    def _gatherer(self, reply_to: str) -> Gatherer[Answer]:
        gatherer = self._gatherers.get(reply_to)
        if gatherer is None:
            if len(self._gatherers) >= KEPT_QUEUES:
                del self._gatherers[next(iter(self._gatherers))]  # one with answers left is kept alive by its own timer and tasks

            async def flush(answers: list[Answer]) -> None:
                try:
                    await self._replies.send_reply(reply_to, ToolResults(results=[outcome for outcome, _ in answers]))
                except Exception:  # whatever it is, the answers are lost, and asked for again; their pages must not be held for ever
                    log.exception("answers_lost", reply_to=reply_to, answers=len(answers))
                for _, page in answers:
                    page.unsent -= 1
                    if page.unsent == 0 and not page.done.done():
                        page.done.set_result(None)

            gatherer = self._gatherers[reply_to] = Gatherer(
                flush, max_items=PAGE_ROWS, max_age=self._gather, max_bytes=PAGE_BYTES, size=lambda answer: len(answer[0].result)
            )
        return gatherer
