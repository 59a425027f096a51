"""Terms of shards: whose claims and confirmations still count. Pure."""

from __future__ import annotations

NO_TERM = 0
"""Terms start at 1: this one never holds."""


def spending_term(shard: int | None, term: int | None) -> int | None:
    """The term under which a request spends. None: it names no shard, and is bound to none. A shard without a term is not held: `NO_TERM`."""
    if shard is None:
        return None
    return NO_TERM if term is None else term


def term_holds(asked: int | None, *, current: int | None, held: bool) -> bool:
    """Whether a request under term ``asked`` may spend: it is the shard's newest term, and its holder has not given the shard up.

    An expired shard lease that nobody took counts as held: its holder may still renew it. Requests without a term (None) are not bound to a
    shard.
    """
    return asked is None or (held and asked == current)
