"""A layout as arguments of `HybridStrategy`, and as text.

`choose_layout` returns and logs the chosen layout with these functions, and ``lightning-hybrid suggest`` prints layouts
as YAML and as tables. Some arguments of `HybridStrategy` are groups of several arguments, such as ``tuning``. Arguments
*by name* are a flat dictionary, in which a part of a group has the key ``"tuning.extra_in_flight"``, for example.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from lightning_hybrid.axes import ALWAYS
from lightning_hybrid.config import HybridConfig
from lightning_hybrid.strategy.open_arguments import USUAL
from lightning_hybrid.tuning.candidates import Layout

_ALWAYS = (*(axis.argument for axis in ALWAYS), "num_microbatches")


def arguments(layout: Layout) -> dict[str, Any]:
    """Return the arguments of `HybridStrategy` for a layout, by name, without values of `USUAL`.

    The sizes of the axes that every layout has and the number of microbatches are always included.
    """
    every = every_argument(layout).items()
    return {name: value for name, value in every if name in _ALWAYS or value != attrgetter(name)(USUAL)}


def keywords(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `HybridStrategy` for arguments by name, with an object for each group."""
    config = HybridConfig().changed(by_name)
    return {name: getattr(config, name) for name in dict.fromkeys(name.partition(".")[0] for name in by_name)}


def nested(by_name: Mapping[str, Any]) -> dict[str, Any]:
    """Return the nested mapping of a YAML file for arguments by name.

    Example:
        >>> nested({"zero_stage": 3, "tuning.memory_limit": "80GiB"})
        {'zero_stage': 3, 'tuning': {'memory_limit': '80GiB'}}
    """
    found: dict[str, Any] = {}
    for name, value in by_name.items():
        group, _, part = name.partition(".")
        if part:
            found.setdefault(group, {})[part] = value
        else:
            found[name] = value
    return found


def every_argument(layout: Layout) -> dict[str, Any]:
    """Return all arguments of `HybridStrategy` that a layout sets, by name, including default values."""
    return {
        **layout.sizes.by_argument,
        "tensor_parallel_mode": layout.tensor_mode,
        "tensor_parallel_depth": layout.tensor_depth,
        "context_parallel": layout.context_kind,
        "num_microbatches": layout.num_microbatches,
        "schedule": layout.schedule,
        "num_chunks": layout.num_chunks,
        "zero_stage": layout.zero_stage,
        "zero_size": layout.zero_size,
        "expert_parallel_size": layout.experts,
        "recompute": list(layout.recompute) if isinstance(layout.recompute, tuple) else layout.recompute,
        "tuning.extra_in_flight": list(layout.extra_in_flight) or 0,
    }


def in_words(layout: Layout) -> str:
    """Return a layout as text, without axes of size 1: for example ``tensor 2 x pipeline 2, 1f1b, 4 microbatches``."""
    sizes = asdict(layout.sizes)
    words = [" x ".join(f"{name} {size}" for name, size in sizes.items() if size > 1) or "one rank"]
    if layout.tensor_mode != "1d":
        words.append(mode_text(layout))
    if layout.context > 1:
        words.append(layout.context_kind)
    if layout.pipeline > 1:
        words.append(schedule_text(layout))
    if layout.num_microbatches > 1:
        words.append(f"{layout.num_microbatches} microbatches")
    if layout.zero_stage:
        words.append(f"zero {zero_text(layout)}")
    if layout.experts > 1:
        words.append(f"experts over {layout.experts}")
    if layout.recompute:
        words.append(f"recompute {recompute_text(layout)}")
    return ", ".join(words)


def mode_text(layout: Layout) -> str:
    """Return the arrangement of the tensor-parallel ranks as text."""
    return f"{layout.tensor_mode} depth {layout.tensor_depth}" if layout.tensor_depth > 1 else layout.tensor_mode


def zero_text(layout: Layout) -> str:
    """Return the ZeRO stage, and the number of replicas that shard if it is not all: for example ``3 over 8``."""
    return str(layout.zero_stage) + (f" over {layout.zero_size}" if layout.zero_size else "")


def schedule_text(layout: Layout) -> str:
    """Return the schedule, the chunks of a rank and the extra microbatches in flight; ``-`` without a pipeline."""
    if layout.pipeline == 1:
        return "-"
    chunks = f" x {layout.num_chunks}" if layout.num_chunks > 1 else ""
    extra = f" + {','.join(map(str, layout.extra_in_flight))}" if layout.extra_in_flight else ""
    return f"{layout.schedule}{chunks}{extra}"


def recompute_text(layout: Layout) -> str:
    """Return which layers are recomputed: ``all``, ``no``, or the number of layers of each stage, for example."""
    if isinstance(layout.recompute, bool):
        return "all" if layout.recompute else "no"
    return layout.recompute if isinstance(layout.recompute, str) else f"layers {','.join(map(str, layout.recompute))}"
