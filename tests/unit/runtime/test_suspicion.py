"""Who is suspect, and what becomes of suspects."""

from __future__ import annotations

import msgspec

from rowmill.runtime.suspicion import (
    CONDEMNED_AFTER,
    REMEMBERED,
    Bury,
    Halve,
    Handle,
    Outlived,
    earlier_crashes,
    failed_deliveries,
    judge,
    untouched_headers,
)
from rowmill_contracts.rows import RowTask, RowTasks
from rowmill_contracts.runs import AdvanceRun


def page(rows: int) -> RowTasks:
    tasks = [RowTask(key=f"{number:02x}", index=number, page=0, data=msgspec.Raw(b"{}")) for number in range(rows)]
    return RowTasks(run_id="r", number=1, org="o", play="p", dataset="d", started_at=1.0, code_digest="c", rows=tasks)


def test_a_suspect_that_crashed_nobody_alone_is_handled_as_any_message() -> None:
    assert judge(page(200), crashes=0, earlier=2) == Handle()


def test_a_page_is_halved_at_its_second_delivery_as_a_suspect() -> None:
    verdict = judge(page(5), crashes=1, earlier=2)
    assert isinstance(verdict, Halve)
    assert [[row.index for row in part.rows] for part in verdict.parts if isinstance(part, RowTasks)] == [[0, 1], [2, 3, 4]]


def test_a_single_row_or_another_message_dies_at_its_third_and_says_how_often_it_crashed() -> None:
    for message in (page(1), AdvanceRun(run_id="r")):
        assert judge(message, crashes=1, earlier=2) == Handle()
        verdict = judge(message, crashes=2, earlier=5)
        assert isinstance(verdict, Bury)
        assert str(verdict.error) == "poison: crashed its consumer 7 times"
        assert verdict.error.code == "poison"


def test_deaths_at_rest_condemn_nothing_until_there_are_very_many() -> None:
    row = page(1)
    assert judge(row, crashes=CONDEMNED_AFTER - 1, earlier=2, at_rest=CONDEMNED_AFTER - 2) == Handle()
    for crashes, at_rest in ((5, 3), (2, 0)):
        verdict = judge(row, crashes=crashes, earlier=2, at_rest=at_rest)
        assert isinstance(verdict, Bury)
        assert str(verdict.error) == f"poison: crashed its consumer {crashes + 2} times"
    verdict = judge(row, crashes=CONDEMNED_AFTER, earlier=2, at_rest=CONDEMNED_AFTER)
    assert isinstance(verdict, Bury)
    assert str(verdict.error) == "poison: its consumer died 22 times, 20 times while it only seemed to wait"


def test_a_page_is_halved_whatever_its_rows_did() -> None:
    assert isinstance(judge(page(2), crashes=1, earlier=2, at_rest=1), Halve)


def test_a_delivery_that_this_process_outlived_is_no_crash() -> None:
    outlived = Outlived()
    outlived.delivered("q", "m")
    assert outlived.crashes("q", "m", 1) == 0
    outlived.delivered("q", "m")
    assert outlived.crashes("q", "m", 3) == 1
    assert outlived.crashes("other", "m", 3) == 3
    outlived.acknowledged("q", "m")
    assert outlived.crashes("q", "m", 3) == 3


def test_a_message_without_id_is_not_known_again_and_what_is_remembered_is_bounded() -> None:
    outlived = Outlived()
    outlived.delivered("q", "")
    assert outlived.crashes("q", "", 2) == 2
    for number in range(REMEMBERED + 1):
        outlived.delivered("q", str(number))
    assert outlived.crashes("q", "0", 2) == 2
    assert outlived.crashes("q", "1", 2) == 1


def test_headers_that_are_no_counts_count_nothing_and_the_brokers_count_does_not_travel() -> None:
    assert failed_deliveries({}) == failed_deliveries({"x-delivery-count": "2"}) == 0
    assert earlier_crashes({"x-rowmill-crashes": b"2"}) == 0
    assert untouched_headers({"x-delivery-count": 2, "traceparent": "t"}) == {"traceparent": "t"}
