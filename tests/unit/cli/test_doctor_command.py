"""`rowmill doctor` where servers are away: what it finds is told, whatever it was asked besides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rowmill.cli.main import app

NOBODY = "127.0.0.1:1"


@pytest.mark.parametrize("asked", [[], ["--audit", "some-run"]], ids=["alone", "audit"])
def test_servers_that_are_away_are_findings(asked: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("ROWMILL_BROKER_URL", f"amqp://guest:guest@{NOBODY}/")
    monkeypatch.setenv("ROWMILL_DATABASE_URL", f"postgresql://nobody@{NOBODY}/rowmill")
    done = CliRunner().invoke(app, ["doctor", "--json", *asked])
    assert done.exit_code == 1
    document = json.loads(done.stdout)
    assert {finding["check"] for finding in document["findings"]} == {"broker", "database"}
