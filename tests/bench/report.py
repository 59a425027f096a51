"""What the bench prints: one line per run, then a table of medians with their ranges and ratios."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field
from typing import Self

from rig import OURS
from workloads import Sample


@dataclass
class Figure:
    """One line of the table. ``rates`` in rows per second (or, for a latency, empty)."""

    label: str
    target: str
    rates: list[float] = field(default_factory=list)
    cpu_ms_per_row: float = 0.0
    all_cpu_ms_per_row: float = 0.0
    peak_mb: float = 0.0
    messages_per_row: float = 0.0
    commits_per_row: float = 0.0
    requests: int = 0
    repeated: int = 0
    peers: dict[str, list[float]] = field(default_factory=dict)
    latency_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, label: str, samples: list[Sample], target: str, peers: dict[str, list[float]]) -> Self:
        middle = statistics.median
        return cls(
            label=label,
            target=target,
            rates=sorted(sample.rate for sample in samples),
            cpu_ms_per_row=middle(sum(sample.usage.cpu[name] for name in OURS) * 1000 / sample.rows for sample in samples),
            all_cpu_ms_per_row=middle(sum(sample.usage.cpu.values()) * 1000 / sample.rows for sample in samples),
            peak_mb=middle(sample.usage.peak_mb for sample in samples),
            messages_per_row=middle(sample.usage.messages / sample.rows for sample in samples),
            commits_per_row=middle(sample.usage.commits / sample.rows for sample in samples),
            requests=max(sum(sample.usage.provider["requests"].values()) for sample in samples),
            repeated=max(sample.usage.provider["repeated_subjects"] for sample in samples),
            peers={name: sorted(rates) for name, rates in peers.items() if rates},
        )


def ranged(numbers: list[float]) -> str:
    """Median and range, such as ``8 120 (7 900–8 400)``."""
    low, middle, high = (f"{number:,.0f}".replace(",", " ") for number in (min(numbers), statistics.median(numbers), max(numbers)))
    return f"{middle} ({low}–{high})"


def print_sample(label: str, sample: Sample) -> None:
    usage = sample.usage
    cpu = " ".join(f"{name} {seconds * 1000 / sample.rows:.3f}" for name, seconds in usage.cpu.items())
    print(
        f"{label}: {sample.rate:,.0f} rows/s in {usage.seconds:.2f} s (staged {sample.staged_seconds:.2f}); {usage.messages} messages, "
        f"{usage.commits} commits, {usage.peak_mb:.0f} MB, {sum(usage.provider['requests'].values())} requests; CPU ms/row: {cpu}",
        flush=True,
    )


def print_peer(name: str, result: dict[str, float]) -> None:
    rate, cpu = result["rows"] / result["seconds"], result["cpu_seconds"] * 1000 / result["rows"]
    print(f"  {name}: {rate:,.0f} rows/s, CPU {cpu:.3f} ms/row", flush=True)


def print_latency(sorted_seconds: list[float]) -> Figure:
    figure = Figure("W7 one row, idle", "p50 ≤ 15 ms, p99 ≤ 30 ms")
    last = len(sorted_seconds) - 1
    for name, share in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99)):
        figure.latency_ms[name] = sorted_seconds[min(last, round(share * last))] * 1000
    print("W7: " + ", ".join(f"{name} {ms:.1f} ms" for name, ms in figure.latency_ms.items()), flush=True)
    return figure


def print_table(figures: list[Figure]) -> None:
    """A Markdown table, as in docs/verification.md."""
    print(
        "\n| workload | rows/s, median (range) | target | beside the peers | requests | paid twice | CPU ms/row ours (all) | MB | messages/row | commits/row |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for figure in figures:
        if figure.latency_ms:
            print(
                f"| {figure.label} | "
                + ", ".join(f"{name} {ms:.1f} ms" for name, ms in figure.latency_ms.items())
                + f" | {figure.target} | | | | | | | |"
            )
            continue
        rate = statistics.median(figure.rates)
        peers = "; ".join(f"{rate / statistics.median(rates):.2f} × {name} {ranged(rates)}" for name, rates in figure.peers.items())
        print(
            f"| {figure.label} | {ranged(figure.rates)} | {figure.target} | {peers} | {figure.requests} | {figure.repeated} | "
            f"{figure.cpu_ms_per_row:.3f} ({figure.all_cpu_ms_per_row:.3f}) | {figure.peak_mb:.0f} | {figure.messages_per_row:.3f} | {figure.commits_per_row:.3f} |"
        )
