"""Which providers keep rows of a run waiting: asked of the gateways where rows wait, and told as those see it who may send there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import msgspec
from tests.fakes.clocks import FrozenClock

from rowmill.client.outages import Outage, outages
from rowmill.runtime.bus import Bus
from rowmill_contracts.counts import Counts
from rowmill_contracts.envelope import Message
from rowmill_contracts.events import AskLanes, LanesShown, LaneView
from rowmill_contracts.run_questions import RunSummary


class Gateways:
    """A bus on which gateways answer a question for lanes, one after the other, as soon as it is asked."""

    reply_to = "replies.client"

    def __init__(self, *answers: LanesShown) -> None:
        self.asked: list[AskLanes] = []
        self._answers = answers
        self._collect: Callable[[Any], None] = lambda _answer: None

    def on_reply(self, _kind: type, collect: Callable[[Any], None]) -> None:
        self._collect = collect

    async def publish(self, message: Message, _key: str, **_where: Any) -> None:
        assert isinstance(message, AskLanes)
        self.asked.append(message)
        for answer in self._answers:
            self._collect(answer)


def lane(provider: str, *, held: bool = True, **facts: Any) -> LaneView:
    return LaneView(org="default", provider=provider, shard=3, held=held, concurrency=5, **facts)


def run(**waiting: int) -> RunSummary:
    return RunSummary(run_id="r1", number=1, org="default", play="p", state="waiting", counts=Counts(), rows_waiting=waiting)


async def told(gateways: Gateways, run: RunSummary, seconds: float = 10.0) -> list[Outage]:
    return await outages(cast("Bus", gateways), run, FrozenClock(), seconds=seconds)


async def test_of_a_run_none_of_whose_rows_waits_nobody_is_asked() -> None:
    gateways = Gateways()
    assert await told(gateways, run()) == []
    assert gateways.asked == []


async def test_a_provider_is_as_its_lanes_holder_sees_it() -> None:
    old = LanesShown(gateway="a", lanes=[lane("clearbit", held=False, closed_seconds=500.0, why="http_429"), lane("slow")])
    holder = LanesShown(gateway="b", lanes=[lane("clearbit", closed_seconds=30.0, unavailable_seconds=9.0, why="http_503"), lane("slow", held=False)])
    gateways = Gateways(old, holder)

    found = await told(gateways, run(clearbit=412, slow=7))

    assert found == [Outage("clearbit", 412, "http_503", 1_030.0)], "rows wait for their turn at the other, which serves"
    assert [question.org for question in gateways.asked] == ["default"]


async def test_one_that_is_open_to_probes_is_away_and_has_no_time() -> None:
    for away in ({"unavailable_seconds": 3.0}, {"probing": True}):
        gateways = Gateways(LanesShown(gateway="a", lanes=[lane("clearbit", why="connection_failed", **away)]))
        assert await told(gateways, run(clearbit=2)) == [Outage("clearbit", 2, "connection_failed", None)]


async def test_whom_no_gateway_answers_for_is_left_out() -> None:
    assert await told(Gateways(), run(clearbit=412), seconds=0.01) == []
    nobodys = LanesShown(gateway="a", lanes=[lane("clearbit", held=False, closed_seconds=30.0)])
    assert await told(Gateways(nobodys), run(clearbit=412), seconds=0.01) == []


def test_a_run_says_who_its_rows_wait_for_on_the_wire() -> None:
    assert msgspec.json.decode(msgspec.json.encode(run(clearbit=3)), type=RunSummary).rows_waiting == {"clearbit": 3}
