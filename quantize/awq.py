"""INT4 AWQ: which columns of the linears are scaled up before rounding, and the checkpoint that results.

AWQ (Lin et al. 2024) multiplies column j of a matrix by s_j and divides its input by it, s growing with what the column
reads, so that columns that matter are rounded finely. Here s = (mean square of the input)^(alpha/2), alpha is chosen
for each input by the error of what its linears put out, and rounding.py rounds what it leaves. q, k and v share one s,
and so do gate and up: it goes into the norm before them. o_proj and down_proj get a `pre_quant_scale`.

Layer by layer, each on what the unrounded layers before it put out: on SmolLM2, what rounded ones put out serves worse
(perplexity 8.5 and 11.1 % above fp32's on the two held-out texts, against 7.8 and 9.5 %).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from plankiln.checkpoint import Checkpoint
from plankiln.quantize.rounding import group_scales, reciprocal, round_matrix
from plankiln.quantize.statistics import run
from plankiln.quantize.torch_model import torch_model

Progress = Callable[[str, int, int], None]
ALPHAS = tuple(step / 10 for step in range(8))
_SEARCHED = (1.0, 0.91, 0.82, 0.73)  # of a group's scale, while alpha is searched
# Linears that read one input, and the norm before them where there is one.
_INPUTS: tuple[tuple[tuple[str, ...], str | None], ...] = (
    (("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm"),
    (("self_attn.o_proj",), None),
    (("mlp.gate_proj", "mlp.up_proj"), "post_attention_layernorm"),
    (("mlp.down_proj",), None),
)
_Tensors = dict[str, Any]


def round_checkpoint(
    checkpoint: Checkpoint, out: Path, ids: Sequence[Sequence[int]], mirrored: bool, progress: Progress
) -> None:
    """Rewrite the int4 matrices, their scales and the norms before them of the exported checkpoint `out`, in place.

    checkpoint: the source, whose weights are rounded. ids: calibration text. mirrored: scales may be negative.
    progress("rounding", layers done, of all).
    """
    import torch
    from safetensors.torch import load_file, save_file

    files = {path: load_file(path) for path in sorted(out.glob("*.safetensors"))}
    places = {name: tensors for tensors in files.values() for name in tensors}
    model = torch_model(checkpoint)
    layers = model.model.layers
    texts = _layer_inputs(model, ids)  # moved on from layer to layer
    with torch.inference_mode():
        for number, layer in enumerate(layers):
            prefix = f"model.layers.{number}."
            rounded = [name for names, _ in _INPUTS for name in names if f"{prefix}{name}.weight_scale" in places]
            hessians = _hessians(layer, number, rounded, texts)
            for names, norm in _inputs(rounded):
                _round_input(layer, prefix, names, norm, hessians[names[0]], places, mirrored)
            progress("rounding", number + 1, len(layers))
    for path, tensors in files.items():
        save_file(tensors, path, metadata={"format": "pt"})


def _inputs(rounded: Sequence[str]) -> Iterator[tuple[tuple[str, ...], str | None]]:
    """The inputs whose linears are all rounded, with the norm that takes up their scales, then what is rounded while
    others of its input are not, one by one."""
    for names, norm in _INPUTS:
        if all(name in rounded for name in names):
            yield names, norm
        else:
            yield from (((name,), None) for name in names if name in rounded)


def _round_input(
    layer: Any,
    prefix: str,
    names: Sequence[str],
    norm: str | None,
    hessian: Any,
    places: dict[str, _Tensors],
    mirrored: bool,
) -> None:
    """Round the layer's linears `names`, which read one input, into the checkpoint's tensors."""
    import torch

    weights = {name: layer.get_parameter(f"{name}.weight") for name in names}
    scale_name = f"{prefix}{names[0]}.weight_scale"
    scales = places[scale_name][scale_name].shape[1]
    group = len(hessian) // scales
    factors = best_factors(list(weights.values()), hessian, group, mirrored)
    hessian = hessian / factors[:, None] / factors
    for name, weight in weights.items():
        q, scale = round_matrix(weight * factors, hessian, group, mirrored)
        tensors, full = places[f"{prefix}{name}.weight"], prefix + name
        tensors[f"{full}.weight"] = (q[0::2] & 15 | q[1::2] << 4).view(torch.uint8).contiguous()
        places[f"{full}.weight_scale"][f"{full}.weight_scale"] = scale
        if norm is None:
            tensors[f"{full}.pre_quant_scale"] = 1 / factors
    if norm is not None:
        name = f"{prefix}{norm}.weight"
        places[name][name] = layer.get_parameter(f"{norm}.weight") / factors


def best_factors(weights: Sequence[Any], hessian: Any, group: int, mirrored: bool) -> Any:
    """s [K] for the matrices [N, K] that read one input, whose Hessian is XᵀX up to a factor [K, K].

    The error of an output, tr(E·H·Eᵀ) for an error E of the weights, is taken with each group's scale searched coarsely
    and nothing compensated.
    """
    import torch

    power = torch.diagonal(hessian).sqrt()
    power = power.clamp(min=float(power.max()) * 1e-4 or 1.0)
    matrices = torch.cat(tuple(weights))
    best, least = torch.ones_like(power), float("inf")
    for alpha in ALPHAS:
        factors = power.pow(alpha)
        factors /= (factors.max() * factors.min()).sqrt()
        error = _rounded(matrices * factors, torch.diagonal(hessian) / factors**2, group, mirrored) / factors - matrices
        loss = float(((error @ hessian) * error).sum())
        if loss < least:
            best, least = factors, loss
    return best


def _rounded(weight: Any, cost: Any, group: int, mirrored: bool) -> Any:
    import torch

    columns = weight.t().contiguous()
    for start in range(0, len(columns), group):
        part = columns[start : start + group]
        scale = group_scales(part, cost[start : start + group], mirrored, _SEARCHED)
        part.copy_((part * reciprocal(scale)).round_().clamp_(-8, 7).mul_(scale))
    rounded: torch.Tensor = columns.t()
    return rounded


@dataclass
class _Batch:
    """Some texts on their way: what the next layer reads, and every layer's other arguments: masks, rotations."""

    x: Any
    arguments: list[dict[str, Any]]


def _layer_inputs(model: Any, ids: Sequence[Sequence[int]]) -> list[_Batch]:
    """The batches of the texts before the first layer."""
    found: list[_Batch] = []

    def recorder(number: int) -> Any:
        def forward(x: Any, **kwargs: Any) -> Any:
            if number == 0:
                found.append(_Batch(x, []))
            found[-1].arguments.append(kwargs)
            return x

        return forward

    for number, layer in enumerate(model.model.layers):
        layer.forward = recorder(number)
    try:
        run(model, ids, lambda *_: None)
    finally:
        for layer in model.model.layers:
            del layer.forward
    return found


def _hessians(layer: Any, number: int, names: Sequence[str], texts: Sequence[_Batch]) -> dict[str, Any]:
    """Run the texts through layer `number`; the mean of x·xᵀ over the tokens, [K, K] float32, of each linear's input.
    Those that read the same share one."""
    first = {name: next(names for names, _ in _INPUTS if name in names) for name in names}
    found: dict[tuple[str, ...], Any] = {}
    tokens = sum(batch.x.shape[0] * batch.x.shape[1] for batch in texts)

    def look(key: tuple[str, ...]) -> Any:
        def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1])
            found[key] = found[key].addmm_(x.T, x) if key in found else x.T @ x

        return hook

    one_each = {key: name for name, key in reversed(first.items())}
    handles = [layer.get_submodule(name).register_forward_pre_hook(look(key)) for key, name in one_each.items()]
    try:
        for batch in texts:
            batch.x = layer(batch.x, **batch.arguments[number])
    finally:
        for handle in handles:
            handle.remove()
    return {name: found[key] / tokens for name, key in first.items()}
