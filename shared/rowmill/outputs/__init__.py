"""Writes the rows of a run to a CSV, JSON Lines or Parquet file that appears when it is complete."""

from rowmill.outputs.row_writer import RowWriter, check_output

__all__ = ["RowWriter", "check_output"]
