"""How values become bytes: canonical JSON and row keys, values that JSON cannot carry, receipt keys."""
