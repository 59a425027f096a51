"""Durations and rates as authors write them, turned into numbers.

Owns the two small notations of the authoring surface: durations (``"7d"``, ``"1h30m"``, ``250``) and rates (``"10/s"``).
"""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from rowmill.errors import DefinitionError

Duration = float | int | str
"""Seconds as a number, or text such as ``"7d"``, ``"1h30m"``, ``"1.5h"``, ``"250ms"``."""

_UNIT_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ms|min|s|m|h|d|w)")
_RATE = re.compile(r"(\d+)\s*/\s*(\d+(?:\.\d+)?)?\s*(ms|min|s|m|h|d|w)")


def seconds(duration: Duration) -> float:
    """The duration in seconds.

    Raises `DefinitionError` for text that is no duration, for a negative number and for one that is not finite.
    """
    if isinstance(duration, str):
        return _seconds_of_text(duration)
    if isinstance(duration, bool) or not isinstance(duration, int | float):
        raise DefinitionError(f"{duration!r} is not a duration: write seconds, or text such as '7d', '1h30m', '250ms'")
    if not math.isfinite(duration) or duration < 0:
        raise DefinitionError(f"{duration!r} is not a duration: it must be finite and not negative")
    return float(duration)


def _seconds_of_text(text: str) -> float:
    compact = text.strip().lower().replace(" ", "")
    if re.fullmatch(r"\d+(\.\d+)?", compact):
        return float(compact)
    total, position = 0.0, 0
    for part in _PART.finditer(compact):
        if part.start() != position:
            break
        total += float(part[1]) * _UNIT_SECONDS[part[2]]
        position = part.end()
    if not compact or position != len(compact):
        raise DefinitionError(f"{text!r} is not a duration: write numbers with the units ms, s, m, h, d, w, such as '7d', '1h30m', '250ms'")
    return total


def optional_seconds(duration: Duration | None) -> float | None:
    """The duration in seconds, None for None."""
    return None if duration is None else seconds(duration)


class Rate(NamedTuple):
    """At most ``requests`` in any window of ``window_seconds``."""

    requests: int
    window_seconds: float

    @classmethod
    def parse(cls, rate: str | Rate) -> Rate:
        """Read ``"10/s"``, ``"60/min"``, ``"1000/h"``, ``"100/30s"``; a `Rate` is returned as it is.

        Raises `DefinitionError` for anything else and for a rate of nothing.
        """
        if isinstance(rate, Rate):
            return rate
        found = _RATE.fullmatch(rate.strip().lower()) if isinstance(rate, str) else None
        if found is None or int(found[1]) == 0 or float(found[2] or 1) == 0:
            raise DefinitionError(f"{rate!r} is not a rate: write requests per unit, such as '10/s', '60/min', '1000/h', '100/30s'")
        return cls(int(found[1]), float(found[2] or 1) * _UNIT_SECONDS[found[3]])

    @property
    def text(self) -> str:
        """As it is written; `parse` reads it."""
        unit = {1.0: "s", 60.0: "min", 3600.0: "h"}.get(self.window_seconds, f"{self.window_seconds:g}s")
        return f"{self.requests}/{unit}"
