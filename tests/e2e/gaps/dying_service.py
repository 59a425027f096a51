"""Hosts one service as `rowmill serve` does, but for one trap: at its gap it kills itself, or takes a message for sent that nobody gets.

An entry of the tests' own: the product has no switch for this, and pays nothing for it. Run as ``python dying_service.py GAP``, a `Gap` as JSON.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[3]))

import msgspec
from tests.e2e.gaps.gap import Gap

from rowmill.runtime import hosting
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.receipts import ClaimReceipts
from rowmill_contracts.rows import RowTasks
from rowmill_contracts.shards import ShardsLeased


class Trap:
    """Counts what goes out, and acts at the gap."""

    def __init__(self, gap: Gap) -> None:
        self._gap = gap
        self._seen = 0
        self._claimed = False

    async def out(self, message_type: str | None, key: str, body: bytes, send: Callable[[], Awaitable[None]]) -> None:
        """Send a message, unless this is the gap."""
        gap = self._gap
        number = 0
        if self._counts(message_type, key, body):
            self._seen += 1
            number = self._seen
        if gap.when == "before" and number == gap.number:
            die()
        if gap.when == "lost" and gap.number <= number < gap.number + gap.lost:
            return
        await send()
        if gap.when == "after" and number == gap.number:
            die()

    def _counts(self, message_type: str | None, key: str, body: bytes) -> bool:
        gap, name = self._gap, (message_type or "").partition(".")[0]
        self._claimed |= name == "ReceiptsClaimed"
        if name != gap.message or not key.startswith(gap.key):
            return False
        message = decode(message_type, body)
        if isinstance(message, ShardsLeased):
            return self._claimed and bool(message.shards)  # with the run's calls: gateways renew what they have without any
        if isinstance(message, ClaimReceipts):
            return not message.only_cached  # where calls would wait long, a look at what is stored comes first
        return not gap.returning or (isinstance(message, RowTasks) and any(row.waits for row in message.rows))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def set_trap(trap: Trap) -> None:
    """Every message of the process goes through these two."""
    publish_body, reply = Bus.publish_body, Bus.reply
    send_reply = Bus.send_reply

    async def publish_body_or_die(self: Bus, body: bytes, message_type: str | None, key: str, **options: Any) -> None:
        await trap.out(message_type, key, body, lambda: publish_body(self, body, message_type, key, **options))

    async def reply_or_die(self: Bus, delivery: Delivery, message: Message) -> None:
        await trap.out(message.message_type, "", encode(message), lambda: reply(self, delivery, message))

    async def send_reply_or_die(self: Bus, reply_to: str, message: Message, *, correlation_id: str = "") -> None:
        if correlation_id:  # it is `reply` that sends it
            await send_reply(self, reply_to, message, correlation_id=correlation_id)
        else:
            await trap.out(message.message_type, "", encode(message), lambda: send_reply(self, reply_to, message))

    Bus.publish_body = publish_body_or_die  # type: ignore[method-assign]
    Bus.reply = reply_or_die  # type: ignore[method-assign]
    Bus.send_reply = send_reply_or_die  # type: ignore[method-assign]


if __name__ == "__main__":
    gap = msgspec.json.decode(sys.argv[1], type=Gap)
    set_trap(Trap(gap))
    hosting.serve([gap.service], stop_with_parent=True)
