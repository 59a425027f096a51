"""Reads files and objects in memory as pages of JSON-ready rows, flat in memory. Staging them is the client's part."""

from rowmill.inputs.headers import check_columns
from rowmill.inputs.opening import open_source
from rowmill.inputs.sources import PAGE_BYTES, PAGE_ROWS, Row, Source, SourceStats

__all__ = ["PAGE_BYTES", "PAGE_ROWS", "Row", "Source", "SourceStats", "check_columns", "open_source"]
