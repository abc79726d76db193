"""The styles of a plan: the parallel layer into which each style turns a layer, and the sharding of its parameters.

`plan` finds the style of each layer with :func:`find_style`, stores its parameter splits in a :class:`PlanRow`, and
applies it before the first step. `strategy.gather` and `strategy.summary` read the same splits after the run and for
the printed table, so a split is data (:class:`ParamSplit`) and not a function that shards. `grid.styles` has the styles
for ranks in a square or cube.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.tensor_parallel import layers
from lightning_hybrid.tensor_parallel.attention import ParallelAttention
from lightning_hybrid.tensor_parallel.experts import ParallelExperts, is_experts
from lightning_hybrid.tensor_parallel.layers import parallelize_layer
from lightning_hybrid.tensor_parallel.layouts.placed_layer import PlacedLayer
from lightning_hybrid.torch_internals import gradient_hooks


@dataclass(frozen=True)
class ParamSplit:
    """The sharding of a parameter, or of a buffer that has a layout.

    Attributes:
        path: The dotted name relative to the layer.
        dim: The dimension that is split.
        blocks: The number of equal blocks along this dimension, such as 3 for packed queries, keys and values. Each
            block is split separately.
    """

    path: str
    dim: int
    blocks: int = 1

    def cuts(self, rank: int, size: int) -> list[tuple[int, int, int]]:
        """Return the cuts that give a rank its shard.

        Args:
            rank: A tensor-parallel rank.
            size: The number of tensor-parallel ranks.

        Returns:
            For each cut: the dimension, the number of parts of each block, and the index of the rank's part.
        """
        return [(self.dim, size, rank)]

    def dim_of(self, axis: str) -> int | None:
        """Return the dimension that an axis of the tensor-parallel mesh splits, or ``None``."""
        return self.dim

    def local_shape(self, shape: Sequence[int], size: int) -> list[int]:
        """Return the shape of a shard."""
        local = list(shape)
        for dim, parts, _ in self.cuts(0, size):
            local[dim] //= parts
        return local

    def transposed(self) -> ParamSplit:
        """Return the sharding of the transposed parameter, which has two dimensions."""
        return replace(self, dim=1 - self.dim)


@dataclass(frozen=True)
class PlanRow:
    """One layer of a plan with one of its styles.

    Attributes:
        name: The dotted name of the layer in the full module.
        style: The name of the style, with its arguments after a colon.
        param_splits: The sharding of its parameters, and of buffers with a layout. Other parameters are replicated.
        sequence_dim: The dimension of activations along which sequences are sharded around the layer; ``None`` if they
            are not sharded.
        options: Attributes of the parallel layer, in addition to the attributes of the style.
    """

    name: str
    style: str
    param_splits: tuple[ParamSplit, ...] = ()
    sequence_dim: int | None = None
    options: dict[str, Any] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        """The name of the style, without the text after a colon."""
        return self.style.partition(":")[0]

    def parameters(self) -> dict[str, ParamSplit]:
        """Return the sharding of the parameters, by their dotted names in the full module."""
        return {join_names(self.name, split.path): split for split in self.param_splits}


@dataclass(frozen=True)
class Style:
    """The way in which layers of some classes are parallelized.

    Attributes:
        classes: The layer classes that the style supports. A subclass must not override `forward`, except of
            `nn.Module`, for which any class is supported.
        mixin: The class of parallel layers that they become; ``None`` if they do not change.
        param_splits: Returns the sharding of the parameters of a layer.
        attributes: Attributes of the parallel layer, by name.
        partial_grads: True if the gradients of its unsharded parameters come only from this rank's shard of the
            activations. They are then partial sums over the ranks.
        for_sequences: True if the style has an effect only in regions: in a line, only under sequence parallelism.
        head_parts: The number of parts into which the heads of an attention are divided; ``None`` if they are divided
            over all ranks.
    """

    classes: tuple[type[nn.Module], ...]
    mixin: type | None
    param_splits: Callable[[nn.Module], list[ParamSplit]] = lambda layer: []
    attributes: dict[str, Any] = field(default_factory=dict)
    partial_grads: bool = False
    for_sequences: bool = False
    head_parts: int | None = None

    def unsupported_reason(self, layer: nn.Module, size: int) -> str | None:
        """Return the reason why a layer cannot have this style, as the end of a sentence; ``None`` if it can.

        Args:
            layer: The layer. Its parameters have their full shapes.
            size: The number of ranks.
        """
        base = next((base for base in self.classes if isinstance(layer, base)), None)
        if base is None:
            return f"is a {type(layer).__name__} instead of {' or '.join(base.__name__ for base in self.classes)}"
        if self.mixin is not None and "forward" in vars(layer):
            return "has a replaced `forward`"
        if base is not nn.Module and type(layer).forward is not base.forward:
            return f"is a {type(layer).__name__} that overrides `forward`"
        if self.classes == (nn.Embedding,):
            assert isinstance(layer, nn.Embedding)
            if layer.max_norm is not None or layer.scale_grad_by_freq or layer.sparse:
                return "uses max_norm, scale_grad_by_freq or sparse, which need the full embedding"
        if self.mixin is not None and issubclass(self.mixin, ParallelAttention):
            assert isinstance(layer, nn.MultiheadAttention)
            parts = self.head_parts or size
            if layer.num_heads % parts:
                return f"has {layer.num_heads} heads, which cannot be divided over {parts} ranks"
            if layer.bias_k is not None or layer.add_zero_attn:
                return "uses add_bias_kv or add_zero_attn, which cannot be sharded"
        if self.mixin is ParallelExperts and not is_experts(layer):
            return (
                "has no attribute `num_experts` with parameters of this many rows and"
                " forward(self, hidden_states, top_k_index, top_k_weights)"
            )
        for split in self.param_splits(layer):
            owner, _, name = split.path.rpartition(".")
            holder = layer.get_submodule(owner)
            parameter: Tensor | None = holder._parameters.get(name)
            if parameter is None and self.mixin is PlacedLayer:
                parameter = holder._buffers.get(name)
            if parameter is None:
                return f"computes its {split.path!r} from other parameters"
            if gradient_hooks(parameter):
                return f"has a hook on its {split.path!r}, which would receive only a shard of the gradient"
            for dim, parts, _ in split.cuts(0, size):
                parts *= split.blocks if dim == split.dim else 1
                if parameter.shape[dim] % parts:
                    return (
                        f"has {split.path!r} of shape {tuple(parameter.shape)}, whose dimension {dim} cannot be split"
                        f" into {parts} equal parts"
                    )
        return None

    def apply(self, layer: nn.Module, **attributes: Any) -> None:
        """Turn a layer into a parallel layer. :class:`~.shard.Sharder` shards its parameters.

        Args:
            layer: The layer, whose class is changed in place. Nothing happens for a style without a `mixin`.
            attributes: More attributes of the parallel layer, such as its group. They replace `Style.attributes`.
        """
        if self.mixin is not None:
            parallelize_layer(layer, self.mixin, **{**self.attributes, **attributes})


def _weight_and_bias(dim: int, blocks: int = 1, *, bias: bool = True) -> Callable[[nn.Module], list[ParamSplit]]:
    def param_splits(layer: nn.Module) -> list[ParamSplit]:
        has_bias = bias and getattr(layer, "bias", None) is not None
        return [ParamSplit("weight", dim, blocks), *([ParamSplit("bias", 0, blocks)] if has_bias else [])]

    return param_splits


#: The parameters of the input projections of `nn.MultiheadAttention`, each with its number of packed projections.
IN_PROJECTIONS = {"in_proj_weight": 3, "q_proj_weight": 1, "k_proj_weight": 1, "v_proj_weight": 1, "in_proj_bias": 3}


def _attention(layer: nn.Module) -> list[ParamSplit]:
    splits = [ParamSplit(name, 0, n) for name, n in IN_PROJECTIONS.items() if getattr(layer, name) is not None]
    return [*splits, ParamSplit("out_proj.weight", 1)]


def _experts(layer: nn.Module) -> list[ParamSplit]:
    return [ParamSplit(name, 0) for name, _ in layer.named_parameters(recurse=False)]


def _column(blocks: int = 1, *, gather_output: bool = False) -> Style:
    attributes = {"gather_output": gather_output, "input_is_gathered": False, "is_transposed": False}
    return Style((nn.Linear,), layers.ColumnParallelLinear, _weight_and_bias(0, blocks), attributes)


def _row(*, scatter_input: bool = False) -> Style:
    splits = _weight_and_bias(1, bias=False)
    attributes = {"scatter_input": scatter_input, "is_transposed": False}
    return Style((nn.Linear,), layers.RowParallelLinear, splits, attributes)


#: The styles by name. Names of transformers are used where a style is the same, with a few exceptions, see
#: `auto_plan.hf_plan`.
STYLES: dict[str, Style] = {
    "replicate": Style((nn.Module,), None),
    "colwise": _column(),
    "colwise_gather_output": _column(gather_output=True),
    "packed_colwise_2": _column(2),
    "packed_colwise_3": _column(3),
    "rowwise": _row(),
    "rowwise_split_input": _row(scatter_input=True),
    "attention": Style((nn.MultiheadAttention,), ParallelAttention, _attention),
    "vocab": Style((nn.Embedding,), layers.VocabParallelEmbedding, _weight_and_bias(0)),
    "vocab_head": Style((nn.Linear,), layers.VocabParallelHead, _weight_and_bias(0)),
    "colwise_embedding": Style((nn.Embedding,), layers.ColumnParallelEmbedding, _weight_and_bias(1)),
    "experts": Style((nn.Module,), ParallelExperts, _experts),
    "divide": Style((nn.Module,), layers.DividedNumbers),
    "local_rng": Style((nn.Module,), layers.LocalRandomNumbers),
    "narrow_input": Style((nn.Module,), layers.NarrowInput),
    "mask_per_head": Style((nn.Module,), layers.MaskPerHead),
    "layout": Style((nn.Module,), PlacedLayer),
    "on_shards": Style((nn.Module,), layers.OnShards, partial_grads=True),
    "sequence_parallel": Style((nn.Module,), layers.OnShards, partial_grads=True, for_sequences=True),
    "sequence_gathered": Style((nn.Module,), layers.SequenceGathered, for_sequences=True),
    "sequence_region": Style((nn.Module,), layers.SequenceRegion, partial_grads=True, for_sequences=True),
}


#: Styles that take arguments after a colon, and that can be combined with another style.
WRAPPERS = {"divide", "local_rng", "narrow_input", "mask_per_head"}

#: The kind of the internal style that replaces plan entries for parameters. It belongs to the module that has them, and
#: has the form of :func:`layout_style`.
LAYOUT = "layout"


def layout_style(dims: Mapping[str, int]) -> str:
    """Return the style of a module whose parameters have layouts, for example ``"layout:weight=S(0),bias=S(0)"``.

    Args:
        dims: The split dimension of each parameter, by name.
    """
    return f"{LAYOUT}:" + ",".join(f"{name}=S({dim})" for name, dim in dims.items())


def layout_dims(style: str) -> dict[str, int]:
    """Return the split dimension of each parameter of a :func:`layout_style`."""
    parts = (part.partition("=") for part in style.partition(":")[2].split(","))
    return {name: int(letter[2:-1]) for name, _, letter in parts}


def find_style(name: str, layer: nn.Module) -> Style:
    """Return the style with a name, for ranks in a line.

    Some names are different styles for a linear layer and for an embedding.

    Args:
        name: The name of the style, with its arguments after a colon. `plan.check_styles` has checked it.
        layer: The layer.
    """
    kind = name.partition(":")[0]
    if kind == "vocab" and isinstance(layer, nn.Linear):
        kind = "vocab_head"
    elif kind == "colwise" and isinstance(layer, nn.Embedding):
        kind = "colwise_embedding"
    style = STYLES[kind]
    if kind == LAYOUT:
        splits = [ParamSplit(parameter, dim) for parameter, dim in layout_dims(name).items()]
        return replace(style, param_splits=lambda layer: splits)
    return transposed(style) if is_conv1d(layer) and style.classes == (nn.Linear,) else style


def is_conv1d(layer: nn.Module) -> bool:
    """Return True if a layer is transformers' `Conv1D`, the linear layer of GPT-2. Its weight is transposed."""
    kind = type(layer)
    return kind.__name__ == "Conv1D" and kind.__module__ == "transformers.pytorch_utils"


def transposed(style: Style) -> Style:
    """Return the style for layers whose weight is transposed: `Conv1D` of transformers."""

    def param_splits(layer: nn.Module) -> list[ParamSplit]:
        splits = style.param_splits(layer)
        return [each.transposed() if each.path == "weight" else each for each in splits]

    attributes = {**style.attributes, "is_transposed": True}
    return replace(style, classes=(nn.Module,), param_splits=param_splits, attributes=attributes)
