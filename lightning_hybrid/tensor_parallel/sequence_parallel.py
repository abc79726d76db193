"""Sequence regions: groups of layers that compute on sequence shards and pass the shards to each other.

::

    body           layer 0       layer 1       layer 2        norm
    region         [ ............................ ]
    activations    scattered     shards        shards         gathered before the norm

Each layer of this example has the style ``"sequence_region"``. Adjacent regions of an `nn.Sequential` pass shards, so
the sequence is scattered and gathered only once. :class:`~.mode.Mode` calls :func:`assign_sequence_dims` while a plan
is made, because a style describes one layer, but a region must know if its neighbors are regions too. In forward,
`layers.SequenceRegion` scatters and gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

from torch import nn

from lightning_hybrid.tensor_parallel.styles import STYLES, PlanRow

#: The kinds of styles that are removed from a plan without sequence parallelism.
_FOR_SEQUENCES = frozenset(name for name, style in STYLES.items() if style.for_sequences)


def assign_sequence_dims(rows: list[PlanRow], module: nn.Module, *, sequence_parallel: bool) -> list[PlanRow]:
    """Add the options of sequence parallelism to the rows of a plan.

    Args:
        rows: The rows of the plan, one for each style of a layer.
        module: The full module.
        sequence_parallel: True if sequences are sharded. If False, rows that only affect sequence parallelism are
            removed.

    Returns:
        The rows. The row of a region, and each row inside it, has the dimension along which sequences are sharded.
        Regions know if they scatter and gather, and column-wise layers if their input is gathered already.

    Raises:
        ValueError: If a style that computes on sequence shards is given to a layer outside all regions.
    """
    if not sequence_parallel:
        return [row for row in rows if row.kind not in _FOR_SEQUENCES]
    dims = {row.name: int(row.style.partition(":")[2] or 1) for row in rows if row.kind == "sequence_region"}
    gathered = {row.name for row in rows if row.kind == "sequence_gathered"}
    alike = [pair for pair in _consecutive_layers(module) if dims.get(pair[0]) == dims.get(pair[1])]
    result = []
    for row in rows:
        region = next((name for name in _ancestors(row.name) if name in dims), None)
        if region is None:
            if row.kind in _FOR_SEQUENCES:
                raise ValueError(
                    f"tensor_parallel_plan gives {row.name!r} the style {row.style!r}, which works only inside a module"
                    f" with the style 'sequence_region', but no module that contains {row.name!r} has this style."
                    " [LH512]"
                )
            result.append(row)
            continue
        options = dict(row.options)
        if row.kind == "sequence_region":
            options |= {
                "scatter_input": all(second != row.name for _, second in alike),
                "gather_output": all(first != row.name for first, _ in alike),
            }
        elif row.kind.startswith(("colwise", "packed_colwise")):
            options |= {"input_is_gathered": any(name in gathered for name in _ancestors(row.name))}
        result.append(replace(row, sequence_dim=dims[region], options=options))
    return result


def count_uses(module: nn.Module) -> Counter[int]:
    """Return how many times each layer occurs in a module as a child, by the `id()` of the layer.

    `PlanBuilder` does not shard a layer that occurs twice, for example a tied layer.
    """
    return Counter(id(child) for parent in module.modules() for child in parent._modules.values() if child is not None)


def _ancestors(name: str) -> Iterator[str]:
    """Yield a module name, then the names of its ancestors, from the inside out, without the root."""
    while name:
        yield name
        name = name.rpartition(".")[0]


def _consecutive_layers(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Yield pairs of layer names: the second layer receives the output of the first, and both occur once."""
    names = {id(layer): name for name, layer in module.named_modules()}
    uses = count_uses(module)
    for container in module.modules():
        if isinstance(container, nn.Sequential) and type(container).forward is nn.Sequential.forward:
            for first, second in pairwise(container._modules.values()):
                if uses[id(first)] == uses[id(second)] == 1:
                    yield names[id(first)], names[id(second)]
