"""The `rowmill` command. One module per command or group of commands; `main` puts them together."""
