"""Measuring: one driver, and a process of its own for whatever is measured. See `driver` and `worker`."""
