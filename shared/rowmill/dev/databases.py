"""Creating and dropping databases in a Postgres that some URL names, whoever runs it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote, urlsplit, urlunsplit

from rowmill.errors import ServersUnavailable

_CONNECT_SECONDS = 10.0


def url_of_database(url: str, name: str) -> str:
    """The same server, another database."""
    return urlunsplit(urlsplit(url)._replace(path=f"/{quote(name, safe='')}"))


def create_database(url: str, name: str) -> str:
    """Create an empty database beside the one that `url` names; returns its URL. One that exists is an error."""
    execute(url, f"CREATE DATABASE {quoted(name)} TEMPLATE template0 ENCODING 'UTF8'")
    return url_of_database(url, name)


def drop_database(url: str, name: str) -> None:
    """Drop a database if there is one, ending connections to it (Postgres 13 and later)."""
    execute(url, f"DROP DATABASE IF EXISTS {quoted(name)} WITH (FORCE)")


def quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def execute(url: str, statement: str) -> None:
    """Run one statement outside a transaction, in a thread and loop of its own: it works inside a running loop too, and blocks it."""
    with ThreadPoolExecutor(max_workers=1) as pool:
        pool.submit(asyncio.run, _execute(url, statement)).result()


async def _execute(url: str, statement: str) -> None:
    import asyncpg  # noqa: PLC0415 - a driver is loaded only by who connects

    try:
        connection = await asyncpg.connect(url, timeout=_CONNECT_SECONDS, ssl=False)
    except (OSError, TimeoutError) as error:
        raise ServersUnavailable(f"no connection to the database at {urlsplit(url).hostname}:{urlsplit(url).port}: {error}") from error
    try:
        await connection.execute(statement)
    finally:
        await connection.close()
