"""`rowmill receipts` against a receipt-store that runs."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from rowmill.cli import consent
from rowmill.cli.main import app as command
from rowmill.runtime.bus import Bus
from rowmill.runtime.deliveries import Delivery
from rowmill_contracts.run_questions import AskOldestRun, OldestRun
from rowmill_contracts.topology import ADMISSION_ASKS
from rowmill_receipt_store.app import App
from rowmill_receipt_store.settings import ReceiptStoreSettings

from .conftest import Caller, new_key

pytestmark = pytest.mark.servers


class Operator:
    """Types commands."""

    async def types(self, *arguments: str, typed: str | None = None) -> Result:
        """``typed``: what is typed when the command asks."""
        return await asyncio.to_thread(CliRunner().invoke, command, ["receipts", *arguments], input=typed)

    async def reads(self, *arguments: str) -> Any:
        result = await self.types(*arguments, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)


@pytest.fixture
async def operator(broker_url: str, database_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> AsyncIterator[Operator]:
    monkeypatch.setenv("ROWMILL_BROKER_URL", broker_url)
    monkeypatch.chdir(tmp_path)
    found_settings = ReceiptStoreSettings(broker_url=broker_url, database_url=database_url)
    found = App(found_settings)
    await found.start()
    async with Bus(found_settings, service="admission") as admission:

        async def no_run_goes_on(delivery: Delivery) -> None:
            assert isinstance(delivery.message, AskOldestRun)
            await admission.reply(delivery, OldestRun())

        await admission.consume(ADMISSION_ASKS, no_run_goes_on)
        yield Operator()
    await found.stop()


@pytest.fixture
async def lost(ann: Caller, key: bytes) -> str:
    """The short digest of a receipt of unknown outcome."""
    await ann.claim(key, confirm=True, effect="non_idempotent")
    await ann.fail(key, becomes="outcome_unknown")
    return key.hex()[:12]


async def test_what_nobody_knows_is_listed_shown_and_settled(operator: Operator, ann: Caller, key: bytes, lost: str) -> None:
    listed = await operator.types("list")
    assert lost in listed.stdout
    none = await operator.types("list", "--run", "no-run")
    told = "no receipts of that run or tool whose outcome nobody knows: nothing waits for your decision (`--state any` lists all)\n"
    assert none.stdout == told
    assert key.hex() not in listed.stdout
    shown = await operator.types("show", lost[:8])
    assert f"rowmill receipts replay {lost}" in shown.stdout
    assert (await operator.reads("show", lost))["state"] == "unknown"

    settled = await operator.types("settle", lost, "--output", '{"score": 5}', "--cost", "0.02")

    assert (settled.exit_code, settled.stdout) == (0, f"receipt {lost} is settled\n")
    assert (await operator.reads("show", lost))["output"] == {"raw": {"score": 5}}
    assert lost in (await operator.types("list", "--state", "completed", "--run", ann.run)).stdout
    again = await operator.types("replay", lost)
    assert again.exit_code == 1
    assert "its outcome is known" in again.stderr


async def test_a_replay_frees_the_key_and_failed_ends_it_for_the_run(operator: Operator, ann: Caller, bob: Caller, lost: str, key: bytes) -> None:
    assert (await operator.types("replay", lost)).exit_code == 0
    assert (await bob.claim(key, confirm=True, effect="non_idempotent")).state == "granted"
    await bob.fail(key, dispatch=2, becomes="outcome_unknown")

    assert (await operator.types("settle", lost, "--failed", "not at the provider")).exit_code == 0

    assert (await bob.but(lease="again").claim(key, effect="non_idempotent")).state == "failed"
    assert (await operator.reads("list", "--state", "any", "--run", bob.run))[0]["failure"]["message"] == "not at the provider"


async def test_old_outputs_are_pruned_where_it_is_asked_for(operator: Operator, ann: Caller, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "at_a_terminal", lambda: True)
    mine = new_key()
    await ann.claim(mine, confirm=True)
    await ann.complete(mine)

    assert (await operator.reads("prune", "--older-than", "0s", "--dry-run"))["completed"] >= 1
    assert (await operator.reads("prune", "--yes"))["completed"] == 0
    assert (await operator.reads("show", mine.hex()[:10]))["state"] == "completed"
    assert "nothing was forgotten" in (await operator.types("prune", "--older-than", "0s", typed="n\n")).stdout
    assert (await operator.reads("show", mine.hex()[:10]))["state"] == "completed"
    asked = await operator.types("prune", "--older-than", "0s", typed="y\n")
    assert "Calls whose outputs are forgotten are paid for again." in asked.stderr
    assert "\nforgot " in asked.stdout
    missing = await operator.types("show", mine.hex()[:10])
    assert isinstance(missing.exception, SystemExit)
    assert missing.exit_code == 2
    assert "no receipt begins with" in missing.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "xyz"),
        ("show", "ab"),
        ("settle", "abcd"),
        ("settle", "abcd", "--output", "{"),
        ("settle", "abcd", "--output", "1", "--cost", "much"),
        ("list", "--state", "odd"),
        ("prune", "--older-than", "soon"),
    ],
)
def test_wrong_usage_is_said_without_asking(arguments: tuple[str, ...]) -> None:
    result = CliRunner().invoke(command, ["receipts", *arguments])
    assert result.exit_code == 2
    assert "rowmill: " in result.stderr
