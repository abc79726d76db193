"""The plan for layers that torch brings: what can be divided without knowing the user's code."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch.nn.functional as F
from torch import nn

from lightning_hybrid.tensor_parallel.styles import find_style

__all__ = ["ELEMENTWISE", "automatic_plan"]

#: Activations that act on each feature alone, so that a share of the features is enough.
ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.LogSigmoid, nn.Identity),
)
_FUNCTIONS = (F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, F.selu, F.mish, F.relu6, F.hardswish, F.softplus)
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)


def automatic_plan(module: nn.Module, size: int, *, sequence_parallel: bool) -> tuple[dict[str, str], dict[str, str]]:
    """Styles for the layers whose inner life is known.

    - `nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer`: attention by heads, the two linear layers by features;
    - `nn.MultiheadAttention` anywhere;
    - in an `nn.Sequential`, two `nn.Linear` with nothing but elementwise activations and dropout between them;
    - `nn.Embedding` by rows, and the `nn.Linear` that leads back to them (tied, or the last one, of equal size).

    Args:
        module: The whole module.
        size: The number of ranks.
        sequence_parallel: Whether transformer layers work on shares of the sequence.

    Returns:
        The styles by module name; and, for layers of these kinds that stay whole, the reason.
    """
    found = _Found(module, size)
    for name, layer in module.named_modules():
        if isinstance(layer, _LAYERS):
            _transformer_layer(found, name, layer, sequence_parallel=sequence_parallel)
        elif isinstance(layer, nn.MultiheadAttention):
            found.add(name, "attention")
        elif isinstance(layer, nn.Sequential):
            _sequential(found, name, layer)
    _vocabulary(found, module)
    return found.plan, found.reasons


class _Found:
    """What was found so far."""

    def __init__(self, module: nn.Module, size: int) -> None:
        self.module, self.size = module, size
        self.plan: dict[str, str] = {}
        self.reasons: dict[str, str] = {}
        self._places = Counter(
            id(child) for parent in module.modules() for child in parent._modules.values() if child is not None
        )

    def is_elsewhere(self, name: str) -> bool:
        """Whether this layer also stands somewhere else, where it may get something whole."""
        return self._places[id(self.module.get_submodule(name))] > 1

    def why_not(self, name: str, style: str) -> str | None:
        layer = self.module.get_submodule(name)
        found = find_style(style.partition(":")[0], layer)
        assert found is not None
        return found.why_not(layer, self.size)

    def add(self, *names_and_styles: str) -> bool:
        """Plan for all of these, or, if one is not possible, for none."""
        pairs = list(zip(names_and_styles[::2], names_and_styles[1::2], strict=True))
        if any(name in self.plan or name in self.reasons for name, _ in pairs):
            return False
        if len(pairs) > 1 and pairs[0][1] == "colwise" and any(self.is_elsewhere(name) for name, _ in pairs):
            self.reasons[pairs[0][0]] = "or what follows it stands at several places"
            return False
        for name, style in pairs:
            reason = self.why_not(name, style)
            if reason is not None:
                self.reasons[name] = reason
                return False
        self.plan.update(pairs)
        return True


def _transformer_layer(found: _Found, name: str, layer: nn.Module, *, sequence_parallel: bool) -> None:
    prefix = f"{name}." if name else ""
    attentions = [f"{prefix}{each}" for each in ("self_attn", "multihead_attn") if hasattr(layer, each)]
    whole = [
        found.add(attention, "attention:memory" if attention.endswith("multihead_attn") else "attention")
        for attention in attentions
    ]
    if not _is_torchs(layer):
        found.reasons[f"{prefix}linear1"] = f"belongs to a {type(layer).__name__}, which computes in ways of its own"
        whole.append(False)
    elif layer.activation in _FUNCTIONS or isinstance(layer.activation, ELEMENTWISE):
        pair = (f"{prefix}linear1", "colwise", f"{prefix}dropout", "on_shards", f"{prefix}linear2", "rowwise")
        whole.append(found.add(*pair))
    else:
        found.reasons[f"{prefix}linear1"] = "is followed by an activation that may mix features"
        whole.append(False)
    if sequence_parallel and all(whole):
        found.plan[name] = "sequence_region" if _is_batch_first(layer) else "sequence_region:0"
        inside = [
            each for each in ("norm1", "norm2", "norm3", "dropout1", "dropout2", "dropout3") if hasattr(layer, each)
        ]
        found.plan.update({f"{prefix}{each}": "sequence_parallel" for each in inside})
    elif sequence_parallel:
        found.reasons[name] = "cannot work on shares of a sequence, because not all of its layers are divided"


def _is_torchs(layer: nn.Module) -> bool:
    """Whether the layer computes as torch's does."""
    base = next(kind for kind in _LAYERS if isinstance(layer, kind))
    methods = ("forward", "_sa_block", "_mha_block", "_ff_block")
    return all(getattr(type(layer), method, None) is getattr(base, method, None) for method in methods)


def _is_batch_first(layer: nn.Module) -> bool:
    assert isinstance(layer.self_attn, nn.MultiheadAttention)
    return bool(layer.self_attn.batch_first)


def _sequential(found: _Found, name: str, body: nn.Sequential) -> None:
    """Pairs of linear layers: the first makes a share of the features, the second takes it."""
    if type(body).forward is not nn.Sequential.forward:
        return
    prefix = f"{name}." if name else ""
    first: str | None = None
    between: list[str] = []
    for child, layer in body._modules.items():  # also what stands there twice
        path = f"{prefix}{child}"
        if type(layer) is nn.Linear:
            styles = [word for each in between for word in (each, "on_shards")]
            paired = first is not None and found.add(first, "colwise", *styles, path, "rowwise")
            first, between = None if paired else path, []
        elif isinstance(layer, nn.Dropout):
            between.append(path)
        elif not isinstance(layer, ELEMENTWISE):
            first, between = None, []


def _vocabulary(found: _Found, module: nn.Module) -> None:
    """Embeddings, and the layers that lead back to their rows: those that share the weight, else the last linear."""
    owners = _owners(module)
    linears = {name: layer for name, layer in module.named_modules() if type(layer) is nn.Linear}
    embeddings = {name: layer for name, layer in module.named_modules() if isinstance(layer, nn.Embedding)}
    for name, layer in embeddings.items():
        tied = [owner for owner in owners.get(id(layer.weight), []) if owner != name]
        if not all(owner in linears or owner in embeddings for owner in tied):
            found.reasons[name] = "shares its weight with a layer that is neither nn.Linear nor nn.Embedding"
            continue
        if not found.add(name, "vocab", *(word for owner in tied for word in (owner, "vocab"))) or tied or not linears:
            continue
        last, head = list(linears.items())[-1]
        if head.out_features == layer.num_embeddings:
            found.add(last, "vocab")


def _owners(module: nn.Module) -> dict[int, list[str]]:
    """The layers that hold each parameter, by its identity."""
    owners: dict[int, list[str]] = {}
    for name, owner in module.named_modules():
        for parameter in _own_parameters(owner):
            owners.setdefault(parameter, []).append(name)
    return owners


def _own_parameters(layer: nn.Module) -> Iterator[int]:
    return (id(parameter) for parameter in layer._parameters.values() if parameter is not None)
