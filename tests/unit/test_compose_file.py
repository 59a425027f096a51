"""compose.yaml agrees with the command line and with what `rowmill dev` starts.

It is only read here: there was no Docker engine to run it with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from rowmill.dev.compose import POSTGRES_IMAGE, RABBITMQ_IMAGE
from rowmill.runtime.hosting import SERVICES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    document: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    found: dict[str, Any] = document["services"]
    return found


def test_every_service_that_can_be_served_is_there_once_and_nothing_else(services: dict[str, Any]) -> None:
    assert set(services) == {"rabbitmq", "postgres", *SERVICES}
    for name in SERVICES:
        assert services[name]["command"] == ["serve", name]
        assert services[name]["profiles"] == ["services"]


def test_services_reach_both_servers_by_their_names_in_the_file(services: dict[str, Any]) -> None:
    for name in SERVICES:
        environment = services[name]["environment"]
        assert environment["ROWMILL_BROKER_URL"].endswith("@rabbitmq:5672/")
        assert environment["ROWMILL_DATABASE_URL"].endswith("@postgres:5432/rowmill")
        assert set(services[name]["depends_on"]) == {"rabbitmq", "postgres"}


def test_only_services_that_run_author_code_see_the_project(services: dict[str, Any]) -> None:
    seeing = {name for name in SERVICES if "ROWMILL_PROJECT" in services[name]["environment"]}
    assert seeing == {"row-executor", "tool-gateway"}
    assert {name for name in SERVICES if "env_file" in services[name]} == {"tool-gateway"}


def test_servers_listen_on_loopback_only(services: dict[str, Any]) -> None:
    for name in ("rabbitmq", "postgres"):
        assert all(port.startswith("127.0.0.1:") for port in services[name]["ports"])
    assert all("ports" not in services[name] for name in SERVICES)


def test_servers_are_the_versions_that_rowmill_dev_starts(services: dict[str, Any]) -> None:
    assert services["rabbitmq"]["image"] == RABBITMQ_IMAGE
    assert services["postgres"]["image"] == POSTGRES_IMAGE


def test_the_image_holds_every_source_root() -> None:
    copied = [line.split()[1:-1] for line in (ROOT / "Dockerfile").read_text().splitlines() if line.startswith("COPY")]
    assert {"contracts", "shared", "services", "pyproject.toml", "requirements.lock"} <= {name for names in copied for name in names}
