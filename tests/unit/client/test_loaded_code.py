"""Which code services have: asked of whoever hears it, and said to a person where it is not that of the files."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, cast

import pytest

from rowmill.cli.wording import other_code_told
from rowmill.client import loaded_code
from rowmill.client.loaded_code import ask_code
from rowmill.errors import UnknownName
from rowmill.runtime.bus import Bus
from rowmill.runtime.loaded_code import LoadedCode
from rowmill_contracts.envelope import Message
from rowmill_contracts.events import AskCode, CodeShown


class Processes:
    """A bus on which these processes answer, those that are ``late`` when all others have."""

    reply_to = "replies.client"

    def __init__(self, *answers: CodeShown, late: tuple[CodeShown, ...] = ()) -> None:
        self._answers = answers
        self._late = late
        self._collect: Callable[[Any], None] = lambda _answer: None

    def on_reply(self, _kind: type, collect: Callable[[Any], None]) -> None:
        self._collect = collect

    async def publish(self, message: Message, _key: str, **_where: Any) -> None:
        assert message == AskCode(play="leads")
        for answer in self._answers:
            self._collect(answer)
        for answer in self._late:
            asyncio.get_running_loop().call_soon(self._collect, answer)


def has(service: str, digest: str | None = "d", *, process: str = "", play: str = "leads", loaded_at: float = 1000.0) -> CodeShown:
    return CodeShown(service=service, process=process or service, play=play, digest=digest, loaded_at=loaded_at)


async def told(processes: Processes, seconds: float) -> list[str]:
    return sorted(answer.process for answer in await ask_code(cast("Bus", processes), "leads", seconds=seconds))


async def test_the_first_of_each_service_is_waited_for_and_who_answers_together_with_it() -> None:
    first, gateway, other = has("row-executor", process="e1"), has("tool-gateway", process="g1"), has("row-executor", process="e2")
    async with asyncio.timeout(10):
        assert await told(Processes(first, gateway, late=(other,)), seconds=3600.0) == ["e1", "e2", "g1"]


async def test_one_of_each_service_is_waited_for_however_soon_the_first_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loaded_code, "OTHERS_SECONDS", 0.0)
    slow = Processes(has("row-executor", process="e1"))
    asyncio.get_running_loop().call_later(0.02, lambda: slow._collect(has("tool-gateway", process="g1")))
    async with asyncio.timeout(10):
        assert await told(slow, seconds=3600.0) == ["e1", "g1"]


async def test_who_does_not_answer_is_not_waited_for_for_long() -> None:
    assert await told(Processes(has("row-executor", process="e1"), has("tool-gateway", play="others")), seconds=0.01) == ["e1"]
    assert await told(Processes(), seconds=0.01) == []
    assert loaded_code.PATIENCE_SECONDS <= 1.0


@pytest.mark.parametrize(
    ("loaded", "said"),
    [
        ([], None),
        ([has("row-executor"), has("tool-gateway")], None),
        (
            [has("row-executor"), has("tool-gateway", "other"), has("row-executor", "other", process="e2", loaded_at=900.0)],
            "the services run code of {}; restart `rowmill up` to use your changes",
        ),
        ([has("row-executor", None, loaded_at=900.0)], "services that run since {} do not have the play 'leads'; restart `rowmill up` to have it"),
    ],
)
def test_a_person_is_told_since_when_services_have_other_code(loaded: list[CodeShown], said: str | None) -> None:
    at = time.strftime("%H:%M:%S", time.localtime(900.0))
    assert other_code_told("leads", "d", loaded) == (None if said is None else said.format(at))


def test_a_process_says_which_code_it_has_of_plays_that_it_knows() -> None:
    def digest(play: str) -> str:
        if play != "leads":
            raise UnknownName("play", play, [])
        return "d"

    code = LoadedCode("tool-gateway", "g1", 900.0, digest)
    assert code.shown(AskCode(play="leads")) == has("tool-gateway", process="g1", loaded_at=900.0)
    assert code.shown(AskCode(play="another")).digest is None
