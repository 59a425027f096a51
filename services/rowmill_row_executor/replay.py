"""The record of a body's calls, met again in a replay. Pure: it decides what is on record, what is new, and what cannot be.

A call is found by what it is called (kind, name, and how often that was met before), not by its position alone: with `asyncio.gather` the order in
which branches go on depends on which wait ends first. Two rules keep a replay honest. Within one branch (an asyncio task) calls come in recorded
order. And nothing new begins before the whole record was met again; `BodyCalls` waits for that, and tells when it cannot be any more.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

import msgspec

from rowmill.errors import NonDeterministicPlay
from rowmill_contracts.envelope import NULL
from rowmill_contracts.runs import RecordedCall


@dataclass(frozen=True, slots=True)
class MetCall:
    """A call that the body makes now. ``recorded``: the same call on record."""

    kind: str
    name: str
    request: str
    recorded: RecordedCall | None = None

    def __str__(self) -> str:
        return told(self.kind, self.name, self.request)


class Replay:
    """One replay of a body over what is on record."""

    def __init__(self, calls: Iterable[RecordedCall]) -> None:
        self._recorded: dict[tuple[str, str, int], RecordedCall] = {}
        counted: Counter[tuple[str, str]] = Counter()
        self._next_position = 0
        for call in sorted(calls, key=lambda call: call.position):
            self._recorded[call.kind, call.name, counted[call.kind, call.name]] = call
            counted[call.kind, call.name] += 1
            self._next_position = call.position + 1
        self._unmet = {call.position: call for call in self._recorded.values()}
        self._met: Counter[tuple[str, str]] = Counter()
        self._last_in_branch: dict[Hashable, RecordedCall] = {}
        self._branches: set[Hashable] = set()

    def meet(self, kind: str, name: str, request: str, branch: Hashable) -> MetCall:
        """The body makes this call in that branch.

        Raises:
            NonDeterministicPlay: it is on record with another request, or behind a call that this branch has met already.

        """
        self._branches.add(branch)
        recorded = self._recorded.get((kind, name, self._met[kind, name]))
        self._met[kind, name] += 1
        if recorded is None:
            return MetCall(kind, name, request)
        if recorded.request != request:
            met = told(kind, name, request)
            raise NonDeterministicPlay(f"the body made another call than the one on record: recorded {_told(recorded)}, met {met}")
        last = self._last_in_branch.get(branch)
        if last is not None and last.position > recorded.position:
            raise NonDeterministicPlay(
                f"the body made its calls in another order than the one on record: recorded {_told(recorded)} before {_told(last)}, met it after"
            )
        self._last_in_branch[branch] = recorded
        self._unmet.pop(recorded.position, None)
        return MetCall(kind, name, request, recorded)

    @property
    def one_branch(self) -> bool:
        """Whether all calls were made by one branch so far."""
        return len(self._branches) <= 1

    @property
    def exhausted(self) -> bool:
        """Whether every call on record was met again."""
        return not self._unmet

    def unmet(self) -> RecordedCall | None:
        """The first call on record that was not met."""
        return self._unmet[min(self._unmet)] if self._unmet else None

    def contradiction(self, met: str) -> NonDeterministicPlay:
        """The error of a body that goes on (``met``) without having made the first unmet call."""
        unmet = self.unmet()
        recorded = "nothing" if unmet is None else _told(unmet)
        return NonDeterministicPlay(f"the body went another way than the one on record: recorded {recorded}, met {met}")

    def record(self, met: MetCall, result: msgspec.Raw = NULL) -> RecordedCall:
        """The record of a new call, at the next position."""
        call = RecordedCall(position=self._next_position, kind=met.kind, name=met.name, request=met.request, result=result)
        self._next_position += 1
        return call


def _told(call: RecordedCall) -> str:
    return told(call.kind, call.name, call.request)


def told(kind: str, name: str, request: str) -> str:
    return f"{kind} {name!r}" + (f" ({request[:12]})" if request else "")
