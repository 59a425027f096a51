"""What a process says that it has in hand: since when, past which deadline, and by what a person finds it."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

from aio_pika.abc import AbstractIncomingMessage
from tests.fakes.clocks import FrozenClock

from rowmill.runtime.in_hand import NAMED, PEAK_SECONDS, READ_BYTES, TOLD, Held, HeldMessages, MessagesInHand
from rowmill.runtime.outages import RECOVERY_SECONDS, Outages
from rowmill.runtime.session import Session
from rowmill_contracts.envelope import encode
from rowmill_contracts.in_hand import QueueInHand
from rowmill_contracts.runs import AdvanceRun

QUEUE = "executor.advance.v1"
DEADLINE = 60.0


class Process:
    """One service in one process, on a clock that stands."""

    def __init__(self) -> None:
        self.clock = FrozenClock()
        self.outages = Outages(self.clock)
        self.in_hand = MessagesInHand("row-executor", "p1", self.clock, self.outages)
        self.in_hand.serve(QUEUE, DEADLINE)
        self.session = self.new_session()

    def new_session(self) -> Session:
        self.session = cast("Session", SimpleNamespace(ended=asyncio.Event()))
        return self.session

    def take(self, name: str = "m", *, session: Session | None = None) -> tuple[HeldMessages, Held]:
        hand = self.in_hand.of(session or self.session, QUEUE)
        return hand, hand.take(message(name), self.clock.monotonic())

    @property
    def shown(self) -> QueueInHand:
        [queue] = self.in_hand.shown().queues
        return queue


def message(name: str, *, body: bytes | None = None, **properties: Any) -> AbstractIncomingMessage:
    body = encode(AdvanceRun(run_id=f"run-{name}")) if body is None else body
    given = {"type": AdvanceRun.message_type, "message_id": name, "correlation_id": f"run-{name}", "body": body, **properties}
    return cast("AbstractIncomingMessage", SimpleNamespace(**given))


def test_a_message_is_in_hand_from_its_delivery_until_it_is_left_and_the_oldest_tells_the_age() -> None:
    process = Process()
    assert (process.shown.messages, process.shown.oldest) == (0, None)
    hand, first = process.take("first")
    process.clock.time += 10
    _, second = process.take("second")
    process.clock.time += 5
    assert (process.shown.messages, process.shown.oldest, process.shown.overdue) == (2, 15.0, 0)
    hand.leave(first)
    assert (process.shown.messages, process.shown.oldest) == (1, 5.0)
    hand.leave(second)
    assert (process.shown.messages, process.shown.oldest, process.shown.late) == (0, None, [])


def test_past_its_deadline_and_not_before_a_message_is_named_by_type_id_and_run() -> None:
    process = Process()
    process.take("a")
    process.clock.time += DEADLINE
    assert (process.shown.overdue, process.shown.late) == (0, [])
    process.clock.time += 0.5
    shown = process.shown
    [late] = shown.late
    assert (shown.overdue, shown.kept, shown.deadline) == (1, 0, DEADLINE)
    assert (late.message_type, late.message_id, late.run_id, late.seconds) == ("AdvanceRun.v1", "a", "run-a", 60.5)


def test_of_many_late_messages_all_are_counted_and_the_oldest_named() -> None:
    process = Process()
    for number in range(NAMED + 3):
        process.take(str(number))
        process.clock.time += 1
    process.clock.time += DEADLINE
    assert process.shown.overdue == NAMED + 3
    assert [late.message_id for late in process.shown.late] == [str(number) for number in range(NAMED)]


def test_a_message_that_is_large_or_cannot_be_read_is_named_all_the_same_and_nothing_of_its_body_is_told() -> None:
    process = Process()
    hand = process.in_hand.of(process.session, QUEUE)
    for strange in (
        message("large", body=b"s" * (READ_BYTES + 1)),
        message("none", body=b"secret"),
        message("\x1b[2Jodd", type=None, correlation_id=None),
        message("asked", body=b"s" * (READ_BYTES + 1), correlation_id="asked"),
    ):
        hand.take(strange, process.clock.monotonic())
    process.clock.time += DEADLINE + 1
    named = [(late.message_type, late.message_id, late.run_id) for late in process.shown.late]
    assert named == [
        ("AdvanceRun.v1", "large", "run-large"),
        ("AdvanceRun.v1", "none", None),
        ("", "?[2Jodd", None),
        ("AdvanceRun.v1", "asked", None),
    ]
    assert b"secret" not in encode(process.in_hand.shown())


def test_what_a_stranger_gave_for_a_name_is_told_in_short_and_printable() -> None:
    process = Process()
    hand = process.in_hand.of(process.session, QUEUE)
    long = "\x00\ud800" + 1000 * "ä"
    body = encode(AdvanceRun(run_id="\x07" + 1000 * "r"))
    hand.take(message(long, body=body), process.clock.monotonic())
    hand.take(message("asked", type=long, body=b"s" * (READ_BYTES + 1), correlation_id=long), process.clock.monotonic())
    process.clock.time += DEADLINE + 1
    first, second = process.shown.late
    short = f"??{(TOLD - 2) * 'ä'}…"
    assert (first.message_id, first.run_id) == (short, f"?{(TOLD - 1) * 'r'}…")
    assert (second.message_type, second.run_id) == (short, short)
    assert len(encode(process.in_hand.shown())) < 3000


def test_with_the_end_of_its_session_a_message_is_in_hand_no_more_and_comes_anew_by_the_next() -> None:
    process = Process()
    former = process.session
    hand, held = process.take("a")
    process.clock.time += DEADLINE + 1
    former.ended.set()
    assert (process.shown.messages, process.shown.oldest, process.shown.overdue, process.shown.peak) == (0, None, 0, 0)
    process.new_session()
    process.take("a")  # delivered again, while the handler of the first delivery goes on
    assert (process.shown.messages, process.shown.peak, process.shown.overdue) == (1, 1, 0)
    process.take("late", session=former)
    assert (process.shown.messages, process.shown.peak) == (1, 1)
    hand.leave(held)
    assert process.shown.messages == 1


def test_the_peak_of_the_last_seconds_is_told_and_then_forgotten() -> None:
    process = Process()
    held = [process.take(str(number)) for number in range(4)]
    for hand, one in held:
        hand.leave(one)
    process.clock.time += PEAK_SECONDS - 0.1
    assert (process.shown.messages, process.shown.peak) == (0, 4)
    process.clock.time += 1
    assert process.shown.peak == 4
    process.take("next")
    process.clock.time += PEAK_SECONDS
    assert process.shown.peak == 1
    process.clock.time += 10 * PEAK_SECONDS
    assert process.shown.peak == 1


def test_time_in_which_something_was_away_does_not_count_and_what_is_late_for_it_is_told_apart() -> None:
    process = Process()
    note = process.outages.noting("the database")
    process.take("a")
    process.clock.time += 20
    note(True)
    process.clock.time += 50
    shown = process.in_hand.shown()
    assert [(away.what, away.seconds) for away in shown.away] == [("the database", 50.0)]
    assert (process.shown.overdue, process.shown.kept, process.shown.late[0].kept) == (0, 1, True)
    note(False)
    assert (process.shown.overdue, process.shown.kept) == (0, 0)  # it has its time anew
    process.clock.time += 30 + RECOVERY_SECONDS
    assert process.shown.overdue == 0
    process.clock.time += 11
    assert (process.shown.overdue, process.shown.kept) == (1, 0)


def test_what_was_late_before_an_outage_stays_so_under_it() -> None:
    process = Process()
    process.take("a")
    process.clock.time += DEADLINE + 1
    process.outages.noting("the database")(True)
    process.take("b")
    process.clock.time += DEADLINE + 1
    assert (process.shown.overdue, process.shown.kept) == (1, 1)
    assert [(late.message_id, late.kept) for late in process.shown.late] == [("a", False), ("b", True)]


def test_what_begins_to_hang_under_an_outage_is_found_once_that_is_over() -> None:
    process = Process()
    process.clock.time += 20
    note = process.outages.noting("answers on x")
    note(True)
    process.take("hangs")
    process.clock.time += 4000
    assert (process.shown.overdue, process.shown.kept) == (0, 1)
    note(False)
    process.clock.time += DEADLINE + RECOVERY_SECONDS
    assert (process.shown.overdue, process.shown.kept) == (0, 0)
    process.clock.time += 1
    assert (process.shown.overdue, process.shown.kept) == (1, 0)


def test_a_handler_that_waits_for_what_is_away_keeps_its_message_and_no_other() -> None:
    process = Process()
    _, waits = process.take("waits")
    process.take("hangs")
    process.clock.time += DEADLINE + 5
    waits.waits(DEADLINE, 1.0, process.clock.monotonic())
    assert (process.shown.overdue, process.shown.kept) == (1, 1)
    assert [(late.message_id, late.kept) for late in process.shown.late] == [("waits", True), ("hangs", False)]


def test_a_queue_that_was_left_is_told_for_as_long_as_something_of_it_is_in_hand() -> None:
    process = Process()
    hand, held = process.take("a")
    process.in_hand.leave(QUEUE)
    assert (process.shown.consumed, process.shown.messages) == (False, 1)
    hand.leave(held)
    process.clock.time += 3 * PEAK_SECONDS
    assert process.in_hand.shown().queues == []
