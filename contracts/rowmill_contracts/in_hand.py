"""What processes have in hand: messages delivered to them that they have not acknowledged. The broker tells no ages of these; they do."""

from __future__ import annotations

import msgspec

from rowmill_contracts.envelope import Message, message


@message()
class AskInHand(Message, frozen=True, kw_only=True):
    """A question on the fanout `rowmill.control`: each service that hears it answers with `InHandShown` on ``reply_to``, once in each process."""


class LateMessage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message that is in hand past its deadline, by what a person finds it. ``seconds``: since it came. ``kept``: see `QueueInHand`."""

    message_type: str
    message_id: str
    seconds: float
    run_id: str | None = None
    kept: bool = False


class QueueInHand(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Messages of one queue in hand, as counted there at this moment.

    ``consumed``: whether the process takes more of them. ``peak``: the most that were in hand at once in the last seconds, which whoever counted a
    moment ago may have counted. ``oldest``: seconds since the first of them came; None: there is none. ``deadline``: seconds that one may be in hand.
    ``overdue``: those past it. ``kept``: those that are not past it only because time does not count for as long as something is away that
    they need. ``late``: the oldest of each, a few.
    """

    queue: str
    deadline: float
    consumed: bool = True
    messages: int = 0
    peak: int = 0
    oldest: float | None = None
    overdue: int = 0
    kept: int = 0
    late: list[LateMessage] = []


class Away(msgspec.Struct, frozen=True, kw_only=True):
    """Something that a process needs and does not reach, for so many seconds."""

    what: str
    seconds: float


@message()
class InHandShown(Message, frozen=True, kw_only=True):
    """One service's answer. ``process``: its own id, as in its log; ``place``: of the operating system's process, with its host."""

    service: str
    process: str
    place: str
    queues: list[QueueInHand]
    away: list[Away] = []
