"""Lanes: what one organisation may do at one provider at a time. Pure: the time is an argument, in seconds of one monotonic clock.

A lane owns its concurrency, its pace, whether and until when it is closed, and the estimate of how long a call will wait. It knows nothing of
calls, receipts or requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from rowmill_tool_gateway.pacing import Pace
from rowmill_tool_gateway.throttling import Throttle

FIRST_GUESS: Final = 0.05
"""Seconds that a request is taken to last before one was seen."""
SMOOTHING: Final = 0.2
"""Weight of the newest duration in the running mean."""


@dataclass(frozen=True, slots=True)
class ProbePolicy:
    """When a provider counts as unreachable, and the waits between probes in seconds."""

    after: int
    first: float
    limit: float


@dataclass(frozen=True, slots=True)
class Standing:
    """What a lane has learned of its provider, and whoever has the lane next must know. ``closed_until`` and ``away_since``: by this process's
    clock. ``missed``: how often in a row the provider could not be reached, if so often that one request at a time finds out; else 0.
    """

    closed_until: float = float("-inf")
    share: float = 1.0
    missed: int = 0
    away_since: float | None = None

    def says(self, other: Standing, now: float) -> bool:
        """Whether both say the same from now on: a closing that is over says nothing."""
        closed = max(self.closed_until, now) == max(other.closed_until, now)
        return closed and (self.share, self.missed, self.away_since) == (other.share, other.missed, other.away_since)


class Lane:
    """(organisation, provider). ``concurrency``: requests open at once. ``weight``s are in requests: a call of a batch tool is a part of one."""

    def __init__(
        self, org: str, provider: str, shard: int, *, concurrency: int, pace: Pace | None, probes: ProbePolicy, recovery: float = math.inf
    ) -> None:
        self.org = org
        self.provider = provider
        self.shard = shard
        self.concurrency = concurrency
        self.pace = pace
        self.in_flight = 0
        self.begun = 0
        """Requests that were sent since the lane was made."""
        self.elsewhere = 0
        """Requests that other gateways have open since they had the lane's shard."""
        self.claimed = 0.0
        """Requests' worth of calls that are being claimed or are claimed and not sent."""
        self.closed_until = float("-inf")
        self.unavailable_since: float | None = None
        """Since when the provider refuses or cannot be reached; None while it serves, however long its pace makes calls wait."""
        self.why = ""
        """The code of the failure for which it does not serve, as far as it was seen here."""
        self._probes = probes
        self._throttle = Throttle(recovery)
        self._missed = 0
        self._finds_out = False
        """The newest request was sent to find out whether the provider is back, and not before it was unreachable."""
        self._duration = FIRST_GUESS
        self.weight = 1.0
        """Of the calls that wait elsewhere for it, as far as is known."""
        self.came = 0
        """Calls that came since the lane was made."""
        self._waited_for_until = float("-inf")
        self._new = True
        """Who had the lane before may have sent calls away, and nobody was called since."""
        self._heard_until = float("-inf")
        """Until when calls wait that were sent away by when the last one came here."""
        self._ours_since = float("inf")
        self._appointment = float("-inf")
        self._scout_at, self._scout_gap = float("-inf"), 0.0
        """When the last one of the calls comes back that find out whether the provider serves, and for how long after it none does."""
        self.kept_waiting = False
        """Calls were told to wait until they are called back."""

    @property
    def probing(self) -> bool:
        """The provider was unreachable; one request at a time finds out whether it is back."""
        return self._missed >= self._probes.after

    @property
    def name(self) -> str:
        """The same in every gateway."""
        return f"{self.org}/{self.provider}"

    @property
    def slots(self) -> int:
        """Requests that may be opened besides those that are, here and elsewhere."""
        return (1 if self.probing else self.allowed) - self.in_flight - self.elsewhere

    @property
    def allowed(self) -> int:
        """Requests that may be open at once, as far as the provider bears what is declared."""
        share = self._throttle.share
        return self.concurrency if share == 1.0 else max(1, int(self.concurrency * share))

    @property
    def share(self) -> float:
        """How much of what is declared the provider bears: 1 unless it refused of late."""
        return self._throttle.share

    @property
    def standing(self) -> Standing:
        """What it has learned of its provider."""
        return Standing(self.closed_until, self.share, self._missed if self.probing else 0, self.unavailable_since)

    def learn(self, known: Standing) -> None:
        """Others had the lane, and know this. What closed it here closes it still. Others may have kept calls waiting, too."""
        self.closed_until = max(self.closed_until, known.closed_until)
        self.unavailable_since = known.away_since
        self.kept_waiting |= known.away_since is not None
        self._missed = known.missed
        self._throttle.learn(known.share, self.closed_until)
        self._slow_down()

    def ready_at(self) -> float:
        """The earliest time of the next request, concurrency and permits aside. Infinite where that depends on requests that are on their way."""
        return self.closed_until if self.pace is None else max(self.closed_until, self.pace.due_at())

    def could_send(self, now: float) -> bool:
        """Whether a request could be sent, permits aside."""
        return self.slots > 0 and self.ready_at() <= now

    def may_send(self, now: float) -> bool:
        return self.could_send(now) and (self.pace is None or self.pace.permitted(now))

    def claim_room(self, now: float, ahead: float) -> float:
        """Requests' worth of calls to claim now: what can be sent within ``ahead`` seconds and is not claimed yet."""
        if self.closed_until > now:
            return 0.0
        room = self._by_slots(ahead)
        if self.pace is not None:
            room = min(room, self.pace.sends_within(now, ahead))
        return room - self.claimed

    def requests_within(self, seconds: float) -> int:
        """How many requests its slots let begin within so many seconds, if they go on to last as long as of late: one at least."""
        return max(1, math.ceil(self._by_slots(seconds)))

    def _by_slots(self, seconds: float) -> float:
        return max(0, self.slots) + (0.0 if self.probing else self.allowed * seconds / self._duration)

    def opened(self, now: float) -> None:
        """A request is about to be sent."""
        self.in_flight += 1
        self.begun += 1
        self._finds_out = self.probing
        if self.pace is not None:
            self.pace.begin(now)

    def finished(self, seconds: float | None) -> None:
        """A request ended; ``seconds`` is how long it took, None where it was not sent after all."""
        self.in_flight -= 1
        if seconds is not None:
            self._duration += SMOOTHING * (max(seconds, 0.0005) - self._duration)

    def reached(self) -> None:
        """The provider answered, whatever it said."""
        self._missed = 0

    def served(self, now: float) -> None:
        """The provider answered, and not that it is exhausted."""
        self.unavailable_since = None
        self.why = ""
        self.kept_waiting = False
        self._scout_at, self._scout_gap = float("-inf"), 0.0
        self._throttle.served(now)
        self._slow_down()

    def takes_scout(self, now: float, not_before: float, within: float) -> float | None:
        """Seconds until the call that asks is asked for again to find out whether the provider serves, past all appointments; None where enough are
        chosen for that.

        The first comes when the lane opens, others after it as probes follow one another, as far as ``within`` seconds reach. There must be others:
        one whose run is stopped, or whose executor dies, never comes back, and all would wait for it.
        """
        scout_at = max(self._scout_at + self._scout_gap, self.closed_until, now + not_before)
        if scout_at - now > within:
            return None
        self._scout_gap = min(self._probes.limit, max(self._probes.first, 2 * self._scout_gap))
        self._scout_at = scout_at
        return scout_at - now

    def closed_for(self, now: float) -> float:
        """Seconds until the lane opens; 0 while it is open."""
        return max(0.0, self.closed_until - now)

    def unavailable_for(self, now: float) -> float | None:
        """Seconds for which the provider has not served; None while it does."""
        return None if self.unavailable_since is None else now - self.unavailable_since

    def missed(self, now: float, jitter: float) -> None:
        """A connection never opened. After several in a row the lane closes between probes; what was begun before says nothing new, and no probe is
        sent until all of it has ended. ``jitter``: from 0 to 1.
        """
        self._refused(now)
        if self.probing and not self._finds_out:
            return
        self._missed += 1
        beyond = self._missed - self._probes.after
        if beyond >= 0:
            wait = min(self._probes.limit, self._probes.first * 2.0 ** min(beyond, 30))
            self.close(now, wait * (0.5 + jitter / 2))

    def close(self, now: float, seconds: float) -> None:
        """Send nothing for so long; a lane that is closed for longer stays so."""
        self._refused(now)
        self.closed_until = max(self.closed_until, now + seconds)

    def overrun(self, now: float, seconds: float) -> None:
        """The provider said that it is too much (429, 425): from then on half of what was allowed, and nothing at all for so long."""
        self.close(now, seconds)
        if self._throttle.refused(now, self.closed_until):
            self._slow_down()

    def _slow_down(self) -> None:
        if self.pace is not None:
            self.pace.share = self._throttle.share

    def _refused(self, now: float) -> None:
        if self.unavailable_since is None:
            self.unavailable_since = now

    def requests_per_second(self) -> float:
        """How fast the lane is taken to work off what waits."""
        return self._rate(1 if self.probing else self.allowed)

    def _rate(self, slots: int) -> float:
        by_slots = slots / self._duration
        return by_slots if self.pace is None else min(by_slots, self.pace.per_second)

    def expected_wait(self, now: float, requests_before: float) -> float:
        """Seconds until a call behind so many requests will be sent, as far as one can tell."""
        start = max(now, self.closed_until)
        by_slots = requests_before * self._duration / (1 if self.probing else self.allowed)
        return start - now + (by_slots if self.pace is None else max(by_slots, self.pace.wait_behind(start, requests_before)))

    def taken_over(self, now: float) -> None:
        """The lane is ours anew, and may have been another's: who had an appointment before has gone there, and nobody needs to come after them."""
        self._appointment = float("-inf")
        self._new = True
        self._ours_since = now

    def called(self, now: float, waited: float, weight: float, hand: float, longest_wait: float) -> None:
        """A call came that was first asked for ``waited`` seconds ago. If that is longer than a call waits in hand, it has waited elsewhere; if the
        lane was not ours then, others may wait by appointments that are not known here, for as long as anyone does.
        """
        self.came += 1
        self._heard_until = now + longest_wait
        self._ours_since = min(self._ours_since, now)
        if waited > hand and now - waited < self._ours_since:
            self.weight, self._waited_for_until = weight, max(self._waited_for_until, now + longest_wait)

    @property
    def waited_for_until(self) -> float:
        """Until when calls may wait elsewhere for their turn here, as far as is known. Where it is to be found out, for as long after the last call
        came as any may wait: lanes of which nobody has heard for longer are many, and nobody asks for them.
        """
        return max(self._waited_for_until, self._heard_until) if self._new else self._waited_for_until

    def waited_for(self, until: float) -> None:
        """A call waits elsewhere until then, unless it is called before."""
        self._waited_for_until = max(self._waited_for_until, until)

    def is_waited_for(self, now: float) -> bool:
        """Whether calls wait elsewhere for their turn here, as far as is known and not merely to be found out."""
        return self._waited_for_until > now

    def called_sooner(self, now: float, seconds: float) -> None:
        """Those who wait come within so many seconds, as far as there is room, and others after them."""
        self._new = False
        self._appointment = min(self._appointment, now + seconds)

    def left(self) -> None:
        """The lane is another's: it knows who waits."""
        self._new, self._waited_for_until = False, float("-inf")

    def appoint(self, now: float, not_before: float, weight: float) -> float:
        """Seconds from ``now`` at which a deferred call should be asked for again; one appointment after the other, at the lane's rate.

        At its last known rate also where nobody knows when the provider returns: calls that all came at once then would only be deferred again.
        """
        self._appointment = max(self._appointment, self.closed_until, now + not_before) + weight / self._rate(self.allowed)
        self.weight = weight
        self._waited_for_until = max(self._waited_for_until, self._appointment)
        return self._appointment - now
