"""Asking executors and gateways which code of a play they have. Nobody knows how many there are: the first of each is waited for, a moment longer for
others.
"""

from __future__ import annotations

import asyncio
from typing import Final

from rowmill.runtime.bus import Bus
from rowmill_contracts.events import AskCode, CodeShown
from rowmill_contracts.topology import CONTROL

PATIENCE_SECONDS: Final = 1.0
OTHERS_SECONDS: Final = 0.05
"""Those that hear the question at once answer within some milliseconds of each other."""
LOADERS: Final = frozenset({"row-executor", "tool-gateway"})
"""Services that load authors' code."""


async def ask_code(bus: Bus, play: str, *, seconds: float = PATIENCE_SECONDS) -> list[CodeShown]:
    """What they say within ``seconds``, in any order; nothing where none hears it."""
    answers: dict[str, CodeShown] = {}
    all_kinds = asyncio.Event()

    def collect(answer: CodeShown) -> None:
        if answer.play == play:
            answers[answer.process] = answer
        if {each.service for each in answers.values()} >= LOADERS:
            all_kinds.set()

    bus.on_reply(CodeShown, collect)
    try:
        async with asyncio.timeout(seconds):
            await bus.publish(AskCode(play=play), "", exchange=CONTROL, reply_to=bus.reply_to)
            await all_kinds.wait()
            await asyncio.sleep(OTHERS_SECONDS)
    except TimeoutError:
        pass
    return list(answers.values())
