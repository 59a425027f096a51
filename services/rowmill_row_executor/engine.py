"""What bodies and rows work with, and the programs that were captured with it."""

from __future__ import annotations

from concurrent.futures import Executor
from dataclasses import dataclass

from rowmill.errors import RowmillError
from rowmill.runtime.clock import Clock
from rowmill.runtime.deliveries import Rejected
from rowmill.runtime.rest import Rest, working
from rowmill_contracts.runs import RunRecord
from rowmill_row_executor.capture import Captured, Programs, capture
from rowmill_row_executor.code import PlayCode
from rowmill_row_executor.ports import Admission, CallDesk, RowSource, Settler
from rowmill_row_executor.settings import RowExecutorSettings
from rowmill_row_executor.step_runner import StepRunner


@dataclass(frozen=True, slots=True)
class Engine:
    """What bodies and rows work with, wired by the app."""

    admission: Admission
    desk: CallDesk
    sheets: RowSource
    settler: Settler
    clock: Clock
    code: PlayCode
    threads: Executor
    steps: StepRunner


class RunStopped(RowmillError):
    """The run was stopped; its rows are cancelled."""

    code = "run_stopped"


class Captures:
    """Programs of datasets, captured when they are first wanted."""

    def __init__(self, engine: Engine, settings: RowExecutorSettings) -> None:
        self._engine = engine
        self._settings = settings
        self._programs = Programs(settings.programs_kept)

    async def of(self, run_id: str, dataset: str, rest: Rest | None = None) -> Captured:
        """Raises what `capture` and `record_of` raise. ``rest``: of a suspect, which is at work while the body runs for it."""
        return await self._programs.get(run_id, dataset, lambda: self._capture(run_id, dataset, rest))

    async def _capture(self, run_id: str, dataset: str, rest: Rest | None) -> Captured:
        run = await self.record_of(run_id)
        play = self._engine.code.play(run.play)
        async with working(rest):
            return await capture(
                self._engine,
                play,
                run,
                dataset,
                self._engine.code.digest(run.play),
                timeout=self._settings.capture_timeout,
                drop_patience=self._settings.body_drop_patience,
            )

    async def record_of(self, run_id: str) -> RunRecord:
        """Raises `RunStopped`, and `Rejected` for a run that nobody knows."""
        taken = await self._engine.admission.take(run_id, read_only=True)
        if taken.outcome == "over":
            raise RunStopped(f"run {run_id!r} was stopped")
        if taken.run is None:
            raise Rejected(f"no run {run_id!r}")
        return taken.run
