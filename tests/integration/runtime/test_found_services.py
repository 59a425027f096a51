"""What commands say and do with services that run, and with servers on which none do."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rowmill import Client, registry
from rowmill.cli import connecting
from rowmill.cli.main import app as command
from rowmill.dev.servers import Servers
from rowmill.dev.working_set import SIGNS, missing_services
from rowmill.errors import UnavailableError
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill.runtime.settings import ServiceSettings
from rowmill_contracts.topology import ADMISSION_ASKS, ADMISSION_RUNS, RECEIPTS_CLAIMS

pytestmark = pytest.mark.servers

PLAY = """
from rowmill import Context, play
from pydantic import BaseModel

class Nothing(BaseModel):
    word: str

@play("nothing", description="Does nothing")
async def nothing(ctx: Context, input: Nothing) -> None:
    return None
"""


@pytest.fixture(autouse=True)
def _project(broker_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A project whose own broker, which no setting names, is the module's."""
    (tmp_path / "plays_of_found_services.py").write_text(PLAY)
    (tmp_path / "rowmill.toml").write_text('plays = ["plays_of_found_services"]\n')
    for name in ("ROWMILL_BROKER_URL", "ROWMILL_DATABASE_URL", "ROWMILL_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Servers, "running_broker_url", lambda _self: broker_url)
    monkeypatch.setattr(connecting, "LAG_SECONDS", 0.0)
    with registry.isolated():
        yield
    sys.modules.pop("plays_of_found_services", None)


async def types(*arguments: str) -> Result:
    return await asyncio.to_thread(CliRunner().invoke, command, list(arguments))


async def ignore(_delivery: Delivery) -> None:
    return


@pytest.mark.parametrize(
    ("words", "service", "queue"),
    [
        (("runs", "list"), "admission", ADMISSION_ASKS),
        (("runs", "get", "r"), "admission", ADMISSION_ASKS),
        (("receipts", "list"), "receipt-store", RECEIPTS_CLAIMS),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
async def test_without_services_a_question_names_what_starts_them_and_is_not_left_behind(
    broker_url: str, words: tuple[str, ...], service: str, queue: str
) -> None:
    async with Bus(ServiceSettings(broker_url=broker_url), service="test") as bus:
        await bus.declare()
        result = await types(*words)
        assert result.exit_code == 1
        assert f"the {service} service does not run" in result.stderr
        assert "`rowmill up`" in result.stderr
        assert await bus.depths([queue]) == {queue: (0, 0)}


async def test_a_service_that_runs_and_does_not_answer_is_said_with_what_tells_why(broker_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROWMILL_ASK_TIMEOUT", "0.2")
    async with Bus(ServiceSettings(broker_url=broker_url), service="test") as bus:
        await bus.declare()
        await bus.consume(ADMISSION_ASKS, ignore)
        result = await types("runs", "list")
    assert result.exit_code == 1
    assert "no answer to ListRuns.v1" in result.stderr
    assert "`rowmill doctor` says what is wrong" in result.stderr


async def test_a_run_is_left_to_services_of_the_projects_own_servers_once_they_all_run(broker_url: str) -> None:
    start = ("run", "nothing", "--input", "word=a", "--detach", "--json")
    async with Bus(ServiceSettings(broker_url=broker_url), service="test") as bus:
        await bus.declare()
        for queue in list(SIGNS.values())[1:]:
            await bus.consume(queue, ignore)
        assert await missing_services(broker_url) == ["admission"]
        refused = await types(*start)
        assert refused.exit_code == 1
        assert "missing: admission (`rowmill up` starts" in refused.stderr

        waiting = asyncio.create_task(missing_services(broker_url, patience=60))
        await bus.consume(ADMISSION_ASKS, ignore)
        assert await waiting == []
        started = await types(*start)
        assert started.exit_code == 0, started.output
        assert json.loads(started.stdout)["run_id"]
        assert await bus.depths([ADMISSION_RUNS]) == {ADMISSION_RUNS: (1, 0)}


async def test_a_client_without_an_address_finds_the_projects_own_broker(broker_url: str) -> None:
    async with Bus(ServiceSettings(broker_url=broker_url), service="test") as bus, Client() as client:
        await bus.declare()
        before = (await bus.depths([ADMISSION_RUNS]))[ADMISSION_RUNS][0]
        await client.start("nothing", word="a")
        assert (await bus.depths([ADMISSION_RUNS]))[ADMISSION_RUNS][0] == before + 1


async def test_a_client_whose_project_has_no_broker_that_runs_is_told_at_once_what_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Servers, "running_broker_url", lambda _self: None)
    with pytest.raises(UnavailableError, match=r"`rowmill up` starts servers and services, `rowmill dev up` the servers alone"):
        Client()


async def test_a_client_that_is_in_no_project_takes_the_address_that_services_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Servers, "running_broker_url", lambda _self: None)
    (tmp_path / "rowmill.toml").unlink()
    assert Client().bus._settings.broker_url == ServiceSettings().broker_url


async def test_a_client_whose_broker_does_not_answer_is_told_what_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowmill.client.client.CONNECT_SECONDS", 0.2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen: whoever connects is refused
        with pytest.raises(UnavailableError, match=r"no broker answered at amqp.* within 0\.2 s; .*`rowmill up` starts .*`rowmill dev up`"):
            async with Client(f"amqp://guest:guest@127.0.0.1:{taken.getsockname()[1]}/"):
                pass
