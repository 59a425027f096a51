"""That a deadline is past everything that may rightly keep a message in hand, and before the broker takes it back."""

from __future__ import annotations

import pytest

from rowmill.runtime import deadlines
from rowmill.runtime.db import STATEMENT_SECONDS
from rowmill.runtime.publishing import CONFIRM_TIMEOUT
from rowmill_admission.settings import AdmissionSettings
from rowmill_receipt_store.settings import ReceiptStoreSettings
from rowmill_row_executor.settings import RowExecutorSettings
from rowmill_sheet_writer.settings import SheetWriterSettings
from rowmill_tool_gateway.settings import ToolGatewaySettings

CONSUMER_TIMEOUT = 1800.0
"""RabbitMQ's default."""


@pytest.mark.parametrize("scale", [1.0, 0.2, 0.05])
def test_deadlines_lie_between_what_settings_allow_and_what_the_broker_does(scale: float) -> None:
    admission, store, writer = AdmissionSettings(time_scale=scale), ReceiptStoreSettings(time_scale=scale), SheetWriterSettings(time_scale=scale)
    executor, gateway = RowExecutorSettings(time_scale=scale), ToolGatewaySettings(time_scale=scale)
    capture, drop, row = executor.capture_timeout, executor.body_drop_patience, executor.row_timeout
    hand, sent = gateway.hand, gateway.in_flight_hold
    rows = deadlines.rows(executor, capture_timeout=capture, drop_patience=drop, row_timeout=row)
    allowed = [
        (deadlines.stored(store), STATEMENT_SECONDS + CONFIRM_TIMEOUT + 2 * store.suspect_alone + store.ask_timeout),
        (deadlines.commands(admission, halt_timeout=admission.halt_timeout), admission.halt_timeout + admission.ask_timeout + 300 * scale),
        (deadlines.queries(writer, query_timeout=writer.query_timeout), writer.query_timeout + 2 * writer.suspect_alone),
        (deadlines.keys(executor, capture_timeout=capture, drop_patience=drop), capture + drop + executor.ask_timeout + 2 * executor.suspect_alone),
        (deadlines.calls(gateway, hand=hand, in_flight_hold=sent), max(sent, 1.5 * hand) + hand / 20 + 2 * gateway.suspect_alone),
        (deadlines.calls(gateway, hand=10 * sent, in_flight_hold=sent), min(15 * sent, 1400.0)),
        (rows, min(1.15 * row + capture, 1400.0)),
        (deadlines.BODIES, 2 * executor.body_timeout),
    ]
    for deadline, bound in allowed:
        assert bound < deadline <= deadlines.LONGEST < CONSUMER_TIMEOUT - 240
