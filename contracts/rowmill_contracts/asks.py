"""What may be answered to any request, besides its own answer."""

from __future__ import annotations

from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import Message, message


@message()
class RequestDied(Message, frozen=True, kw_only=True):
    """The request was dead-lettered, for the reason given: it was not carried out, and asking again will not help."""

    error: Problem
