"""What became of each matrix: the rows a build writes to report.json, which `plankiln quantize-report` reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from plankiln.bundle import find_bundle, read_manifest
from plankiln.errors import BundleError
from plankiln.manifest import REPORT, Manifest
from plankiln.trust import open_tree

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.(?:.*\.)?(\w+)")
_REBUILD = "build it again with this plankiln"


class MatrixRow(BaseModel):
    """One matrix. name: its tensor's. bytes: as stored, scales included. error: ‖stored - source‖ / ‖source‖."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)

    name: str
    format: str
    bytes: Annotated[int, Field(ge=0)]
    error: Annotated[float, Field(ge=0)]

    @property
    def layer(self) -> int | None:
        """The layer it belongs to; None for the embedding and the head."""
        found = _LAYER.fullmatch(self.name.removesuffix(".weight"))
        return int(found[1]) if found else None

    @property
    def kind(self) -> str:
        """What it is called in every layer (`q_proj`), or its whole name."""
        module = self.name.removesuffix(".weight")
        found = _LAYER.fullmatch(module)
        return found[2] if found else module


@dataclass(frozen=True)
class Total:
    """All matrices of one format."""

    format: str
    matrices: int
    bytes: int


@dataclass(frozen=True)
class Report:
    """A bundle's matrices, in the order they were stored, and its manifest."""

    path: Path
    manifest: Manifest
    rows: tuple[MatrixRow, ...]

    def totals(self) -> list[Total]:
        """Per format, the largest first."""
        names = dict.fromkeys(row.format for row in self.rows)
        chosen = {name: [row for row in self.rows if row.format == name] for name in names}
        found = [Total(name, len(rows), sum(row.bytes for row in rows)) for name, rows in chosen.items()]
        return sorted(found, key=lambda total: -total.bytes)


def relative_error(original: NDArray[np.float32], stored: NDArray[np.float32]) -> float:
    """‖stored - original‖ / ‖original‖, to four digits; of a matrix of zeros ‖stored‖. Both [N, K]."""
    difference = np.linalg.norm((stored - original).astype(np.float64))
    size = np.linalg.norm(original.astype(np.float64))
    return float(f"{float(difference / size) if size else float(difference):.4g}")


def read_report(path: Path) -> Report:
    """The matrices that a bundle's report lists. Raises BundleError when it lists none or is not what was built."""
    root = find_bundle(path)
    manifest, _ = read_manifest(root)
    entry = manifest.files[REPORT]
    with open_tree(root) as tree:
        data = tree.read_verified(REPORT, entry.bytes, entry.sha256)
        where = tree.where(REPORT)
    try:
        rows = _CONTENT.validate_json(data).matrices
    except ValidationError:
        raise BundleError("the build's report does not list matrices", where, _REBUILD) from None
    return Report(root, manifest, tuple(rows))


class _Content(BaseModel):
    matrices: list[MatrixRow]


_CONTENT = TypeAdapter(_Content)


def layers_and_kinds(rows: Sequence[MatrixRow]) -> tuple[list[int], list[str]]:
    """The layers that the rows belong to, ascending, and the kinds of matrix in them, in their order."""
    layered = [row for row in rows if row.layer is not None]
    return sorted({row.layer for row in layered if row.layer is not None}), list(dict.fromkeys(r.kind for r in layered))
