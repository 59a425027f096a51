"""A private Postgres node from Debian's package: own port on loopback, own data folder, passwords for everyone.

It keeps what it promises over a crash (fsync is on); the other settings suit many small runs on a developer's machine.
"""

from __future__ import annotations

import secrets
import shutil
import signal
from pathlib import Path
from typing import Any

from rowmill.dev import databases, processes
from rowmill.dev.ports import LOOPBACK, come_free, free_ports
from rowmill.dev.processes import Account, ProcessMark
from rowmill.dev.state import read_record, write_record
from rowmill.errors import PackagesMissing, ServersUnavailable

PACKAGE_VERSIONS = Path("/usr/lib/postgresql")

_USER = "rowmill"
_DATABASE = "rowmill"
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0

_SETTINGS = {
    "shared_buffers": "256MB",
    "max_connections": "200",
    "unix_socket_directories": "",  # none: clients use TCP with a password, and a socket's path may not be longer than 107 bytes
    "wal_level": "minimal",  # nothing is replicated; commits stay as durable
    "max_wal_senders": "0",
    "wal_buffers": "16MB",
    "max_wal_size": "2GB",
    "checkpoint_timeout": "15min",
    "random_page_cost": "1.1",
    "jit": "off",  # compiling costs more than our short statements take
    "timezone": "UTC",
    "log_timezone": "UTC",
}


def programs_folder() -> Path | None:
    """Where `initdb` and `postgres` of the newest installed version are; None if there is none."""
    versions = [folder for folder in PACKAGE_VERSIONS.glob("*/bin") if (folder / "initdb").exists() and (folder / "postgres").exists()]
    if versions:
        return max(versions, key=lambda folder: (folder.parent.name.isdigit() and int(folder.parent.name), folder))
    found = shutil.which("postgres")
    beside = Path(found).resolve().parent if found else None
    return beside if beside is not None and (beside / "initdb").exists() else None


class PrivatePostgres:
    """One node whose data live in `base`/postgres and whose record (port, password, process) is `base`/postgres.json."""

    kind = "private"

    def __init__(self, base: Path) -> None:
        self.folder = base / "postgres"
        self._data = self.folder / "data"
        self._record_file = base / "postgres.json"

    @property
    def url(self) -> str:
        return self._url_of(_DATABASE)

    @property
    def running(self) -> bool:
        return self._mark() is not None

    def start(self) -> None:
        if self.running:
            self._await_ready()
            return
        account = processes.account_for("postgres")
        processes.make_private_folder(self.folder, account)
        record = self._record() or {"password": secrets.token_urlsafe(18), "port": None, "made": False}
        if record["port"] is None or not come_free([record["port"]]):
            record["port"] = free_ports(1)[0]
        write_record(self._record_file, record)
        programs = self._programs()
        if not record["made"]:
            self._make_cluster(programs, record, account)
        self._forget_dead_owner()
        settings = {**_SETTINGS, "listen_addresses": LOOPBACK, "port": str(record["port"])}
        argv = [str(programs / "postgres"), "-D", str(self._data)]
        argv += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        environment = processes.plain_environment({"HOME": str(self.folder)}, path=[programs])
        mark = processes.start_detached(argv, account=account, env=environment, folder=self.folder, log=self._log)
        record["server"] = [mark.pid, mark.born]
        write_record(self._record_file, record)
        self._await_ready()
        if not record["made"]:
            databases.create_database(self._url_of("postgres"), _DATABASE)
            write_record(self._record_file, {**record, "made": True})

    def stop(self) -> None:
        """SIGINT: Postgres' fast shutdown, which ends its clients' connections (SIGTERM would wait for them to leave)."""
        if (server := self._mark()) is not None:
            processes.stop_tree(server, signal.SIGINT, timeout=_STOP_SECONDS)

    def kill(self) -> None:
        if (server := self._mark()) is not None:
            processes.kill_tree(server)

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        if (server := self._mark()) is not None:
            processes.freeze_tree(server)

    def resume(self) -> None:
        if (server := self._mark()) is not None:
            processes.signal_tree(server, signal.SIGCONT)

    def delete(self) -> None:
        self.kill()
        if self.folder.exists():
            shutil.rmtree(self.folder)
        self._record_file.unlink(missing_ok=True)

    def describe(self) -> dict[str, object]:
        known = bool(self._record())
        return {
            "kind": self.kind,
            "running": self.running,
            "url": self.url if known else None,
            "data": str(self._data),
            "log": str(self._log),
        }

    def create_database(self, name: str) -> str:
        return databases.create_database(self._url_of("postgres"), name)

    def drop_database(self, name: str) -> None:
        databases.drop_database(self._url_of("postgres"), name)

    @property
    def _log(self) -> Path:
        return self.folder / "postgres.log"

    def _record(self) -> dict[str, Any]:
        return read_record(self._record_file)

    def _mark(self) -> ProcessMark | None:
        stored = self._record().get("server")
        mark = ProcessMark(stored[0], stored[1]) if stored else None
        return mark if processes.alive(mark) else None

    def _url_of(self, database: str) -> str:
        record = self._record()
        if not record:
            raise ServersUnavailable(f"the database in {self.folder} was never started")
        return databases.url_of_database(f"postgresql://{_USER}:{record['password']}@{LOOPBACK}:{record['port']}/", database)

    def _programs(self) -> Path:
        """The programs that fit the data: a cluster is only readable by the major version that made it."""
        newest = programs_folder()
        if newest is None:
            raise PackagesMissing("Postgres is not installed; `rowmill dev up --install` installs Debian's postgresql")
        made_by = self._data / "PG_VERSION"
        if not made_by.exists():
            return newest
        version = made_by.read_text().strip()
        fitting = PACKAGE_VERSIONS / version / "bin"
        if (fitting / "postgres").exists():
            return fitting
        if newest.parent.name.isdigit() and newest.parent.name != version:
            raise ServersUnavailable(
                f"{self._data} was made by Postgres {version}, and only {newest.parent.name} is installed; "
                f"install postgresql-{version}, or delete the data with `rowmill dev reset`"
            )
        return newest

    def _make_cluster(self, programs: Path, record: dict[str, Any], account: Account) -> None:
        if self._data.exists():  # an earlier attempt ended half-way; nothing of value can be in it
            shutil.rmtree(self._data)
        password_file = self.folder / "password"
        processes.write_private_file(password_file, record["password"], account)
        argv = [str(programs / "initdb"), "-D", str(self._data), "-U", _USER, "--auth=scram-sha-256", f"--pwfile={password_file}"]
        argv += ["--encoding=UTF8", "--locale=C"]
        done = processes.run_as(account, argv, env=processes.plain_environment({"HOME": str(self.folder)}), folder=self.folder)
        password_file.unlink()
        if done.returncode != 0:
            raise ServersUnavailable(f"initdb failed in {self.folder}: {' '.join(done.stderr.split())}")

    def _forget_dead_owner(self) -> None:
        """Remove the lock file of a server that was killed, when its pid is now somebody else's: Postgres would refuse to start.

        Not while a server of this data folder still runs, whoever started it.
        """
        lock = self._data / "postmaster.pid"
        if not lock.exists():
            return
        pid = int(lock.read_text().split("\n", 1)[0])
        if str(self._data) in processes.command_line(pid):
            raise ServersUnavailable(f"a Postgres that we did not start (process {pid}) already runs on {self._data}")
        lock.unlink()

    def _await_ready(self) -> None:
        """Wait for the word `ready` in the server's own lock file, as pg_ctl does (its eighth line is the state)."""
        lock = self._data / "postmaster.pid"

        def ready() -> bool:
            lines = lock.read_text().split("\n") if lock.exists() else []
            mark = self._mark()
            return mark is not None and len(lines) >= 8 and lines[0] == str(mark.pid) and lines[7].strip() == "ready"

        answered = processes.wait_until(lambda: ready() or not self.running, timeout=_START_SECONDS)
        if not answered or not self.running:
            ended = "ended while starting" if answered else f"did not serve within {_START_SECONDS:.0f} s"
            raise ServersUnavailable(f"the private Postgres in {self.folder} {ended}; its last words: {processes.last_words(self._log)}")
