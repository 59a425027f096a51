"""Durations, rates, secrets and credential scopes."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from rowmill.durations import Rate, seconds
from rowmill.errors import DefinitionError, SecretMissing
from rowmill.secret import Auth, Basic, Bearer, Header, credential_scope, resolve, secret


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        (5, 5.0),
        (0.25, 0.25),
        ("7d", 604800.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("1.5h", 5400.0),
        ("2w", 1209600.0),
        ("90", 90.0),
        (" 1 min ", 60.0),
        (0, 0.0),
    ],
)
def test_durations_are_seconds_or_text_with_units(written: Any, meant: float) -> None:
    assert seconds(written) == meant


@pytest.mark.parametrize("written", ["", "d", "7 days ago", "1x", "-5s", "h1", "1h 30", -1, float("nan"), float("inf"), True, None, [1]])
def test_what_is_no_duration_is_refused_with_an_example(written: Any) -> None:
    with pytest.raises(DefinitionError, match=r"not a duration"):
        seconds(written)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("10/s", (10, 1.0)),
        ("60/min", (60, 60.0)),
        ("1000/h", (1000, 3600.0)),
        ("100/30s", (100, 30.0)),
        (" 5 / 1.5 s ", (5, 1.5)),
        ("2/m", (2, 60.0)),
    ],
)
def test_rates_are_requests_per_window(written: str, meant: tuple[int, float]) -> None:
    assert Rate.parse(written) == meant
    assert Rate.parse(Rate(*meant)) == meant


@pytest.mark.parametrize("written", ["10", "/s", "0/s", "1.5/s", "10/0s", "ten/s", 10, None])
def test_what_is_no_rate_is_refused_with_an_example(written: Any) -> None:
    with pytest.raises(DefinitionError, match="'10/s'"):
        Rate.parse(written)


def test_a_secret_is_a_name_and_never_shows_more() -> None:
    assert repr(secret("KEY", account="a")) == "SecretRef(name='KEY', account='a', file=None)"
    assert "value" not in repr(Bearer(secret("KEY", function=lambda: "value")))
    with pytest.raises(DefinitionError, match="name"):
        secret(" ")


def test_a_secret_comes_from_its_function_its_file_or_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_text("from file\n")
    assert resolve(secret("KEY", function=lambda: "made"), {"KEY": "env"}) == "made"
    assert resolve(secret("KEY", file=str(file)), {"KEY": "env"}) == "from file"
    assert resolve(secret("KEY"), {"KEY": "env", "KEY_FILE": str(file)}) == "env"
    assert resolve(secret("KEY"), {"KEY_FILE": str(file)}) == "from file"


@pytest.mark.parametrize(
    ("environ", "told"),
    [
        ({}, "set the environment variable KEY, or KEY_FILE"),
        ({"KEY": ""}, "empty in environment variable KEY"),
        ({"KEY_FILE": "/nowhere"}, "file /nowhere"),
    ],
)
def test_a_missing_secret_names_the_places(environ: dict[str, str], told: str) -> None:
    with pytest.raises(SecretMissing, match=told):
        resolve(secret("KEY"), environ)


def test_credentials_become_headers() -> None:
    def value_of(ref: Any) -> str:
        return f"<{ref.name}>"

    assert Bearer(secret("K")).headers(value_of) == {"Authorization": "Bearer <K>"}
    assert Header("X-Api-Key", secret("K")).headers(value_of) == {"X-Api-Key": "<K>"}
    pair = base64.b64encode(b"me:<P>").decode()
    assert Basic("me", secret("P")).headers(value_of) == {"Authorization": f"Basic {pair}"}
    assert [ref.name for ref in Basic(secret("U"), secret("P")).secrets] == ["U", "P"]


@pytest.mark.parametrize(
    ("auth", "told"),
    [
        (Bearer(secret("KEY")), "secret KEY as Authorization: Bearer"),
        (Header("X-Api-Key", secret("KEY", "eu")), "secret KEY of account eu in the header X-Api-Key"),
        (Basic("me", secret("P")), "secret P as Authorization: Basic"),
        (Basic(secret("U"), secret("P")), "secret U and secret P as Authorization: Basic"),
    ],
)
def test_it_is_told_which_secret_is_sent_and_how_by_names_alone(auth: Auth, told: str) -> None:
    assert auth.told == told


def test_a_credential_scope_is_of_name_and_account_alone() -> None:
    scopes = [credential_scope(auth) for auth in (None, Bearer(secret("K")), Bearer(secret("K", account="b")), Bearer(secret("L")))]
    assert len(set(scopes)) == 4
    assert credential_scope(Bearer(secret("K", function=lambda: "rotated"))) == scopes[1]
