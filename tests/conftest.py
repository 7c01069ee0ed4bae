"""What every test module shares: one seed for fresh random inputs, shown in the header of a run, and a stage store."""

from __future__ import annotations

import os
import shutil
import tempfile
import time

import pytest


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("PLANKILN_SEED", str(time.time_ns() % 2**32))
    os.environ["PLANKILN_STORE"] = tempfile.mkdtemp(prefix="plankiln-test-store-")


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(os.environ["PLANKILN_STORE"], ignore_errors=True)


def pytest_report_header(config: pytest.Config) -> str:
    return f"PLANKILN_SEED={os.environ['PLANKILN_SEED']}"
