"""What a process ends itself for: memory over its limit, a loop that does not turn. Whoever watches over it starts it again.

A process in that state cannot say which message brought it there, and a handler's error would blame a bystander. Ending tells the broker: what was in
hand comes again, and the message that does it every time is found as a suspect (DESIGN.md, "When something dies").
"""

from __future__ import annotations

import asyncio
import faulthandler
import os
import resource
from typing import Any, Final, NoReturn

import structlog

log = structlog.get_logger()

EXIT_STATUS: Final = 70
"""Of a process that ended itself for its memory; one whose loop stood still ends with 1."""


def limit_memory(megabytes: int | None) -> None:
    """Let this process have no more address space than that; what would need more raises `MemoryError`. None: no limit of ours."""
    if megabytes is not None:
        size = megabytes * 1024 * 1024
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (size if hard == resource.RLIM_INFINITY else min(size, hard), hard))


def end_process(event: str, **fields: Any) -> NoReturn:
    """End without a further word: nothing is stored, acknowledged or answered."""
    try:
        log.critical(event, **fields)
    finally:
        os._exit(EXIT_STATUS)


async def insist_on_turning(limit: float) -> None:
    """Until cancelled: end the process once its loop has not turned for ``limit`` seconds, with all threads' tracebacks on stderr.

    The timer runs outside Python, so that it also ends what holds the interpreter's lock (a regular expression that backtracks for ever).
    """
    try:
        while True:
            faulthandler.dump_traceback_later(limit, exit=True)
            await asyncio.sleep(limit / 10)
    finally:
        faulthandler.cancel_dump_traceback_later()
