"""`python -m rowmill` is the `rowmill` command."""

from rowmill.cli.main import app

app()
