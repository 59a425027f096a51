"""For how long a message of each work queue may be in hand by design: the sum of what may keep it there while nothing is away.

Durations that settings bound come from these, as the process has them. What is away keeps messages in hand for longer, rightly: that time does not
count (`rowmill.runtime.outages`). A deadline says when something is wrong, and ends nothing (docs/adr/0027).
"""

from __future__ import annotations

from typing import Final

from rowmill.runtime.db import STATEMENT_SECONDS
from rowmill.runtime.publishing import CONFIRM_TIMEOUT
from rowmill.runtime.settings import ServiceSettings

STORING: Final = 2 * STATEMENT_SECONDS + CONFIRM_TIMEOUT
"""Store, then publish, then acknowledge (DESIGN.md, idea 1): a turn at the database and a statement there, and a confirm; what takes longer counts as
away. Not scaled, as these limits are not.
"""

LONGEST: Final = 1500.0
"""Whatever a message waits for, the broker takes it back after 30 minutes (``consumer_timeout``), which looks like a crash of who had it. This is
when a person still can do something about it. Not scaled: the broker does not know of scales.
"""

HELD: Final = 300.0
"""No message is held longer than 5 minutes (DESIGN.md, idea 2); for what no setting bounds, as it depends on the size of a run."""


def stored(settings: ServiceSettings) -> float:
    """Of the queues of admission, receipt-store and sheet-writer, where nothing else bounds it.

    At the gate, suspects' beginning, others of their queue, and the last one's end (``suspect_alone``, three times); a neighbour's answer
    (``ask_timeout``); `STORING`.
    """
    return min(LONGEST, 3 * settings.suspect_alone + settings.ask_timeout + STORING)


def commands(settings: ServiceSettings, *, halt_timeout: float) -> float:
    """Of runs' commands and questions: besides, the receipt-store's word on a decision; a retry reopens a run's rows page by page (`HELD`)."""
    return min(LONGEST, stored(settings) + halt_timeout + HELD * settings.time_scale)


def queries(settings: ServiceSettings, *, query_timeout: float) -> float:
    """Of questions to the sheet-writer: besides, a statement that somebody asked, behind others that take as long."""
    return min(LONGEST, stored(settings) + 2 * query_timeout)


def keys(settings: ServiceSettings, *, capture_timeout: float, drop_patience: float) -> float:
    """Of pages that want keys: besides, the capture of their program, and the end of the body that it ran."""
    return min(LONGEST, stored(settings) + capture_timeout + drop_patience)


def rows(settings: ServiceSettings, *, capture_timeout: float, drop_patience: float, row_timeout: float) -> float:
    """Of pages of rows: the same, and a row. Its time is looked at every twentieth of ``row_timeout``, and twice more before its code is left alone.

    In that time a row has its calls (``call_hold`` each), its steps, and what its code waits for. That rows wait for others of their run
    (``concurrency``) is bounded by nothing, and by `LONGEST` in the end.
    """
    return min(LONGEST, keys(settings, capture_timeout=capture_timeout, drop_patience=drop_patience) + row_timeout * (1 + 3 / 20))


BODIES: Final = LONGEST
"""Of runs' bodies: ``body_timeout`` bounds each of a body's calls and steps, and nothing how many of them it has while it is in hand."""


def calls(settings: ServiceSettings, *, hand: float, in_flight_hold: float) -> float:
    """Of pages of calls: what was not sent is let go after one and a half ``hand``, what was after ``in_flight_hold``, each at a sweep."""
    return min(LONGEST, stored(settings) + max(1.5 * hand, in_flight_hold) + hand)
