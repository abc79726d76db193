"""The automatic plan, which finds a style for each layer that is known to be divisible.

:func:`~lightning_hybrid.tensor_parallel.plan.make_plan` calls :func:`auto_plan` for ``tensor_parallel_plan="auto"``,
before the first step and on rank 0 only; `strategy.parallelize` sends the plan to the other ranks. A wrong style can
give wrong results without an error, so a layer is sharded only if the code around it is known too. A rule such as
"shard every `nn.Linear`" would shard layers whose outputs must be complete.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from lightning_hybrid.distributed.module_names import join_names
from lightning_hybrid.tensor_parallel.auto_plan.blocks import add_blocks
from lightning_hybrid.tensor_parallel.auto_plan.builder import PlanBuilder
from lightning_hybrid.tensor_parallel.auto_plan.hf_plan import HuggingFacePlans
from lightning_hybrid.tensor_parallel.mode import Mode
from lightning_hybrid.torch_internals import TRANSFORMER_METHODS

# Activations that act on each feature separately, so that they can run on a shard of the features.
_ELEMENTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.SiLU, nn.Mish, nn.ELU, nn.CELU, nn.SELU, nn.Softplus, nn.Softsign),
    *(nn.Tanh, nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.Tanhshrink, nn.LogSigmoid, nn.Identity),
)
_ELEMENTWISE_FUNCTIONS = (F.relu, F.gelu, F.silu, F.leaky_relu, F.elu, F.selu, F.mish, F.relu6, F.hardswish, F.softplus)
# An embedding is not sharded if it has at least this many times fewer rows than the largest one, and is not tied.
_SMALL = 8
_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)  # layers of torch whose code is known


def auto_plan(
    module: nn.Module, size: int, mode: Mode, *, sequence_parallel: bool
) -> tuple[dict[str, str], dict[str, str]]:
    """Return styles for the layers that are known to be divisible.

    - `nn.TransformerEncoderLayer`, `nn.TransformerDecoderLayer`: attention by heads, the two linear layers by features
    - `nn.MultiheadAttention` anywhere
    - in an `nn.Sequential`, two `nn.Linear` with only elementwise activations and dropout between them
    - the layers in the plan of a Hugging Face model (`hf_plan`)
    - multilayer perceptrons and attentions with the usual names, if a trial gives the same results with shards, and if
      their code is known or is proved to do nothing else (`blocks`)
    - `nn.Embedding` by rows, unless it is small, and its head: the layers that are tied to it, or else the last
      `nn.Linear` if it has as many rows

    The trials run code of the module, in copies on the CPU. The module does not change.

    Args:
        module: The full module.
        size: The number of ranks.
        mode: The way in which layers are sharded over the ranks. If it shards samples, layers of other packages are not
            sharded.
        sequence_parallel: True if transformer layers compute on sequence shards.

    Returns:
        The styles by module name; and the reasons, as the end of a sentence, for layers of these kinds that are not
        sharded.
    """
    builder = PlanBuilder(module, size, mode)
    for name, layer in module.named_modules():
        if isinstance(layer, _LAYERS):
            _transformer_layer(builder, name, layer, has_regions=sequence_parallel or mode.shards_samples)
        elif isinstance(layer, nn.MultiheadAttention):
            builder.add((name, "attention"))
        elif isinstance(layer, nn.Sequential):
            _sequential(builder, name, layer)
    if mode.shards_samples:  # blocks of other packages read the sizes of a full batch
        _vocabulary(builder)
        return builder.plan, builder.reasons
    own = HuggingFacePlans(builder)
    own.add_blocks()
    add_blocks(builder, own.end_names())
    _vocabulary(builder)
    own.add_ends()
    return builder.plan, builder.reasons


def _transformer_layer(builder: PlanBuilder, name: str, layer: nn.Module, *, has_regions: bool) -> None:
    """Plan a transformer layer of torch: its attentions, its two linear layers, and a region around it if possible.

    Args:
        builder: The builder of the plan.
        name: The name of the layer.
        layer: The layer.
        has_regions: True if transformer layers become regions, in which all activations are sharded.
    """
    linear1, dropout, linear2 = (join_names(name, child) for child in ("linear1", "dropout", "linear2"))
    attentions = (("self_attn", "attention"), ("multihead_attn", "attention:memory"))
    is_parallel = [
        builder.add((join_names(name, child), style)) for child, style in attentions if hasattr(layer, child)
    ]
    if not _is_unmodified(layer):
        builder.reasons[linear1] = f"belongs to a {type(layer).__name__} that overrides methods of its torch class"
    elif not (layer.activation in _ELEMENTWISE_FUNCTIONS or isinstance(layer.activation, _ELEMENTWISE)):
        builder.reasons[linear1] = "is followed by an activation that can combine several features"
    # The builder does not add a layer that has a reason.
    is_parallel.append(builder.add((linear1, "colwise"), (dropout, "on_shards"), (linear2, "rowwise")))
    children = [child for child, _ in layer.named_children() if child.rstrip("123") in ("norm", "dropout")]
    inside = [(join_names(name, child), "sequence_parallel") for child in children if child != "dropout"]
    if has_regions and all(is_parallel) and _can_be_region(builder, inside):
        builder.plan |= {name: "sequence_region" if _is_batch_first(layer) else "sequence_region:0", **dict(inside)}
    elif has_regions:
        builder.reasons[name] = "cannot use sequence parallelism, because not all of its layers are sharded"


def _can_be_region(builder: PlanBuilder, inside: list[tuple[str, str]]) -> bool:
    """Return True if the norms and dropouts of a transformer layer can run in a region."""
    layers = [builder.layers[name] for name, _ in inside]
    are_known = all(isinstance(layer, (nn.LayerNorm, nn.Dropout)) for layer in layers)
    return not builder.mode.shards_samples or (are_known and builder.obstacle(inside) is None)


def _is_unmodified(layer: nn.Module) -> bool:
    """Return True if no subclass of the user changes what the layer computes."""
    base = next(kind for kind in _LAYERS if isinstance(layer, kind))
    methods = ("forward", *TRANSFORMER_METHODS)
    return all(getattr(type(layer), method, None) is getattr(base, method, None) for method in methods)


def _is_batch_first(layer: nn.Module) -> bool:
    assert isinstance(layer.self_attn, nn.MultiheadAttention)
    return bool(layer.self_attn.batch_first)


def _sequential(builder: PlanBuilder, name: str, body: nn.Sequential) -> None:
    """Plan pairs of linear layers: the first computes a shard of the features, and the second takes the shard."""
    if type(body).forward is not nn.Sequential.forward:
        return
    first: str | None = None
    dropouts: list[str] = []
    for child, layer in body._modules.items():  # includes layers that occur twice
        path = join_names(name, child)
        if type(layer) is nn.Linear:
            between = [(dropout, "on_shards") for dropout in dropouts]
            is_paired = first is not None and builder.add((first, "colwise"), *between, (path, "rowwise"))
            first, dropouts = None if is_paired else path, []
        elif isinstance(layer, nn.Dropout):
            dropouts.append(path)
        elif not isinstance(layer, _ELEMENTWISE):
            first, dropouts = None, []


def _vocabulary(builder: PlanBuilder) -> None:
    """Plan embeddings, and their heads: the tied layers, or else the last linear layer.

    An untied embedding that is much smaller than the vocabulary, such as the embedding of token types, is not sharded:
    a classifier with as many classes would be mistaken for its head.
    """
    layers = dict(builder.module.named_modules())
    most = max((layer.num_embeddings for layer in layers.values() if isinstance(layer, nn.Embedding)), default=0)
    linears = [name for name, layer in layers.items() if type(layer) is nn.Linear]
    for name, embedding in layers.items():
        if not isinstance(embedding, nn.Embedding):
            continue
        tied = [
            other
            for other, layer in layers.items()
            if other != name and any(parameter is embedding.weight for parameter in layer._parameters.values())
        ]
        if not tied and _SMALL * embedding.num_embeddings <= most:
            builder.reasons[name] = (
                f"has few rows ({embedding.num_embeddings}) compared with the largest embedding ({most})"
            )
        elif builder.add((name, "vocab"), *((other, "vocab") for other in tied), block=name) and linears and not tied:
            last = (linears[-1], "vocab")
            is_head = layers[last[0]].out_features == embedding.num_embeddings
            if is_head and builder.obstacle([last]) is None:
                builder.add(last)
