"""`run`: what a person reads of it."""

from __future__ import annotations

import inspect

from rowmill import Client, run


def test_every_option_is_told_by_help() -> None:
    options = [name for name, given in inspect.signature(Client.start).parameters.items() if given.kind is given.KEYWORD_ONLY]
    assert "budget" in options
    assert [name for name in options if f"``{name}``" not in (run.__doc__ or "")] == []
