"""Each test defines plays, tools and providers in a registry of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rowmill import registry


@pytest.fixture(autouse=True)
def own_registry() -> Iterator[registry.Registry]:
    with registry.isolated() as empty:
        yield empty
