"""What is loaded by whom: authors' code and short commands must not wait for drivers."""

from __future__ import annotations

import subprocess
import sys

import pytest

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
