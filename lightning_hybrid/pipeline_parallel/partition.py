"""Partition of layers into stages, computed from numbers only.

:mod:`lightning_hybrid.strategy.layout` calls :func:`partition` with the user's argument `partition` before the module
is split, or :func:`numbered` with the stages that the user has set as attribute :data:`STAGE_MARK` of layers.
:mod:`lightning_hybrid.strategy.checks` validates the argument when the strategy is created. Every rank computes the
same result, without communication. Here, a *layer* is a row of the body: a layer with its frozen copy counts as one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

#: The attribute of a layer, or of a module that contains layers, by which the user chooses the stage.
STAGE_MARK = "pipeline_stage"


def partition(method: str | Sequence[int], weights: Sequence[int], num_stages: int) -> list[range]:
    """Split a sequence of layers into stages.

    Args:
        method: ``"uniform"`` for equal numbers of layers; ``"parameters"`` for the smallest possible maximum weight of
            a stage; the number of layers of each stage; or the stage of each layer. A list that starts with 0 contains
            stages, because a stage has at least one layer.
        weights: The weight of each layer. For ``"parameters"``, it is the number of parameters that the layer adds to
            its stage. The other methods use only the length of the list.
        num_stages: The number of stages, over all ranks and their chunks.

    Returns:
        The layers of each stage, in order. Each stage has at least one layer.

    Raises:
        ValueError: If the method does not exist, there are fewer layers than stages, a weight is negative, or a list
            does not match the layers.
        TypeError: If a weight or an entry of a list is not an integer.

    Example:
        >>> partition("uniform", weights=[1, 1, 1, 1, 8], num_stages=2)
        [range(0, 2), range(2, 5)]
        >>> partition("parameters", weights=[1, 1, 1, 1, 8], num_stages=2)
        [range(0, 4), range(4, 5)]
        >>> partition([3, 2], weights=[1, 1, 1, 1, 8], num_stages=2) == partition([0, 0, 0, 1, 1], [1] * 5, 2)
        True
    """
    if method == "uniform":
        return uniform(len(weights), num_stages)
    if method == "parameters":
        return balanced(weights, num_stages)
    if not isinstance(method, (list, tuple)):
        raise ValueError(
            f"partition={method!r} must be 'uniform', 'parameters', or a list that contains either the number of layers"
            " in each stage or the stage of each layer [LH102]"
        )
    if is_numbered(method):
        return numbered(method, len(weights), num_stages)
    return explicit(method, len(weights), num_stages)


def uniform(num_layers: int, num_stages: int) -> list[range]:
    """Assign the same number of layers to each stage. The last stages get the remaining layers, one layer each.

    Later stages keep fewer activations in memory, so they have room for the additional layer.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    _check_sizes(num_layers, num_stages)
    share, remainder = divmod(num_layers, num_stages)
    return _ranges([share + (stage >= num_stages - remainder) for stage in range(num_stages)])


def explicit(layers_per_stage: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """Assign a given number of layers to each stage.

    Raises:
        ValueError: If the number of entries is not the number of stages, an entry is below 1, or the entries do not sum
            to ``num_layers``.
        TypeError: If an entry is not an integer.
    """
    counts = list(layers_per_stage)
    _check_sizes(num_layers, num_stages)
    _check_integers("number of layers", counts, at_least=1)
    if len(counts) != num_stages:
        raise ValueError(
            f"partition={counts} is for {len(counts)} stages, but pipeline_parallel_size * num_chunks is {num_stages}; "
            "list either the number of layers in each stage or the stage of each layer, starting at 0 [LH117]"
        )
    if sum(counts) != num_layers:
        raise ValueError(
            f"partition={counts} is for {sum(counts)} layers, but the body has {num_layers}; "
            f"change the numbers so that they sum to {num_layers} [LH117]"
        )
    return _ranges(counts)


def is_numbered(layers: Sequence[int]) -> bool:
    """Return True if a list contains the stage of each layer, and False if it contains numbers of layers."""
    return len(layers) > 0 and layers[0] == 0


def numbered(stages: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """Assign each layer to a given stage.

    Raises:
        ValueError: If the number of entries is not the number of layers, or the entries do not start with 0, decrease,
            skip a stage, or exceed the last stage.
        TypeError: If an entry is not an integer.
    """
    stages = list(stages)
    _check_sizes(num_layers, num_stages)
    _check_integers("stage", stages, at_least=0)
    if len(stages) != num_layers:
        raise ValueError(
            f"the layer stages {stages} are for {len(stages)} layers, but there are {num_layers} layers; list one stage"
            f" for each layer, or one number of layers (at least 1) for each of the {num_stages} stages [LH117]"
        )
    for layer, (before, stage) in enumerate(pairwise([0, *stages])):
        if stage < before:
            raise ValueError(
                f"the layer stages {stages} decrease from {before} to {stage} at layer {layer}; layers are called in"
                " order, so the stages must not decrease [LH117]"
            )
    counts = [stages.count(stage) for stage in range(max(num_stages, stages[-1] + 1))]
    if len(counts) > num_stages:
        raise ValueError(
            f"the layer stages {stages} contain stage {stages[-1]}, but pipeline_parallel_size * num_chunks is"
            f" {num_stages}; use numbers from 0 to {num_stages - 1} [LH117]"
        )
    if 0 in counts:
        raise ValueError(
            f"the layer stages {stages} do not contain stage {counts.index(0)}; assign at least one layer to each of"
            f" the stages 0 to {num_stages - 1} [LH117]"
        )
    return _ranges(counts)


def balanced(weights: Sequence[int], num_stages: int) -> list[range]:
    """Find the partition with the smallest possible maximum weight of a stage that is otherwise as even as possible.

    First, compute the smallest possible maximum weight. Among all partitions within this limit, choose the partition
    with the smallest sum of squared stage weights. If there are several, choose the smallest sum of squared numbers of
    layers, which distributes layers without parameters evenly. If there are still several, choose the partition with
    fewer layers on earlier stages, as in :func:`uniform`.

    Raises:
        ValueError: If there are fewer layers than stages, or a weight is negative.
        TypeError: If a weight is not an integer.
    """
    weights = list(weights)
    _check_sizes(len(weights), num_stages)
    _check_integers("weight", weights, at_least=0)
    return _most_even(weights, num_stages, _lightest_limit(weights, num_stages))


def _lightest_limit(weights: Sequence[int], num_stages: int) -> int:
    """Return the smallest possible maximum weight of a stage, by bisection over the integers."""
    limits = range(max(weights), sum(weights) + 1)
    return limits[bisect_left(limits, True, key=lambda limit: _stages_needed(weights, limit) <= num_stages)]


def _stages_needed(weights: Sequence[int], limit: int) -> int:
    """Return the number of stages needed if no stage may be heavier than ``limit``, by filling stages greedily."""
    num_stages, load = 1, 0
    for weight in weights:
        load += weight
        if load > limit:
            num_stages, load = num_stages + 1, weight
    return num_stages


def _most_even(weights: Sequence[int], num_stages: int, limit: int) -> list[range]:
    """Return the most even partition without a stage heavier than ``limit``.

    This is dynamic programming over (number of remaining stages, first layer of these stages), from the last stage to
    the first.
    """
    num_layers = len(weights)
    prefix = [0, *accumulate(weights)]
    # best[first]: for the best partition of the layers from `first` on, if any, the sum of squared weights, the sum of
    # squared counts, and the end of its first stage
    best: dict[int, tuple[int, int, int]] = {num_layers: (0, 0, num_layers)}
    best_of_stages = []
    for stage in reversed(range(num_stages)):
        rest, best = best, {}
        for first in range(stage, num_layers):
            too_far = bisect_right(prefix, prefix[first] + limit)
            ways = [
                (rest[end][0] + (prefix[end] - prefix[first]) ** 2, rest[end][1] + (end - first) ** 2, end)
                for end in range(first + 1, too_far)
                if end in rest
            ]
            if ways:
                best[first] = min(ways)
        best_of_stages.append(best)
    bounds = [0]
    for best in reversed(best_of_stages):
        bounds.append(best[bounds[-1]][2])
    assert bounds[-1] == num_layers
    return [range(first, end) for first, end in pairwise(bounds)]


def _ranges(counts: Sequence[int]) -> list[range]:
    """Return consecutive ranges of the given lengths."""
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def _check_sizes(num_layers: int, num_stages: int) -> None:
    """Raise an error if there are fewer layers than stages, or no stages."""
    if num_stages < 1:
        raise ValueError(f"The number of stages must be at least 1, got {num_stages}. [LH103]")
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be split into {num_stages} stages. Each stage needs at least one layer. Choose"
            f" pipeline_parallel_size and num_chunks so that their product is at most {num_layers}. [LH118]"
        )


def _check_integers(what: str, values: Sequence[int], at_least: int) -> None:
    """Raise an error if a value is not an integer or is below the minimum."""
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(
                f"a {what} must be an integer, but {value!r} is a {type(value).__name__} (in {values}) [LH101]"
            )
        if value < at_least:
            raise ValueError(f"a {what} must be at least {at_least}, got {value} (in {values}) [LH103]")
