"""Real servers for the tests in tests/integration and tests/e2e. Unit tests use none of this.

- `broker_url`, `database_url`: an emptied virtual host, and a database of the test module's own, dropped at its end.
- `servers`: the session's shared pair behind them. Nobody stops, kills or freezes these.
- `own_servers`: a pair for tests that do; running anew at the start of each test.

One private pair is started for the session in a folder of its own and deleted at the end. `ROWMILL_TEST_SERVERS=FOLDER` keeps a pair in
that folder running between sessions instead (nothing to wait for); `ROWMILL_BROKER_URL` and `ROWMILL_DATABASE_URL` name servers to use as
they are.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
import structlog
from tests.pairs import private_pair
from tests.vhosts import Vhosts, vhosts_of

from rowmill.dev import ServerSet, private_servers
from rowmill.dev.external import ExternalBroker, ExternalDatabase
from rowmill.dev.nodes import BrokerNode, DatabaseNode
from rowmill.dev.private import PrivateServers
from rowmill.dev.state import locked

_numbers = count(1)

# Tracebacks in the log as services write them. By default structlog draws them with all local variables, a second each in which the loop stands
# still.
structlog.configure(
    processors=[
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.StackInfoRenderer(),
        structlog.processors.TimeStamper(fmt="%Y-%m-%d %H:%M:%S", utc=False),
        structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback),
    ]
)


@pytest.fixture(scope="session")
def servers() -> Iterator[ServerSet]:
    """The session's broker and database."""
    broker_url, database_url = os.environ.get("ROWMILL_BROKER_URL"), os.environ.get("ROWMILL_DATABASE_URL")
    kept = os.environ.get("ROWMILL_TEST_SERVERS")
    if broker_url and database_url:
        found = ServerSet(ExternalBroker(broker_url), ExternalDatabase(database_url))
        found.start()
        yield found
    elif kept:
        private = private_servers(Path(kept).resolve())
        with locked(private.folder / "lock"):
            private.start()
        yield private
    else:
        with private_pair() as private:
            broker: BrokerNode = ExternalBroker(broker_url) if broker_url else private.broker
            database: DatabaseNode = ExternalDatabase(database_url) if database_url else private.database
            found = ServerSet(broker, database)
            found.start()
            yield found


@pytest.fixture(scope="session")
def _vhosts(servers: ServerSet) -> Iterator[Vhosts]:
    with vhosts_of(servers.broker) as vhosts:
        yield vhosts


@pytest.fixture(scope="module")
def broker_url(servers: ServerSet, request: pytest.FixtureRequest) -> str:
    """A virtual host in which nothing is left of other test modules (of a broker that is not ours: the one that its URL names)."""
    if servers.broker.kind == "external":
        return servers.broker.url
    vhosts: Vhosts = request.getfixturevalue("_vhosts")
    return vhosts.empty_one()


@pytest.fixture(scope="module")
def database_url(servers: ServerSet, request: pytest.FixtureRequest) -> Iterator[str]:
    """An empty database of this test module's own."""
    name = _name_for(request)
    yield servers.database.create_database(name)
    servers.database.drop_database(name)


@pytest.fixture(scope="module")
def _module_pair() -> Iterator[PrivateServers]:
    with private_pair() as private:
        yield private


@pytest.fixture
def own_servers(_module_pair: PrivateServers) -> PrivateServers:
    """A pair that this test may stop, kill and freeze; both run at its start. Data of the module's earlier tests are still there.

    Its calls block; in async tests use ``await asyncio.to_thread(own_servers.broker.kill)``.
    """
    _module_pair.broker.resume()
    _module_pair.database.resume()
    _module_pair.start()
    return _module_pair


def _name_for(request: pytest.FixtureRequest) -> str:
    module = re.sub(r"[^a-z0-9]+", "_", request.module.__name__.rsplit(".", 1)[-1].lower())
    return f"{module[:40]}_{os.getpid()}_{next(_numbers)}"
