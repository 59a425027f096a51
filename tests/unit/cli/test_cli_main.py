"""What all commands share: version, errors as one sentence, exit statuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from rowmill import registry
from rowmill.cli import consent
from rowmill.cli.main import app
from rowmill.cli.progress import Progress
from rowmill.errors import RowmillError

PLAY = """
from pydantic import BaseModel
from rowmill import Context, Rows, play

class Company(BaseModel):
    website: str

class Companies(BaseModel):
    companies: Rows[Company]

@play("companies", description="Nothing")
async def companies(ctx: Context, input: Companies) -> None:
    return None
"""


def rowmill(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def nothing_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROWMILL_PROJECT", str(tmp_path))
    monkeypatch.setenv("ROWMILL_BROKER_URL", "amqp://u:hidden@127.0.0.1:1/")
    monkeypatch.setenv("ROWMILL_DATABASE_URL", "postgresql://127.0.0.1:1/x")
    monkeypatch.delenv("ROWMILL_DEBUG", raising=False)
    return tmp_path


def test_version() -> None:
    assert rowmill("--version").stdout.startswith("rowmill ")


def test_an_error_on_purpose_is_one_sentence_on_stderr_and_status_1(nothing_answers: Path) -> None:
    result = rowmill("dev", "up")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("rowmill: ROWMILL_BROKER_URL names the broker at amqp://u:***@127.0.0.1:1/")
    assert result.stderr.count("\n") == 1


def test_debug_lets_the_error_through(nothing_answers: Path) -> None:
    result = rowmill("--debug", "dev", "up")
    assert isinstance(result.exception, RowmillError)


def test_missing_packages_end_with_status_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rowmill.dev.rabbitmq.PACKAGE_SCRIPTS", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    for name in ("ROWMILL_BROKER_URL", "ROWMILL_DATABASE_URL"):
        monkeypatch.delenv(name, raising=False)
    result = rowmill("dev", "up", "--project", str(tmp_path))
    assert result.exit_code == 2
    assert "apt-get install -y rabbitmq-server" in result.stderr


WRONG = {
    "no file": ("run", "companies", "--csv", "nofile.csv"),
    "no column": ("run", "companies", "--csv", "other.csv"),
    "no such ending": ("run", "companies", "--csv", "other.csv", "--out", "rows.doc"),
    "no duration": ("dlq", "purge", "--older-than", "soon", "--yes"),
    "no rate": ("dlq", "replay", "--rate", "fast"),
    "no patience": ("doctor", "--patience", "much"),
    "no answer's file": ("receipts", "settle", "abcd", "--output", "@nofile.json"),
}


@pytest.mark.parametrize("words", WRONG.values(), ids=WRONG)
def test_what_was_asked_wrongly_ends_with_status_2_and_not_with_that_of_failed_rows(
    nothing_answers: Path, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (nothing_answers / "rowmill.toml").write_text('plays = ["plays_of_wrong_usage"]\n')
    (nothing_answers / "plays_of_wrong_usage.py").write_text(PLAY)
    (nothing_answers / "other.csv").write_text("a,b\n1,2\n")
    monkeypatch.chdir(nothing_answers)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with registry.isolated():
        result = rowmill(*words)
    sys.modules.pop("plays_of_wrong_usage", None)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert "a bug" not in result.stderr


ROWS = """
from pydantic import BaseModel
from rowmill import Context, Rows, play

class Row(BaseModel):
    website: str

class One(BaseModel):
    companies: Rows[Row]
    region: str

class Two(BaseModel):
    companies: Rows[Row]
    blocked: Rows[Row]
    more: Rows[Row] | None = None

@play("one")
async def one(ctx: Context, input: One) -> None: ...

@play("two")
async def two(ctx: Context, input: Two) -> None: ...
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("one",), "play 'one' has no rows for 'companies': give --csv FILE, or --input companies=@FILE"),
        (("two", "--input", "blocked=@b.csv"), "play 'two' has no rows for 'companies': give --input companies=@FILE"),
        (("two",), "play 'two' has no rows for 'companies' and 'blocked': give --input companies=@FILE and --input blocked=@FILE"),
        (("one", "--csv", "b.csv"), "input of play 'one': region: Field required"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_run_without_its_rows_is_told_how_to_give_them(
    nothing_answers: Path, words: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (nothing_answers / "rowmill.toml").write_text('plays = ["plays_that_want_rows"]\n')
    (nothing_answers / "plays_that_want_rows.py").write_text(ROWS)
    (nothing_answers / "b.csv").write_text("website\nx\n")
    monkeypatch.chdir(nothing_answers)
    monkeypatch.setattr(sys, "path", [*sys.path])
    with registry.isolated():
        result = rowmill("run", *words)
    sys.modules.pop("plays_that_want_rows", None)
    assert (result.exit_code, result.stderr) == (2, f"rowmill: {told}\n")


def test_one_staged_row_is_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    progress.staged(1)
    progress.run_started("r1")
    assert "staged 1 row; run r1" in capsys.readouterr().err


def test_an_unknown_command_ends_with_status_2() -> None:
    result = rowmill("frobnicate")
    assert result.exit_code == 2
    assert "frobnicate" in result.stderr


def test_a_bug_is_named_as_one() -> None:
    broken = typer.Typer(cls=type(typer.main.get_group(app)), pretty_exceptions_enable=False)

    @broken.command()
    def divide() -> None:
        raise ZeroDivisionError("division by zero")

    @broken.command()
    def other() -> None:
        pass

    result = CliRunner().invoke(broken, ["divide"])
    assert result.exit_code == 1
    assert "unexpected ZeroDivisionError: division by zero (a bug" in result.stderr


def test_status_as_json_says_that_nothing_runs_and_ends_with_status_1(nothing_answers: Path) -> None:
    result = rowmill("dev", "status", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["broker"] == {
        "data": None,
        "kind": "external",
        "log": None,
        "running": False,
        "url": "amqp://u:***@127.0.0.1:1/",
    }
    assert "hidden" not in result.output


@pytest.mark.parametrize("words", [("dev", "reset"), ("dlq", "purge"), ("receipts", "prune")], ids=" ".join)
def test_what_deletes_more_than_it_names_refuses_where_nobody_can_be_asked(nothing_answers: Path, words: tuple[str, ...]) -> None:
    for more in ((), ("--json",)):
        result = rowmill(*words, *more)
        assert result.exit_code == 2
        assert "nobody can be asked here" in result.stderr
        assert "add --yes" in result.stderr
    assert not list(nothing_answers.iterdir())


def test_a_reset_asks_at_the_terminal_and_goes_by_the_answer(nothing_answers: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(consent, "at_a_terminal", lambda: True)
    refused = CliRunner().invoke(app, ["dev", "reset"], input="n\n")
    assert refused.exit_code == 1
    assert not list(nothing_answers.iterdir())
    assert "there was nothing to delete" in CliRunner().invoke(app, ["dev", "reset"], input="y\n").stderr


def test_down_and_reset_of_nothing_are_no_errors(nothing_answers: Path) -> None:
    assert "nothing of this project's own was running" in rowmill("dev", "down").stderr
    assert json.loads(rowmill("dev", "reset", "--yes", "--json").stdout) == {"deleted": False}
