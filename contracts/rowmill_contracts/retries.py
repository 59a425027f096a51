"""Retries of runs: how clients ask for one, and how admission has the sheet-writer let rows be worked again."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from rowmill_contracts.counts import Counts
from rowmill_contracts.envelope import Message, message
from rowmill_contracts.runs import Identity, ParkedRow

NOT_RETRIED: Final = "not_retried"
"""The error code of a row that was to be worked again and was not, since its run ended before its body came to the row's dataset. It stands as it
stood before: failed, with the error that it had.
"""


@message()
class RunRetry(Message, frozen=True, kw_only=True):
    """Work the failed rows of a run that is over again, at a new attempt; whatever completed stays. The run goes on, and ends anew with corrected
    counts. Published twice it is one retry: under the same ``retry_id`` (else the message's id, else the same body within 10 minutes), or while the
    run goes on. Answered by `RunShown` where somebody waits for an answer.
    """

    run_id: Identity
    retry_id: Identity | None = None


@message()
class ReopenRows(Message, frozen=True, kw_only=True):
    """Let the failed rows of a closed dataset (with ``cancelled``, the cancelled ones, too) be worked again, at ``attempt``: what is told of an older
    one changes them no more. A few pages at a time, from ``page`` on. ``number``: the run's.
    """

    run_id: str
    number: int
    dataset: str
    attempt: Annotated[int, msgspec.Meta(ge=2)]
    page: Annotated[int, msgspec.Meta(ge=0)] = 0
    cancelled: bool = False


@message()
class RowsReopened(Message, frozen=True, kw_only=True):
    """The rows that are open at that attempt, however often it is asked; go on at ``next_page`` (None: these were the last). ``counts``: as they are
    by now.
    """

    rows: list[ParkedRow] = []
    next_page: int | None = None
    counts: Counts = Counts()
    version: int = 0
