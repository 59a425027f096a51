"""Storing staged inputs: pages and seals in batches, each batch one commit under the locks of its inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from rowmill.runtime.db import Connection, Database
from rowmill.runtime.deliveries import Rejected
from rowmill_admission import inputs
from rowmill_admission.endings import fail_input
from rowmill_admission.inputs import Input, StoredPage
from rowmill_admission.owed import Postman
from rowmill_admission.store import inputs as input_store
from rowmill_contracts.counts import Problem
from rowmill_contracts.runs import InputSealed

Staged = StoredPage | InputSealed


class Staging:
    """``on_ended``: called with the inputs that were sealed or failed, after the commit."""

    def __init__(self, database: Database, postman: Postman, on_ended: Callable[[Iterable[str]], None]) -> None:
        self._database = database
        self._postman = postman
        self._on_ended = on_ended

    async def store(self, staged: Sequence[Staged]) -> None:
        """Store pages and seals of any inputs. A page stored before is no change; with other rows it fails its input."""

        async def work(connection: Connection) -> tuple[list[str], list[str]]:
            known = await input_store.lock(connection, [each.input_id for each in staged])
            problems = await self._store_pages(connection, known, [each for each in staged if isinstance(each, StoredPage)])
            sealed: dict[str, InputSealed] = {}
            for seal in (each for each in staged if isinstance(each, InputSealed)):
                before = known[seal.input_id]
                first = sealed.setdefault(seal.input_id, seal)
                problem = inputs.sealed_twice(before, seal) or inputs.seals_differ(first, seal)
                if problem is not None:
                    problems.setdefault(seal.input_id, problem)
                elif before.state == "open" and before.seal_pages is None:
                    await input_store.note_seal(connection, seal)
            return await self._judge(connection, known, problems)

        woken, ended = await self._database.transact(work)
        self._postman.wake(woken)
        if ended:
            self._on_ended(ended)

    async def fail(self, input_id: str, problem: Problem) -> None:
        """Fail an input that is not sealed, and its runs."""

        async def work(connection: Connection) -> list[str]:
            known = (await input_store.lock(connection, [input_id]))[input_id]
            return await fail_input(connection, input_id, problem) if known.state == "open" else []

        self._postman.wake(await self._database.transact(work))
        self._on_ended([input_id])

    async def _store_pages(self, connection: Connection, known: dict[str, Input], pages: Sequence[StoredPage]) -> dict[str, Problem]:
        problems: dict[str, Problem] = {}
        first: dict[tuple[str, int], StoredPage] = {}
        for page in sorted(pages, key=lambda each: (each.input_id, each.page)):
            if known[page.input_id].state == "failed":
                continue
            if first.setdefault((page.input_id, page.page), page).digest != page.digest:
                problems.setdefault(page.input_id, inputs.conflicting(page.input_id, page.page))
        if not first:
            return problems
        new = await input_store.insert_pages(connection, list(first.values()))
        arrived: dict[str, list[int]] = {}
        for input_id, _, rows in new:
            arrived.setdefault(input_id, []).append(rows)
        for input_id, rows_of_pages in sorted(arrived.items()):
            await input_store.raise_counts(connection, input_id, len(rows_of_pages), sum(rows_of_pages))
        old = [page for name, page in first.items() if name not in {(input_id, page) for input_id, page, _ in new}]
        if old:
            stored = await input_store.digests_among(connection, old)
            for page in old:
                if stored[page.input_id, page.page] != page.digest:
                    problems.setdefault(page.input_id, inputs.conflicting(page.input_id, page.page))
        return problems

    async def _judge(self, connection: Connection, known: dict[str, Input], problems: dict[str, Problem]) -> tuple[list[str], list[str]]:
        """Seal what is whole, fail what is wrong; returns runs that owe messages, and inputs that ended."""
        woken: list[str] = []
        ended: list[str] = []
        for input_id, now in (await input_store.lock(connection, list(known))).items():
            if now.state == "failed":
                continue
            problem = problems.get(input_id)
            if problem is None and not inputs.may_be_whole(now):
                continue
            if problem is None and now.state == "sealed" and now.pages == known[input_id].pages:
                continue
            problem = problem or inputs.verdict(now, await input_store.whole(connection, input_id))
            if problem is None:
                await input_store.end(connection, input_id, "sealed")
            else:
                woken += await fail_input(connection, input_id, problem)
            ended.append(input_id)
        return woken, ended


async def store_whole(connection: Connection, input_id: str, pages: Sequence[StoredPage]) -> None:
    """Store an input that is whole already (the rows of a `RunStart`), in the caller's transaction.

    Raises:
        Rejected: somebody staged something under its id, which is admission's to give.

    """
    if not await input_store.insert_whole(connection, input_id, len(pages), sum(page.rows for page in pages)):
        raise Rejected(f"the rows of this run are kept as input {input_id!r}, under which something was staged before")
    if pages:
        await input_store.insert_pages(connection, pages)
