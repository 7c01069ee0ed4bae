"""Round the weights of an int4 checkpoint so that errors cancel in what the linears put out, not in the weights.

The checkpoint that calibration exported fixes the pre-scales; each matrix, divided by them, is rounded anew: column
after column, and the error a column makes is taken out of the columns still to come, by the inverse Hessian of the
linear's input (Frantar et al. 2022, GPTQ; Frantar and Alistarh 2022, OBC). Each group's scale is searched for the least
error, columns weighed by their Hessian's diagonal, among float16 values, which CPU plans store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from plankiln.checkpoint import Checkpoint
from plankiln.quantize.statistics import decoder_linears, run
from plankiln.quantize.torch_model import torch_model

Progress = Callable[[str, int, int], None]
SHRINK = tuple(1.0 - 0.03 * step for step in range(15))
DAMPING = 0.01  # of the Hessian's mean diagonal, added to it
HESSIAN_BYTES = 2 << 30  # kept at a time; a model with more takes several passes over the text
_BLOCK = 128
_NORMS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "input_layernorm"),
    **dict.fromkeys(("gate_proj", "up_proj"), "post_attention_layernorm"),
}
# Linears that read one input, under the first one's name.
_SHARED = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def round_checkpoint(checkpoint: Checkpoint, out: Path, ids: Sequence[Sequence[int]], progress: Progress) -> None:
    """Rewrite the int4 weights and scales of the exported checkpoint in `out`, in place; everything else stays.

    checkpoint: the source, whose weights are rounded. ids: calibration text. progress("rounding", linears, of all).
    """
    from safetensors.torch import load_file, save_file

    model = torch_model(checkpoint)
    linears = decoder_linears(model)
    norms = {name: module.weight.detach() for name, module in model.named_modules() if name.endswith("norm")}
    for path in sorted(out.glob("*.safetensors")):
        tensors = load_file(path)
        names = [name for name in linears if f"{name}.weight_scale" in tensors]
        for part in _parts(names, linears):
            hessians = _hessians(model, part, ids, lambda done, total: progress("hessians", done, total))
            for number, name in enumerate(part):
                factors = _factors(name, tensors, norms)
                hessian = hessians[_input_of(name)] * factors[:, None] * factors[None, :]
                weight = linears[name].weight.detach() / factors
                group = weight.shape[1] // tensors[f"{name}.weight_scale"].shape[1]
                q, scale = round_matrix(weight, hessian, group)
                tensors[f"{name}.weight"] = (q[0::2] & 15 | (q[1::2] & 15) << 4).contiguous()
                tensors[f"{name}.weight_scale"] = scale
                progress("rounding", number + 1, len(part))
        save_file(tensors, path, metadata={"format": "pt"})


def round_matrix(weight: Any, hessian: Any, group: int) -> tuple[Any, Any]:
    """q uint8 [N, K], of which the low four bits are the int4 value, and scale float32 [N, K/group].

    weight [N, K]; hessian [K, K] of its input, XᵀX up to a factor.
    """
    import torch

    n, k = weight.shape
    weight = weight.clone().float()
    inverse = _inverse_factor(hessian.float())
    cost = torch.diagonal(hessian).float().clamp(min=1e-12)
    q = torch.zeros(n, k, dtype=torch.int8)
    scales = torch.zeros(n, k // group)
    block = max(_BLOCK, group)
    for start in range(0, k, block):
        end = min(start + block, k)
        errors = torch.zeros(n, end - start)
        for column in range(start, end):
            if column % group == 0:
                scale = _scale(weight[:, column : column + group], cost[column : column + group])
                scales[:, column // group] = scale
            values = torch.where(scale > 0, (weight[:, column] / scale).round().clamp(-8, 7), torch.zeros(n))
            values = values.nan_to_num(0.0)
            q[:, column] = values.to(torch.int8)
            error = (weight[:, column] - values * scale) / inverse[column, column]
            weight[:, column:end] -= error[:, None] * inverse[column, column:end][None, :]
            errors[:, column - start] = error
        weight[:, end:] -= errors @ inverse[start:end, end:]
    return q.view(torch.uint8), scales


def _scale(weights: Any, cost: Any) -> Any:
    """The float16 scale [N] of one group [N, group] with the least error, columns weighed by `cost`."""
    import torch

    peak = weights.abs().amax(1) / 7
    best, least = peak, torch.full_like(peak, float("inf"))
    for factor in SHRINK:
        scale = (peak * factor).half().float()
        inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
        rounded = (weights * inverse[:, None]).round().clamp(-8, 7) * scale[:, None]
        error = ((rounded - weights) ** 2 * cost).sum(1)
        best, least = torch.where(error < least, scale, best), torch.minimum(error, least)
    return best


def _inverse_factor(hessian: Any) -> Any:
    """The upper Cholesky factor of the damped Hessian's inverse."""
    import torch

    k = hessian.shape[0]
    diagonal = torch.diagonal(hessian)
    dead = diagonal == 0
    damped = hessian + torch.eye(k) * (DAMPING * float(diagonal.mean()) + 1e-10)
    damped[dead, dead] = 1.0
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)


def _factors(name: str, tensors: dict[str, Any], norms: dict[str, Any]) -> Any:
    """What the columns of an exported matrix were divided by: a pre-scale, or what its norm took up. [K]"""
    import torch

    prescale = tensors.get(f"{name}.pre_quant_scale")
    if prescale is not None:
        return prescale.float()
    layer, _, module = name.rpartition(".")
    norm = f"{layer.rpartition('.')[0]}.{_NORMS.get(module)}"
    if norm not in norms:
        return torch.ones(1)
    before, after = norms[norm], tensors[f"{norm}.weight"].float()
    return torch.where(before != 0, after / before, torch.ones_like(after))


def _input_of(name: str) -> str:
    layer, _, module = name.rpartition(".")
    return f"{layer}.{_SHARED.get(module, module)}"


def _parts(names: Sequence[str], linears: dict[str, Any]) -> list[list[str]]:
    """The linears in runs whose Hessians fit HESSIAN_BYTES."""
    parts: list[list[str]] = [[]]
    used, seen = 0, set[str]()
    for name in names:
        source = _input_of(name)
        own = 0 if source in seen else 4 * linears[name].in_features ** 2
        if parts[-1] and used + own > HESSIAN_BYTES:
            parts.append([])
            used, own = 0, 4 * linears[name].in_features ** 2
            seen.clear()
        used += own
        seen.add(source)
        parts[-1].append(name)
    return parts


def _hessians(model: Any, names: Sequence[str], ids: Sequence[Sequence[int]], progress: Any) -> dict[str, Any]:
    """XᵀX of each distinct input."""
    found: dict[str, Any] = {}
    modules = decoder_linears(model)

    def look(name: str) -> Any:
        def hook(_module: Any, inputs: tuple[Any, ...]) -> None:
            x = inputs[0].reshape(-1, inputs[0].shape[-1]).float()
            product = x.T @ x
            found[name] = found[name] + product if name in found else product

        return hook

    wanted = {_input_of(name) for name in names}
    handles = [modules[name].register_forward_pre_hook(look(name)) for name in wanted]
    try:
        run(model, ids, progress)
    finally:
        for handle in handles:
            handle.remove()
    return found
