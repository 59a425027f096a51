"""`rowmill run` as a person types it, on a project and files of its own: what comes out, what is said, and how it ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Self
from urllib.parse import urlsplit, urlunsplit

import pytest
from tests.e2e.stage import BOUND, Books, ProviderProcess, Stage, contact_of, leads, make_project, provider_environment, read_csv, score_of, write_csv
from tests.integration.faults.proxy import FaultProxy

from rowmill.client import Client
from rowmill.client.loaded_code import ask_code


def _text(cell: object) -> str:
    return "" if cell is None else str(cell)


def test_a_file_comes_out_enriched_in_its_own_order_and_the_second_run_asks_nobody(system: Stage, word: str, tmp_path: Path) -> None:
    rows = leads(400, word)
    rows[50:50] = [dict(rows[7], name="a twin")]  # of a row long before it
    rows.append(rows[3])
    rows.reverse()  # the first of two twins may be any
    source, out = write_csv(tmp_path / "mine.csv", rows), tmp_path / "enriched.csv"

    first = system.rowmill("run", "plays:leads", "--csv", str(source), "--out", str(out))

    assert first.returncode == 0, first.stderr
    written = read_csv(out)
    assert [row["domain"] for row in written] == [row["domain"] for row in rows]
    assert list(written[0]) == ["domain", "name", "contact", "score", "_status", "_error"]
    for row in written:
        assert (row["contact"], row["score"]) == (_text(contact_of(row["domain"])), _text(score_of(row["domain"])))
        assert row["_error"] == ""
    assert sorted({row["_status"] for row in written}) == ["completed", "duplicate"]
    assert [row["_status"] for row in written].count("duplicate") == 2
    assert Books.told(system.provider.stats()) == Books.of(row["domain"] for row in rows)
    assert "402 admitted, 400 completed, 0 failed, 0 cancelled, 0 reused, 2 duplicates" in first.stdout
    assert "rowmill: staged 402 rows; run run-" in first.stderr
    assert "rowmill: leads: admitted " in first.stderr
    assert "restart `rowmill up`" not in first.stderr, "the services have the code that there is"

    system.provider.reset()
    second = system.rowmill("run", "leads", "--csv", str(source), "--out", str(out), "--json")

    assert second.returncode == 0, second.stderr
    assert system.provider.stats()["requests"] == {}
    again = read_csv(out)
    assert [{**row, "_status": ""} for row in again] == [{**row, "_status": ""} for row in written]
    summary = json.loads(second.stdout)
    assert summary["state"] == "completed"
    assert summary["written"] == 402
    assert (summary["counts"]["reused"], summary["counts"]["duplicates"], summary["counts"]["calls"]) == (400, 2, 0)


def test_failed_rows_stay_in_the_output_and_decide_the_exit_status(system: Stage, word: str, tmp_path: Path) -> None:
    rows = leads(60, word)
    source, out = write_csv(tmp_path / "mine.csv", rows), tmp_path / "enriched.csv"
    command = ("run", "plays:leads", "--csv", str(source), "--out", str(out))
    system.provider.control(reply={"path": "/match", "status": 400, "count": 3, "body": '{"error": "no such thing"}'})

    failed = system.rowmill(*command)

    assert failed.returncode == 1, failed.stderr
    written = read_csv(out)
    assert [row["domain"] for row in written] == [row["domain"] for row in rows]
    bad = [row for row in written if row["_status"] == "failed"]
    assert len(bad) == 3
    assert all("400" in row["_error"] and row["contact"] == "" for row in bad)
    assert "3 failed" in failed.stdout
    run_id = failed.stdout.split()[1]
    code = bad[0]["_error"].partition(":")[0]
    assert f"rowmill: 3 rows failed: {code} (3); `rowmill runs retry {run_id}` works them again" in failed.stderr

    system.provider.control(reply={"path": "/match", "status": 400, "count": 1})
    allowed = system.rowmill(*command, "--allow-failed", "--json")

    assert allowed.returncode == 0, allowed.stderr
    counts = json.loads(allowed.stdout)["counts"]
    assert (counts["reused"], counts["failed"], counts["completed"]) == (57, 1, 2)  # what failed is tried again


def test_the_rows_of_a_run_that_was_retried_are_written_by_the_same_command_with_its_name(system: Stage, word: str, tmp_path: Path) -> None:
    rows = leads(10, word)
    source, out = write_csv(tmp_path / "mine.csv", rows), tmp_path / "enriched.csv"
    command = ("run", "plays:leads", "--csv", str(source), "--run-id", f"named-{word}", "--out", str(out))
    system.provider.control(reply={"path": "/match", "status": 400, "count": 1, "body": '{"error": "no such thing"}'})
    assert system.rowmill(*command).returncode == 1

    retried = system.rowmill("runs", "retry", f"named-{word}")
    assert "1 failed row of run" in retried.stdout
    assert "start `rowmill up` again" in retried.stderr
    written = system.rowmill(*command)

    assert written.returncode == 0, written.stderr
    found = read_csv(out)
    assert [(row["domain"], row["contact"]) for row in found] == [(row["domain"], _text(contact_of(row["domain"]))) for row in rows]
    assert {row["_status"] for row in found} == {"completed"}

    others, other_out = write_csv(tmp_path / "others.csv", leads(10, f"other{word}")), tmp_path / "others_out.csv"
    refused = system.rowmill("run", "plays:leads", "--csv", str(others), "--run-id", f"named-{word}", "--out", str(other_out))

    assert (refused.returncode, refused.stdout) == (2, ""), refused.stderr
    assert f"the run named-{word} exists (completed) and works another file" in refused.stderr
    assert "staged" not in refused.stderr
    assert not other_out.exists()
    limited = system.rowmill(*command, "--limit", "3")
    assert (limited.returncode, "was started without a limit" in limited.stderr) == (2, True), limited.stderr


def test_a_run_that_fails_of_an_empty_key_names_its_row_and_leaves_the_former_output_as_it_was(system: Stage, word: str, tmp_path: Path) -> None:
    rows = leads(5, word)
    rows[2] = dict(rows[2], domain="")
    source, out = write_csv(tmp_path / "mine.csv", rows), tmp_path / "enriched.csv"
    out.write_text("what I have\n")

    failed = system.rowmill("run", "misspelt", "--csv", str(source), "--out", str(out))

    assert failed.returncode == 1
    assert "row 3 of the input (counted from 1, the header not counted): key column 'domain' is empty; every row needs a key" in failed.stdout
    assert out.read_text() == "what I have\n"
    assert f"{out} stays as it was" in failed.stderr
    assert "written" not in failed.stdout

    elsewhere = system.rowmill("run", "misspelt", "--csv", str(source), "--out", str(tmp_path / "new.csv"), "--json")
    assert json.loads(elsewhere.stdout)["written"] is None

    assert "`rowmill run --require domain --bad-rows FILE` leaves such rows out" in failed.stdout
    aside = tmp_path / "aside.csv"
    without = system.rowmill("run", "plays:leads", "--csv", str(source), "--out", str(out), "--require", "domain", "--bad-rows", str(aside))
    assert without.returncode == 0, without.stderr
    assert f"1 bad record of {source} set aside" in without.stderr
    assert [row["domain"] for row in read_csv(out)] == [row["domain"] for row in rows if row["domain"]]
    assert [(row["_line"], row["_why"]) for row in read_csv(aside)] == [("4", "column 'domain' is empty")]
    assert not (tmp_path / "new.csv").exists()


async def test_a_run_is_waited_for_over_an_outage_and_whoever_leaves_it_is_told_how_to_come_back(system: Stage, word: str, tmp_path: Path) -> None:
    rows = leads(20, word)
    source, gone = write_csv(tmp_path / "mine.csv", rows), tmp_path / "gone"
    gone.mkdir()
    command = ("run", "leads", "--csv", str(source))
    system.provider.control(hold=True)  # no run ends before the outage

    async with FaultProxy(urlsplit(system.broker_url).port or 0) as road:
        with ExitStack() as stack:
            following = stack.enter_context(Typed(system, road, *command, "--out", str(tmp_path / "enriched.csv"), "--json"))
            leaving = stack.enter_context(Typed(system, road, *command, "--run-id", f"named-{word}"))
            failing = stack.enter_context(Typed(system, road, *command, "--out", str(gone / "enriched.csv")))
            for typed in (following, leaving, failing):
                await typed.said("; run ")
            road.stall()
            road.cut()
            for typed in (following, leaving, failing):
                await typed.said("no answer from the services for ")

            leaving.process.send_signal(signal.SIGINT)
            assert await leaving.ended() == 130
            left = f"interrupted. The run named-{word} is stored as far as it got; nothing paid for is lost. The same command goes on"
            assert left in leaving.stderr

            gone.rmdir()
            system.provider.control(hold=False)
            road.heal()
            assert await following.ended() == 0, following.stderr
            assert following.stderr.count("no answer from the services for ") == following.stderr.count("the services answer again, after ")
            assert json.loads(following.stdout)["written"] == 20  # and nothing else, such as a log of lost connections
            assert [row["domain"] for row in read_csv(tmp_path / "enriched.csv")] == [row["domain"] for row in rows]

            assert await failing.ended() == 1
            run_id = failing.stderr.partition("; run ")[2].split()[0]
            assert f"The run {run_id} is stored as far as it got; nothing paid for is lost." in failing.stderr
            assert f"The same command with `--run-id {run_id}` goes on" in failing.stderr
            assert str(gone) in failing.stderr


class Typed:
    """A `rowmill` command that is under way, and reaches the broker by a road of its own."""

    def __init__(self, system: Stage, road: FaultProxy, *arguments: str) -> None:
        self._said = Path(tempfile.mkdtemp(dir=system.project))
        place = urlsplit(system.broker_url)
        url = urlunsplit(place._replace(netloc=f"{place.netloc.rpartition('@')[0]}@127.0.0.1:{road.port}"))
        environment = {**os.environ, **system.environment, "ROWMILL_BROKER_URL": url}
        command = [sys.executable, "-m", "rowmill", *arguments]
        with (self._said / "stdout").open("wb") as out, (self._said / "stderr").open("wb") as err:
            self.process = subprocess.Popen(command, cwd=system.project, env=environment, stdout=out, stderr=err)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()

    @property
    def stdout(self) -> str:
        return (self._said / "stdout").read_text()

    @property
    def stderr(self) -> str:
        return (self._said / "stderr").read_text()

    async def said(self, words: str) -> None:
        """Return once it has said that."""
        async with asyncio.timeout(BOUND):
            while words not in self.stderr:
                assert self.process.poll() is None, self.stderr
                await asyncio.sleep(0.05)

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        return await asyncio.to_thread(self.process.wait, BOUND)


async def test_code_that_was_edited_since_the_services_loaded_it_is_not_what_runs_and_a_person_is_told_so(
    system: Stage, client: Client, word: str, tmp_path: Path
) -> None:
    source = write_csv(tmp_path / "mine.csv", leads(1, word))
    edited = make_project(tmp_path / "edited")
    with (edited / "plays.py").open("a", encoding="utf-8") as plays:
        plays.write("\n# edited\n")

    assert {answer.service for answer in await ask_code(client.bus, "leads")} == {"row-executor", "tool-gateway"}
    told = await asyncio.to_thread(system.rowmill, "run", "plays:leads", "--csv", str(source), folder=edited)

    assert told.returncode == 0, told.stderr
    assert re.search(r"rowmill: the services run code of \d\d:\d\d:\d\d; restart `rowmill up` to use your changes\n", told.stderr), told.stderr


def test_a_limit_works_the_first_rows_only(system: Stage, word: str, tmp_path: Path) -> None:
    rows = [{**row, "score": "1"} for row in leads(300, word)]  # the play computes one of its own
    source, out = write_csv(tmp_path / "mine.csv", rows), tmp_path / "enriched.jsonl"

    ended = system.rowmill("run", "plays:leads", "--csv", str(source), "--out", str(out), "--limit", "10")

    assert ended.returncode == 0, ended.stderr
    written = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(row["domain"], row["score"]) for row in written] == [(row["domain"], score_of(row["domain"])) for row in rows[:10]]
    assert "rowmill: the input's column 'score' is hidden: " in ended.stderr
    assert ended.stderr.count("is hidden") == 1
    assert Books.told(system.provider.stats()) == Books.of(row["domain"] for row in rows[:10])


BAD_FILES = {
    "a header is missing": (b"company,name\nacme,Ann\n", ["'domain'"]),
    "a record is too wide": (b'domain,name\na.example,"two\nlines"\nb.example,Bob,extra\n', ["record 2", "line 4"]),
    "bytes are of no encoding": (b"domain,name\na.example,Ann\nb.example,B\xff\x00b\n", ["mine.csv"]),
    "it is empty": (b"", ["mine.csv"]),
}


@pytest.mark.parametrize(("content", "said"), BAD_FILES.values(), ids=BAD_FILES)
def test_an_unusable_file_is_named_with_the_place_and_nothing_is_started(system: Stage, tmp_path: Path, content: bytes, said: list[str]) -> None:
    source = tmp_path / "mine.csv"
    source.write_bytes(content)

    ended = system.rowmill("run", "plays:leads", "--csv", str(source))

    assert ended.returncode == 2
    assert all(word in ended.stderr for word in said), ended.stderr
    assert "Traceback" not in ended.stderr
    assert "staged" not in ended.stderr


def test_what_is_asked_for_and_not_there_is_named_beside_what_is(system: Stage, word: str, tmp_path: Path) -> None:
    source = write_csv(tmp_path / "mine.csv", leads(3, word))

    no_file = system.rowmill("run", "plays:leads", "--csv", str(tmp_path / "other.csv"))
    no_play = system.rowmill("run", "laeds", "--csv", str(source))
    no_attribute = system.rowmill("run", "plays:laeds", "--csv", str(source))
    no_tool = system.rowmill("run", "misspelt", "--csv", str(source), "--out", str(tmp_path / "out.csv"))

    assert no_file.returncode == 2
    assert "no such file" in no_file.stderr
    assert "other.csv" in no_file.stderr
    assert no_play.returncode == 2
    assert "leads, misspelt" in no_play.stderr
    assert no_attribute.returncode == 2
    assert "plays:leads" in no_attribute.stderr
    assert no_tool.returncode == 1
    errors = no_tool.stdout + no_tool.stderr + (tmp_path / "out.csv").read_text()
    assert "hunter.fnid" in errors
    assert all(tool in errors for tool in ("apollo.match", "crm.score", "hunter.find"))


def test_without_a_broker_it_says_what_was_tried_and_how_to_start_one(system: Stage, word: str, tmp_path: Path) -> None:
    source = write_csv(tmp_path / "mine.csv", leads(3, word))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    ended = system.rowmill("run", "plays:leads", "--csv", str(source), ROWMILL_BROKER_URL=f"amqp://guest:secret@127.0.0.1:{port}/")

    assert ended.returncode == 1
    assert str(port) in ended.stderr
    assert "secret" not in ended.stderr
    assert "start it, or unset ROWMILL_BROKER_URL to have rowmill start a private one" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_in_a_fresh_folder_a_private_set_is_started_for_the_command_and_kept_for_the_next(
    tmp_path: Path, word: str, request: pytest.FixtureRequest
) -> None:
    project = make_project(tmp_path / "project")
    rows = leads(20, word)
    write_csv(project / "mine.csv", rows)
    bare = {name: value for name, value in os.environ.items() if not name.startswith("ROWMILL_")}

    with ProviderProcess() as provider:
        environment = {**bare, **provider_environment(provider.url)}

        def rowmill(*arguments: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "rowmill", *arguments]
            return subprocess.run(command, cwd=project, env=environment, capture_output=True, text=True, timeout=BOUND, check=False)

        request.addfinalizer(lambda: rowmill("dev", "reset", "--yes"))
        nothing = rowmill("runs", "list")
        assert nothing.returncode == 1
        assert "`rowmill up` starts servers and services" in nothing.stderr

        first = rowmill("run", "plays:leads", "--csv", "mine.csv", "--out", "enriched.csv")
        assert first.returncode == 0, first.stderr
        assert "private set" in first.stderr
        assert [row["contact"] for row in read_csv(project / "enriched.csv")] == [_text(contact_of(row["domain"])) for row in rows]
        assert Books.told(provider.stats()) == Books.of(row["domain"] for row in rows)

        provider.reset()
        second = rowmill("run", "plays:leads", "--csv", "mine.csv", "--out", "enriched.csv")
        assert second.returncode == 0, second.stderr
        assert provider.stats()["requests"] == {}
