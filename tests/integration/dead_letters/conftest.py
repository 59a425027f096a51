"""Letters buried by hand in the queues of a broker without services, and the commands that a person would type."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rowmill.cli.main import app
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import death_headers, subject_headers
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.topology import EXCHANGE, EXECUTOR_ROWS, WORK_QUEUES, dead


@dataclass(frozen=True)
class Died:
    """A message to bury. ``ago``: seconds since it died."""

    message: Message
    message_id: str
    queue: str = EXECUTOR_ROWS
    error: Exception = ValueError("poison")  # noqa: RUF009 - never changed
    ago: float = 60.0


async def bury(bus: Bus, died: Sequence[Died]) -> None:
    """As the bus buries what its handlers cannot handle."""
    for each in died:
        at = bus._clock.now() - each.ago
        headers = death_headers(
            each.error,
            service="test",
            queue=each.queue,
            exchange=EXCHANGE,
            key=each.queue,
            attempts=3,
            first_failure=at - 10,
            last_failure=at,
        )
        await bus.publish_body(
            encode(each.message),
            each.message.message_type,
            dead(each.queue),
            message_id=each.message_id,
            headers={**headers, **subject_headers(each.message)},
        )


class Desk:
    """A broker's queues, and `rowmill` in a folder of its own. For tests that are not async: each call runs a loop to its end."""

    def __init__(self, broker_url: str) -> None:
        self._settings = ServiceSettings(broker_url=broker_url, time_scale=0.05)

    def run(self, work: Callable[[Bus], Any]) -> Any:
        async def with_bus() -> Any:
            async with Bus(self._settings, service="test") as bus:
                return await work(bus)

        return asyncio.run(with_bus())

    def bury(self, *died: Died) -> None:
        self.run(lambda bus: bury(bus, died))

    def empty(self) -> None:
        async def purge(bus: Bus) -> None:
            session = await bus.live_session()
            channel = await session.connection.channel()
            for queue in WORK_QUEUES:
                for name in (queue.name, dead(queue.name)):
                    await (await channel.get_queue(name, ensure=False)).purge()

        self.run(purge)

    def taken(self, queue: str) -> list[tuple[str | None, bytes, dict[str, Any]]]:
        """What lies in a queue, taken from it: (message id, body, headers), in order."""

        async def take(bus: Bus) -> list[tuple[str | None, bytes, dict[str, Any]]]:
            session = await bus.live_session()
            lying = await (await session.connection.channel()).get_queue(queue, ensure=False)
            found = []
            while (message := await lying.get(fail=False)) is not None:
                await message.ack()
                found.append((message.message_id, message.body, dict(message.headers)))
            return found

        found: list[tuple[str | None, bytes, dict[str, Any]]] = self.run(take)
        return found

    def ids(self, queue: str) -> list[str | None]:
        return [message_id for message_id, _, _ in self.taken(queue)]

    def depth(self, queue: str) -> int:
        ready: int = self.run(lambda bus: bus.depths([queue]))[queue][0]
        return ready

    def types(self, *arguments: str, typed: str | None = None) -> Result:
        return CliRunner().invoke(app, ["dlq", *arguments], input=typed)

    def rowmill(self, *arguments: str, typed: str | None = None, status: int = 0) -> str:
        result = self.types(*arguments, typed=typed)
        assert result.exit_code == status, result.output
        return result.stdout if status == 0 else result.output

    def json(self, *arguments: str) -> Any:
        return json.loads(self.rowmill(*arguments, "--json"))


@pytest.fixture
def desk(broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROWMILL_BROKER_URL", broker_url)
    found = Desk(broker_url)
    found.empty()
    return found
