"""What README.md and docs/ say exists does: targets, commands, options, code, links, files and tests."""

from __future__ import annotations

import importlib.util
import itertools
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel
from typer.core import TyperCommand, TyperGroup, TyperOption
from typer.main import get_command

from rowmill import registry
from rowmill.cli.main import app
from rowmill.client.running import MemoryPages
from rowmill.paged_handle import PagedHandle
from rowmill.project import Project
from rowmill.row_shapes import shape_of
from rowmill.row_views import OpenRow, ReadSet
from rowmill.tools import tool_of
from rowmill_tool_gateway.failures import BY_STATUS, Observation, rule_for
from rowmill_tool_gateway.results import Result, read_answer
from rowmill_tool_gateway.toolbox import Toolbox

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md"))]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)[^)]*\)")
CODE = re.compile(r"`([^`\n]+)`")


def blocks(page: Path, language: str) -> list[str]:
    return [text for found, text in FENCE.findall(page.read_text("utf-8")) if found == language]


def spoken(page: Path) -> list[str]:
    """Pieces of code in a page: lines of its plain blocks, and what stands between backquotes in its text."""
    text = page.read_text("utf-8")
    lines = [line for block in blocks(page, "") for line in block.splitlines()]
    return lines + CODE.findall(FENCE.sub("", text))


def command_lines() -> list[tuple[str, list[str]]]:
    """Every `rowmill ...` that a page names, with what follows the word."""
    found: dict[tuple[str, str], None] = {}
    for page in PAGES:
        for piece in spoken(page):
            before, word, after = piece.partition("rowmill ")
            if word and re.fullmatch(r"(?:[A-Z_]+=\S+ )*", before) and re.match(r"[a-z-]", after):
                found[page.name, after.partition("#")[0].strip()] = None
    return [(page, shlex.split(line)) for page, line in found]


def all_commands() -> dict[str, TyperCommand | TyperGroup]:
    """Commands and groups by the words that name them; the program itself by none."""

    def walk(command: object, name: str) -> dict[str, TyperCommand | TyperGroup]:
        assert isinstance(command, TyperCommand | TyperGroup)
        below = command.commands if isinstance(command, TyperGroup) else {}
        return {name: command} | {key: found for word, each in below.items() for key, found in walk(each, f"{name} {word}".strip()).items()}

    return walk(get_command(app), "")


COMMANDS = all_commands()


def options_of(words: str) -> set[str]:
    return {name for parameter in COMMANDS[words].params if isinstance(parameter, TyperOption) for name in parameter.opts} | {"--help"}


def split_command(words: list[str]) -> tuple[str, list[str]]:
    """The longest command that the words begin with, and the words after it."""
    length = max(size for size in range(len(words) + 1) if " ".join(words[:size]) in COMMANDS)
    return " ".join(words[:length]), words[length:]


@pytest.mark.parametrize(("page", "words"), command_lines(), ids=lambda value: value if isinstance(value, str) else "_".join(value)[:60])
def test_commands_exist_with_their_options(page: str, words: list[str]) -> None:
    for alternatives in itertools.product(*(word.split("|") for word in words)):
        command, rest = split_command(list(alternatives))
        if isinstance(COMMANDS[command], TyperGroup):
            assert not [word for word in rest if not word.startswith("-")], f"{page}: there is no command {' '.join(words)!r}"
        named = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert named <= options_of(command) | options_of(""), f"{page}: {' '.join(words)}"


@pytest.mark.parametrize("command", [name for name, found in COMMANDS.items() if not isinstance(found, TyperGroup)])
def test_every_command_is_in_the_readme(command: str) -> None:
    assert command in {split_command(words)[0] for page, words in command_lines() if page == README.name}


def test_makes_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text("utf-8")
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {found for page in PAGES for piece in spoken(page) for found in re.findall(r"^make ([a-z-]+)", piece)}
    assert named >= {"demo", "test", "install"}
    assert named <= known


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = [link for link in LINK.findall(FENCE.sub("", page.read_text("utf-8"))) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_tests_that_are_named_exist(page: Path) -> None:
    below = ("contracts/", "docs/", "examples/", "services/", "shared/", "tests/")
    paths = [piece for piece in CODE.findall(page.read_text("utf-8")) if piece.startswith(below) and "<" not in piece and " " not in piece]
    assert [path for path in paths if not (ROOT / path).exists()] == []
    tests = {name for file in (ROOT / "tests").rglob("test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text("utf-8"))}
    named = [piece for piece in CODE.findall(page.read_text("utf-8")) if re.fullmatch(r"test_\w+", piece)]
    assert [name for name in named if name not in tests] == []


def python_files(folder: Path) -> list[Path]:
    """Write the README's Python and its `rowmill.toml`, each play in a project of its own; returns the projects.

    A block says in its first line which file it is; a script goes with the plays before it.
    """
    folders: list[Path] = []
    for number, text in enumerate(blocks(README, "python")):
        name = text.split("\n", 1)[0].removeprefix("# ")
        if name == "plays.py":
            folders.append(folder / f"project{number}")
            folders[-1].mkdir()
            (folders[-1] / "rowmill.toml").write_text(blocks(README, "toml")[0], "utf-8")
        (folders[-1] / name).write_text(text, "utf-8")
    return folders


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_tests_are_in_the_file_that_is_named_before_them(page: Path) -> None:
    for file, tests in re.findall(r"`(tests/[\w/]+\.py)` ((?:`test_\w+`(?:, )?)+)", page.read_text("utf-8")):
        there = set(re.findall(r"def (test_\w+)", (ROOT / file).read_text("utf-8")))
        assert set(re.findall(r"test_\w+", tests)) <= there, file


def test_the_readmes_plays_load(tmp_path: Path) -> None:
    projects = python_files(tmp_path)
    assert len(projects) == 2
    for project in projects:
        listed = subprocess.run([sys.executable, "-m", "rowmill", "plays", "list"], cwd=project, capture_output=True, text=True, check=False)
        assert listed.returncode == 0, listed.stderr


@pytest.fixture
def load(tmp_path: Path) -> Iterator[Callable[[str], Any]]:
    """Loads one of the README's files, by its name, from the project that it is in."""
    projects = python_files(tmp_path)

    def loaded(name: str) -> Any:
        [file] = [project / name for project in projects if (project / name).exists()]
        spec = importlib.util.spec_from_file_location(f"readme_{file.stem}", file)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    with registry.isolated():
        yield loaded


def test_the_readmes_column_reads_its_row_in_both_ways(load: Callable[[str], Any]) -> None:
    class Lead(BaseModel):
        domain: str
        name: str | None = None

    row = OpenRow({"domain": "a.example", "name": "Ann"}, shape_of(Lead))
    row.put("contact", "ann@a.example")
    assert load("greeting.py").greeting(row.view(ReadSet())) == "Dear Ann, is ann@a.example still yours?"


def test_the_readmes_reading_of_rows_works(load: Callable[[str], Any], capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"domain": "a.example", "contact": "a@a.example"}, {"domain": "b.example"}]
    load("reading.py").after(PagedHandle("run", "leads", MemoryPages(rows)))
    assert capsys.readouterr().out.splitlines() == [f"2 rows: {rows}", "a.example a@a.example", "b.example None", "2"]


def test_what_calls_cost_in_the_readme_is_what_they_are_charged(load: Callable[[str], Any]) -> None:
    priced = load("priced.py")
    tool = tool_of(priced.Summarise)
    prepared = Toolbox(lambda _: None, find=lambda _: tool).find(tool.id)  # type: ignore[arg-type,return-value]
    assert prepared is not None
    assert prepared.cost_of(b'{"text": "' + b"x" * 100 + b'"}') == Decimal("0.002")
    found, nothing = read_answer(tool, 200, b'{"summary": "x", "tokens": 7}', 1000), read_answer(tool, 404, b"", 1000)
    assert isinstance(found, Result)
    assert isinstance(nothing, Result)
    assert (found.no_result, found.cost) == (False, Decimal("0.00014"))
    assert (nothing.no_result, nothing.cost) == (True, Decimal(0))


def test_the_readmes_table_of_charges_is_the_gateways() -> None:
    """Each status that it names is charged as the gateway does it, and none that has a rule of its own is missing."""
    table = README.read_text("utf-8").partition("| how a call ends | charged |")[2].partition("\n\n")[0]
    told: dict[int, bool] = {}
    for line in table.splitlines()[2:]:
        ends, charged = [part.strip() for part in line.split("|")[1:3]]
        assert charged == "nothing" or charged.startswith("the cost")
        if not ends.startswith("2xx"):
            told |= {int(status.replace("x", "9")): charged != "nothing" for status in re.findall(r"\b[1-5](?:\d\d|xx)\b", ends)}
    assert told == {status: rule_for(Observation("answered", "", status=status)).charged for status in told}
    assert told.keys() >= {*BY_STATUS, 399, 400, 404, 499, 500, 503, 599}


def test_the_readmes_python_is_typed(tmp_path: Path) -> None:
    first, second = python_files(tmp_path)
    (second / "first_plays.py").write_text((first / "plays.py").read_text("utf-8"), "utf-8")  # checked in one go
    command = [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(ROOT / ".mypy_cache" / "readme")]
    names = sorted(path.name for path in second.glob("*.py"))
    checked = subprocess.run([*command, *names], cwd=second, capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


def test_plays_that_the_readme_runs_are_those_it_shows(tmp_path: Path) -> None:
    shown = {name for project in python_files(tmp_path) for name in re.findall(r'@play\("(\w+)"', (project / "plays.py").read_text("utf-8"))}
    text = README.read_text("utf-8")
    run = {*re.findall(r"rowmill run plays:(\w+)", text), *re.findall(r'"play": ?"(\w+)"', text)}
    assert run
    assert run <= shown


def test_the_settings_file_of_the_readme_is_valid(tmp_path: Path) -> None:
    (tmp_path / "rowmill.toml").write_text(blocks(README, "toml")[0], "utf-8")
    assert Project.find(tmp_path).settings.plays == ["plays"]


def test_settings_that_are_named_exist() -> None:
    """Names in the environment are fields of some settings class, or options of a command."""
    settings = "\n".join(path.read_text("utf-8") for folder in ("services", "shared") for path in (ROOT / folder).rglob("*.py"))
    named = {name for page in (README, ROOT / "CONTRIBUTING.md") for name in re.findall(r"ROWMILL_[A-Z_]+\b", page.read_text("utf-8"))}
    for name in named - {"ROWMILL_TEST_SERVERS"}:
        field = name.removeprefix("ROWMILL_").split("__")[0].lower()
        assert name in settings or re.search(rf"^    {field}: ", settings, re.MULTILINE), f"nobody reads {name}"
