"""Presence: that a process which holds leases of receipts is there. One request says so for all of them."""

from __future__ import annotations

from rowmill_contracts.envelope import Message, message


@message()
class KeepPresence(Message, frozen=True, kw_only=True):
    """``presence`` is there, for as long as the answer says. ``leave``: it goes; its leases may be taken at once.

    A presence that was not kept in time ends once others ask for one of its leases, and stays ended; its process goes on under another name.
    """

    presence: str
    leave: bool = False


@message()
class PresenceKept(Message, frozen=True, kw_only=True):
    """``held`` false: it has ended. ``seconds``: how long it lasts from the moment at which it was asked for."""

    held: bool
    seconds: float = 0
