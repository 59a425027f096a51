"""`rowmill plays`: what plays a project has, without running any."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="The project's plays.", no_args_is_help=True)


@app.callback()
def _group() -> None:
    """The project's plays."""


@app.command("list")
def list_plays(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """List the project's plays with their input fields."""
    from rowmill import registry  # noqa: PLC0415 - commands load what they need
    from rowmill.project import Project  # noqa: PLC0415

    Project.find(Path.cwd()).load()
    plays = [registry.play_named(name) for name in registry.known_plays()]
    if as_json:
        found = [
            {
                "name": play.name,
                "description": play.description,
                "module": play.module,
                "input": list(play.input_model.model_fields),
                "staged": play.rows_fields,
            }
            for play in plays
        ]
        print(json.dumps(found, indent=2))
        return
    if not plays:
        print("no plays; `plays` in rowmill.toml names the modules that define them")
    for play in plays:
        fields = ", ".join(f"{name} (staged)" if name in play.rows_fields else name for name in play.input_model.model_fields)
        print(f"{play.name:20} {play.description or '-'}  [{play.module}; input: {fields or 'none'}]")
