"""What is known of runs whose rows wait: by admission's tables, by the provider's arrivals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import asyncpg

from rowmill.client import Job


class Books:
    """What admission and the sheet-writer have written about the runs that wait, each of whose rows is named ``RUN:ROW`` by its place."""

    def __init__(self, connection: asyncpg.Connection, jobs: list[Job]) -> None:
        self._connection = connection
        self._runs = [job.run_id for job in jobs]
        self.typical_waits = 0
        """Times that nine rows of ten have waited at most. The others found out whether the provider serves again."""
        self.most_waits = 0

    async def waiting(self) -> int:
        row = await self._connection.fetchrow(
            "SELECT count(*) FILTER (WHERE w.state = 'waiting') AS waiting, max(w.waits) AS most,"
            " coalesce(percentile_disc(0.9) WITHIN GROUP (ORDER BY w.waits), 0) AS typical"
            " FROM admission.waits w JOIN admission.datasets d USING (dataset_seq) WHERE d.run_id = ANY ($1)",
            self._runs,
        )
        assert row is not None
        self.typical_waits = max(self.typical_waits, row["typical"])
        self.most_waits = max(self.most_waits, row["most"] or 0)
        return int(row["waiting"])

    async def asked(self) -> dict[str, float]:
        """When the call of each row that waits, or has waited and is under way, was first asked for, by the row's name."""
        rows = await self._connection.fetch(
            "SELECT d.run_id, w.row_index, w.asked FROM admission.waits w JOIN admission.datasets d USING (dataset_seq) WHERE d.run_id = ANY ($1)",
            self._runs,
        )
        number = {run_id: place for place, run_id in enumerate(self._runs)}
        return {f"{number[row['run_id']]}:{row['row_index']}": row["asked"] for row in rows}

    async def admitted(self) -> list[int]:
        """Rows that were admitted, by run."""
        rows = await self._connection.fetch("SELECT sum(row_count) AS rows FROM sheets.pages WHERE run_id = ANY ($1) GROUP BY run_id", self._runs)
        return [row["rows"] for row in rows]


@dataclass(frozen=True, slots=True)
class Order:
    """In which order rows that had waited arrived, and which arrived before they were all there.

    ``overtaking``: rows that had not waited and arrived before one of their run that had, by name. ``early``: by how many places the row came that
    came the most before the place that its age gives it among those of its run that had waited, but for those that were to find out whether the
    provider serves. ``apart``: the most by which one run was ahead of another, as long as that one had some left.
    """

    overtaking: list[str]
    early: int
    apart: int


def order_of(arrivals: Sequence[str], asked: dict[str, float], *, scouts: int) -> Order:
    """``asked``: of the rows that had waited. ``scouts``: so many at most were to find out whether the provider serves."""
    of_run: dict[str, list[str]] = defaultdict(list)
    for name in arrivals:
        of_run[name.partition(":")[0]].append(name)
    waited: dict[str, list[str]] = defaultdict(list)
    for name in sorted(asked, key=asked.__getitem__):
        waited[name.partition(":")[0]].append(name)
    overtaking = [name for run, names in of_run.items() for name in names[: len(waited[run])] if name not in asked]
    before_their_place: list[int] = []
    for run, names in waited.items():
        place = {name: number for number, name in enumerate(names)}
        arrived = [name for name in of_run[run] if name in place]
        before_their_place += [place[name] - number for number, name in enumerate(arrived)]
    early = sorted(before_their_place, reverse=True)[min(scouts, len(before_their_place) - 1)]
    ahead = dict.fromkeys(waited, 0)
    apart = 0
    for name in arrivals:
        if name in asked:
            ahead[name.partition(":")[0]] += 1
            unfinished = [count for run, count in ahead.items() if count < len(waited[run])]
            apart = max(apart, max(ahead.values()) - min(unfinished, default=max(ahead.values())))
    return Order(overtaking, early, apart)


def most_within(times: list[float], seconds: float) -> int:
    """The most arrivals in any window of that length."""
    first, most = 0, 0
    for last, time in enumerate(times):
        while time - times[first] >= seconds:
            first += 1
        most = max(most, last - first + 1)
    return most
