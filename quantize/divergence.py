"""How far a model's predictions move when some of its matrices change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from plankiln.quantize.formats import Floats

LARGEST = 80.0  # of a logit's change, so that its exponential stays finite


class Divergence:
    """The mean Kullback-Leibler divergence, in nats a token, of a torch model's next-token distributions from those it
    had when this was made, over given texts.

    What every layer read is kept (4 bytes x layers x tokens x hidden size) and so are the logits, so that a change in
    layer i runs only the layers from i on.
    """

    def __init__(self, model: Any, ids: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._texts = [_Text(model, list(row)) for row in ids]

    def of(self, weights: Mapping[str, Floats]) -> float:
        """With these tensors in place of the model's own, which are put back. KL(own || changed)."""
        import torch

        parameters = {name: self._model.get_parameter(name) for name in weights}
        own = {name: parameter.data for name, parameter in parameters.items()}
        first = min(_layer(name) for name in weights)
        try:
            for name, parameter in parameters.items():
                parameter.data = torch.from_numpy(weights[name])
            total = sum(text.divergence(self._model, first) for text in self._texts)
        finally:
            for name, parameter in parameters.items():
                parameter.data = own[name]
        return max(0.0, total / sum(text.tokens for text in self._texts))


class _Text:
    """One text: what each layer got, the logits and their probabilities [tokens, vocabulary]."""

    def __init__(self, model: Any, ids: list[int]) -> None:
        import torch

        self.tokens = len(ids)
        self.ids = torch.tensor([ids])
        self.inputs: list[tuple[Any, dict[str, Any]]] = []

        def look(_module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.inputs.append((args[0], kwargs))

        handles = [layer.register_forward_pre_hook(look, with_kwargs=True) for layer in model.model.layers]
        try:
            with torch.no_grad():
                self.logits = model(self.ids, use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        self.probabilities = self.logits.softmax(-1)

    def divergence(self, model: Any, first: int) -> float:
        """The sum over tokens. first: the first layer that changed; -1 is the embedding."""
        import torch

        with torch.no_grad():
            x = model.model.embed_tokens(self.ids) if first < 0 else self.inputs[first][0]
            rest = slice(max(first, 0), None)
            for layer, (_, kwargs) in zip(model.model.layers[rest], self.inputs[rest], strict=True):
                x = layer(x, **kwargs)
            change = model.lm_head(model.model.norm(x))[0].sub_(self.logits)
            # log Σ p exp(d), with d shifted by its mean: no cancellation when the change is small
            change -= (self.probabilities * change).sum(-1, keepdim=True)
            excess = change.clamp_(max=LARGEST).expm1_().mul_(self.probabilities)
            return float(excess.sum(-1, dtype=torch.float64).log1p().sum())


def _layer(name: str) -> int:
    """The number of the layer that a tensor belongs to; -1 for the embedding, and for the head, which is run anyway."""
    parts = name.split(".")
    return int(parts[2]) if parts[:2] == ["model", "layers"] else -1
