"""`rowmill run` writes over no file that it reads."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.unit.cli.test_cli_main import PLAY
from typer.testing import CliRunner

from rowmill import registry
from rowmill.cli.main import app
from rowmill.cli.same_files import refuse_same_files

INPUT = "website\na.example\nb.example,too wide\n"

CLASHES = {
    "bad rows over the input": (("--csv", "mine.csv", "--bad-rows", "mine.csv"), ("--bad-rows", "--csv")),
    "bad rows by another way": (("--csv", "mine.csv", "--bad-rows", "./sub/../mine.csv"), ("--bad-rows", "--csv")),
    "bad rows by a symlink": (("--csv", "mine.csv", "--bad-rows", "soft.csv"), ("--bad-rows", "--csv")),
    "bad rows by a hard link": (("--csv", "mine.csv", "--bad-rows", "hard.csv"), ("--bad-rows", "--csv")),
    "the output over the input": (("--csv", "soft.csv", "--out", "mine.csv"), ("--out", "--csv")),
    "the output over a named input": (("--input", "companies=@mine.csv", "--out", "./mine.csv"), ("--out", "--input companies=@FILE")),
    "the output and the bad rows": (("--csv", "mine.csv", "--out", "new.csv", "--bad-rows", "sub/../new.csv"), ("--bad-rows", "--out")),
    "the bad rows by a link to the output": (("--csv", "mine.csv", "--out", "new.csv", "--bad-rows", "ahead.csv"), ("--bad-rows", "--out")),
}


@pytest.mark.parametrize(("words", "named"), CLASHES.values(), ids=CLASHES)
def test_a_file_that_would_be_overwritten_is_refused_naming_both_options(
    words: tuple[str, ...], named: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ROWMILL_PROJECT", str(tmp_path))
    monkeypatch.setenv("ROWMILL_BROKER_URL", "amqp://127.0.0.1:1/")
    monkeypatch.setenv("ROWMILL_DATABASE_URL", "postgresql://127.0.0.1:1/x")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "rowmill.toml").write_text('plays = ["plays_of_same_files"]\n')
    (tmp_path / "plays_of_same_files.py").write_text(PLAY)
    (tmp_path / "sub").mkdir()
    (tmp_path / "mine.csv").write_text(INPUT)
    (tmp_path / "soft.csv").symlink_to("mine.csv")
    (tmp_path / "ahead.csv").symlink_to("new.csv")
    os.link(tmp_path / "mine.csv", tmp_path / "hard.csv")

    with registry.isolated():
        result = CliRunner().invoke(app, ["run", "companies", *words])
    sys.modules.pop("plays_of_same_files", None)

    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert result.stderr.startswith(f"rowmill: {named[0]} "), result.stderr
    assert f" and {named[1]} " in result.stderr
    assert "the same file, which would be overwritten" in result.stderr
    assert (tmp_path / "mine.csv").read_text() == INPUT
    assert not (tmp_path / "new.csv").exists()


def test_files_of_their_own_and_what_is_no_file_may_be_written(tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text(INPUT)
    refuse_same_files(
        [("--csv", mine), ("--csv", Path(os.devnull)), ("--input twice=@FILE", mine)],
        [("--out", tmp_path / "new.csv"), ("--bad-rows", Path(os.devnull))],
    )
