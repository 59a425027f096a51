"""That deadlines are the figures that docs/adr/0027 gives, with what each of them is for, and lie before the broker takes messages back."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from rowmill.runtime import deadlines
from rowmill_admission.settings import AdmissionSettings
from rowmill_contracts.topology import (
    ADMISSION_ASKS,
    ADMISSION_RUNS,
    EXECUTOR_ADVANCE,
    EXECUTOR_KEYS,
    EXECUTOR_ROWS,
    SHEETS_ASKS,
)
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_row_executor.settings import RowExecutorSettings
from rowmill_sheet_writer.settings import SheetWriterSettings
from rowmill_tool_gateway.settings import ToolGatewaySettings

DECISION = Path(__file__).parents[3] / "docs" / "adr" / "0027-how-long-a-message-may-be-in-hand.md"
ROW = re.compile(r"^\| (?P<queues>.+?) \| (?P<seconds>[\d ]+) s \|", re.MULTILINE)

CONSUMER_TIMEOUT = 1800.0
"""RabbitMQ's default."""

ANY, CALLS = "any work queue", "gateway.calls.<shard>.v1"


def deadlines_at(scale: float) -> dict[str, float]:
    """By queue, with settings that shorten durations so."""
    admission, store, writer = AdmissionSettings(time_scale=scale), ReceiptStoreSettings(time_scale=scale), SheetWriterSettings(time_scale=scale)
    executor, gateway = RowExecutorSettings(time_scale=scale), ToolGatewaySettings(time_scale=scale)
    capture, drop = executor.capture_timeout, executor.body_drop_patience
    commands = deadlines.commands(admission, halt_timeout=admission.halt_timeout)
    return {
        ANY: deadlines.stored(store),
        ADMISSION_RUNS: commands,
        ADMISSION_ASKS: commands,
        SHEETS_ASKS: deadlines.queries(writer, query_timeout=writer.query_timeout),
        EXECUTOR_KEYS: deadlines.keys(executor, capture_timeout=capture, drop_patience=drop),
        CALLS: deadlines.calls(gateway, hand=gateway.hand, in_flight_hold=gateway.in_flight_hold),
        EXECUTOR_ROWS: deadlines.rows(executor, capture_timeout=capture, drop_patience=drop, row_timeout=executor.row_timeout),
        EXECUTOR_ADVANCE: deadlines.BODIES,
    }


def test_deadlines_are_those_that_were_decided() -> None:
    rows = ROW.finditer(DECISION.read_text())
    decided = {queue.strip("` "): float(row["seconds"].replace(" ", "")) for row in rows for queue in row["queues"].split(",")}
    assert decided == deadlines_at(1.0)


@pytest.mark.parametrize("scale", [1.0, 0.2, 0.05])
def test_deadlines_lie_before_the_broker_takes_messages_back_and_leave_time_for_what_does_not_scale(scale: float) -> None:
    assert all(deadlines.STORING < deadline <= deadlines.LONGEST for deadline in deadlines_at(scale).values())
    assert deadlines.LONGEST < CONSUMER_TIMEOUT - 240


@pytest.mark.parametrize(
    ("row_timeout", "deadline"),
    [(600.0, 215 + 600 * 1.15), (100.0, 215 + 115.0)],
)
def test_where_a_row_may_take_less_than_an_hour_its_time_is_what_is_added(row_timeout: float, deadline: float) -> None:
    executor = RowExecutorSettings(row_timeout=row_timeout)
    rows = deadlines.rows(executor, capture_timeout=30.0, drop_patience=5.0, row_timeout=executor.row_timeout)
    assert rows == pytest.approx(deadline)


def test_a_gateway_that_keeps_unsent_calls_for_longer_than_sent_ones_has_time_for_that() -> None:
    assert deadlines.calls(ToolGatewaySettings(), hand=400.0, in_flight_hold=300.0) == 180 + 600 + 400
