"""What a person sees while a run goes, and when it is over."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import msgspec
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from rowmill.cli.outages import News, outage_told
from rowmill.cli.wording import MOST_CODES, charged_told, first_error_told, numbered, problem_told, rows_told
from rowmill_contracts.counts import Counts, Problem
from rowmill_contracts.events import DatasetEvent, RunEvent
from rowmill_contracts.run_questions import RunSummary

if TYPE_CHECKING:
    from rowmill.client.outages import Outage

PLAIN_SECONDS = 2.0
"""Where stderr is no terminal, one line this often."""


class Progress:
    """Live counts on stderr, from the run's events: a table at a terminal, else a line every two seconds."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=8, transient=True) if self._console.is_terminal else None
        self._staged = 0
        self._state = "staging"
        self._waiting_for = ""
        self._run_id = ""
        self._counts: dict[str, Counts] = {}
        self._totals: dict[str, int | None] = {}
        self._charged = ""
        self._started = self._moved = time.monotonic()
        self._printed = 0.0
        self._before: dict[str, int] = {}
        """Rows of each dataset that had ended when this command heard of it first, which are none of its rate."""
        self._outages: Sequence[Outage] = ()
        self._news = News()
        self._codes: set[str] = set()
        """Codes of errors that were said."""

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    def staged(self, rows: int) -> None:
        self._staged = rows
        self._show()

    def run_started(self, run_id: str) -> None:
        self._run_id = run_id
        self._state = "queued"
        self._started = self._moved = time.monotonic()
        self._console.print(f"rowmill: staged {numbered(self._staged, 'row')}; run {run_id}", highlight=False)

    def run_state(self, event: RunEvent) -> None:
        self._state = event.state
        self._waiting_for = event.waiting_for or ""
        self._show()

    def dataset(self, event: DatasetEvent) -> None:
        known = self._counts.get(event.dataset)
        if known is None or (event.counts.admitted, event.counts.terminal) != (known.admitted, known.terminal):
            self._moved, self._outages = time.monotonic(), ()
        self._before.setdefault(event.dataset, event.counts.terminal)
        if known is None or event.counts.terminal >= known.terminal:
            self._counts[event.dataset] = event.counts
            self._totals[event.dataset] = event.total_rows
        if event.run_calls is not None:
            self._charged = f"calls {event.run_calls}, cost {event.run_cost}"
        if event.first_error is not None:
            self._fails_of(event.dataset, event.first_error)
        self._show()

    def stands_still(self, seconds: float) -> bool:
        """Whether no row was admitted, and none ended, for so long."""
        return time.monotonic() - self._moved >= seconds

    def waits_for(self, outages: Sequence[Outage]) -> None:
        """Providers that keep rows waiting while the counts stand still: shown below them at a terminal, else a line for each change."""
        self._outages = outages
        for outage in self._news.of(outages, time.monotonic()) if self._live is None else ():
            self._console.print(f"rowmill: {outage_told(outage)}", highlight=False, soft_wrap=True)
        if self._live is not None:
            self._show()

    def _fails_of(self, dataset: str, error: Problem) -> None:
        """Say why rows fail while there is time to stop them: the first error of a code, once."""
        if error.code not in self._codes and len(self._codes) < MOST_CODES:
            self._codes.add(error.code)
            self._console.print(f"rowmill: {dataset}: {first_error_told(error)}", highlight=False, markup=False, soft_wrap=True)

    def _show(self) -> None:
        if self._live is not None:
            self._live.update(self._table())
        elif time.monotonic() - self._printed >= PLAIN_SECONDS and self._counts:
            self._printed = time.monotonic()
            for name, counts in self._counts.items():
                line = ", ".join(filter(None, (_line(counts, self._rate(name, counts)), self._charged)))
                self._console.print(f"rowmill: {name}: {line}", highlight=False, soft_wrap=True)

    def _rate(self, dataset: str, counts: Counts) -> float:
        """Rows that ended in a second, of those that had not when this command came."""
        return (counts.terminal - self._before[dataset]) / max(time.monotonic() - self._started, 0.001)

    def _table(self) -> Group:
        title = ", ".join(filter(None, (f"run {self._run_id}: {self._state}", self._charged)))
        table = Table(title=title if self._run_id else f"staging: {numbered(self._staged, 'row')}", title_justify="left")
        for column in ("dataset", "admitted", "done", "failed", "reused", "rows/s"):
            table.add_column(column, justify="left" if column == "dataset" else "right")
        for name, counts in self._counts.items():
            total = self._totals.get(name)
            admitted = f"{counts.admitted}/{total}" if total is not None else str(counts.admitted)
            done = str(counts.completed)
            figures = (str(counts.failed), str(counts.reused), f"{self._rate(name, counts):.0f}")
            table.add_row(name, admitted, done, *figures)
        return Group(table, *(Text(outage_told(outage)) for outage in self._outages))


def _line(counts: Counts, rate: float) -> str:
    return f"admitted {counts.admitted}, done {counts.completed}, failed {counts.failed}, reused {counts.reused}, {rate:.0f} rows/s"


def shown(summary: RunSummary, seconds: float, out: Path | None, written: int | None, *, as_json: bool) -> str:
    """The end of a run for a person, or as one JSON object."""
    counts = msgspec.to_builtins(summary.counts)
    if as_json:
        document: dict[str, Any] = {
            "run_id": summary.run_id,
            "state": summary.state,
            "counts": counts,
            "charges_known": summary.charges_known,
            "output": msgspec.json.decode(summary.output),
            "error": None if summary.error is None else msgspec.to_builtins(summary.error),
            "seconds": round(seconds, 3),
            "out": None if out is None else str(out),
            "written": written,
        }
        return msgspec.json.encode(document).decode()
    total = summary.counts
    lines = [
        f"run {summary.run_id} {summary.state} in {seconds:.1f} s",
        f"  rows: {rows_told(total)}",
        f"  calls: {charged_told(summary)}",
    ]
    if summary.error is not None:
        lines.append(f"  error: {problem_told(summary.error)}")
    if out is not None:
        lines.append(f"  {numbered(written or 0, 'row')} written to {out}")
    return "\n".join(lines)
