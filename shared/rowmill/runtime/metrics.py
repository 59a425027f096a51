"""What a process counts for Prometheus; told at ``/metrics`` (`rowmill.runtime.health`)."""

from __future__ import annotations

from typing import Final

from prometheus_client import Counter, Gauge

HANDLED: Final = Counter("rowmill_messages_handled", "Messages handled and acknowledged.", ["service", "queue"])
FAILED: Final = Counter("rowmill_messages_failed", "Tries of a handler that raised.", ["service", "queue"])
SUSPECT: Final = Counter("rowmill_messages_suspect", "Messages moved aside because they may have crashed their consumers.", ["service", "queue"])
DEAD: Final = Counter("rowmill_messages_dead", "Messages dead-lettered by us.", ["service", "queue"])
IN_HAND: Final = Gauge("rowmill_messages_in_hand", "Messages delivered and not yet acknowledged.", ["service", "queue"])
CONFIRMED: Final = Counter("rowmill_publishes_confirmed", "Messages published and confirmed by the broker.", ["service"])
UNCONFIRMED: Final = Counter("rowmill_publishes_unconfirmed", "Publishes whose outcome stayed unknown; each was repeated.", ["service"])
SESSIONS: Final = Counter("rowmill_broker_sessions", "Sessions with the broker that were set up; all but the first are reconnects.", ["service"])
SESSION_UP: Final = Gauge("rowmill_broker_session_up", "1 while a session is up with every consumer attached.", ["service"])
BLOCKED: Final = Gauge("rowmill_broker_blocked", "1 while the broker takes no messages from us (memory or disk alarm).", ["service"])
DATABASE_REPEATS: Final = Counter("rowmill_database_repeats", "Transactions repeated because the database was away or busy.", ["schema"])
