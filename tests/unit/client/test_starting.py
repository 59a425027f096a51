"""What a client publishes to start a run can be decoded by who gets it, whatever the run is called."""

from __future__ import annotations

from typing import Any, cast

import pytest
from pydantic import BaseModel

from rowmill import Context, Rows, play, registry
from rowmill.client import Client
from rowmill.errors import UsageError
from rowmill.runtime.bus import Bus
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.runs import InputPage, InputSealed, RunStart


class Lead(BaseModel):
    domain: str


class LeadsIn(BaseModel):
    rows: Rows[Lead]


class Published:
    """A bus that takes what can be decoded."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def publish(self, message: Message, key: str, **_: Any) -> None:
        self.messages.append(decode(message.message_type, encode(message)))

    async def listen(self, *_: Any) -> None: ...


async def started(run_id: str) -> list[Message]:
    with registry.isolated():

        @play("leads")
        async def leads(ctx: Context, given: LeadsIn) -> None: ...

    client, bus = Client("amqp://nowhere.example"), Published()
    client.bus = cast("Bus", bus)
    await client.start(leads, rows=[{"domain": "a.example"}], run_id=run_id)
    return bus.messages


@pytest.mark.parametrize("run_id", ["r1", "r" * 200, "\U0001f33e" * 200])
async def test_a_run_of_any_allowed_id_stages_its_rows(run_id: str) -> None:
    page, sealed, start = await started(run_id)
    assert isinstance(page, InputPage)
    assert isinstance(sealed, InputSealed)
    assert isinstance(start, RunStart)
    assert start.run_id == run_id
    assert start.input_ref == {"rows": page.input_id}
    assert page.input_id == sealed.input_id
    assert [page.input_id, sealed.input_id] == [each.input_id for each in (await started(run_id))[:2] if isinstance(each, InputPage | InputSealed)]


@pytest.mark.parametrize("run_id", ["r" * 201, "a\x00b"])
async def test_an_id_that_nobody_would_take_is_refused_at_once(run_id: str) -> None:
    with pytest.raises(UsageError, match="run_id"):
        await started(run_id)
