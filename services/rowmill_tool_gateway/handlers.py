"""What the gateway does with each message."""

from __future__ import annotations

import asyncio

from rowmill.runtime.deliveries import Delivery, Rejected
from rowmill.runtime.loaded_code import LoadedCode
from rowmill_contracts.budgets import is_spent_budget
from rowmill_contracts.events import AskCode, AskLanes, Control
from rowmill_contracts.shards import ShardsFreed
from rowmill_contracts.tools import ToolCalls
from rowmill_tool_gateway.answers import Replies
from rowmill_tool_gateway.engine import Engine


class Handlers:
    """``code``: what the process has loaded; None where nobody asks for it (tests)."""

    def __init__(self, engine: Engine, replies: Replies, code: LoadedCode | None = None) -> None:
        self._engine = engine
        self._replies = replies
        self._code = code

    async def calls(self, delivery: Delivery) -> None:
        """Work a page of calls; returns once each was answered, so only then it is acknowledged.

        Who handles it is cancelled when the session with the broker is lost. The page stays in hand all the same, and is let go in its time: what was
        claimed for it would else be renewed, and kept from whoever is given the page next, for as long as this process lives.
        """
        match delivery.message:
            case ToolCalls() as message if delivery.reply_to:
                await asyncio.shield(self._engine.take(message, delivery.reply_to).done)
            case ToolCalls():
                raise Rejected("tool calls without a reply queue: nobody would learn their outcome")
            case other:
                raise Rejected(f"{other.message_type} is not for the tool gateway")

    async def control(self, delivery: Delivery) -> None:
        """A hint that a run stopped or was halted, or that another gateway gave shards up, or an operator's question."""
        match delivery.message:
            case Control(run_id=run_id, action="stop" | "halt", reason=reason):
                self._engine.dispatcher.give_back(run_id, confirmed=not is_spent_budget(reason))
            case ShardsFreed(shards=shards):
                self._engine.shards.freed(shards)
            case AskLanes() as question if delivery.reply_to:
                await self._replies.send_reply(delivery.reply_to, self._engine.show(question))
            case AskCode() as question if delivery.reply_to and self._code is not None:
                await self._replies.send_reply(delivery.reply_to, self._code.shown(question))
            case _:
                pass  # a resumed run's calls come anew
