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
