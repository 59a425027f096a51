"""Which dead letters are meant, which are alike, and which can be replayed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from rowmill.client.dead_letters import DeadLetter, Filter, grouped, letter_of
from rowmill.client.replaying import REFUSED, refusal
from rowmill.errors import UnknownName
from rowmill_contracts.envelope import MESSAGES, Message, encode
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import RunStop
from rowmill_contracts.topology import ADMISSION_RUNS, EXECUTOR_ROWS

NOW = 10_000.0


def letter(message_id: str = "m-1", *, error: str = "boom", died: float | None = NOW - 100, message_type: str = "RowTasks.v1") -> DeadLetter:
    return DeadLetter(
        queue=EXECUTOR_ROWS,
        message_id=message_id,
        message_type=message_type,
        error_type="ValueError",
        error=error,
        last_failure=died,
        run_id="run-1",
        play="leads",
        tools=["p.t"],
    )


@pytest.mark.parametrize(
    ("chosen", "fits"),
    [
        (Filter(), True),
        (Filter(run_id="run-1", play="leads", tool="p.t", error="ValueError", older_than=100, message_ids=("x", "m-")), True),
        (Filter(run_id="run-2"), False),
        (Filter(play="lead"), False),
        (Filter(tool="p.u"), False),
        (Filter(error="BOOM"), True),
        (Filter(error="Value"), False),
        (Filter(older_than=101), False),
        (Filter(message_ids=("1",)), False),
    ],
)
def test_a_letter_is_meant_if_it_fits_all_that_is_given(chosen: Filter, *, fits: bool) -> None:
    assert chosen.fits(letter(), NOW) is fits


def test_a_letter_that_does_not_say_when_it_died_is_older_than_anything() -> None:
    assert Filter(older_than=1e9).fits(letter(died=None), NOW)


def test_a_queue_is_named_with_or_without_dead_and_must_exist() -> None:
    assert Filter(queue=f"{EXECUTOR_ROWS}.dead").queues() == Filter(queue=EXECUTOR_ROWS).queues() == [EXECUTOR_ROWS]
    with pytest.raises(UnknownName):
        Filter(queue="executor.rows").queues()


def test_ids_and_numbers_do_not_tell_errors_apart() -> None:
    errors = ["row 7 of 0011aabbccdd: no", "row 12 of ffee99887766: no", "row 7: yes"]
    groups = grouped(letter(str(number), error=error, died=NOW - number) for number, error in enumerate(errors))
    assert [(group.letters, group.example, group.first_failure, group.last_failure) for group in groups] == [
        (2, errors[0], None, NOW),
        (1, errors[2], None, NOW - 2),
    ]


def test_only_what_has_its_effect_although_nobody_waits_is_replayed() -> None:
    replayable = {name.partition(".")[0] for name in MESSAGES} - set(REFUSED)
    asked = {name for name in replayable if refusal(letter(message_type=f"{name}.v1")) is None}
    work = {"RowTasks", "RowsSettled", "RowsParked", "RowsCommitted", "RunStart", "RunStop", "EventArrived"}
    assert work <= asked
    assert refusal(letter(message_type="RunStart.v9")) is None
    assert refusal(letter(message_type="")) is None
    assert "rowmill runs retry" in (refusal(letter(message_type="ToolCalls.v1")) or "")


@dataclass
class Lying:
    """What a letter is read from."""

    type: str
    body: bytes
    message_id: str | None = None
    headers: dict[str, Any] = field(default_factory=dict)


def identity(message: Message, message_id: str | None = None, *, queue: str = EXECUTOR_ROWS) -> str:
    return letter_of(queue, Lying(message.message_type, encode(message), message_id)).identity  # type: ignore[arg-type]


def page(*indexes: int, run_id: str = "r", dataset: str = "d", attempt: int = 1, waits: int = 0) -> RowTasks:
    rows = [RowTask(key=f"{index:064x}", index=index, page=0, attempt=attempt, waits=waits) for index in indexes]
    return RowTasks(run_id=run_id, number=1, org="o", play="p", dataset=dataset, started_at=0, code_digest="c", rows=rows)


def test_pages_of_the_same_rows_at_the_same_attempts_are_one_letter_whatever_message_they_came_in() -> None:
    first = identity(page(1, 2), "a")
    again = msgspec.structs.replace(page(1, 2, waits=1), code_digest="other")
    assert identity(again, "b") == first
    others = [page(1), page(1, 2, 3), page(1, 2, run_id="s"), page(1, 2, dataset="e"), page(1, 2, attempt=2)]
    assert len({first, *(identity(other, "a") for other in others)}) == 1 + len(others)


def test_any_other_letter_is_known_by_its_id_or_without_one_by_its_body() -> None:
    stop, other = RunStop(run_id="r"), RunStop(run_id="s")
    assert identity(stop, "a", queue=ADMISSION_RUNS) == identity(other, "a", queue=ADMISSION_RUNS)
    assert identity(stop, "a", queue=ADMISSION_RUNS) != identity(stop, "b", queue=ADMISSION_RUNS)
    assert identity(stop, queue=ADMISSION_RUNS) == identity(stop, queue=ADMISSION_RUNS) != identity(other, queue=ADMISSION_RUNS)
