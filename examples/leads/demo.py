"""The main job on the example: start the local provider, enrich `leads.csv`, show what came out and what was paid; then run it again.

    python demo.py                 # all 1 000 leads
    python demo.py --limit 20      # the first 20

Broker and database are found or started by `rowmill run`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

from provider import ProviderProcess

HERE = Path(__file__).resolve().parent
SHOWN_LINES = 6


def run_leads(out: Path, provider_url: str, limit: int | None) -> int:
    """`rowmill run` as a person would type it, with the providers at `provider_url`; its exit status."""
    command = [sys.executable, "-m", "rowmill", "run", "plays:leads", "--csv", "leads.csv", "--out", str(out)]
    if limit is not None:
        command += ["--limit", str(limit)]
    environment = os.environ | {"HUNTER_KEY": "demo", "APOLLO_KEY": "demo"}
    for provider in ("HUNTER", "APOLLO", "CRM"):
        environment[f"ROWMILL_PROVIDERS__{provider}__BASE_URL"] = provider_url
    return subprocess.run(command, cwd=HERE, env=environment, check=False).returncode


def show_result(out: Path) -> None:
    with out.open(encoding="utf-8") as file:
        for line in islice(file, SHOWN_LINES):
            print("  " + line.rstrip("\n"))


def show_books(stats: dict[str, Any]) -> None:
    requests = ", ".join(f"{n} to {path}" for path, n in stats["requests"].items()) or "none"
    print(f"  requests: {requests}")
    print(f"  items: {sum(stats['items'].values())}, of which paid a second time: {stats['repeated_subjects']}")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--limit", type=int, help="only the first N leads")
    parser.add_argument("--out", type=Path, default=HERE / "enriched.csv")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="how long the provider takes to answer")
    options = parser.parse_args()
    out = options.out.resolve()
    with ProviderProcess("--latency-ms", str(options.latency_ms)) as provider:
        print(f"A provider stands at {provider.url} and counts what it is asked.\n\nFirst run", flush=True)
        if status := run_leads(out, provider.url, options.limit):
            return status
        print(f"\n{out} begins with")
        show_result(out)
        print("\nWhat the provider saw")
        first = provider.stats(brief=True)
        show_books(first)
        if not first["requests"]:
            print("  (an earlier demo had paid for everything; `rowmill dev reset` forgets it)")
        provider.reset()
        print("\nThe same again: what is known is not paid for twice", flush=True)
        if status := run_leads(out, provider.url, options.limit):
            return status
        print("\nWhat the provider saw")
        show_books(provider.stats(brief=True))
    return 0


if __name__ == "__main__":
    sys.exit(main())
