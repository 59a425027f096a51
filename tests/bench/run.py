"""Measure the workloads of the bench on servers of its own, beside its peers in the same sitting. Asserts no time.

    make bench                                       # small sizes, three runs each
    python tests/bench/run.py --workload W1 --rows 20000 --repeat 5 --json out.json
    make bench ARGS=--full                           # W3 with 150 000 rows, W1 with 20 000 too
    make bench ARGS="--workload W9"                  # a rate over two gateways, in a sitting of its own

Exit status 1 if a row was lost or an item paid twice, whatever the speed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import psutil
from report import Figure, print_latency, print_peer, print_sample, print_table
from rig import Rig
from workloads import PACED_RATE, Sample, latencies, new_prefix, peer, run_play, write_rows

WORKLOADS = ("W1", "W1-20ms", "W2", "W3", "W4", "W7")
ALONE = "W9"
"""Wants two gateways, and so a sitting of its own."""


class Bench:
    """One sitting."""

    def __init__(self, rig: Rig, given: argparse.Namespace) -> None:
        self.rig = rig
        self.given = given
        self.figures: list[Figure] = []
        self.problems: list[str] = []

    def play(self, name: str) -> Any:
        import bench_plays  # noqa: PLC0415 - the rig has put its folder on the path

        return getattr(bench_plays, name)

    def csv(self, rows: int) -> Path:
        return write_rows(self.rig.folder / "rows.csv", new_prefix(), rows)

    async def sample(self, label: str, play: str, path: Path, rows: int, requests: int | None) -> Sample:
        sample = await run_play(self.rig, self.play(play), path, rows, requests=requests)
        self.problems += [f"{label}: {problem}" for problem in sample.problems]
        print_sample(label, sample)
        return sample

    def add(self, label: str, samples: list[Sample], target: str, peers: dict[str, list[float]] | None = None) -> None:
        self.figures.append(Figure.of(label, samples, target, peers or {}))

    async def scalar(self, latency_ms: float) -> None:
        """W1: one scalar call a row, 100 in flight; the peers run between ours."""
        rows = self.given.rows or 5_000
        for size in [rows, 20_000] if self.given.full else [rows]:
            label = f"W1 {size} rows, {latency_ms:g} ms"
            names = ("plain aiohttp", "aiohttp on uvloop, results thrown away", "bare aio-pika")
            samples: list[Sample] = []
            peers: dict[str, list[float]] = {name: [] for name in names}
            self.rig.provider.control(latency_ms=latency_ms)
            for _ in range(self.given.repeat):
                samples.append(await self.sample(label, "scalar", self.csv(size), size, size))
                if self.given.no_peers:
                    continue
                path = str(self.csv(size))
                provider, database = self.rig.provider.url, self.rig.database_url
                for name, script, urls, options in (
                    (names[0], "plain_aiohttp.py", [provider], ["--csv", path, "--database", database]),
                    (names[1], "plain_aiohttp.py", [provider], []),
                    (names[2], "plain_aio_pika.py", [self.rig.broker_url, database, provider], []),
                ):
                    result = await asyncio.to_thread(peer, script, *urls, new_prefix(), str(size), *options)
                    peers[name].append(result["rows"] / result["seconds"])
                    print_peer(name, result)
            self.rig.provider.control(latency_ms=0.0)
            self.add(label, samples, "8 000 rows/s" if not latency_ms else "4 500 rows/s", peers)

    async def batches(self, *, again: bool) -> None:
        """W2: 50 rows a request; W4: the same again, unchanged."""
        rows = self.given.rows or 20_000
        samples, repeated, peers = [], [], {"plain aiohttp, 50 a request": []}  # type: ignore[var-annotated]
        for _ in range(self.given.repeat):
            path = self.csv(rows)
            samples.append(await self.sample("W2", "batch", path, rows, int(1.05 * rows / 50) + 1))
            if again:
                repeated.append(await self.sample("W4", "batch", path, rows, 0))
            if not self.given.no_peers:
                result = await asyncio.to_thread(peer, "plain_aiohttp.py", self.rig.provider.url, new_prefix(), str(rows), "--batch", "50")
                peers["plain aiohttp, 50 a request"].append(result["rows"] / result["seconds"])
        self.add(f"W2 {rows} rows", samples, "15 000 rows/s, ≤ 1.05 × rows / 50 requests", peers)
        if again:
            self.add(f"W4 {rows} rows", repeated, "100 000 rows/s, no request")

    async def pure(self) -> None:
        """W3: two pure columns."""
        rows = self.given.rows or (150_000 if self.given.full else 50_000)
        samples = [await self.sample("W3", "pure", self.csv(rows), rows, 0) for _ in range(self.given.repeat)]
        self.add(f"W3 {rows} rows", samples, "30 000 rows/s")

    async def paced(self) -> None:
        """W9: a provider that allows 200 requests a second, two gateways. Too many are 5 of 100 more than that in any second by the provider's own
        clock: 50 ms of the rate, for what requests may differ by on their way.
        """
        rows = self.given.rows or (10_000 if self.given.full else 3_000)
        samples = []
        for _ in range(self.given.repeat):
            sample = await self.sample("W9", "paced", self.csv(rows), rows, rows)
            peak = sample.usage.provider["peak_per_second"]["hunter"]
            if peak > 1.05 * PACED_RATE:
                self.problems.append(f"W9: {peak} requests came within a second, {PACED_RATE} are allowed")
            print(f"W9: at most {peak} requests in any second; {100 * sample.rate / PACED_RATE:.1f} % of the rate over the whole run", flush=True)
            samples.append(sample)
        self.add(f"W9 {rows} rows", samples, f"98 % of {PACED_RATE}/s, never more")

    async def idle(self) -> None:
        """W7: one row while the system is idle."""
        found = sorted(await latencies(self.rig, self.given.latencies))
        self.figures.append(print_latency(found))

    async def all(self) -> None:
        wanted = self.given.workload or WORKLOADS
        if ALONE in wanted:
            await self.paced()
            return
        await self.sample("warm-up", "scalar", self.csv(400), 400, 400)
        await self.sample("warm-up", "batch", self.csv(400), 400, None)
        await self.sample("warm-up", "pure", self.csv(400), 400, 0)
        if "W7" in wanted:
            await self.idle()
        if "W1" in wanted:
            await self.scalar(0.0)
        if "W1-20ms" in wanted:
            await self.scalar(20.0)
        if "W2" in wanted or "W4" in wanted:
            await self.batches(again="W4" in wanted)
        if "W3" in wanted:
            await self.pure()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--workload", action="append", choices=(*WORKLOADS, ALONE), help=f"one; may be given more than once (default: all but {ALONE})"
    )
    parser.add_argument("--rows", type=int, help="instead of the workload's own number")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--latencies", type=int, default=50, help="runs of one row in W7")
    parser.add_argument("--full", action="store_true", help="full sizes")
    parser.add_argument("--no-peers", action="store_true", help="ours alone; says nothing about ratios")
    parser.add_argument("--json", type=Path, help="write the figures there too")
    given = parser.parse_args()
    load = ", ".join(f"{number:.1f}" for number in os.getloadavg())
    print(f"{platform.platform()}, Python {platform.python_version()}, {psutil.cpu_count()} cores; load before: {load}", flush=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped then, too
    with Rig(copies={"tool-gateway": 2} if given.workload and ALONE in given.workload else None) as rig:
        bench = Bench(rig, given)
        asyncio.run(bench.all())
    print_table(bench.figures)
    if given.json:
        given.json.write_text(json.dumps({"load": load, "figures": [asdict(figure) for figure in bench.figures]}, indent=2))
    for problem in bench.problems:
        print(f"PROBLEM {problem}", file=sys.stderr)
    return 1 if bench.problems else 0


if __name__ == "__main__":
    sys.exit(main())
