"""Writes the result of a run to a file."""
