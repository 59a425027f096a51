"""Docker Compose is used only where an engine answers; shown with a stand-in for the `docker` command (no engine was to be had)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from rowmill.dev import compose
from rowmill.dev.compose import ComposeProject, ComposeServers
from rowmill.errors import ServersUnavailable

CLIENT_WITHOUT_ENGINE = 'if [ "$1" = info ]; then echo "Cannot connect to the Docker daemon" >&2; exit 1; fi; echo v2'
ENGINE_WITHOUT_COMPOSE = 'if [ "$1" = compose ]; then echo "unknown command" >&2; exit 1; fi; echo 28.0'
ENGINE = 'case "$*" in *"ps --services"*) echo rabbitmq;; *) echo 28.0;; esac'
FAILS_TO_PULL = 'case "$*" in *up*) echo "pull access denied" >&2; exit 18;; *) echo 28.0;; esac'


def test_no_client_is_no_engine(no_packages: None) -> None:
    assert not compose.engine_answers()


@pytest.mark.parametrize("body", [CLIENT_WITHOUT_ENGINE, ENGINE_WITHOUT_COMPOSE, "exit 0"])
def test_a_client_without_engine_or_compose_falls_through(fake_docker: Callable[[str], Path], body: str) -> None:
    fake_docker(body)
    assert not compose.engine_answers()


def test_a_client_that_hangs_falls_through(fake_docker: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compose, "_ENGINE_SECONDS", 0.1)
    fake_docker("exec tail -f /dev/null")
    assert not compose.engine_answers()


def test_an_engine_with_compose_is_used(fake_docker: Callable[[str], Path]) -> None:
    fake_docker(ENGINE)
    assert compose.engine_answers()


def test_both_servers_listen_on_loopback_with_a_password_of_their_own(fake_docker: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake_docker(ENGINE)
    servers = ComposeServers(ComposeProject(tmp_path / "compose.json", "rowmill-test"))
    servers.start()

    assert "up --detach --wait" in calls.read_text()
    text = (tmp_path / "compose.json").read_text()
    assert text.count("127.0.0.1:") == 2
    assert (tmp_path / "compose.json").stat().st_mode & 0o077 == 0
    assert servers.broker.url.startswith("amqp://rowmill:")
    assert servers.database.url.endswith("/rowmill")
    assert ":rowmill@" not in servers.broker.url
    assert servers.broker.running
    assert not servers.database.running


def test_a_second_start_keeps_ports_and_passwords(fake_docker: Callable[[str], Path], tmp_path: Path) -> None:
    fake_docker(ENGINE)
    project = ComposeProject(tmp_path / "compose.json", "rowmill-test")
    ComposeServers(project).start()
    first = ComposeServers(project).database.url
    ComposeServers(project).start()
    assert ComposeServers(project).database.url == first


def test_what_docker_said_is_in_the_error(fake_docker: Callable[[str], Path], tmp_path: Path) -> None:
    fake_docker(FAILS_TO_PULL)
    with pytest.raises(ServersUnavailable, match="pull access denied"):
        ComposeServers(ComposeProject(tmp_path / "compose.json", "rowmill-test")).start()


def test_delete_removes_volumes_and_the_file(fake_docker: Callable[[str], Path], tmp_path: Path) -> None:
    calls = fake_docker(ENGINE)
    servers = ComposeServers(ComposeProject(tmp_path / "compose.json", "rowmill-test"))
    servers.start()
    servers.delete()
    assert "down --volumes" in calls.read_text()
    assert not (tmp_path / "compose.json").exists()
