"""The built wheel, used from a folder that has nothing but a person's own file."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from tests.e2e.stage import BOUND, read_csv, write_csv

ROOT = Path(__file__).parents[2]

PLAYS = """
from pydantic import BaseModel
from rowmill import Context, Handle, RowContext, Rows, column, play

class Words(BaseModel):
    words: Rows

@column()
def length(row, ctx: RowContext) -> int:
    return len(row["word"])

@play("measure", description="Measures words")
async def measure(ctx: Context, input: Words) -> Handle:
    return await ctx.dataset("words", input.words).with_column("length", length).run(key="word")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The `rowmill` command of the wheel, installed where this checkout cannot be seen but our dependencies can."""
    place = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(place), str(ROOT)]
    subprocess.run(build, check=True, capture_output=True, timeout=BOUND)
    (wheel,) = place.glob("rowmill-*.whl")
    venv = place / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True, timeout=BOUND)
    python = venv / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q", "--no-deps", "--no-index", str(wheel)]
    subprocess.run(pip, check=True, timeout=BOUND)
    # A path file in a path file's folder is not read, so the checkout's own editable install stays out of sight.
    (site,) = venv.glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return venv / "bin" / "rowmill"


def test_the_wheel_holds_everything_that_runs_need(installed: Path, broker_url: str, database_url: str, tmp_path: Path) -> None:
    (tmp_path / "plays.py").write_text(PLAYS)
    words = [{"word": "a" * number} for number in range(1, 30)]
    write_csv(tmp_path / "words.csv", words)
    bare = {name: value for name, value in os.environ.items() if not name.startswith(("ROWMILL_", "PYTHON"))}

    def rowmill(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([installed, *arguments], cwd=tmp_path, env=bare | more, capture_output=True, text=True, timeout=BOUND, check=False)

    where = subprocess.run(
        [installed.with_name("python"), "-c", "import rowmill, rowmill_admission, rowmill_contracts as c; print(rowmill.__file__, c.__file__)"],
        cwd=tmp_path,
        env=bare,
        capture_output=True,
        text=True,
        check=True,
    )
    assert str(ROOT) not in where.stdout
    assert rowmill("--version").stdout.startswith("rowmill 0.")
    listed = rowmill("plays", "list")
    assert listed.returncode == 0, listed.stderr
    assert "measure" in listed.stdout

    servers = {"ROWMILL_BROKER_URL": broker_url, "ROWMILL_DATABASE_URL": database_url}
    ended = rowmill("run", "plays:measure", "--csv", "words.csv", "--out", "measured.csv", **servers)
    assert ended.returncode == 0, ended.stderr
    assert "a private set is started" in ended.stderr  # of services, by the installed package
    assert [row["length"] for row in read_csv(tmp_path / "measured.csv")] == [str(len(row["word"])) for row in words]
