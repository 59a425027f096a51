"""Admission: owns runs, their inputs and datasets, and what waits. Loads no author code."""
