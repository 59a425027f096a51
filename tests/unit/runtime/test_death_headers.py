"""What a dead letter says of its death."""

from __future__ import annotations

from rowmill.runtime.deliveries import death_headers


def test_a_message_dies_also_of_an_error_that_cannot_be_put_in_words() -> None:
    class Unsayable(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no words")

    headers = death_headers(Unsayable(), service="row-executor", queue="q", exchange="", key="q", attempts=3, first_failure=1.0, last_failure=2.0)
    assert headers["x-rowmill-error-type"] == "Unsayable"
    assert "Unsayable" in headers["x-rowmill-error"]
