"""What the doctor makes of queues: what should not lie there, or not as much of it, or be held by nobody who works."""

from __future__ import annotations

from dataclasses import replace

import pytest

from rowmill.doctor.health import Health, QueueState, judge
from rowmill_contracts.topology import EXECUTOR_ROWS, WORK_QUEUE_LENGTH

HALF = WORK_QUEUE_LENGTH // 2
WELL = QueueState(EXECUTOR_ROWS, ready=0, unacknowledged=0, consumers=1, dead=0, suspects=0)


def found(queue: QueueState, *, unfinished: int | None = 0) -> list[str]:
    health = Health("amqp://broker", "postgresql://database", unfinished=unfinished, queues=[queue])
    judge(health)
    assert all(finding.advice for finding in health.findings)
    return [f"{finding.check}: {finding.problem}" for finding in health.findings]


@pytest.mark.parametrize(
    ("queue", "said"),
    [
        (WELL, []),
        (replace(WELL, ready=HALF), []),
        (
            replace(WELL, ready=HALF + 1),
            [f"queues: {EXECUTOR_ROWS} holds {HALF + 1} messages, over half of its bound."],
        ),
        (replace(WELL, ready=3, consumers=0), [f"queues: 3 messages lie in {EXECUTOR_ROWS}, and nobody consumes it."]),
        (replace(WELL, dead=2), [f"dead letters: 2 dead letters lie in {EXECUTOR_ROWS}.dead."]),
        (replace(WELL, unacknowledged=4), [f"messages: 4 messages of {EXECUTOR_ROWS} are unacknowledged although every run is over."]),
        (replace(WELL, unacknowledged=None), []),
        (replace(WELL, suspects=5), [f"messages: 5 messages lie in {EXECUTOR_ROWS}.suspect although every run is over."]),
    ],
)
def test_what_lies_where_it_should_not_is_found(queue: QueueState, said: list[str]) -> None:
    assert found(queue) == said


@pytest.mark.parametrize("unfinished", [1, None])
def test_while_runs_are_under_way_or_may_be_messages_are_held(unfinished: int | None) -> None:
    assert found(replace(WELL, unacknowledged=4, suspects=5), unfinished=unfinished) == []


def test_rows_may_travel_by_whatever_is_ready_held_suspected_or_delayed_and_by_what_cannot_be_seen() -> None:
    health = Health("b", "d", queues=[replace(WELL, ready=1, unacknowledged=2, suspects=4)], delayed=8)
    assert health.queued == 15
    assert replace(health, queues=[WELL], delayed=0).queued == 0
    assert replace(health, queues=[replace(WELL, unacknowledged=None)], delayed=None).queued is None


def test_of_services_that_run_author_code_it_is_said_what_holds_them_up_if_they_run() -> None:
    health = Health("b", "d", services={"row-executor": False, "tool-gateway": False, "admission": False, "receipt-store": True})
    judge(health)
    assert {finding.problem.split()[3]: "If it runs, author code holds it up" in finding.advice for finding in health.findings} == {
        "row-executor": True,
        "tool-gateway": True,
        "admission": False,
    }
