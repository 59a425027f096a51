"""What clients may send and listen to: the public, cold queues (runs, inputs and events, dead letters) and the events.

Each is declared once here. The bus consumes the queues with admission's handlers (`consume_public`); FastStream declares the same ones for the
AsyncAPI document (`asyncapi_document`). Why FastStream does not consume: docs/adr/0001-public-subscribers.md.

``python -m rowmill_admission.public`` prints the document.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Any, Final, Literal

from rowmill.runtime import deadlines
from rowmill.runtime.bus import Bus
from rowmill_admission.handlers import Handlers
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts import topology
from rowmill_contracts.envelope import Message
from rowmill_contracts.events import DatasetEvent, RowsCompleted, RowsFailed, RunEvent
from rowmill_contracts.retries import RunRetry
from rowmill_contracts.runs import EventArrived, InputPage, InputSealed, RunStart, RunStop


@dataclass(frozen=True)
class Public:
    """A public queue of the topology, and the messages that it carries (none named: any that died)."""

    queue: str
    title: str
    description: str
    messages: tuple[type[Message], ...]
    undecodable: Literal["bury", "hand over"] = "bury"


RUNS: Final = Public(
    topology.ADMISSION_RUNS,
    "runs",
    "Start, stop and retry runs, and tell of events that plays wait for. Exchange rowmill, keys runs.start, runs.stop, runs.retry and runs.event.",
    (RunStart, RunStop, RunRetry, EventArrived),
)
INPUTS: Final = Public(
    topology.ADMISSION_INPUTS,
    "inputs",
    "Stage an input page by page, and seal it. Exchange rowmill, key inputs.",
    (InputPage, InputSealed),
)
DEAD: Final = Public(
    topology.ADMISSION_DEAD,
    "dead-letters",
    "A copy of each dead letter, untouched, with the reason in its headers: admission ends what others waited for.",
    (),
    undecodable="hand over",
)
PUBLIC: Final = (RUNS, INPUTS, DEAD)


@dataclass(frozen=True)
class Told:
    """Events that anyone may listen to. ``key``: the routing key, with what varies in braces."""

    title: str
    key: str
    description: str
    message: type[Message]


EVENTS: Final = (
    Told("rows-completed", "rows.completed.{play}.{dataset}", "Rows that completed, after the commit.", RowsCompleted),
    Told("rows-failed", "rows.failed.{play}.{dataset}", "Rows that failed or were cancelled, after the commit.", RowsFailed),
    Told("run", "run.{state}.{play}", "A run changed its state.", RunEvent),
    Told("dataset", "dataset.{state}.{play}.{dataset}", "A dataset opened, went on or closed.", DatasetEvent),
)


async def consume_public(bus: Bus, settings: AdmissionSettings, handlers: Handlers) -> None:
    """Consume the public queues."""
    stored, commands = deadlines.stored(settings), deadlines.commands(settings, halt_timeout=settings.halt_timeout)
    for public, prefetch, handler, deadline in (
        (RUNS, settings.run_prefetch, handlers.handle_run, commands),
        (INPUTS, settings.input_prefetch, handlers.handle_input, stored),
        (DEAD, settings.dead_prefetch, handlers.handle_dead, stored),
    ):
        await bus.consume(public.queue, handler, prefetch=prefetch, undecodable=public.undecodable, deadline=deadline)


def asyncapi_document() -> dict[str, Any]:
    """The AsyncAPI 3.0 document of all this. Needs no broker."""
    from rowmill_admission.asyncapi import document  # noqa: PLC0415 - FastStream is loaded for the document alone

    return document(PUBLIC, EVENTS)


if __name__ == "__main__":
    json.dump(asyncapi_document(), sys.stdout, indent=2, sort_keys=True)
    sys.stdout.write("\n")
