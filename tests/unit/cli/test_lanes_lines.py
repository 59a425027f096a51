"""Lanes as lines: columns stay apart, however much stands in them."""

from __future__ import annotations

import pytest

from rowmill.cli.lanes import _line
from rowmill_contracts.events import LaneView


@pytest.mark.parametrize("provider", ["hunter", "a-provider-with-quite-a-long-name"])
def test_two_spaces_at_least_stand_between_columns(provider: str) -> None:
    lane = LaneView(org="default", provider=provider, shard=1, held=True, concurrency=5, unavailable_seconds=1234.0, why="connection_failed")
    closed = LaneView(org="default", provider=provider, shard=1, held=True, concurrency=5, closed_seconds=42.0, why="http_503")
    for each, state in ((lane, "cannot be reached"), (closed, "answers 503")):
        line = _line(each)
        assert f"{state}  " in line
        assert line.endswith("  0/5 requests open, 0 waiting")
        assert f"/{provider}  " in line
    opened = _line(LaneView(org="default", provider="hunter", shard=1, held=True, concurrency=5))
    assert opened.index("open  ") == 31
