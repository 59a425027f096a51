"""Who should have which shards, and when a gateway steps back from another's. Pure: the time is an argument, in seconds of one monotonic clock.

Every gateway reckons the shares from the same list of names, so nobody has to tell anybody. A shard goes where its calls go, and these go to the
first of those who wait at its queue. So a gateway that is not the one to have a shard steps back: it waits at the queue behind all others. It does so
when the gateways change, and when calls of the shard come to it all the same. Nobody ever leaves a queue: whoever disappears, its calls go to another
at once, who keeps them until the shard is its own, or is found to be nobody's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Collection, Sequence

from rowmill_contracts.digests import SHARDS


def shares(gateways: Collection[str], shards: int = SHARDS) -> dict[str, frozenset[int]]:
    """The shards of each gateway: as many as any other's, or one more. Few others change hands when a gateway comes or goes.

    Each shard prefers gateways in an order of its own (rendezvous hashing, Thaler and Ravishankar 1998), and gets the best one that has room.
    """
    if not gateways:
        return {}
    least, larger = divmod(shards, len(gateways))
    found: dict[str, set[int]] = {gateway: set() for gateway in gateways}
    given: set[int] = set()
    for _, shard, gateway in sorted((_preference(gateway, shard), shard, gateway) for gateway in found for shard in range(shards)):
        has = found[gateway]
        if shard in given or len(has) > least or (len(has) == least and not larger):
            continue
        larger -= len(has) == least
        has.add(shard)
        given.add(shard)
    return {gateway: frozenset(has) for gateway, has in found.items()}


def _preference(gateway: str, shard: int) -> bytes:
    return hashlib.sha256(f"{gateway}\n{shard}".encode()).digest()


class Sharing:
    """The shares as one gateway knows them. ``patience``: seconds from when it stepped back for which calls that come all the same are sent away at
    once; after that they are kept, since nobody else seems to take them. ``again``: seconds after which it steps back anew.
    """

    def __init__(self, gateway: str, *, patience: float, again: float) -> None:
        self._gateway = gateway
        self._patience = patience
        self._again = again
        self._gateways: tuple[str, ...] = ()
        self._ours: frozenset[int] | None = None
        self._stepped: dict[int, float] = {}
        """When we stepped back last; infinite while we do."""
        self._due: set[int] = set()
        self._doubtful: set[int] = set()
        """Others' shards of which calls came, until it is known who shares now."""

    @property
    def shards(self) -> list[int] | None:
        """Our share; None: we have none yet, and take what comes as if we were alone."""
        return None if self._ours is None else sorted(self._ours)

    def ours(self, shard: int) -> bool:
        """Whether the shard may be ours."""
        return self._ours is None or shard in self._ours

    def assigned(self, shard: int) -> bool:
        """Whether the shard is known to be ours, whichever queue's first we are."""
        return self._ours is not None and shard in self._ours

    def told(self, gateways: Sequence[str]) -> bool:
        """These share. Whether that is new: then others' shards are due to be stepped back from, else those of which calls came to us."""
        names = tuple(sorted(gateways))
        changed = names != self._gateways
        if changed:
            self._gateways = names
            self._ours = shares(names).get(self._gateway)
            self._due = {shard for shard in range(SHARDS) if not self.ours(shard)}
        else:
            self._due |= self._doubtful
        self._doubtful.clear()
        return changed

    def called(self, shard: int, now: float) -> bool:
        """A call of the shard came to us. Whether to ask who shares now: the shard is another's, as far as we know, and that one may be gone."""
        if self.ours(shard) or shard in self._due or shard in self._doubtful or self._age(shard, now) < self._again:
            return False
        self._doubtful.add(shard)
        return True

    def wanted(self, shard: int, now: float) -> bool:
        """Whether we want the shard, of which we have calls: it is ours, or nobody takes its calls though we stepped back."""
        return self.ours(shard) or self._patience <= self._age(shard, now) < self._again

    def sends_away(self, shard: int, now: float) -> bool:
        """Whether calls of the shard are another's to take, as soon as they come again."""
        return not self.ours(shard) and (shard in self._due or self._age(shard, now) < self._patience)

    def _age(self, shard: int, now: float) -> float:
        return now - self._stepped.get(shard, -math.inf)

    def due(self, held: Collection[int], now: float) -> list[int]:
        """The shards to step back from now; of those that we ``held`` although they are another's, sooner or later each."""
        self._due.update(shard for shard in held if not self.ours(shard) and self._age(shard, now) >= self._again)
        return sorted(self._due)

    def stepping(self, shard: int) -> None:
        """We are about to step back."""
        self._due.discard(shard)
        self._stepped[shard] = math.inf

    def stepped(self, shard: int, now: float) -> None:
        """Who waits at the queue is before us now."""
        self._stepped[shard] = now
