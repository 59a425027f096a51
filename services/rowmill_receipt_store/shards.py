"""Terms of shards: whose claims and confirmations still count. Pure."""

from __future__ import annotations


def term_holds(asked: int | None, *, current: int | None, held: bool) -> bool:
    """Whether a request under term ``asked`` may spend: it is the shard's newest term, and its holder has not given the shard up.

    An expired shard lease that nobody took counts as held: its holder may still renew it. Requests without a term (None) are not bound to a
    shard.
    """
    return asked is None or (held and asked == current)
