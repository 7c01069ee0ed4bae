"""Group sizes: whether whole groups fill every matrix, and every rank's part of it, before any work is done."""

from __future__ import annotations

from plankiln.compiler.families import DecoderSpec
from plankiln.errors import BuildError, Problem
from plankiln.recipe import GROUPED, GROUPS, Quantize

_SPLIT_BY_COLUMNS = ("o_proj", "down_proj")  # their input is spread over the ranks


def with_group(spec: DecoderSpec, quantize: Quantize, tensor_parallel: int = 1) -> Quantize:
    """The settings with a group size that is a number: `auto` becomes the largest that fits.

    Raises BuildError naming the matrices that are not whole groups, and what would be legal.
    """
    legal = legal_groups(spec, tensor_parallel)
    if quantize.weights == "int8_smoothquant" and not legal:
        raise BuildError(_misfits(spec, GROUPS[0], tensor_parallel))  # int8 kernels take 32 columns at a time
    if quantize.weights not in GROUPED or quantize.group_size is None:
        return quantize
    if quantize.group_size == "auto":
        if not legal:
            raise BuildError(_misfits(spec, GROUPS[0], tensor_parallel))
        return quantize.model_copy(update={"group_size": legal[-1]})
    if quantize.group_size not in legal:
        raise BuildError(_misfits(spec, quantize.group_size, tensor_parallel))
    return quantize


def legal_groups(spec: DecoderSpec, tensor_parallel: int = 1) -> list[int]:
    """The group sizes that divide every linear's input, on every rank; ascending."""
    widths = _widths(spec, tensor_parallel).values()
    return [group for group in GROUPS if all(width % group == 0 for width in widths)]


def _widths(spec: DecoderSpec, tensor_parallel: int) -> dict[str, float]:
    """Columns of a rank's part of each kind of linear; a fraction where the ranks' parts would be uneven."""
    shapes = {
        name.removesuffix(".weight"): shape[1]
        for name, shape in spec.expected_tensors().items()
        if name.startswith("model.layers.0.") and len(shape) == 2
    }
    return {
        name.removeprefix("model.layers.0."): columns / (tensor_parallel if name.endswith(_SPLIT_BY_COLUMNS) else 1)
        for name, columns in shapes.items()
    }


def _misfits(spec: DecoderSpec, group: int, tensor_parallel: int) -> list[Problem]:
    widths = _widths(spec, tensor_parallel)
    bad = {name: width for name, width in widths.items() if width % group}
    pairs = [
        f"{size} with `tensor_parallel: {ranks}`"
        for ranks in sorted({1, 2, 4, 8, tensor_parallel})
        for size in legal_groups(spec, ranks)
        if ranks <= tensor_parallel
    ]
    hint = f"legal: {', '.join(pairs)}" if pairs else "no group size fits this model: use `fp8` or `bf16`"
    on_ranks = f" on each of {tensor_parallel} ranks" if tensor_parallel > 1 else ""
    return [
        Problem(
            f"`{name}` of every layer has {width:g} columns{on_ranks}, not whole groups of {group}",
            "`quantize.weights`",
            hint,
        )
        for name, width in bad.items()
    ]
