"""Reading a response body that a client library hands over in pieces: bounded in size, silence and share of the common budget."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass

from rowmill_tool_gateway.body_budget import BodyBudget
from rowmill_tool_gateway.http_parsing import BadResponse, ResponseTooLarge


@dataclass(frozen=True, slots=True)
class Bounds:
    """``limit``: bytes of one body. ``stall``: seconds of silence of the provider that are too many; waiting for the budget is not counted."""

    limit: int
    stall: float
    budget: BodyBudget


async def pieces_of(source: AsyncIterator[bytes], announced: int | None, bounds: Bounds) -> AsyncGenerator[bytes, None]:
    """The pieces, each asked for only while there is budget. What they hold of it goes back when the iteration ends, however it does.

    Raises `ResponseTooLarge`, `BadResponse` for a body that stalls, and whatever ``source`` raises.
    """
    if announced is not None and announced > bounds.limit:
        raise ResponseTooLarge(f"the answer has {announced} bytes; at most {bounds.limit} are read")
    room = asyncio.Event()
    share = bounds.budget.share(room.set)
    size = 0
    try:
        while True:
            room.clear()
            if not share.want(size, announced):
                await room.wait()
            try:
                async with asyncio.timeout(bounds.stall):
                    piece = await anext(source, b"")
            except TimeoutError as error:
                raise BadResponse(f"the answer stalled for {bounds.stall:g} s") from error
            if not piece:
                return
            size += len(piece)
            if size > bounds.limit:
                raise ResponseTooLarge(f"the answer has more than {bounds.limit} bytes")
            yield piece
    finally:
        share.done()


async def whole_body(source: AsyncIterator[bytes], announced: int | None, bounds: Bounds) -> bytes:
    """All pieces in one."""
    return b"".join([piece async for piece in pieces_of(source, announced, bounds)])
