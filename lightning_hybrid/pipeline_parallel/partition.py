"""Which layers belong to which stage: integers in, integers out."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise

STAGE_MARK = "pipeline_stage"  # the attribute by which a layer, or what holds it, says its stage


def partition(method: str | Sequence[int], weights: Sequence[int], num_stages: int) -> list[range]:
    """Cut a row of layers into stages.

    Args:
        method: ``"uniform"`` for equally many layers per stage, ``"parameters"`` for the lightest possible heaviest
            stage; the number of layers of each stage, or the stage of each layer. The latter begins with 0, which no
            stage's number of layers is.
        weights: The weight of each layer, for ``"parameters"`` the number of parameters that it brings to its stage;
            the other methods only count the layers.
        num_stages: Number of stages, over all ranks and their chunks.

    Returns:
        The layers of each stage, in order; each has at least one layer.

    Raises:
        ValueError: If there is no such method, there are fewer layers than stages, or the given layers do not fit.
        TypeError: If a weight or a number of layers is not an integer.

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
    """Equally many layers per stage; what is left over goes to the later stages, one layer each.

    Later stages keep fewer activations alive, so they can carry the additional layer.

    Raises:
        ValueError: If there are fewer layers than stages.
    """
    _check_sizes(num_layers, num_stages)
    share, remainder = divmod(num_layers, num_stages)
    return _ranges([share + (stage >= num_stages - remainder) for stage in range(num_stages)])


def explicit(layers_per_stage: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """The given number of layers for each stage.

    Raises:
        ValueError: If there is not one number for each stage, one is below 1, or they do not sum to ``num_layers``.
        TypeError: If a number of layers is not an integer.
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
    """Whether a list has the stage of each layer, and not the number of layers of each stage."""
    return len(layers) > 0 and layers[0] == 0


def numbered(stages: Sequence[int], num_layers: int, num_stages: int) -> list[range]:
    """The given stage for each layer.

    Raises:
        ValueError: If there is not one number for each layer, they do not begin with 0, go back, leave out a stage, or
            there are not as many stages.
        TypeError: If a number is not an integer.
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
    """The partition whose heaviest stage is as light as possible, and which is otherwise as even as possible.

    First the limit is found that the heaviest stage cannot get below. Of all partitions that keep to it, the one with
    the smallest sum of squared stage weights is taken; of several, the one with the smallest sum of squared numbers of
    layers, which spreads layers without parameters; and then the one with fewer layers on earlier stages, as in
    :func:`uniform`.

    Raises:
        ValueError: If there are fewer layers than stages, or a weight is negative.
        TypeError: If a weight is not an integer.
    """
    weights = list(weights)
    _check_sizes(len(weights), num_stages)
    _check_integers("weight", weights, at_least=0)
    return _most_even(weights, num_stages, _lightest_limit(weights, num_stages))


def _lightest_limit(weights: Sequence[int], num_stages: int) -> int:
    """The smallest possible weight of the heaviest stage, by bisection over the integers."""
    limits = range(max(weights), sum(weights) + 1)
    return limits[bisect_left(limits, True, key=lambda limit: _stages_needed(weights, limit) <= num_stages)]


def _stages_needed(weights: Sequence[int], limit: int) -> int:
    """How many stages it takes if none may be heavier than ``limit``; each is filled as far as it goes."""
    num_stages, load = 1, 0
    for weight in weights:
        load += weight
        if load > limit:
            num_stages, load = num_stages + 1, weight
    return num_stages


def _most_even(weights: Sequence[int], num_stages: int, limit: int) -> list[range]:
    """Dynamic programming over (stages that remain, first layer of these), from the last stage to the first."""
    num_layers = len(weights)
    prefix = [0, *accumulate(weights)]
    # best[first]: squared weights and squared counts of the best way to cut what begins at layer first, if any,
    # and where the first stage of that way ends
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
    return [range(end - count, end) for end, count in zip(accumulate(counts), counts, strict=True)]


def _check_sizes(num_layers: int, num_stages: int) -> None:
    if num_stages < 1:
        raise ValueError(f"The number of stages must be at least 1, got {num_stages}. [LH103]")
    if num_layers < num_stages:
        raise ValueError(
            f"{num_layers} layers cannot be split into {num_stages} stages. Each stage needs at least one layer. Choose"
            f" pipeline_parallel_size and num_chunks so that their product is at most {num_layers}. [LH118]"
        )


def _check_integers(what: str, values: Sequence[int], at_least: int) -> None:
    for value in values:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(
                f"a {what} must be an integer, but {value!r} is a {type(value).__name__} (in {values}) [LH101]"
            )
        if value < at_least:
            raise ValueError(f"a {what} must be at least {at_least}, got {value} (in {values}) [LH103]")
