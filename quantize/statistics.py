"""What the linears of a model read: per column the largest and the mean square, and Hessians, over calibration text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

Progress = Callable[[str, int, int], None]


@dataclass
class InputStatistics:
    """Of one linear's input x [tokens, K]: peak [K] of |x|, square [K] the mean of x², mean of |x| over all."""

    peak: Any
    square: Any
    mean: float
    tokens: int


def decoder_linears(model: Any) -> dict[str, Any]:
    """The linears of the decoder's layers by name: all that calibration quantizes."""
    import torch

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and ".layers." in name
    }


def input_statistics(model: Any, ids: Sequence[Sequence[int]], progress: Progress) -> dict[str, InputStatistics]:
    """Run the model over the texts and look at what each linear reads. progress("statistics", texts done, of all)."""
    import torch

    found: dict[str, InputStatistics] = {}

    def look(name: str) -> Any:
        def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            peak, square, mean = x.abs().amax(0), (x * x).mean(0), float(x.abs().mean())
            old = found.get(name)
            if old is None:
                found[name] = InputStatistics(peak, square, mean, len(x))
                return
            share = len(x) / (old.tokens + len(x))
            old.peak = torch.maximum(old.peak, peak)
            old.square += (square - old.square) * share
            old.mean += (mean - old.mean) * share
            old.tokens += len(x)

        return hook

    handles = [module.register_forward_pre_hook(look(name)) for name, module in decoder_linears(model).items()]
    try:
        run(model, ids, lambda done, total: progress("statistics", done, total))
    finally:
        for handle in handles:
            handle.remove()
    return found


def run(model: Any, ids: Sequence[Sequence[int]], progress: Callable[[int, int], None], batch: int = 16) -> None:
    """The model's forward over the texts, those of equal length in batches: weights are fake-quantized once a batch."""
    import torch

    with torch.inference_mode():
        done = 0
        for rows in _batched(ids, batch):
            model(torch.tensor(rows), use_cache=False, logits_to_keep=1)
            done += len(rows)
            progress(done, len(ids))


def batches(ids: Sequence[Sequence[int]], batch: int = 16) -> int:
    """How many forwards `run` makes of the texts."""
    return sum(1 for _ in _batched(ids, batch))


def _batched(ids: Sequence[Sequence[int]], batch: int) -> Iterator[list[Sequence[int]]]:
    for _, alike in groupby(ids, key=len):
        rows = list(alike)
        yield from (rows[i : i + batch] for i in range(0, len(rows), batch))
