"""Projects: what `rowmill.toml` may say, how author code is loaded and named, and what its digest covers."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rowmill import registry
from rowmill.durations import Rate
from rowmill.errors import ProjectError, UnknownName
from rowmill.project import Project, code_digest

_numbers = itertools.count()

Folder = Callable[[dict[str, str]], Path]
"""Makes a project's folder of file names and texts."""

PLAYS = """
from rowmill import Context, Provider, play
from rowmill.tools import ToolCall

crm = Provider("crm", base_url="https://crm.example", rate="1/s")

@crm.tool("score", effect="read")
def score(item: int, call: ToolCall) -> int:
    return item

@play("leads")
async def leads(ctx: Context) -> None: ...

other = 5
"""


@pytest.fixture(autouse=True)
def own_imports(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test has its own import path, modules and environment: other tests may have loaded a project, whose `plays` would be found here too."""
    for name in [name for name in os.environ if name.startswith("ROWMILL_")]:
        monkeypatch.delenv(name)
    monkeypatch.setattr(sys, "path", [place for place in sys.path if not (Path(place) / "plays.py").exists()])
    monkeypatch.delitem(sys.modules, "plays", raising=False)
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    def make(files: dict[str, str]) -> Path:
        place = tmp_path / f"project{next(_numbers)}"
        for name, text in files.items():
            file = place / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        return place

    return make


def loaded(place: Path, **options: Any) -> Project:
    project = Project.find(place, **options)
    project.load()
    return project


def test_the_nearest_folder_upwards_is_the_project(folder: Folder) -> None:
    place = folder({"rowmill.toml": 'plays = ["a"]\ntools = ["b"]\nbroker = "amqp://x"\ndatabase = "postgresql://y"\n', "deep/er/x.py": ""})
    project = Project.find(place / "deep" / "er")
    assert (project.folder, project.file) == (place, place / "rowmill.toml")
    settings = project.settings
    assert (settings.plays, settings.tools, settings.broker, settings.database) == (["a"], ["b"], "amqp://x", "postgresql://y")


def test_without_a_file_the_folder_itself_is_the_project_with_defaults(folder: Folder) -> None:
    project = loaded(folder({"plays.py": PLAYS}))
    assert (project.file, project.settings.plays) == (None, ["plays"])
    assert project.play("leads").name == "leads"


def test_names_are_registered_ones_or_module_and_attribute(folder: Folder) -> None:
    project = loaded(folder({"rowmill.toml": "", "plays.py": PLAYS}))
    assert project.play("plays:leads") is project.play("leads")
    assert project.tool("plays:score") is project.tool("crm.score")
    for name, told in (
        ("laeds", "unknown play 'laeds'; known: leads"),
        ("plays:laeds", "unknown play 'plays:laeds'; known: plays:leads"),
        ("plays:other", "known: plays:leads"),
    ):
        with pytest.raises(UnknownName, match=told):
            project.play(name)
    with pytest.raises(UnknownName, match="unknown tool 'plays:leads'; known: plays:score"):
        project.tool("plays:leads")
    with pytest.raises(ProjectError, match="no module 'nowhere'"):
        project.play("nowhere:leads")


def test_loading_again_changes_nothing(folder: Folder) -> None:
    project = loaded(folder({"rowmill.toml": 'tools = ["plays"]', "plays.py": PLAYS}))
    play = project.play("leads")
    project.load()
    assert project.play("leads") is play
    assert sys.path.count(str(project.folder)) == 1


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("plays = [", "is not valid TOML"),
        ('play = ["plays"]', "play: Extra inputs are not permitted"),
        ("plays = 5", r"plays: .*list.* \(given: 5\)"),
        ("[providers.crm]\nspeed = 1", "providers.crm.speed: Extra inputs"),
        ("[providers.crm]\nconcurrency = 0", "providers.crm.concurrency"),
        ("profile = 'live'", "unknown profile 'live'; known: none"),
        ("[providers.cmr]\nrate = '1/s'", "unknown provider 'cmr'; known: crm"),
    ],
)
def test_what_the_file_may_not_say_is_refused_by_name(folder: Folder, text: str, told: str) -> None:
    with pytest.raises(ProjectError, match=told):
        loaded(folder({"rowmill.toml": text, "plays.py": PLAYS}))


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"rowmill.toml": ""}, r"there is no module 'plays' in .*rowmill.toml names it"),
        ({"x.py": ""}, r"there is no module 'plays' .*there is no rowmill.toml"),
        ({"plays.py": "import not_there"}, "module 'plays' cannot be loaded: No module named 'not_there'"),
        ({"plays.py": "1 / 0"}, "module 'plays' cannot be loaded: ZeroDivisionError"),
        ({"plays.py": "def"}, "module 'plays' cannot be loaded: SyntaxError"),
        ({"plays.py": "from rowmill import play\nplay('A')"}, "module 'plays' cannot be loaded: play name 'A'"),
    ],
)
def test_code_that_cannot_be_loaded_is_named_with_its_error(folder: Folder, files: dict[str, str], told: str) -> None:
    with pytest.raises(ProjectError, match=told):
        loaded(folder(files))


def test_a_second_project_with_a_module_of_the_same_name_is_refused(folder: Folder) -> None:
    loaded(folder({"rowmill.toml": "", "plays.py": PLAYS}))
    with registry.isolated(), pytest.raises(ProjectError, match="module 'plays' was already loaded from"):
        loaded(folder({"rowmill.toml": "", "plays.py": PLAYS}))


def test_the_environment_wins_over_the_profile_which_wins_over_the_file(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    text = """
        broker = "amqp://file"
        database = "postgresql://file"
        [providers.crm]
        rate = "2/s"
        concurrency = 2
        [profiles.live]
        broker = "amqp://live"
        [profiles.live.providers.crm]
        rate = "3/s"
        """
    place = folder({"rowmill.toml": text, "plays.py": PLAYS})
    assert Project.find(place, profile="live").settings.broker == "amqp://live"
    monkeypatch.setenv("ROWMILL_PROFILE", "live")
    monkeypatch.setenv("ROWMILL_DATABASE_URL", "postgresql://env")
    monkeypatch.setenv("ROWMILL_PROVIDERS__CRM__CONCURRENCY", "9")
    monkeypatch.setenv("ROWMILL_TOOLS", "plays, plays")
    monkeypatch.setenv("ROWMILL_SOMETHING_ELSE", "x")
    project = loaded(place)
    assert (project.settings.broker, project.settings.database, project.settings.tools) == ("amqp://live", "postgresql://env", ["plays", "plays"])
    crm = registry.provider_named("crm")
    assert (crm.rate, crm.concurrency) == (Rate(3, 1.0), 9)


# Code digests

CODE = {
    "rowmill.toml": 'plays = ["package.plays"]',
    "package/__init__.py": "",
    "package/plays.py": """
        import json
        from rowmill import Context, play
        from . import sibling
        from helping import inner

        @play("p")
        async def body(ctx: Context) -> None: ...
        """,
    "package/sibling.py": "",
    "helping/__init__.py": "",
    "helping/inner.py": "def use() -> None:\n    import helping.far\n",
    "helping/far.py": "VALUE = 1",
    "bystander.py": "VALUE = 1",
}


def digest(folder: Folder, changes: dict[str, str]) -> str:
    """The digest of the play of `CODE` with some files changed, loaded as in a process of its own."""
    before = set(sys.modules)
    path = [*sys.path]
    with registry.isolated():
        project = loaded(folder({**CODE, **changes}))
        made = project.code_digest(project.play("p"))
        assert code_digest(project.play("p")) == made
    sys.path[:] = path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    return made


@pytest.mark.parametrize(
    "file", ["package/plays.py", "package/__init__.py", "package/sibling.py", "helping/__init__.py", "helping/inner.py", "helping/far.py"]
)
def test_a_change_of_any_module_that_the_play_imports_changes_its_digest(folder: Folder, file: str) -> None:
    assert digest(folder, {}) != digest(folder, {file: textwrap.dedent(CODE[file]) + "\n# changed"})


def test_modules_that_the_play_does_not_import_and_the_folders_place_make_no_difference(folder: Folder) -> None:
    assert digest(folder, {}) == digest(folder, {"bystander.py": "VALUE = 2", "rowmill.toml": CODE["rowmill.toml"] + "\n# changed"})


def test_a_digest_speaks_of_the_code_that_was_loaded(folder: Folder) -> None:
    unedited = digest(folder, {})
    project = loaded(folder(CODE))
    (project.folder / "package" / "sibling.py").write_text("edited = 1")
    assert project.code_digest(project.play("p")) == unedited
