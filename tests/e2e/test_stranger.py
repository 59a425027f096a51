"""A client that knows nothing of rowmill's code: plain JSON through Debian's amqp-tools, plain AMQP to listen."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
from typing import Any

import aio_pika
import pytest
from tests.e2e.stage import BOUND, Stage, contact_of, leads

from rowmill.client import Client

PUBLISH = shutil.which("amqp-publish")


def publish(url: str, key: str, body: str, *more: str) -> None:
    assert PUBLISH is not None, "install Debian's amqp-tools (`make test` does)"
    subprocess.run([PUBLISH, f"--url={url}", "--exchange=rowmill", f"--routing-key={key}", f"--body={body}", *more], check=True, timeout=30)


async def test_plain_json_starts_a_run_and_a_listener_gets_every_row(system: Stage, client: Client, word: str) -> None:
    rows = leads(150, word)
    run_id = f"stranger-{word}"
    start = json.dumps({"run_id": run_id, "play": "leads", "input": {"min_score": 10}, "rows": rows})
    connection = await aio_pika.connect(system.broker_url)
    async with connection, asyncio.timeout(BOUND):
        channel = await connection.channel()
        queue = await channel.declare_queue(exclusive=True)
        await queue.bind("rowmill.events", "rows.#")

        await asyncio.to_thread(publish, system.broker_url, "runs.start", start, "--content-type=application/json")
        await asyncio.to_thread(publish, system.broker_url, "runs.start", start)  # the same run, however often it is published

        heard: dict[int, dict[str, Any]] = {}
        async with queue.iterator() as messages:
            async for message in messages:
                event = json.loads(message.body)
                assert message.routing_key == "rows.completed.leads.leads"
                assert event["run_id"] == run_id
                heard |= {row["index"]: row for row in event["rows"]}
                await message.ack()
                if len(heard) == len(rows):
                    break
    assert sorted(heard) == list(range(len(rows)))
    assert [heard[index]["data"]["domain"] for index in range(len(rows))] == [row["domain"] for row in rows]
    assert [heard[index]["data"].get("contact") for index in range(len(rows))] == [contact_of(row["domain"]) for row in rows]
    job = await client.job(run_id)
    async with asyncio.timeout(BOUND):
        await job.wait()
    await system.audit(client, job, rows)
    assert [run.run_id for run in await client.runs(play="leads")].count(run_id) == 1


MALFORMED = {
    "it is not JSON": ("{not json", "malformed"),
    "a field is missing": ('{"input": {}}', "play"),
    "a field has another type": ('{"play": "leads", "rows": 3}', "rows"),
    "the play's name cannot be one": ('{"play": "No Such Name"}', "play"),
}


@pytest.mark.parametrize(("body", "said"), MALFORMED.values(), ids=MALFORMED)
async def test_a_message_that_cannot_be_read_is_dead_lettered_with_the_reason(system: Stage, body: str, said: str) -> None:
    publish(system.broker_url, "runs.start", body)

    letters: list[dict[str, Any]] = []
    async with asyncio.timeout(BOUND):
        while not letters:
            listed = await asyncio.to_thread(system.rowmill, "dlq", "list", "--json")
            assert listed.returncode == 0, listed.stderr
            letters = [letter for letter in json.loads(listed.stdout) if letter["body"] == body]
    assert len(letters) == 1
    assert letters[0]["queue"] == "admission.runs.v1"
    assert letters[0]["service"] == "admission"
    assert letters[0]["error_type"] in {"malformed", "malformed_message"}, letters[0]
    assert said in letters[0]["error"] or said == "malformed", letters[0]


async def test_a_play_that_nobody_has_fails_its_run_naming_those_that_there_are(system: Stage, client: Client, word: str) -> None:
    run_id = f"unknown-{word}"
    publish(system.broker_url, "runs.start", json.dumps({"run_id": run_id, "play": "laeds", "rows": [{"domain": "a.example"}]}))
    job = await client.job(run_id)
    async with asyncio.timeout(BOUND):
        summary = await job.wait()
    assert summary.state == "failed"
    assert summary.error is not None
    assert "leads" in summary.error.message
