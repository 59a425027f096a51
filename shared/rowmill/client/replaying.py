"""Which dead letters can be replayed, and as what message they go out again. Pure.

A letter can be replayed if handling it late still has its effect. What somebody waited for has been answered with a failure, so its replay would
reach nobody; those are refused with what to do instead. See docs/adr/0009-replays.md.
"""

from __future__ import annotations

from typing import Final

import aio_pika

from rowmill.client.dead_letters import BROKER_HEADERS, HEADER, DeadLetter
from rowmill.runtime.deliveries import REPLAYED

_RUN_OVER: Final = "its run was failed when this letter died, and a run that is over does not go on; start the run again: what is paid for stays paid"
_INPUT_FAILED: Final = "its input was failed when this letter died, and the runs over it; stage it again under another id and start the run anew"
_ASKER_GONE: Final = "it is a question whose asker was answered with a failure or has asked again; nobody waits for its answer any more"

REFUSED: Final[dict[str, str]] = {
    "AdvanceRun": _RUN_OVER,
    "OpenDataset": _RUN_OVER,
    "InputPage": _INPUT_FAILED,
    "InputSealed": _INPUT_FAILED,
    "ToolCalls": (
        "the rows that made these calls were answered with a failure, so a replay would pay for results that nobody takes; "
        "once their run is over, `rowmill runs retry` works them again"
    ),
    **dict.fromkeys(
        (
            *("TakeRun", "RenewRun", "RecordCalls", "ReleaseRun", "GetRun", "ListRuns", "AskOldestRun", "KeyPage"),
            *("LookupRows", "ReadRows", "ReadCounts", "QuerySheets", "ReopenRows"),
            *("ClaimReceipts", "Confirm", "Renew", "Complete", "Fail", "Release", "LeaseShard", "HaltRun"),
        ),
        _ASKER_GONE,
    ),
}
"""Why letters of a type cannot be replayed, by the type's name without version."""


def refusal(letter: DeadLetter) -> str | None:
    """Why the letter cannot be replayed; None if it can."""
    return REFUSED.get(letter.message_type.partition(".")[0])


def replayed(message: aio_pika.abc.AbstractIncomingMessage, replay: str) -> aio_pika.Message:
    """The message as it was before it died: the same body and id, without what was noted on its way, and said to be of this replay."""
    headers = {name: value for name, value in (message.headers or {}).items() if name not in BROKER_HEADERS and not name.startswith(HEADER)}
    return aio_pika.Message(
        message.body,
        content_type=message.content_type,
        content_encoding=message.content_encoding,
        delivery_mode=aio_pika.DeliveryMode.PERSISTENT,
        type=message.type,
        message_id=message.message_id,
        correlation_id=message.correlation_id,
        reply_to=message.reply_to,
        timestamp=message.timestamp,
        headers={**headers, REPLAYED: replay},
    )
