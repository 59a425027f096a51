"""A project: its `rowmill.toml`, loading its author code, and finding plays and tools in it.

Every setting can also be given as ``ROWMILL_...`` in the environment, which wins over the profile, which wins over the file.
"""

from __future__ import annotations

import importlib
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from rowmill import registry
from rowmill.code_digests import code_digest
from rowmill.errors import ProjectError, RowmillError, UnknownName
from rowmill.plays import Play
from rowmill.source import remember
from rowmill.tools import FunctionTool, HttpTool, Tool, tool_of
from rowmill.validation import explain

__all__ = ["FILE_NAME", "Project", "ProjectSettings", "ProviderOverride", "code_digest"]

FILE_NAME = "rowmill.toml"
ModuleNames = Annotated[list[str], NoDecode]
"""In the environment: names with commas between them."""


class ProviderOverride(BaseModel):
    """What a project sets differently for a provider, ``[providers.<name>]``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    base_url: str | None = None
    rate: str | None = None
    concurrency: int | None = Field(default=None, ge=1)
    timeout: float | str | None = None
    burst: int | None = Field(default=None, ge=1)
    connections: int | None = Field(default=None, ge=1)
    http2: bool | None = None
    proxy: str | None = None
    tls: dict[str, str] | None = None


class ProjectSettings(BaseSettings):
    """What `rowmill.toml` may say.

    ``plays`` and ``tools``: modules to import. ``broker`` and ``database``: URLs of the two servers; in the environment
    ``ROWMILL_BROKER_URL`` and ``ROWMILL_DATABASE_URL``. ``providers``: overrides by provider name. ``profile``: which of ``profiles`` counts.
    """

    model_config = SettingsConfigDict(env_prefix="ROWMILL_", env_nested_delimiter="__", extra="forbid", frozen=True, populate_by_name=True)

    plays: ModuleNames = ["plays"]
    tools: ModuleNames = []
    broker: str | None = Field(default=None, validation_alias="ROWMILL_BROKER_URL")
    database: str | None = Field(default=None, validation_alias="ROWMILL_DATABASE_URL")
    providers: dict[str, ProviderOverride] = {}
    profile: str | None = None
    profiles: dict[str, dict[str, Any]] = {}

    @field_validator("plays", "tools", mode="before")
    @classmethod
    def _split(cls, names: Any) -> Any:
        return [name.strip() for name in names.split(",") if name.strip()] if isinstance(names, str) else names

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - pydantic-settings passes it
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic-settings passes it
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - pydantic-settings passes it
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """The environment wins over what the file says, which is given as arguments."""
        return env_settings, init_settings


class Project:
    """A folder with author code. ``file``: its `rowmill.toml`, None where there is none and the defaults count."""

    def __init__(self, folder: Path, settings: ProjectSettings, file: Path | None = None) -> None:
        self.folder = folder
        self.settings = settings
        self.file = file

    @classmethod
    def find(cls, start: Path, profile: str | None = None) -> Project:
        """The project of the nearest folder from ``start`` upwards that holds `rowmill.toml`, else of ``start`` itself.

        ``profile`` wins over ``ROWMILL_PROFILE`` and the file's own choice. Raises `ProjectError` for a file that cannot be read or says what
        it may not.
        """
        start = start.resolve()
        folder = next((place for place in (start, *start.parents) if (place / FILE_NAME).is_file()), None)
        if folder is None:
            if not start.is_dir():
                raise ProjectError(f"there is no folder {start}")
            return cls(start, _settings(start, {}, profile))
        file = folder / FILE_NAME
        return cls(folder, _settings(file, _read(file), profile), file)

    def load(self) -> None:
        """Import the project's modules, with its folder first on the import path, and apply the provider overrides. Again is allowed.

        Raises `ProjectError` for a module that is not there or fails, `UnknownName` for an override of a provider that does not exist.
        """
        for module in dict.fromkeys((*self.settings.plays, *self.settings.tools)):
            self._import(module)
        for name, override in self.settings.providers.items():
            registry.provider_named(name).configure(**override.model_dump())

    def play(self, name: str) -> Play[Any, Any]:
        """The play that ``name`` means: ``module:attribute``, or the registered name. Raises `UnknownName`, which lists the known ones."""
        if ":" not in name:
            return registry.play_named(name)
        module, members = self._members(name)
        found = members.get(name.partition(":")[2])
        if isinstance(found, Play):
            return found
        raise UnknownName("play", name, [f"{module}:{member}" for member, value in members.items() if isinstance(value, Play)])

    def tool(self, name: str) -> Tool:
        """The tool that ``name`` means: ``module:attribute``, or the tool's id. Raises `UnknownName`, which lists the known ones."""
        if ":" not in name:
            return registry.tool_named(name)
        module, members = self._members(name)
        tools = {member: value for member, value in members.items() if _is_tool(value)}
        wanted = name.partition(":")[2]
        if wanted in tools:
            return tool_of(tools[wanted])
        raise UnknownName("tool", name, [f"{module}:{member}" for member in tools])

    def code_digest(self, play: Play[Any, Any]) -> str:
        """The digest of the play's code; see `rowmill.code_digests`."""
        return code_digest(play, self.folder)

    def _members(self, name: str) -> tuple[str, dict[str, Any]]:
        module = name.partition(":")[0]
        return module, vars(self._import(module))

    def _import(self, name: str) -> ModuleType:
        if str(self.folder) not in sys.path:
            sys.path.insert(0, str(self.folder))
            importlib.invalidate_caches()
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
                where = f"{self.file} names it" if self.file else f"there is no {FILE_NAME} from {self.folder} upwards, so it was tried"
                raise ProjectError(f"there is no module {name!r} in {self.folder} ({where})") from error
            raise ProjectError(f"module {name!r} cannot be loaded: {error}") from error
        except RowmillError as error:
            raise ProjectError(f"module {name!r} cannot be loaded: {error}") from error
        except Exception as error:  # author code may raise anything while it is imported
            raise ProjectError(f"module {name!r} cannot be loaded: {type(error).__name__}: {error}") from error
        self._refuse_another(name, module)
        self._remember_sources()
        return module

    def _refuse_another(self, name: str, module: ModuleType) -> None:
        """Two projects in one process cannot both have a module of one name: the first one loaded would silently serve the second."""
        ours = self.folder.joinpath(*name.split("."))
        loaded = Path(getattr(module, "__file__", None) or "").resolve()
        if (ours.with_suffix(".py").is_file() or (ours / "__init__.py").is_file()) and not loaded.is_relative_to(self.folder):
            raise ProjectError(f"module {name!r} was already loaded from {loaded}, so this project's own in {self.folder} cannot be")

    def _remember_sources(self) -> None:
        """Keep the source of every module of the project as it was loaded, so that digests speak of the code that runs."""
        for module in list(sys.modules.values()):
            file = getattr(module, "__file__", None)
            if file is not None and file.endswith(".py") and Path(file).resolve().is_relative_to(self.folder):
                remember(file)


def _is_tool(value: Any) -> bool:
    if isinstance(value, FunctionTool | Tool):
        return True
    return isinstance(value, type) and issubclass(value, HttpTool) and "__rowmill_tool__" in vars(value)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ProjectError(f"{file} is not valid TOML: {error}") from error
    except OSError as error:
        raise ProjectError(f"{file} cannot be read: {error.strerror}") from error


def _settings(place: Path, document: Mapping[str, Any], profile: str | None) -> ProjectSettings:
    try:
        settings = ProjectSettings(**document)
        chosen = profile or settings.profile
        if chosen is None:
            return settings
        if chosen not in settings.profiles:
            raise UnknownName("profile", chosen, list(settings.profiles))
        return ProjectSettings(**_merged(document, settings.profiles[chosen]))
    except ValidationError as error:
        raise ProjectError(f"{place}: {explain(error)}") from error


def _merged(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables joined member by member; what ``over`` says wins."""
    merged = dict(under)
    for name, value in over.items():
        former = merged.get(name)
        merged[name] = _merged(former, value) if isinstance(former, Mapping) and isinstance(value, Mapping) else value
    return merged
