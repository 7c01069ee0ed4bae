"""What every test module shares: one seed for fresh random inputs, shown in the header of a run."""

from __future__ import annotations

import os
import time

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PLANKILN_SEED", str(time.time_ns() % 2**32))


def pytest_report_header(config: pytest.Config) -> str:
    return f"PLANKILN_SEED={os.environ['PLANKILN_SEED']}"
