"""Windows of rates: what each lane may have sent of late, by the database's clock, whoever sent it. Pure.

A holder of a shard counts its sends itself, exactly. Here stands what its successor must know: the sends that it reported last, and the permits that
it drew with that report, which count as sent at their end. Every send is under a permit that was stored before, or in a report that took its place.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rowmill_contracts.shards import Draw, Sent


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What is stored of one window. ``number``: of the request that drew last. ``elapsed``: seconds since then, by the database's clock."""

    term: int
    number: int
    sent: list[Sent]
    permits: int
    seconds: float
    elapsed: float


def may_have_sent(window: Window | None, span: float) -> list[Sent]:
    """What may have been sent within the last ``span`` seconds, oldest first. Permits count as used at their end, which may be still to come."""
    if window is None:
        return []
    sent = [Sent(seconds_ago=one.seconds_ago + window.elapsed, requests=one.requests) for one in window.sent]
    if window.permits:
        sent.append(Sent(seconds_ago=window.elapsed - window.seconds, requests=window.permits))
    return sorted((one for one in sent if one.seconds_ago < span), key=lambda one: -one.seconds_ago)


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be stored for a draw. ``told``: what the holder is to be told of its predecessors; None: it knows better."""

    draw: Draw
    term: int
    sent: Sequence[Sent]
    told: Sequence[Sent] | None


def report(draw: Draw, *, term: int, window: Window | None) -> Report | None:
    """What a draw by the shard's holder, under ``term``, leads to. None: nothing; its holder has drawn anew since it asked.

    A holder knows what was sent once it was told under the term that it holds; a report of a former term is not believed.
    """
    if window is not None and (window.term, window.number) >= (term, draw.number):
        return None
    if draw.sent is not None and draw.term == term:
        return Report(draw=draw, term=term, sent=draw.sent, told=None)
    known = may_have_sent(window, draw.span)
    return Report(draw=draw, term=term, sent=known, told=known)
