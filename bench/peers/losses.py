"""Perplexity from logits, for peers that give them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np


def mean_loss(logits: np.ndarray[Any, Any], targets: Sequence[int]) -> float:
    """Mean over rows of -log softmax(logits)[target] in float64. logits: [len(targets), vocab]."""
    rows = logits.astype(np.float64)
    most = rows.max(axis=1)
    chosen = rows[np.arange(len(rows)), list(targets)]
    return float((most + np.log(np.exp(rows - most[:, None]).sum(axis=1)) - chosen).mean())
