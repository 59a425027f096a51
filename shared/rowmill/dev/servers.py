"""A project's own set of servers: which ones, where their data are, and one lock for every command in that project.

In order: the URLs that were given; else what the project used last; else Docker Compose where an engine answers; else private nodes from
Debian's packages. Each of the two servers is looked for by itself: a given database and a private broker make a set.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rowmill.dev import compose, processes
from rowmill.dev.compose import ComposeProject, ComposeServers
from rowmill.dev.external import ExternalBroker, ExternalDatabase
from rowmill.dev.install import Report, install_command, install_packages, missing_packages
from rowmill.dev.nodes import BrokerNode, DatabaseNode, ServerSet
from rowmill.dev.private import private_servers
from rowmill.dev.state import locked, read_record, write_record
from rowmill.errors import PackagesMissing

FOLDER_NAME = ".rowmill"

# The servers' shell scripts do not quote every path.
_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._+-]+")


class Servers:
    """The servers of the project in `project`, the folder that holds `rowmill.toml`.

    `broker_url` and `database_url` name servers that somebody else runs; such a server is never started, stopped or reset.
    """

    def __init__(self, project: Path, *, broker_url: str | None = None, database_url: str | None = None) -> None:
        self._folder = project.resolve() / FOLDER_NAME
        self._record_file = self._folder / "servers.json"
        self._broker = ExternalBroker(broker_url) if broker_url else None
        self._database = ExternalDatabase(database_url) if database_url else None

    def ensure(self, *, install: bool = False, report: Report = lambda _: None) -> ServerSet:
        """Both servers, started if they do not run; `report` hears what takes time.

        Raises ServersUnavailable or PackagesMissing, which say what was tried and how to start one. Packages are installed only with `install`.
        """
        for given in (self._broker, self._database):
            if given is not None:
                given.start()  # before anything is started that would not be of use alone
        if self._broker and self._database:
            return ServerSet(self._broker, self._database)
        with self._lock():
            found = self._recorded() or self._choose(install=install, report=report)
            if found.database.kind == "private":
                self._require_packages(install=install, report=report)  # they may have been removed since
            wanted = self._with_given(found)
            if not wanted.running:
                report(f"starting {self._names()} for this project ({found.database.kind})")
            if wanted.broker is found.broker and wanted.database is found.database:
                found.start()
            else:
                wanted.start()
        return wanted

    def status(self) -> dict[str, dict[str, object]]:
        """What runs where, as `rowmill dev status --json` prints it; nothing is started."""
        absent: dict[str, object] = {"kind": None, "running": False, "url": None, "data": None, "log": None}
        found = self._recorded()
        broker = self._broker or (found.broker if found else None)
        database = self._database or (found.database if found else None)
        return {
            "broker": broker.describe() if broker else absent,
            "database": database.describe() if database else absent,
        }

    def running_broker_url(self) -> str | None:
        """Where this project's broker answers now; None if it does not. Nothing is started."""
        found = self._recorded()
        broker = self._broker or (found.broker if found else None)
        return broker.url if broker is not None and broker.running else None

    def nodes(self) -> tuple[BrokerNode | None, DatabaseNode | None]:
        """The servers that this project uses, whether or not they run; None: it has none yet. Nothing is started."""
        found = self._recorded()
        return self._broker or (found.broker if found else None), self._database or (found.database if found else None)

    def stop(self) -> bool:
        """Stop what is ours, cleanly, keeping its data; whether there was anything to stop."""
        with self._lock():
            found = self._recorded()
            if found is None or not (found.broker.running or found.database.running):
                return False
            found.stop()
            return True

    def reset(self) -> bool:
        """Stop what is ours and delete all that it stored, receipts of paid calls among it; whether there was anything."""
        with self._lock():
            record = read_record(self._record_file)
            found = self._recorded()
            if found is None:
                return False
            found.delete()
            if record["kind"] == "private":
                shutil.rmtree(record["folder"], ignore_errors=True)
            self._record_file.unlink()
            return True

    @contextmanager
    def _lock(self) -> Iterator[None]:
        """Every command of the project that starts, stops or deletes servers does it alone."""
        self._folder.mkdir(mode=0o711, exist_ok=True)
        ignore = self._folder / ".gitignore"
        if not ignore.exists():
            ignore.write_text("*\n")
        with locked(self._folder / "lock"):
            yield

    def _recorded(self) -> ServerSet | None:
        """What the project used last: its data hold what was paid, so it is not left for another kind that could be had now."""
        record = read_record(self._record_file)
        if not record:
            return None
        return self._compose() if record["kind"] == "compose" else private_servers(Path(record["folder"]))

    def _choose(self, *, install: bool, report: Report) -> ServerSet:
        if compose.engine_answers():
            write_record(self._record_file, {"kind": "compose"})
            return self._compose()
        self._require_packages(install=install, report=report)  # before the folder: it must be one that their users can reach
        users = ([] if self._broker else ["rabbitmq"]) + ([] if self._database else ["postgres"])
        place = data_folder(self._folder, users)
        write_record(self._record_file, {"kind": "private", "folder": str(place)})
        return private_servers(place)

    def _require_packages(self, *, install: bool, report: Report) -> None:
        missing = missing_packages(broker=self._broker is None, database=self._database is None)
        if missing and install:
            install_packages(missing, report=report)
        elif missing:
            raise PackagesMissing(
                f"no {self._names()}: {self._variables()} not set, no Docker engine answers, and Debian's {' and '.join(missing)} "
                f"not installed; `rowmill dev up --install` installs and starts what is missing, or run: {install_command(missing)}"
            )

    def _compose(self) -> ComposeServers:
        return ComposeServers(ComposeProject(self._folder / "compose.json", f"rowmill-{_digest(self._folder)}"))

    def _with_given(self, found: ServerSet) -> ServerSet:
        return ServerSet(self._broker or found.broker, self._database or found.database)

    def _names(self) -> str:
        if self._broker or self._database:
            return "database" if self._broker else "broker"
        return "broker and database"

    def _variables(self) -> str:
        unset = [name for name, given in (("ROWMILL_BROKER_URL", self._broker), ("ROWMILL_DATABASE_URL", self._database)) if not given]
        return f"{' and '.join(unset)} {'are' if len(unset) == 2 else 'is'}"


def project_folder(start: Path) -> Path:
    """The nearest folder from `start` upwards that holds `rowmill.toml`; `start` itself if none does."""
    return next((folder for folder in (start, *start.parents) if (folder / "rowmill.toml").exists()), start)


def data_folder(beside: Path, users: list[str]) -> Path:
    """Where a private set that runs as `users` keeps its data: in `beside` (the project's `.rowmill`) if they can live there.

    They cannot when their users may not pass a folder above it (a project under /root), or when the path holds spaces or the like. Then in
    a folder of its own that lasts: under /var/lib/rowmill for root, else under ~/.local/share/rowmill.
    """
    here = beside / "servers"
    here.mkdir(mode=0o711, exist_ok=True)
    if _fit_for_servers(here, users):
        return here
    here.rmdir()
    lasting = Path("/var/lib/rowmill") if os.geteuid() == 0 else Path.home() / ".local/share/rowmill"
    lasting.mkdir(mode=0o711, parents=True, exist_ok=True)
    lasting.chmod(0o711)
    parent = lasting if _fit_for_servers(lasting, users) else Path("/var/tmp")  # noqa: S108 - mkdtemp makes a folder of our own there
    return Path(tempfile.mkdtemp(prefix=f"rowmill-{_digest(beside)}-", dir=parent))


def _fit_for_servers(folder: Path, users: list[str]) -> bool:
    if not _PLAIN_PATH.fullmatch(str(folder)):
        return False
    accounts = [processes.account_for(user) for user in users] if os.geteuid() == 0 else []
    environment = processes.plain_environment({})
    return all(processes.run_as(account, ["test", "-x", str(folder)], env=environment, folder=Path("/")).returncode == 0 for account in accounts)


def _digest(path: Path) -> str:
    return hashlib.sha256(str(path).encode()).hexdigest()[:8]
