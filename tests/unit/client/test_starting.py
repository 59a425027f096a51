"""What a client publishes to start a run can be decoded by who gets it, whatever the run is called."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from pydantic import BaseModel

from rowmill import Context, Rows, play, registry, run
from rowmill.client import Client
from rowmill.errors import UsageError
from rowmill.runtime.bus import Bus
from rowmill_contracts.envelope import Message, decode, encode
from rowmill_contracts.runs import InputPage, InputSealed, RunStart


class Lead(BaseModel):
    domain: str


class LeadsIn(BaseModel):
    rows: Rows[Lead]


class Published:
    """A bus that takes what can be decoded."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    async def publish(self, message: Message, key: str, **_: Any) -> None:
        self.messages.append(decode(message.message_type, encode(message)))

    async def listen(self, *_: Any) -> None: ...


async def started(run_id: str) -> list[Message]:
    with registry.isolated():

        @play("leads")
        async def leads(ctx: Context, given: LeadsIn) -> None: ...

    client, bus = Client("amqp://nowhere.example"), Published()
    client.bus = cast("Bus", bus)
    await client.start(leads, rows=[{"domain": "a.example"}], run_id=run_id)
    return bus.messages


@pytest.mark.parametrize("run_id", ["r1", "r" * 200, "\U0001f33e" * 200])
async def test_a_run_of_any_allowed_id_stages_its_rows(run_id: str) -> None:
    page, sealed, start = await started(run_id)
    assert isinstance(page, InputPage)
    assert isinstance(sealed, InputSealed)
    assert isinstance(start, RunStart)
    assert start.run_id == run_id
    assert start.input_ref == {"rows": page.input_id}
    assert page.input_id == sealed.input_id
    assert [page.input_id, sealed.input_id] == [each.input_id for each in (await started(run_id))[:2] if isinstance(each, InputPage | InputSealed)]


@pytest.mark.parametrize("run_id", ["r" * 201, "a\x00b"])
async def test_an_id_that_nobody_would_take_is_refused_at_once(run_id: str) -> None:
    with pytest.raises(UsageError, match="run_id"):
        await started(run_id)


PLAYS = """
from pydantic import BaseModel
from rowmill import Context, Rows, play

class Given(BaseModel):
    companies: Rows
    template: str = ""
    people: list[dict[str, str]] = []

@play("enrich")
async def enrich(ctx: Context, input: Given) -> None: ...
"""

IN_MEMORY = [{"a": "1"}]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A project whose play nobody has loaded, as the current folder; whatever were started in it would be found in its folder `.rowmill`."""
    (tmp_path / "rowmill.toml").write_text('plays = ["plays_by_name"]\nbroker = "amqp://127.0.0.1:1/"\n')
    (tmp_path / "plays_by_name.py").write_text(PLAYS)
    (tmp_path / "n.csv").write_text("a\n1\n")
    monkeypatch.delenv("ROWMILL_BROKER_URL", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with registry.isolated():
        yield tmp_path
    sys.modules.pop("plays_by_name", None)


@pytest.mark.parametrize("rows", ["n.csv", IN_MEMORY, Path("n.csv"), iter(IN_MEMORY)], ids=["path", "list", "Path", "iterator"])
async def test_rows_for_a_play_that_is_only_named_are_refused_before_anything_is_started(project: Path, rows: Any) -> None:
    told = r"play 'enrich' .* with a name no rows can be staged for 'companies': pass the play itself"
    with pytest.raises(UsageError, match=told):
        run("enrich", companies=rows, limit=1)
    with pytest.raises(UsageError, match=told):
        await published_by_name("enrich", companies=rows)
    assert not (project / ".rowmill").exists()


async def test_a_play_that_is_loaded_is_known_where_its_project_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with registry.isolated():

        @play("leads")
        async def leads(ctx: Context, given: LeadsIn) -> None: ...

        with pytest.raises(UsageError, match="pass the play itself"):
            await published_by_name("leads", rows="leads.csv")


async def test_a_project_whose_code_ends_its_process_refuses_nothing(project: Path) -> None:
    (project / "plays_by_name.py").write_text("raise SystemExit(3)")
    [start] = await published_by_name("enrich", companies=IN_MEMORY)
    assert isinstance(start, RunStart)


@pytest.mark.parametrize("name", ["enrich", "unknown"])
async def test_what_else_a_play_that_is_only_named_takes_is_sent_as_it_is(project: Path, name: str) -> None:
    given = {"template": "n.csv", "people": IN_MEMORY}
    [start] = await published_by_name(name, **given)
    assert isinstance(start, RunStart)
    assert start.input == given


async def published_by_name(name: str, **given: Any) -> list[Message]:
    client, bus = Client("amqp://nowhere.example"), Published()
    client.bus = cast("Bus", bus)
    await client.start(name, **given)
    return bus.messages
