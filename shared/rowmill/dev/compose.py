"""The two servers in containers, where a Docker engine really answers.

The compose file is written into the project's `.rowmill/` with ports and passwords of the project's own; data are in its volumes. Only the
parts before the engine have been run here (there is no engine on the machines that this was built on); the rest is tested against a
stand-in for the `docker` command.
"""

from __future__ import annotations

import secrets
import shutil
import subprocess
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rowmill.dev import databases
from rowmill.dev.nodes import ServerSet
from rowmill.dev.ports import LOOPBACK, free_ports
from rowmill.dev.state import read_record, write_record
from rowmill.errors import ServersUnavailable

RABBITMQ_IMAGE = "rabbitmq:3.10"  # the versions that everything else was tested with
POSTGRES_IMAGE = "postgres:15"

_ENGINE_SECONDS = 5.0
_COMMAND_SECONDS = 600.0  # the first start pulls images
_USER = "rowmill"


def engine_answers() -> bool:
    """Whether Docker Compose can be used: a client that finds no engine, or one without Compose, does not count."""
    docker = shutil.which("docker")
    if docker is None:
        return False
    for arguments in (["info", "--format", "{{.ServerVersion}}"], ["compose", "version"]):
        try:
            asked = subprocess.run([docker, *arguments], capture_output=True, text=True, check=False, timeout=_ENGINE_SECONDS)
        except (OSError, subprocess.TimeoutExpired):
            return False
        if asked.returncode != 0 or not asked.stdout.strip():
            return False
    return True


class ComposeProject:
    """One compose file, and the containers and volumes that it names."""

    def __init__(self, file: Path, name: str) -> None:
        self.file = file
        self.name = name

    def write(self) -> None:
        """Choose ports and passwords and write the file, unless it is there (JSON is YAML)."""
        if not self.file.exists():
            write_record(self.file, _document(secrets.token_urlsafe(18), free_ports(2)))

    def service(self, name: str) -> dict[str, Any]:
        document = read_record(self.file)
        if not document:
            raise ServersUnavailable(f"{self.file} is missing; `rowmill dev up` writes it")
        found: dict[str, Any] = document["services"][name]
        return found

    def run(self, *arguments: str) -> str:
        """Run `docker compose ARGUMENTS` for this project; returns what it printed."""
        argv = ["docker", "compose", "-p", self.name, "-f", str(self.file), *arguments]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=_COMMAND_SECONDS, stdin=subprocess.DEVNULL)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ServersUnavailable(f"`docker compose {' '.join(arguments)}` could not be run to its end: {error}") from error
        if done.returncode != 0:
            raise ServersUnavailable(f"`docker compose {' '.join(arguments)}` failed: {' '.join(done.stderr.split())}")
        return done.stdout


class _ComposeNode(ABC):
    kind = "compose"
    _service: str

    def __init__(self, project: ComposeProject) -> None:
        self._project = project

    @property
    @abstractmethod
    def url(self) -> str: ...

    @property
    def running(self) -> bool:
        return self._service in self._project.run("ps", "--services", "--status", "running").split()

    def start(self) -> None:
        self._project.write()
        self._project.run("up", "--detach", "--wait", self._service)

    def stop(self) -> None:
        self._project.run("stop", self._service)

    def kill(self) -> None:
        self._project.run("kill", self._service)

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        self._project.run("pause", self._service)

    def resume(self) -> None:
        self._project.run("unpause", self._service)

    def delete(self) -> None:
        self._project.run("rm", "--force", "--stop", "--volumes", self._service)

    def describe(self) -> dict[str, object]:
        logs = f"docker compose -p {self._project.name} -f {self._project.file} logs {self._service}"
        data = f"volume {self._project.name}_{self._service}"
        return {"kind": self.kind, "running": self.running, "url": self.url, "data": data, "log": logs}

    def _port(self) -> str:
        published: str = self._project.service(self._service)["ports"][0]
        return published.split(":")[1]


class ComposeBroker(_ComposeNode):
    """The RabbitMQ container."""

    _service = "rabbitmq"

    @property
    def url(self) -> str:
        return self._url_of("/")

    def add_vhost(self, name: str) -> str:
        self._control("add_vhost", name)
        self._control("set_permissions", "-p", name, _USER, ".*", ".*", ".*")
        return self._url_of(name)

    def drop_vhost(self, name: str) -> None:
        self._control("delete_vhost", name)

    def _control(self, *arguments: str) -> None:
        self._project.run("exec", "-T", self._service, "rabbitmqctl", "--quiet", *arguments)

    def _url_of(self, vhost: str) -> str:
        password = self._project.service(self._service)["environment"]["RABBITMQ_DEFAULT_PASS"]
        path = "/" if vhost == "/" else f"/{quote(vhost, safe='')}"
        return f"amqp://{_USER}:{password}@{LOOPBACK}:{self._port()}{path}"


class ComposeDatabase(_ComposeNode):
    """The Postgres container."""

    _service = "postgres"

    @property
    def url(self) -> str:
        password = self._project.service(self._service)["environment"]["POSTGRES_PASSWORD"]
        return f"postgresql://{_USER}:{password}@{LOOPBACK}:{self._port()}/{_USER}"

    def create_database(self, name: str) -> str:
        return databases.create_database(self.url, name)

    def drop_database(self, name: str) -> None:
        databases.drop_database(self.url, name)


class ComposeServers(ServerSet):
    """Both containers. They are started and deleted by one command: two side by side would race for the project's network."""

    def __init__(self, project: ComposeProject) -> None:
        super().__init__(ComposeBroker(project), ComposeDatabase(project))
        self._project = project

    def start(self) -> None:
        self._project.write()
        self._project.run("up", "--detach", "--wait")

    def stop(self) -> None:
        self._project.run("stop")

    def delete(self) -> None:
        self._project.run("down", "--volumes", "--remove-orphans")
        self._project.file.unlink(missing_ok=True)


def _document(password: str, ports: list[int]) -> dict[str, Any]:
    return {
        "services": {
            "rabbitmq": {
                "image": RABBITMQ_IMAGE,
                "hostname": "rowmill",  # part of the node's name, under which it finds its data again
                "environment": {"RABBITMQ_DEFAULT_USER": _USER, "RABBITMQ_DEFAULT_PASS": password},
                "ports": [f"{LOOPBACK}:{ports[0]}:5672"],
                "volumes": ["rabbitmq:/var/lib/rabbitmq"],
                "healthcheck": {"test": ["CMD", "rabbitmq-diagnostics", "-q", "check_port_connectivity"], "interval": "2s", "retries": 60},
            },
            "postgres": {
                "image": POSTGRES_IMAGE,
                "command": ["postgres", "-c", "max_connections=200", "-c", "shared_buffers=256MB", "-c", "max_wal_size=2GB", "-c", "jit=off"],
                "environment": {"POSTGRES_USER": _USER, "POSTGRES_PASSWORD": password, "POSTGRES_DB": _USER},
                "ports": [f"{LOOPBACK}:{ports[1]}:5432"],
                "volumes": ["postgres:/var/lib/postgresql/data"],
                # by address: the server that only prepares a new database listens on its socket alone
                "healthcheck": {"test": ["CMD", "pg_isready", "-h", LOOPBACK, "-U", _USER], "interval": "2s", "retries": 60},
            },
        },
        "volumes": {"rabbitmq": {}, "postgres": {}},
    }
