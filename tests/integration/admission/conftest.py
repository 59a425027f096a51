"""Admission with played neighbours around it (`admission_neighbours`); every duration at a twentieth."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tests.integration.admission.admission_neighbours import Neighbours

from rowmill.runtime.bus import Bus
from rowmill_admission.app import App
from rowmill_admission.settings import AdmissionSettings


@pytest.fixture
def settings(broker_url: str, database_url: str) -> AdmissionSettings:
    return AdmissionSettings(broker_url=broker_url, database_url=database_url, time_scale=0.05, halt_grace=60.0)


@pytest.fixture
async def neighbours(settings: AdmissionSettings) -> AsyncIterator[Neighbours]:
    async with Bus(settings.model_copy(update={"ask_timeout": 20.0, "ask_again": 2.0}), service="neighbours") as bus:
        played = Neighbours(bus)
        await played.join()
        yield played


@pytest.fixture
async def admission(settings: AdmissionSettings) -> AsyncIterator[App]:
    app = App(settings)
    await app.start()
    yield app
    await app.stop()
