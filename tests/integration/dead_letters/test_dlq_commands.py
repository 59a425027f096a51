"""`rowmill dlq` on a real broker: what each command says, and what it leaves in the queues."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from tests.integration.dead_letters.conftest import Desk, Died

from rowmill.cli import consent, dlq_text
from rowmill.client.dead_letter_queues import letter_box
from rowmill.client.dead_letters import Filter
from rowmill.errors import MalformedMessage
from rowmill.runtime.bus import Bus
from rowmill.runtime.clock import SystemClock
from rowmill.runtime.deliveries import REPLAYED, Rejected
from rowmill_contracts.envelope import Message, encode
from rowmill_contracts.rows import LookupRows, RowsSettled, RowTask, RowTasks
from rowmill_contracts.runs import AdvanceRun, InputPage, OpenDataset, RunStart
from rowmill_contracts.tools import CallItem, ToolCalls
from rowmill_contracts.topology import (
    ADMISSION_ASKS,
    ADMISSION_INPUTS,
    ADMISSION_RUNS,
    EXECUTOR_ADVANCE,
    EXECUTOR_ROWS,
    SHEETS_ASKS,
    SHEETS_SETTLE,
    dead,
    gateway_calls,
)

pytestmark = pytest.mark.servers


def page(run_id: str = "run-1", play: str = "leads", number: int = 0) -> RowTasks:
    rows = [RowTask(key=f"{number:064x}", index=number, page=number, data=msgspec.Raw(b'{"domain":"a.example"}'))]
    return RowTasks(run_id=run_id, number=1, org="o", play=play, dataset="leads", started_at=0, code_digest="c", rows=rows)


def calls(tool: str) -> ToolCalls:
    item = CallItem(call_id="1", tool=tool, receipt_key="k", input=msgspec.Raw(b"{}"))
    return ToolCalls(run_id="run-1", org="o", play="leads", started_at=0, calls=[item])


def settled(run_id: str = "run-1") -> RowsSettled:
    return RowsSettled(run_id=run_id, number=1, org="o", play="leads", dataset="leads", rows=[])


SIX = (
    Died(page("run-1"), "a1", error=ValueError("row 17 of run 0123456789ab"), ago=7200),
    Died(page("run-2"), "a2", error=ValueError("row 18 of run ba9876543210")),
    Died(page("run-1", play="other"), "a3", error=Rejected("not this one")),
    Died(calls("hunter.find"), "b1", gateway_calls(3)),
    Died(calls("crm.score"), "b2", gateway_calls(3)),
    Died(settled(), "c1", SHEETS_SETTLE, error=MalformedMessage("row key 'x'")),
)


def ids(found: list[dict[str, str]]) -> list[str]:
    return [letter["message_id"] for letter in found]


def test_letters_are_listed_by_queue_run_play_tool_error_and_age_and_stay_where_they_lie(desk: Desk) -> None:
    desk.bury(*SIX)
    asked = {
        (): ["a1", "a2", "a3", "c1", "b1", "b2"],
        ("--queue", EXECUTOR_ROWS): ["a1", "a2", "a3"],
        ("--queue", dead(SHEETS_SETTLE)): ["c1"],
        ("--run", "run-2"): ["a2"],
        ("--play", "other"): ["a3"],
        ("--tool", "crm.score"): ["b2"],
        ("--error", "rejected"): ["a3"],
        ("--error", "ROW 1"): ["a1", "a2"],
        ("--older-than", "1h"): ["a1"],
        ("--run", "run-1", "--error", "ValueError"): ["a1", "b1", "b2"],
    }
    assert {options: ids(desk.json("list", *options)) for options in asked} == asked
    assert len(desk.json("list", "--limit", "2")) == 2
    assert sorted(map(str, desk.ids(dead(EXECUTOR_ROWS)))) == ["a1", "a2", "a3"]
    assert "'nope'" in desk.rowmill("list", "--queue", "nope", status=2)


def test_every_command_means_the_letters_that_its_options_name(desk: Desk, tmp_path: Path) -> None:
    desk.bury(*SIX)
    meant = {
        ("--queue", SHEETS_SETTLE): ["c1"],
        ("--run", "run-2"): ["a2"],
        ("--play", "other"): ["a3"],
        ("--tool", "crm.score"): ["b2"],
        ("--error", "rejected"): ["a3"],
        ("--older-than", "1h"): ["a1"],
    }
    for number, (options, letters) in enumerate(meant.items()):
        desk.rowmill("export", f"{number}.jsonl", *options)
        assert ids([json.loads(line) for line in (tmp_path / f"{number}.jsonl").read_text().splitlines()]) == letters
        replay = desk.json("replay", *options, "--dry-run")
        assert replay["replayed"] + sum(replay["refused"].values()) == len(letters)
        assert desk.json("purge", *options, "--dry-run")["found"] == len(letters)


def test_letters_that_died_alike_are_one_group(desk: Desk) -> None:
    desk.bury(*SIX)
    groups = desk.json("list", "--group")
    assert [(group["queue"], group["error_type"], group["letters"], group["runs"]) for group in groups[:2]] == [
        (EXECUTOR_ROWS, "ValueError", 2, ["run-1", "run-2"]),
        (gateway_calls(3), "ValueError", 2, ["run-1"]),
    ]
    assert len(groups) == 4
    assert desk.rowmill("list", "--group").count("\n") == 4


def test_a_letter_is_shown_whole(desk: Desk) -> None:
    desk.bury(*SIX)
    shown = desk.rowmill("show", "a1")
    assert "row 17 of run 0123456789ab" in shown
    assert '      "data": {\n        "domain": "a.example"\n' in shown
    document = desk.json("show", "a1")
    assert document["body"] == encode(page("run-1")).decode()
    assert (document["attempts"], document["headers"]["x-rowmill-key"]) == (3, EXECUTOR_ROWS)
    assert "write more of it" in desk.rowmill("show", "a", status=2)
    assert "no dead letter" in desk.rowmill("show", "zz", status=2)


def test_an_export_holds_every_letter_and_leaves_them(desk: Desk, tmp_path: Path) -> None:
    desk.bury(*SIX)
    assert desk.json("export", "letters.jsonl", "--queue", EXECUTOR_ROWS) == {"file": "letters.jsonl", "exported": 3}
    lines = [json.loads(line) for line in (tmp_path / "letters.jsonl").read_text().splitlines()]
    assert ids(lines) == ["a1", "a2", "a3"]
    assert lines[1]["body"] == encode(page("run-2")).decode()
    assert "there already" in desk.rowmill("export", "letters.jsonl", status=1)
    assert desk.ids(dead(EXECUTOR_ROWS)) == ["a1", "a2", "a3"]


def test_a_purge_asks_and_deletes_only_what_is_meant(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "at_a_terminal", lambda: True)
    desk.bury(*SIX)
    assert "nothing was deleted" in desk.rowmill("purge", "--run", "run-1", typed="n\n")
    assert desk.json("purge", "--run", "run-1", "--dry-run") == {"dry_run": True, "found": 5, "purged": 0}
    assert "--yes" in desk.rowmill("purge", "--json", status=2)
    assert "deleted 1 dead letter\n" in desk.rowmill("purge", "a3", typed="y\n")
    assert desk.json("purge", "--run", "run-1", "--yes") == {"dry_run": False, "found": 4, "purged": 4}
    assert ids(desk.json("list")) == ["a2"]


def test_a_replay_publishes_the_untouched_body_under_its_id_and_takes_the_letter(desk: Desk) -> None:
    desk.bury(*SIX, Died(RunStart(play="leads", run_id="r"), "d1", ADMISSION_RUNS))
    assert desk.json("replay", "--queue", EXECUTOR_ROWS, "--dry-run")["replayed"] == 3
    assert desk.ids(EXECUTOR_ROWS) == []
    done = desk.json("replay", "--run", "run-1", "--queue", EXECUTOR_ROWS, "--rate", "1000/s")
    assert (done["found"], done["looked_at"], done["replayed"], done["refused"]) == (3, 3, 2, {})
    replayed = desk.taken(EXECUTOR_ROWS)
    assert [(message_id, body) for message_id, body, _ in replayed] == [("a1", encode(page("run-1"))), ("a3", encode(page("run-1", play="other")))]
    noted = {"x-delivery-count"}  # by the broker, as it hands a message over
    assert all({name for name in headers if name.startswith("x-")} - noted == {REPLAYED} for _, _, headers in replayed)
    assert desk.ids(dead(EXECUTOR_ROWS)) == ["a2"]
    assert "1 of 1 dead letters replayed" in desk.rowmill("replay", "--queue", ADMISSION_RUNS)
    assert desk.ids(ADMISSION_RUNS) == ["d1"]


class Timed(SystemClock):
    """Does not wait, and knows how long it would have."""

    def __init__(self) -> None:
        self.slept = 0.0

    def monotonic(self) -> float:
        return self.slept

    async def sleep(self, seconds: float) -> None:
        self.slept += seconds


def test_a_replay_is_no_faster_than_it_is_told_to_be(desk: Desk, broker_url: str) -> None:
    desk.bury(*(Died(page(f"run-{number}"), f"a{number}") for number in range(4)))
    clock = Timed()

    async def replay(_bus: Bus) -> int:
        async with letter_box(broker_url, clock=clock) as box:
            return (await box.replay(Filter(), per_second=2.0)).replayed

    assert desk.run(replay) == 4
    assert clock.slept == 1.5


def test_a_replay_says_how_far_it_is_beside_what_it_prints(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dlq_text, "SECONDS_BETWEEN_LINES", 0.0)
    desk.bury(*SIX)
    done = desk.types("replay", "--run", "run-1", "--json")
    assert json.loads(done.stdout)["replayed"] == 3
    told = [line for line in done.stderr.splitlines() if line.startswith("rowmill: looked at")]
    assert (len(told), told[-1]) == (6, "rowmill: looked at 6 of 6 dead letters, replayed 3")


@pytest.mark.parametrize(
    ("message", "queue", "advice"),
    [
        (AdvanceRun(run_id="r"), EXECUTOR_ADVANCE, "start the run again"),
        (OpenDataset(run_id="r", term=1, dataset="d", input_id="i", columns=[], code_digest="c"), ADMISSION_ASKS, "start the run again"),
        (InputPage(input_id="i", page=0, rows=[]), ADMISSION_INPUTS, "stage it again"),
        (calls("p.t"), gateway_calls(0), "rowmill runs retry"),
        (
            LookupRows(run_id="r", number=1, org="o", play="p", dataset="d", page=0, started_at=0, columns=[], rows=[]),
            SHEETS_ASKS,
            "nobody waits for its answer",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Message) else "",
)
def test_what_nobody_waits_for_any_more_is_not_replayed_but_explained(desk: Desk, message: Message, queue: str, advice: str) -> None:
    desk.bury(Died(message, "x1", queue))
    said = desk.rowmill("replay", "--queue", queue)
    assert "0 of 1 dead letters replayed\n1 cannot be replayed:" in said
    assert advice in said
    assert desk.depth(queue) == 0
    assert desk.ids(dead(queue)) == ["x1"]
