"""Room at the executors: bounded, by windows and in all, and given out in turns."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from rowmill_admission.rooms import Ask, RoomLimits, Rooms

LIMITS = RoomLimits(rows=1_000, bytes=1_000_000)


def rooms_of(*datasets: tuple[str, str], limits: RoomLimits = LIMITS, window: int = 200) -> Rooms:
    """Datasets numbered from 0, by organisation and run."""
    rooms = Rooms(limits)
    for seq, (org, run_id) in enumerate(datasets):
        rooms.enter(seq, org, run_id, window)
    return rooms


def test_a_page_gets_room_at_once_where_there_is_some() -> None:
    rooms = rooms_of(("a", "r"))
    rooms.ask(Ask(0, page=0, rows=100, bytes=10))
    assert [ask.dataset_seq for ask in rooms.grant()] == [0]
    assert not rooms.asking
    assert rooms.rows == 100


def test_a_run_has_no_more_out_than_its_window_over_all_its_datasets() -> None:
    rooms = rooms_of(("a", "r"), ("a", "r"))
    rooms.ask(Ask(0, page=0, rows=150, bytes=10))
    rooms.grant()
    rooms.ask(Ask(1, page=0, rows=100, bytes=10))
    assert rooms.grant() == []
    flight = rooms.flight(0)
    assert flight is not None
    rooms.recorded(0, [0])
    flight.sent, flight.ended = 150, 50
    assert [ask.dataset_seq for ask in rooms.grant()] == [1]


def test_a_page_larger_than_the_window_goes_alone() -> None:
    rooms = rooms_of(("a", "r"), window=10)
    rooms.ask(Ask(0, page=0, rows=100, bytes=10))
    assert len(rooms.grant()) == 1


def test_rows_that_wait_count_in_the_window_but_not_in_the_common_room() -> None:
    rooms = rooms_of(("a", "r"), ("a", "s"), limits=RoomLimits(rows=200, bytes=1_000))
    flight = rooms.flight(0)
    assert flight is not None
    flight.sent, flight.waiting = 200, 200
    assert (flight.in_window, flight.in_room, rooms.rows) == (200, 0, 0)
    rooms.ask(Ask(0, page=1, rows=1, bytes=1))
    rooms.ask(Ask(1, page=0, rows=200, bytes=1))
    assert [ask.dataset_seq for ask in rooms.grant()] == [1]


def test_bytes_bound_the_room_as_well_as_rows() -> None:
    rooms = rooms_of(("a", "r"), ("a", "s"), limits=RoomLimits(rows=1_000, bytes=100))
    rooms.ask(Ask(0, page=0, rows=1, bytes=80))
    rooms.ask(Ask(1, page=0, rows=1, bytes=80))
    assert len(rooms.grant()) == 1
    flight = rooms.flight(0)
    assert flight is not None
    rooms.recorded(0, [0])
    flight.sent, flight.sent_bytes, flight.ended = 4, 320, 3
    assert flight.bytes_in_room == 80
    flight.ended = 4
    assert len(rooms.grant()) == 1


def test_a_large_page_is_not_starved_by_small_ones() -> None:
    rooms = rooms_of(("a", "big"), ("b", "small"), limits=RoomLimits(rows=100, bytes=1_000))
    rooms.enter(9, "c", "out", 200)
    flight = rooms.flight(9)
    assert flight is not None
    flight.sent = 50
    rooms.ask(Ask(0, page=0, rows=80, bytes=1))
    rooms.ask(Ask(1, page=0, rows=10, bytes=1))
    assert rooms.grant() == []
    flight.ended = 50
    assert [ask.dataset_seq for ask in rooms.grant()] == [0, 1]


def test_room_goes_round_by_organisation_then_by_run() -> None:
    rooms = rooms_of(("a", "r1"), ("a", "r2"), ("b", "r3"), limits=RoomLimits(rows=1, bytes=1_000))
    turns: list[int] = []
    for page in range(8):
        for seq in range(3):
            flight = rooms.flight(seq)
            assert flight is not None
            if not flight.granted and seq not in rooms._asks:
                rooms.ask(Ask(seq, page, rows=1, bytes=1))
        [granted] = rooms.grant()
        turns.append(granted.dataset_seq)
        rooms.recorded(granted.dataset_seq, [granted.page])
    assert Counter(turns) == {0: 2, 1: 2, 2: 4}
    assert all(first != second for first, second in pairwise(turns))


def test_who_withdraws_gets_nothing() -> None:
    rooms = rooms_of(("a", "r"), ("a", "s"))
    rooms.ask(Ask(0, page=0, rows=1, bytes=1))
    rooms.ask(Ask(1, page=0, rows=1, bytes=1))
    rooms.withdraw(0)
    rooms.withdraw(0)
    assert [ask.dataset_seq for ask in rooms.grant()] == [1]
    rooms.leave(1)
    assert rooms.rows == 0


@given(
    datasets=st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("rstu")), min_size=1, max_size=6),
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 60), st.booleans()), max_size=60),
)
def test_limits_hold_whatever_is_asked_and_ends(datasets: list[tuple[str, str]], steps: list[tuple[int, int, bool]]) -> None:
    rooms = rooms_of(*datasets, limits=RoomLimits(rows=150, bytes=1_000_000), window=70)
    for page, (number, rows, ends) in enumerate(steps):
        seq = number % len(datasets)
        flight = rooms.flight(seq)
        assert flight is not None
        if ends:
            flight.sent += flight.granted_rows
            rooms.recorded(seq, list(flight.granted))
            flight.ended = flight.sent
        elif seq not in rooms._asks:
            rooms.ask(Ask(seq, page, rows=rows, bytes=1))
        rooms.grant()
        assert rooms.rows <= 150
        by_run: dict[str, int] = {}
        for other in range(len(datasets)):
            found = rooms.flight(other)
            assert found is not None
            by_run[found.run_id] = by_run.get(found.run_id, 0) + found.in_window
        assert all(out <= 70 for out in by_run.values())
    for _ in steps:  # whatever asked is served once the rows before it have ended
        for seq in range(len(datasets)):
            flight = rooms.flight(seq)
            assert flight is not None
            rooms.recorded(seq, list(flight.granted))
        rooms.grant()
    assert not rooms.asking
