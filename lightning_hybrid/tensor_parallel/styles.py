"""The styles that a plan may name: what becomes of a layer, and of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from lightning_hybrid.tensor_parallel import layers
from lightning_hybrid.tensor_parallel.attention import ParallelAttention
from lightning_hybrid.tensor_parallel.layers import parallelize_layer

__all__ = ["STYLES", "ParamSplit", "Style", "find_style"]


@dataclass(frozen=True)
class ParamSplit:
    """How a parameter is divided.

    Attributes:
        path: Its dotted name below the layer.
        dim: The dimension that is divided.
        blocks: Into how many equal blocks it falls, each of which is divided.
    """

    path: str
    dim: int
    blocks: int = 1


@dataclass(frozen=True)
class Style:
    """What becomes of a layer.

    Attributes:
        kinds: The layers that it is for; their `forward` must be torch's own.
        mixin: What the layer becomes; ``None`` if it stays what it is.
        divides: Its parameters that are divided, for a given layer.
        attributes: What the mixin is told.
        adds_up: Whether its other parameters see this rank's share of the work, so that gradients add up over ranks.
        for_sequences: Whether it matters under sequence parallelism only.
    """

    kinds: tuple[type[nn.Module], ...]
    mixin: type | None
    divides: Callable[[nn.Module], list[ParamSplit]] = lambda layer: []
    attributes: dict[str, Any] = field(default_factory=dict)
    adds_up: bool = False
    for_sequences: bool = False

    def why_not(self, layer: nn.Module, size: int) -> str | None:
        """Why this style is not possible for a layer, if so.

        Args:
            layer: The layer.
            size: The number of ranks.
        """
        kind = next((kind for kind in self.kinds if isinstance(layer, kind)), None)
        if kind is None:
            return f"is a {type(layer).__name__}, and not one of {', '.join(kind.__name__ for kind in self.kinds)}"
        if kind is not nn.Module and type(layer).forward is not kind.forward:
            return f"is a {type(layer).__name__} with a `forward` of its own"
        if self.mixin is layers.VocabularyEmbedding:
            assert isinstance(layer, nn.Embedding)
            if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
                return "uses max_norm, scale_grad_by_freq or sparse, which need all rows"
        if self.mixin is ParallelAttention:
            assert isinstance(layer, nn.MultiheadAttention)
            if layer.num_heads % size:
                return f"has {layer.num_heads} heads, which cannot be divided over {size} ranks"
            if layer.bias_k is not None or layer.add_zero_attn:
                return "uses add_bias_kv or add_zero_attn"
        for division in self.divides(layer):
            owner, _, name = division.path.rpartition(".")
            parameter = layer.get_submodule(owner)._parameters.get(name)
            if parameter is None:
                return f"computes its {division.path!r} from other parameters"
            if parameter._backward_hooks:
                return f"has a hook on its {division.path!r}, which would see a share of the gradient"
            length = parameter.shape[division.dim]
            if length % (size * division.blocks):
                return (
                    f"has {division.path!r} of shape {tuple(parameter.shape)}, whose dimension {division.dim} cannot be"
                    f" divided into {size * division.blocks} equal parts"
                )
        return None

    def transform(self, layer: nn.Module, **attributes: Any) -> None:
        """Make the layer what this style says; its parameters are divided elsewhere."""
        if self.mixin is not None:
            parallelize_layer(layer, self.mixin, **{**self.attributes, **attributes})


def _weight_and_bias(dim: int, blocks: int = 1, *, bias: bool = True) -> Callable[[nn.Module], list[ParamSplit]]:
    def divides(layer: nn.Module) -> list[ParamSplit]:
        found = [ParamSplit("weight", dim, blocks)]
        if bias and getattr(layer, "bias", None) is not None:
            found.append(ParamSplit("bias", 0, blocks))
        return found

    return divides


def _attention(layer: nn.Module) -> list[ParamSplit]:
    found: Iterator[ParamSplit] = (
        ParamSplit(name, 0, blocks)
        for name, blocks in (
            ("in_proj_weight", 3),
            ("q_proj_weight", 1),
            ("k_proj_weight", 1),
            ("v_proj_weight", 1),
            ("in_proj_bias", 3),
        )
    )
    divided = [division for division in found if getattr(layer, division.path) is not None]
    return [*divided, ParamSplit("out_proj.weight", 1)]


def _column(blocks: int = 1, *, gathers_output: bool = False) -> Style:
    attributes = {"gathers_output": gathers_output, "enters": True}
    return Style((nn.Linear,), layers.ColumnLinear, _weight_and_bias(0, blocks), attributes)


def _row(*, splits_input: bool = False) -> Style:
    divides = _weight_and_bias(1, bias=False)
    return Style((nn.Linear,), layers.RowLinear, divides, {"splits_input": splits_input})


#: The styles by name. Names that other libraries use for the same thing are spelled as there.
STYLES: dict[str, Style] = {
    "replicate": Style((nn.Module,), None),
    "colwise": _column(),
    "colwise_gather_output": _column(gathers_output=True),
    "packed_colwise_2": _column(2),
    "packed_colwise_3": _column(3),
    "rowwise": _row(),
    "rowwise_split_input": _row(splits_input=True),
    "attention": Style((nn.MultiheadAttention,), ParallelAttention, _attention),
    "vocab": Style((nn.Embedding,), layers.VocabularyEmbedding, _weight_and_bias(0)),
    "vocab_head": Style((nn.Linear,), layers.VocabularyHead, _weight_and_bias(0)),
    "on_shards": Style((nn.Module,), layers.OnShards, adds_up=True),
    "sequence_parallel": Style((nn.Module,), layers.OnShards, adds_up=True, for_sequences=True),
    "sequence_gathered": Style((nn.Module,), layers.SequenceGathered, for_sequences=True),
    "sequence_region": Style((nn.Module,), layers.SequenceRegion, for_sequences=True),
}


def find_style(name: str, layer: nn.Module) -> Style | None:
    """The style of this name; ``"vocab"`` is one thing for an embedding and another for a head."""
    if name == "vocab" and isinstance(layer, nn.Linear):
        name = "vocab_head"
    return STYLES.get(name)
