"""`rowmill tools list` and `show`: from the project alone, without a server or a secret."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from rowmill import registry
from rowmill.cli.main import app

TOOLS = """
from decimal import Decimal
from pydantic import BaseModel
from rowmill import Batch, Bearer, HttpTool, Provider, ToolCall, secret

class FindIn(BaseModel):
    domain: str

hunter = Provider("hunter", base_url="https://api.hunter.example", auth=Bearer(secret("HUNTER_KEY")), rate="10/s", concurrency=20)

@hunter.post("/v2/find", effect="read", cost=Decimal("0.01"), batch=Batch(50, path="/v2/bulk"))
class Find(HttpTool[FindIn, dict]):
    extract = {"email": ["email"]}

@hunter.tool("score", effect="idempotent", cost=lambda given: Decimal(len(given.domain)))
async def score(given: FindIn, call: ToolCall) -> int:
    return 1
"""


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "tools_of_this_test.py").write_text(TOOLS)
    (tmp_path / "rowmill.toml").write_text('plays = []\ntools = ["tools_of_this_test"]\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HUNTER_KEY", raising=False)
    with registry.isolated():
        yield
    sys.modules.pop("tools_of_this_test", None)
    sys.path.remove(str(tmp_path))


def test_tools_are_listed_with_their_effect_cost_and_place() -> None:
    told = CliRunner().invoke(app, ["tools", "list"])
    assert told.exit_code == 0, told.output
    assert "POST https://api.hunter.example/v2/find" in told.stdout
    assert "by its input" in told.stdout
    listed = json.loads(CliRunner().invoke(app, ["tools", "list", "--json"]).stdout)
    assert [(tool["id"], tool["effect"], tool["cost"], tool["batch"]) for tool in listed] == [
        ("hunter.find", "read", "0.01", 50),
        ("hunter.score", "idempotent", "by its input", None),
    ]


@pytest.mark.parametrize("name", ["hunter.find", "tools_of_this_test:Find"])
def test_a_tool_is_shown_with_its_input_and_the_names_of_its_secrets(name: str) -> None:
    shown = json.loads(CliRunner().invoke(app, ["tools", "show", name, "--json"]).stdout)
    assert shown["secrets"] == ["HUNTER_KEY"]
    assert (shown["provider_rate"], shown["concurrency"], shown["extract"]) == ("10/s", 20, {"email": ["email"]})
    assert list(shown["input_schema"]["properties"]) == ["domain"]
    assert "api.hunter.example" in CliRunner().invoke(app, ["tools", "show", name]).stdout


def test_an_unknown_tool_is_named_with_the_known_ones() -> None:
    shown = CliRunner().invoke(app, ["tools", "show", "hunter.nothing"])
    assert (shown.exit_code, "hunter.find" in shown.stderr) == (2, True)
