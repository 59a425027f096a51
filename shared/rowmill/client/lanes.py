"""Asking all gateways how their lanes stand. Nobody knows how many there are, so answers are collected for a while."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection

from rowmill.runtime.bus import Bus
from rowmill_contracts.events import AskLanes, LanesShown
from rowmill_contracts.topology import CONTROL


async def ask_lanes(
    bus: Bus,
    *,
    seconds: float,
    org: str | None = None,
    provider: str | None = None,
    enough: Callable[[Collection[LanesShown]], bool] = lambda _: False,
) -> list[LanesShown]:
    """What the gateways say within ``seconds``, in any order; nothing where none runs. ``enough``: whether these answers are, so that no others are
    waited for (``bool``: with the first one).
    """
    answers: dict[str, LanesShown] = {}
    heard = asyncio.Event()

    def collect(answer: LanesShown) -> None:
        answers[answer.gateway] = answer
        heard.set()

    bus.on_reply(LanesShown, collect)
    try:
        async with asyncio.timeout(seconds):
            await bus.publish(AskLanes(org=org, provider=provider), "", exchange=CONTROL, reply_to=bus.reply_to)
            while not enough(answers.values()):
                heard.clear()
                await heard.wait()
    except TimeoutError:
        pass
    return list(answers.values())
