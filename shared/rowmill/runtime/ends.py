"""Whose an error is that derives from ``BaseException``: whoever wants the end of a task, or the author code that the task runs.

Author code may raise anything: a cancellation of its own, a panic of an extension module. Left to the task, nobody would hear of it, and who waits
for what the task was to do would wait for ever.
"""

from __future__ import annotations

import asyncio


def being_cancelled() -> bool:
    """Whether somebody asked for the end of the task that runs; else a ``CancelledError`` came out of code that it called."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def ends_the_task(error: BaseException) -> bool:
    """Whether the process, or who cancels the task, wants its end."""
    if isinstance(error, asyncio.CancelledError):
        return being_cancelled()
    return isinstance(error, KeyboardInterrupt | SystemExit | GeneratorExit)
