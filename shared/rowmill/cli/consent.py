"""Asking a person before something is deleted that no name on the command line says: a project's data, dead letters, old receipts."""

from __future__ import annotations

import sys

import typer

from rowmill.errors import UsageError


def at_a_terminal() -> bool:
    return sys.stdin.isatty()


def need_consent(what: str, *, yes: bool, as_json: bool = False) -> None:
    """Refuse to go on where nobody can be asked, before anything is done. ``what``: the deed, such as "delete dead letters".

    Raises:
        UsageError: ``--yes`` was not given, and there is no terminal, or a machine reads the answer.

    """
    if not yes and (as_json or not at_a_terminal()):
        raise UsageError(f"nobody can be asked here whether to {what}; if you mean it, add --yes")


def consents(question: str, *, yes: bool) -> bool:
    """Whether the person at the terminal says yes; with ``yes`` nobody is asked."""
    return yes or typer.confirm(question, err=True)
