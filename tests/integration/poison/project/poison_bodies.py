"""Plays whose bodies are well, end their process, hold it, or never return."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time

from pydantic import BaseModel

from rowmill import Context, play


class Told(BaseModel):
    does: str


@play("body")
async def body(ctx: Context, input: Told) -> str:  # noqa: A002 - the authoring surface names it so
    """Does as it is told."""
    match input.does:
        case "exit":
            os._exit(3)
        case "hold":
            time.sleep(1e9)  # noqa: ASYNC251 - that is what is wrong with it
        case "never":
            await asyncio.Event().wait()
        case "never, whatever is done about it":
            while True:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.Event().wait()
    return "well"
