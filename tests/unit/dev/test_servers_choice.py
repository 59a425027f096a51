"""Which servers a project uses, and what is said when there are none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rowmill.dev import Servers
from rowmill.dev.external import ExternalBroker, ExternalDatabase, without_password
from rowmill.dev.servers import project_folder
from rowmill.errors import PackagesMissing, ServersUnavailable, UsageError

NOWHERE = "amqp://someone:hidden@127.0.0.1:1/"


def test_without_anything_the_error_says_what_was_tried_and_the_one_command(tmp_path: Path, no_packages: None) -> None:
    with pytest.raises(PackagesMissing) as raised:
        Servers(tmp_path).ensure()
    message = str(raised.value)
    assert "ROWMILL_BROKER_URL and ROWMILL_DATABASE_URL are not set" in message
    assert "no Docker engine answers" in message
    assert "rowmill dev up --install" in message
    assert message.endswith("sudo apt-get install -y rabbitmq-server postgresql")


def test_without_the_rights_to_install_the_one_command_is_said(tmp_path: Path, no_packages: None) -> None:
    with pytest.raises(PackagesMissing, match="run: sudo apt-get install -y rabbitmq-server postgresql"):
        Servers(tmp_path).ensure(install=True)


def test_only_what_is_not_given_is_looked_for(tmp_path: Path, no_packages: None) -> None:
    class Answering(ExternalBroker):
        running = True

    servers = Servers(tmp_path)
    servers._broker = Answering(NOWHERE)
    with pytest.raises(PackagesMissing, match=r"no database: ROWMILL_DATABASE_URL is not set.*apt-get install -y postgresql$"):
        servers.ensure()


def test_a_given_server_that_does_not_answer_is_named_without_its_password(tmp_path: Path) -> None:
    with pytest.raises(ServersUnavailable) as raised:
        Servers(tmp_path, broker_url=NOWHERE, database_url="postgresql://127.0.0.1:1/x").ensure()
    assert "someone:***@127.0.0.1:1" in str(raised.value)
    assert "hidden" not in str(raised.value)
    assert "unset ROWMILL_BROKER_URL" in str(raised.value)
    assert not (tmp_path / ".rowmill").exists()


def test_an_engine_is_used_before_private_nodes_and_remembered(tmp_path: Path, fake_docker: Callable[[str], Path]) -> None:
    calls = fake_docker("echo 28.0")
    assert Servers(tmp_path).ensure().database.kind == "compose"
    assert json.loads((tmp_path / ".rowmill/servers.json").read_text()) == {"kind": "compose"}
    assert "up --detach --wait" in calls.read_text()
    assert Servers(tmp_path).reset()
    assert "down --volumes" in calls.read_text()
    assert not Servers(tmp_path).reset()


def test_a_client_without_engine_falls_through_to_packages(tmp_path: Path, no_packages: None, fake_docker: Callable[[str], Path]) -> None:
    fake_docker("exit 1")
    with pytest.raises(PackagesMissing, match="no Docker engine answers"):
        Servers(tmp_path).ensure()


def test_status_of_a_project_that_never_started_anything_starts_nothing(tmp_path: Path) -> None:
    status = Servers(tmp_path).status()
    assert not status["broker"]["running"]
    assert status["database"]["url"] is None
    assert list(tmp_path.iterdir()) == []
    assert not Servers(tmp_path).stop()


@pytest.mark.parametrize("action", ["kill", "restart", "freeze", "resume"])
def test_somebody_elses_servers_are_not_touched(action: str) -> None:
    for server in (ExternalBroker(NOWHERE), ExternalDatabase("postgresql://127.0.0.1:1/x")):
        with pytest.raises(UsageError, match=f"not ours to {action}"):
            getattr(server, action)()
        server.stop()
        server.delete()


def test_passwords_are_masked_and_nothing_else() -> None:
    assert without_password("amqp://u:p%40@h:1/v") == "amqp://u:***@h:1/v"
    assert without_password("postgresql://h/db") == "postgresql://h/db"


def test_the_project_is_the_nearest_folder_with_a_rowmill_toml(tmp_path: Path) -> None:
    inner = tmp_path / "a" / "b"
    inner.mkdir(parents=True)
    assert project_folder(inner) == inner
    (tmp_path / "rowmill.toml").touch()
    assert project_folder(inner) == tmp_path
