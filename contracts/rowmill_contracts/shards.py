"""What gateways ask of the receipt-store for shards of lanes: leases, permits of rates, and which gateways there are.

One request says it all: a gateway that renews what it has says thereby that it is there, and is told who else is.
"""

from __future__ import annotations

import msgspec

from rowmill_contracts.envelope import Message, message


class Sent(msgspec.Struct, frozen=True, array_like=True):
    """So many requests, sent so many seconds ago or before; what may still be sent has a negative age."""

    seconds_ago: float
    requests: int


class Draw(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Permits for one window of a lane of ``shard``: a provider's rate in an organisation, or a tool's own. ``permits``: requests that its holder
    may send within ``seconds`` from the moment at which this is stored. ``span``: the window's length in seconds. ``sent``: what was sent in the
    last ``span``, as far as the holder was told or did it itself under ``term``; None: it does not know and asks. ``number``: rises with each draw
    of a holder; one that comes late changes nothing.
    """

    window: str
    shard: int
    number: int
    permits: int
    seconds: float
    span: float
    term: int = 0
    sent: list[Sent] | None = None


class Drawn(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """``granted``: the permits are stored. ``sent``: what may have been sent before by others, for who did not know."""

    granted: bool
    sent: list[Sent] | None = None


class OpenRequests(msgspec.Struct, frozen=True, array_like=True):
    """So many requests of a lane that are open. ``lane``: ``<organisation>/<provider>``. ``closed``: seconds for which nothing is sent there, from
    when this is told, by an answer to such a request.
    """

    lane: str
    requests: int
    closed: float = 0.0


class LaneStanding(msgspec.Struct, frozen=True, array_like=True):
    """What is known of a lane's provider. ``lane``: ``<organisation>/<provider>``. ``closed``: seconds for which nothing is sent there, from when
    this is told; 0: it is open. ``share``: how much of what is declared the provider bears; 1: all of it. ``missed``: how often in a row it could not
    be reached, if that is so often that one request at a time finds out; else 0. ``away``: seconds for which it has not served; None: it serves.
    """

    lane: str
    shard: int
    closed: float = 0.0
    share: float = 1.0
    missed: int = 0
    away: float | None = None


@message()
class LeaseShard(Message, frozen=True, kw_only=True):
    """Take or renew shard leases for ``holder`` (``release``: give them up), and draw permits for lanes of shards that it holds thereby. It says also
    that the holder is there, for as long as a shard's lease lasts.

    ``terms``: under which each of the shards is given up, so that a late copy gives up none that was taken again; 0, or none named: whichever it is.
    Of a shard that is taken or renewed: the term that the holder knows of; under another it is told what is known of the shard's lanes.
    ``standings``: of lanes of these shards, where they changed since they were told under this term; under another they change nothing.
    ``serving`` false: it takes no more calls, now or later, and wants no share. ``open``: requests that it still has open in lanes of shards that it
    does not hold, all of them. ``number``: rises with each request of a holder; of one that comes late, what it says of its holder changes nothing.
    """

    holder: str
    shards: list[int]
    release: bool = False
    draws: list[Draw] = []
    terms: list[int] = []
    serving: bool = True
    open: list[OpenRequests] = []
    number: int = 0
    standings: list[LaneStanding] = []


class ShardLease(msgspec.Struct, frozen=True, kw_only=True):
    shard: int
    held: bool
    term: int = 0
    seconds: float = 0


@message()
class ShardsLeased(Message, frozen=True, kw_only=True):
    """``drawn``: for each of the draws. ``gateways``: those among whom the shards are shared: who serves and has been there for a while; to all the
    same. ``open``: what other gateways that are there have open in lanes of shards that they do not hold. ``standings``: what was known of lanes of
    shards that the asker holds, to those who had them before; of the lanes of each shard once, when the asker's term is new to it.
    """

    shards: list[ShardLease]
    drawn: list[Drawn] = []
    gateways: list[str] = []
    open: list[OpenRequests] = []
    standings: list[LaneStanding] = []


@message()
class ShardsFreed(Message, frozen=True, kw_only=True):
    """A hint on the fanout `rowmill.control`: these shards were given up, or requests ended that their former holder had open. Whoever waits for
    that asks now, not in its own time; nothing depends on its arrival.
    """

    shards: list[int]
