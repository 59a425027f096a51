"""What the doctor makes of what services say that they have in hand, and of what the broker counts."""

from __future__ import annotations

from typing import Any

import pytest

from rowmill.doctor.findings import Finding
from rowmill.doctor.in_hand import all_answer, late, lost, unaccounted
from rowmill_contracts.in_hand import Away, InHandShown, LateMessage, QueueInHand
from rowmill_contracts.topology import EXECUTOR_ROWS, SHEETS_SETTLE, suspect


def shown(*queues: QueueInHand, process: str = "p1", away: list[Away] | None = None) -> InHandShown:
    return InHandShown(service="row-executor", process=process, place="host:12", queues=list(queues), away=away or [])


def rows(**facts: Any) -> QueueInHand:
    return QueueInHand(**{"queue": EXECUTOR_ROWS, "deadline": 60.0, **facts})


def of_run(name: str, seconds: float, *, kept: bool = False, run_id: str | None = "r1") -> LateMessage:
    return LateMessage(message_type="RowTasks.v1", message_id=name, seconds=seconds, run_id=run_id, kept=kept)


def told(findings: list[Finding]) -> list[str]:
    assert all(finding.problem.endswith(".") and finding.advice.endswith(".") for finding in findings)
    return [f"{finding.check}: {finding.problem}" for finding in findings]


def test_what_is_in_hand_rightly_is_no_finding() -> None:
    assert late([shown(rows(messages=50, peak=50, oldest=59.0)), shown(rows())]) == []


def test_a_message_past_its_deadline_is_named_with_who_has_it() -> None:
    found = late([shown(rows(messages=3, peak=3, oldest=75.2, overdue=1, late=[of_run("m1", 75.2)]))])
    said = f"A message of {EXECUTOR_ROWS}, RowTasks.v1 (id m1, run r1), has been in hand of row-executor (process p1, host:12) for 75 s"
    assert told(found) == [f"in hand: {said}; at most 60 s is right."]


def test_of_several_the_number_is_told_and_the_oldest_are_named() -> None:
    late_ones = [of_run("m1", 75.2), of_run("m2", 70.0, run_id=None)]
    [said] = told(late([shown(rows(messages=9, overdue=7, late=late_ones))]))
    assert said.startswith(f"in hand: 7 messages of {EXECUTOR_ROWS}, the oldest RowTasks.v1 (id m1, run r1), RowTasks.v1 (id m2), have been in hand")


def test_what_is_kept_for_an_outage_is_named_as_that_with_what_is_away() -> None:
    away = [Away(what="the database", seconds=70.0)]
    queue = rows(messages=2, overdue=1, kept=1, late=[of_run("m1", 175.0), of_run("m2", 75.0, kept=True)])
    overdue, kept = told(late([shown(queue, away=away)]))
    assert overdue.startswith("in hand: ")
    assert "id m1" in overdue
    assert "for 175 s" in overdue
    assert kept.startswith("outage: ")
    assert "id m2" in kept
    assert "for 75 s, where 60 s would be right, while it is without the database, for 70 s." in kept
    assert "Whether anything hangs besides cannot be told before" in late([shown(queue, away=away)])[1].advice
    [alone] = told(late([shown(rows(messages=1, kept=1, late=[of_run("m2", 75.0, kept=True)]))]))
    assert "while it is without what its handlers need." in alone


@pytest.mark.parametrize(
    ("counted", "peaks", "astray"),
    [
        ({}, [], {}),
        ({EXECUTOR_ROWS: 3}, [], {EXECUTOR_ROWS: 3}),
        ({EXECUTOR_ROWS: 3}, [2, 1], {}),
        ({EXECUTOR_ROWS: 3}, [2], {EXECUTOR_ROWS: 1}),
        ({EXECUTOR_ROWS: 3}, [50], {}),
        ({EXECUTOR_ROWS: 2, SHEETS_SETTLE: 1, "listen.x": 5, "replies.y": 4}, [2], {SHEETS_SETTLE: 1}),
        ({suspect(EXECUTOR_ROWS): 1}, [5], {suspect(EXECUTOR_ROWS): 1}),
    ],
)
def test_what_the_broker_counts_beyond_what_anybody_had_is_astray(counted: dict[str, int], peaks: list[int], astray: dict[str, int]) -> None:
    answers = [shown(rows(peak=peak), process=str(number)) for number, peak in enumerate(peaks)]
    assert unaccounted({queue: (9, held) for queue, held in counted.items()}, answers) == astray


def test_what_nobody_has_is_told_with_how_many_consumers_are_silent() -> None:
    answers = [shown(rows(messages=1, peak=1))]
    [silent] = lost({EXECUTOR_ROWS: 2}, {EXECUTOR_ROWS: 3}, answers)
    assert told([silent]) == [f"in hand: 2 messages of {EXECUTOR_ROWS} are unacknowledged, and nobody who answers has them in hand."]
    assert silent.advice.startswith(f"2 of the 3 who consume {EXECUTOR_ROWS} do not answer")
    [gone] = lost({suspect(EXECUTOR_ROWS): 1}, {EXECUTOR_ROWS: 1}, answers)
    assert told([gone]) == [f"in hand: 1 message of {suspect(EXECUTOR_ROWS)} is unacknowledged, and nobody who answers has it in hand."]
    assert "close its connection" in gone.advice


def test_answers_are_waited_for_until_there_are_as_many_as_consumers() -> None:
    one, other = shown(rows(), process="p1"), shown(rows(), rows(queue=SHEETS_SETTLE, consumed=False), process="p2")
    assert all_answer({EXECUTOR_ROWS: 2, SHEETS_SETTLE: 0}, [one, other])
    assert not all_answer({EXECUTOR_ROWS: 2}, [one])
    assert not all_answer({EXECUTOR_ROWS: 1, SHEETS_SETTLE: 1}, [one, other])
    stopping = shown(rows(consumed=False, messages=1, peak=1), process="p3")
    assert all_answer({EXECUTOR_ROWS: 2}, [one, stopping])
