"""Threads for blocking author code: bounded, reused, and replaced when nobody waits for them any more."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import wait

import pytest

from rowmill.runtime.author_threads import AuthorThreads


def test_calls_run_in_a_bounded_number_of_threads_and_errors_reach_who_waits() -> None:
    threads = AuthorThreads(2)
    calls = [threads.submit(lambda: threading.current_thread().ident) for _ in range(50)]
    assert not wait(calls, timeout=20).not_done
    assert 1 <= len({call.result() for call in calls}) <= 2
    failing = threads.submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        failing.result(timeout=20)
    threads.shutdown()


@pytest.mark.parametrize("ending", [StopIteration, GeneratorExit])
async def test_a_call_that_raises_what_no_future_hands_on_ends_for_who_waits_in_a_loop(ending: type[BaseException]) -> None:
    def ends() -> None:
        raise ending

    threads = AuthorThreads(1)
    async with asyncio.timeout(20):
        with pytest.raises(RuntimeError, match=f"a function raised {ending.__name__}"):
            await asyncio.get_running_loop().run_in_executor(threads, ends)
    threads.shutdown()


def test_after_the_end_nothing_starts_and_what_waited_is_cancelled() -> None:
    threads = AuthorThreads(1)
    go = threading.Event()
    running = threads.submit(go.wait)
    waiting = threads.submit(go.wait)
    threads.shutdown(wait=False, cancel_futures=True)
    assert waiting.cancelled()
    go.set()
    assert running.result(timeout=20)
    with pytest.raises(RuntimeError):
        threads.submit(go.wait)


async def test_a_call_that_is_given_up_does_not_use_up_a_thread() -> None:
    threads = AuthorThreads(1)
    loop = asyncio.get_running_loop()
    go = threading.Event()
    for _ in range(3):
        started = asyncio.Event()

        def stuck(started: asyncio.Event = started) -> None:
            loop.call_soon_threadsafe(started.set)
            go.wait(20)

        call = loop.run_in_executor(threads, stuck)
        await started.wait()
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    assert await loop.run_in_executor(threads, lambda: "done") == "done"
    go.set()
    threads.shutdown()
