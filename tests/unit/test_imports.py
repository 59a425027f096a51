"""What is loaded by whom: authors' code and short commands must not wait for drivers."""

from __future__ import annotations

import re
import subprocess
import sys
from typing import get_args

import pytest

import rowmill
from rowmill.secret import Auth

DRIVERS = ("aio_pika", "aiormq", "faststream", "asyncpg")


@pytest.mark.parametrize(
    ("module", "kept_out"),
    [
        ("rowmill", DRIVERS),
        ("rowmill.dev", DRIVERS),
        ("rowmill_contracts", (*DRIVERS, "rowmill", "pydantic")),
        ("rowmill.cli.main", (*DRIVERS, "pyarrow", "aiohttp", "httpx")),
    ],
)
def test_importing_it_loads_nothing_that_it_has_no_use_for_yet(module: str, kept_out: tuple[str, ...]) -> None:
    script = f"import sys, {module}; print(' '.join(name for name in {kept_out!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


KNOWN = """
import importlib, pkgutil
import rowmill.runtime.bus, rowmill_contracts
from rowmill_contracts.envelope import MESSAGES
known = set(MESSAGES)
for module in pkgutil.iter_modules(rowmill_contracts.__path__):
    importlib.import_module(f"rowmill_contracts.{module.name}")
print(*sorted(set(MESSAGES) - known))
"""


def test_whoever_is_on_the_bus_knows_every_kind_of_message() -> None:
    """A dead letter, or a hint to all, may be of any; what is not known cannot be told apart from what is malformed."""
    done = subprocess.run([sys.executable, "-c", KNOWN], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


def test_everything_that_authors_import_is_there_and_no_more_is_spoken_of() -> None:
    assert [name for name in rowmill.__all__ if not hasattr(rowmill, name)] == []
    spoken = re.findall(r"`(?:rowmill\.)?(\w+)`", rowmill.__doc__ or "")
    assert "Client" in spoken
    assert [name for name in spoken if not hasattr(rowmill, name)] == []


def test_each_way_of_sending_a_credential_is_imported_beside_the_others() -> None:
    assert {each.__name__ for each in get_args(Auth)} == {"Bearer", "Header", "Basic"}
    assert [getattr(rowmill, each.__name__, None) for each in get_args(Auth)] == list(get_args(Auth))
