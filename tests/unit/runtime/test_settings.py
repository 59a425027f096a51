"""Settings that every service has."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from rowmill.runtime.settings import ServiceSettings


def test_the_broker_and_we_hear_of_each_other_every_few_seconds() -> None:
    """Without heartbeats nobody would notice that a connection is half-open, or that a process stands still."""
    assert 5 <= ServiceSettings().heartbeat_seconds <= 10
    for never in (0, -1):
        with pytest.raises(ValidationError):
            ServiceSettings(heartbeat_seconds=never)
