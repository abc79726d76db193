"""Selection of the layers that are recomputed, from the argument `recompute`.

`strategy.checks` calls :func:`check_recompute` when the strategy is created, without a module. `strategy.layout` calls
:func:`chosen_layers` when a run starts, on every rank, with the module.

The *body* is the set of layers that a pipeline splits into stages. It is a *chain*, an `nn.Sequential` that the step
calls as a whole, or a set of *units*, which are layers that any code may call.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Sequence
from typing import Any, cast

from torch import nn

from lightning_hybrid.config import Recompute
from lightning_hybrid.distributed.module_names import name_matches
from lightning_hybrid.pipeline_parallel.body import Body


def check_recompute(recompute: Any, num_ranks: int, num_chunks: int) -> None:
    """Check the argument `recompute`.

    Args:
        recompute: The argument; ``"auto"`` has already been replaced by a value.
        num_ranks: The number of pipeline ranks.
        num_chunks: The number of stages per rank. With a single pipeline rank, they count as one stage.

    Raises:
        TypeError: If its type, or the type of an entry, is not supported.
        ValueError: If its value is invalid, or a list of numbers does not have one number for each stage.
    """
    if isinstance(recompute, bool):
        return
    if isinstance(recompute, str):
        if recompute != "selective":
            raise ValueError(
                "recompute must be True, False, 'selective', 'auto', a number, or a list of names or numbers, got"
                f" {recompute!r}. To recompute modules by name, pass a list: recompute=[{recompute!r}]. [LH102]"
            )
    elif isinstance(recompute, int):
        if recompute < 0:
            raise ValueError(
                f"recompute={recompute} must be at least 0. An integer sets how many layers of each stage are"
                " recomputed. [LH103]"
            )
    elif isinstance(recompute, float):
        if not 0 < recompute <= 1:
            raise ValueError(
                f"recompute={recompute} must be above 0.0 and at most 1.0. A float sets which fraction of the layers of"
                " each stage is recomputed. [LH103]"
            )
    elif isinstance(recompute, (list, tuple)):
        _check_list(list(recompute), num_ranks * num_chunks if num_ranks > 1 else 1)
    else:
        raise TypeError(
            "recompute must be a bool, 'selective', an int, a float, or a list of strings or ints, got"
            f" {recompute!r} ({type(recompute).__name__}). [LH101]"
        )


def _check_list(recompute: list[Any], num_stages: int) -> None:
    if recompute and all(isinstance(entry, str) for entry in recompute):
        return
    if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in recompute):
        raise TypeError(
            f"recompute={recompute} must be a list of module names, or a list with the number of layers to recompute in"
            " each stage. [LH101]"
        )
    if len(recompute) != num_stages or min(recompute) < 0:
        raise ValueError(
            f"recompute={recompute} must contain one number (0 or more) for each stage. Each number sets how many"
            f" layers of its stage are recomputed. There are {num_stages} stages (pipeline_parallel_size x num_chunks)."
            " [LH119]"
        )


def is_by_name(recompute: Recompute) -> bool:
    """Return True if the argument contains module names instead of numbers of layers."""
    return isinstance(recompute, (list, tuple)) and isinstance(recompute[0], str)


def chosen_layers(
    recompute: Recompute, module: nn.Module, body: Body | None, stages: Sequence[range]
) -> list[nn.Module]:
    """Return the layers to recompute, of all stages. The result is equal on every rank.

    Args:
        recompute: The checked argument.
        module: The module with all its layers, with or without placeholders.
        body: The body. With module names, it may be ``None`` if there is only one stage. The name of a container of
            units selects the units in it.
        stages: The indices of the layers of each stage in the body.

    Raises:
        ValueError: If a pattern matches no module, or a module that contains the layers of all stages.
    """
    if is_by_name(recompute):
        chain = body.name if body and body.chain else None
        units = body.names if body and not body.chain else ()
        return _matching(cast(list[str], recompute), module, chain, units)
    assert body is not None
    counts = [_count(recompute, stage, len(positions)) for stage, positions in enumerate(stages)]
    return [body.layers[p] for positions, count in zip(stages, counts, strict=True) for p in positions[:count]]


def _count(recompute: Any, stage: int, size: int) -> int:
    """Return the number of layers of a stage that are recomputed."""
    if isinstance(recompute, (bool, str)):
        return size if recompute else 0
    if isinstance(recompute, float):
        return math.ceil(recompute * size)
    return min(size, recompute if isinstance(recompute, int) else recompute[stage])


def _matching(patterns: list[str], module: nn.Module, body: str | None, units: Sequence[str]) -> list[nn.Module]:
    """Return the modules that match patterns. A matching container of units is replaced by its units.

    Args:
        patterns: Dotted names, in which ``*`` matches any text without a dot.
        module: The user's module.
        body: The dotted name of the chain; ``None`` without a chain.
        units: The dotted names of the units; empty without units.
    """
    modules = {name: layer for name, layer in module.named_modules(remove_duplicate=False) if name}
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = [name for name in modules if name_matches(name, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4) or list(modules)[:8]
            raise ValueError(
                f"The recompute pattern {pattern!r} matches no module of {type(module).__name__}. Use a name such as"
                f" {', '.join(map(repr, close))}. '*' matches any text without a dot. [LH120]"
            )
        for name in matching:
            if body is not None and f"{body}.".startswith(f"{name}."):
                raise ValueError(
                    f"The recompute pattern {pattern!r} matches {name!r}, which contains the layers of all stages. Use"
                    f" recompute=['{body}.*'] to select the layers by name, or recompute=True to recompute all layers."
                    " [LH121]"
                )
            inside = [unit for unit in units if unit.startswith(f"{name}.")]
            found |= {each: modules[each] for each in inside or [name]}
    # A layer inside another recomputed layer would run three times.
    return [layer for name, layer in found.items() if not any(name.startswith(f"{other}.") for other in found)]
