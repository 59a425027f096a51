"""Comparing with a provider's own books: that no effect happened twice."""

from __future__ import annotations

import json
from typing import Any, Final

import aiohttp

from rowmill.doctor.findings import Finding
from rowmill.errors import UnavailableError

ANSWER_SECONDS: Final = 15.0
EXAMPLES: Final = 5


async def provider_findings(url: str) -> list[Finding]:
    """What a provider's ``GET URL`` says of effects: a JSON object with ``effects`` (how many there were, by idempotency key), or at least
    ``max_effects_per_key``.

    Raises:
        UnavailableError: it does not answer, or not with that.

    """
    try:
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as session, session.get(url) as answer:
            answer.raise_for_status()
            stats: Any = json.loads(await answer.text())
        return judge(url, stats.get("effects"), stats.get("max_effects_per_key"))
    except (aiohttp.ClientError, TimeoutError, ValueError, AttributeError, TypeError) as error:
        raise UnavailableError(f"{url} does not tell the provider's effects: {error or error!r}") from error


def judge(url: str, effects: dict[str, int] | None, most: int | None) -> list[Finding]:
    """Raises TypeError where neither is told."""
    if effects is None:
        if most is None:
            raise TypeError("neither 'effects' nor 'max_effects_per_key' is there")
        twice, named = (1 if most > 1 else 0), f"one of them {most} times"
    else:
        keys = sorted(key for key, times in effects.items() if times > 1)
        twice, named = len(keys), ", ".join(f"{key} {effects[key]} times" for key in keys[:EXAMPLES])
    if not twice:
        return []
    return [
        Finding(
            "effects",
            f"The provider at {url} counts more than one effect under the same idempotency key ({named}).",
            "Either it does not honour the keys that it is sent, or its tool should be declared non_idempotent.",
        )
    ]
