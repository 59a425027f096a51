"""`rowmill up` beside services that run already."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from rowmill.cli.main import app
from rowmill.dev import working_set
from rowmill.dev.servers import Servers


def test_beside_services_that_run_or_are_stopping_it_says_which_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def missing(_broker_url: str) -> list[str]:
        return ["admission", "tool-gateway", "receipt-store", "sheet-writer"]

    monkeypatch.chdir(tmp_path)
    (tmp_path / "rowmill.toml").write_text("plays = []\n")
    node = SimpleNamespace(url="amqp://nowhere")
    monkeypatch.setattr(Servers, "ensure", lambda _self, **_: SimpleNamespace(broker=node, database=node))
    monkeypatch.setattr(working_set, "missing_services", missing)
    refused = CliRunner().invoke(app, ["up"])
    assert refused.exit_code != 0
    said = str(refused.exception) + refused.output
    assert "already, or are still stopping: row-executor. Wait until they have ended, or stop them" in said
