"""Writes the leads, the same bytes for the same number of rows: `python make_leads.py --rows 20000 --out many.csv`."""

from __future__ import annotations

import argparse
import csv
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

COLUMNS = ["domain", "name", "company", "country", "employees"]

_FIRST = ["Zoë", "Ana", "Jürgen", "Søren", "Łukasz", "Mei", "Amélie", "Tom", "Ngozi", "Iñaki", "Aiko", "Björn", "Олена", "美咲", "Priya"]
_LAST = ["Müller", "O'Brien", "García", "Nowák", "Sørensen", "Smith", "Lefèvre", "Okafor", "Tanaka", "Ivanova", "Çelik", "Rossi", "Patel"]
_TRADE = ["Logistics", "Robotics", "Foods", "Textiles", "Optics", "Energy", "Media", "Analytics", "Paper", "Shipping", "Labs", "Toys"]
_STEM = ["north", "blue", "alder", "quartz", "river", "lumen", "cobalt", "maple", "delta", "harbor", "willow", "summit", "copper", "ember"]
_COUNTRY = ["DE", "FR", "ES", "PL", "DK", "GB", "US", "NG", "JP", "UA", "TR", "IT", "IN"]
_ENDING = ["example", "test"]  # reserved: nobody's real domain is asked about


def lead_rows(count: int) -> Iterator[dict[str, str]]:
    """`count` leads with distinct domains; one name in twenty is empty, and some companies hold a comma or a quote."""
    dice = random.Random(20240229)
    for number in range(count):
        stem, trade = dice.choice(_STEM), dice.choice(_TRADE)
        name = f"{dice.choice(_FIRST)} {dice.choice(_LAST)}" if dice.random() >= 0.05 else ""
        form = dice.choice([" GmbH", ", Inc.", " S.A.", ' "Group"', " Ltd", ""])
        yield {
            "domain": f"{stem}-{trade.lower()}-{number:04d}.{dice.choice(_ENDING)}",
            "name": name,
            "company": f"{stem.capitalize()} {trade}{form}",
            "country": dice.choice(_COUNTRY),
            "employees": str(int(10 ** dice.uniform(0.3, 4.5))),
        }


def write_leads(out: TextIO, count: int) -> None:
    writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lead_rows(count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("leads.csv"))
    options = parser.parse_args()
    with options.out.open("w", encoding="utf-8", newline="") as out:
        write_leads(out, options.rows)


if __name__ == "__main__":
    main()
