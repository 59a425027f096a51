"""What becomes of what others wait for when a message dies: rows failed, runs failed, askers answered (DESIGN.md, "When something dies").

Reads copies; the letters themselves stay in their ``.dead`` queues for the operator. Never raises but for outages: this queue has no dead letters.
"""

from __future__ import annotations

import msgspec
import structlog

from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.db import Connection, Database
from rowmill.runtime.deliveries import Delivery, Undecoded
from rowmill_admission.endings import fail_run
from rowmill_admission.owed import Postman
from rowmill_admission.staging import Staging
from rowmill_admission.store import owed
from rowmill_contracts.asks import RequestDied
from rowmill_contracts.counts import Problem
from rowmill_contracts.envelope import EMPTY_OBJECT, Message
from rowmill_contracts.receipts import HaltRun
from rowmill_contracts.row_keys import KeyPage, PageKeys
from rowmill_contracts.rows import (
    LookupRows,
    QuerySheets,
    ReadRows,
    RowsLooked,
    RowsRead,
    RowsSettled,
    RowTasks,
    SettledRow,
    SheetsQueried,
)
from rowmill_contracts.runs import AdvanceRun, DatasetOpened, InputPage, InputSealed, OpenDataset, RecordCalls, ReleaseRun, TakeRun
from rowmill_contracts.tools import CallOutcome, ToolCalls, ToolFailure, ToolResults
from rowmill_contracts.topology import ADMISSION_INPUTS, SHEETS_SETTLE

log = structlog.get_logger()

DEAD_LETTERED = "dead_lettered"


class Burials:
    """`bury` a copy of a dead letter; the same letter twice has the same effect."""

    def __init__(self, database: Database, bus: Bus, postman: Postman, staging: Staging) -> None:
        self._database = database
        self._bus = bus
        self._postman = postman
        self._staging = staging

    async def bury(self, delivery: Delivery) -> None:
        try:
            await self._bury(delivery, problem_of(delivery))
        except UnavailableError:
            raise
        except Exception:
            log.exception("dead_letter_without_effect", message_type=delivery.message.message_type)
            await self._answer(delivery, RequestDied(error=problem_of(delivery)))  # whatever else becomes of it, nobody is to ask it for ever

    async def _bury(self, delivery: Delivery, problem: Problem) -> None:
        match delivery.message:
            case RowTasks() as tasks:
                await self._bus.publish(failed_tasks(tasks, problem), SHEETS_SETTLE)
            case RowsSettled() as settled:
                again = failed_settlement(settled, problem)
                if again is not None:
                    await self._bus.publish(again, SHEETS_SETTLE)
            case AdvanceRun(run_id=run_id):
                await self._fail_run(run_id, problem)
            case OpenDataset(run_id=run_id):
                await self._fail_run(run_id, problem)
                await self._answer(delivery, DatasetOpened(outcome="failed", error=problem))
            case TakeRun(run_id=run_id, read_only=False) | RecordCalls(run_id=run_id) | ReleaseRun(run_id=run_id):
                await self._fail_run(run_id, problem)
                await self._answer(delivery, RequestDied(error=problem))
            case HaltRun(run_id=run_id):
                await self._fail_undecided(run_id, delivery, problem)
                await self._answer(delivery, RequestDied(error=problem))
            case InputPage(input_id=input_id) | InputSealed(input_id=input_id):
                await self._staging.fail(input_id, problem)
            case ToolCalls() as calls:
                await self._answer(delivery, ToolResults(results=[failed_call(item.call_id, item.tool, problem) for item in calls.calls]))
            case KeyPage():
                await self._answer(delivery, PageKeys(error=problem))
            case LookupRows():
                await self._answer(delivery, RowsLooked(error=problem))
            case ReadRows():
                await self._answer(delivery, RowsRead(error=problem))
            case QuerySheets():
                await self._answer(delivery, SheetsQueried(error=problem))
            case Undecoded() as undecoded:
                named = input_named_in(undecoded, delivery)
                if named is not None:
                    await self._staging.fail(named, problem)
                await self._answer(delivery, RequestDied(error=problem))
            case other:  # who asked is told, whatever it was; counts, renewals: asked for, or told, again by who owns them
                if not delivery.reply_to:
                    log.info("dead_letter_ends_nothing", message_type=other.message_type)
                await self._answer(delivery, RequestDied(error=problem))

    async def _fail_run(self, run_id: str, problem: Problem) -> None:
        self._postman.wake(await self._database.transact(lambda connection: fail_run(connection, run_id, problem)))

    async def _fail_undecided(self, run_id: str, delivery: Delivery, problem: Problem) -> None:
        """Fail a run on which a decision cannot be stored, where that is still owed: it would be asked for without end, and nothing after it sent."""

        async def work(connection: Connection) -> list[str]:
            if not await owed.give_up(connection, run_id, delivery.body):
                return []
            await fail_run(connection, run_id, problem)
            return [run_id]

        self._postman.wake(await self._database.transact(work))

    async def _answer(self, delivery: Delivery, answer: Message) -> None:
        if delivery.reply_to:
            await self._bus.send_reply(delivery.reply_to, answer, correlation_id=delivery.correlation_id)


def problem_of(delivery: Delivery) -> Problem:
    """Why the message died, as its headers say."""
    headers = delivery.headers
    queue = headers.get("x-rowmill-queue") or headers.get("x-first-death-queue") or "its queue"
    reason = headers.get("x-rowmill-error") or headers.get("x-first-death-reason") or "no reason is on record"
    name = delivery.message.wire_type if isinstance(delivery.message, Undecoded) else delivery.message.message_type
    return Problem(code=DEAD_LETTERED, message=f"{name or 'a message without type'} was dead-lettered from {queue}: {reason}")


def failed_tasks(tasks: RowTasks, problem: Problem) -> RowsSettled:
    """The rows of a page that no executor could take, as failed."""
    rows = [
        SettledRow(key=row.key, index=row.index, page=row.page, attempt=row.attempt, status="failed", input=row.data, error=problem)
        for row in tasks.rows
    ]
    return RowsSettled(run_id=tasks.run_id, number=tasks.number, org=tasks.org, play=tasks.play, dataset=tasks.dataset, rows=rows)


def failed_settlement(settled: RowsSettled, problem: Problem) -> RowsSettled | None:
    """Rows that could not be stored as they ended, as failed; where even that died, without their input; None: that died, too."""
    again = all(row.error is not None and row.error.code == DEAD_LETTERED for row in settled.rows)
    if again and all(row.input == EMPTY_OBJECT for row in settled.rows):
        log.error("rows_cannot_be_settled", run_id=settled.run_id, dataset=settled.dataset, rows=len(settled.rows))
        return None
    rows = [
        SettledRow(
            key=row.key,
            index=row.index,
            page=row.page,
            attempt=row.attempt,
            status="failed",
            input=EMPTY_OBJECT if again else row.input,
            error=problem,
            calls=row.calls,
            cost=row.cost,
        )
        for row in settled.rows
    ]
    return msgspec.structs.replace(settled, rows=rows)


def failed_call(call_id: str, tool: str, problem: Problem) -> CallOutcome:
    failure = ToolFailure(tool=tool, code=DEAD_LETTERED, message=problem.message, origin="gateway", category=DEAD_LETTERED)
    return CallOutcome(call_id=call_id, outcome="failed", failure=failure)


class _NamesInput(msgspec.Struct):
    input_id: str


_names_input = msgspec.json.Decoder(_NamesInput)


def input_named_in(undecoded: Undecoded, delivery: Delivery) -> str | None:
    """The input of a page or seal (by its type or, without one, its queue) that is malformed elsewhere: it will never be whole."""
    from_inputs = ADMISSION_INPUTS in {delivery.headers.get("x-rowmill-queue"), delivery.headers.get("x-first-death-queue")}
    if not from_inputs and not undecoded.wire_type.startswith(("InputPage.", "InputSealed.")):
        return None
    try:
        return _names_input.decode(delivery.body).input_id
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
