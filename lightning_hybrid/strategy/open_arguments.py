"""Open arguments of `HybridStrategy`: a layout search chooses their values when a run starts.

`HybridStrategy` calls :func:`resolve_open` in its constructor. Checks and the setup of processes need a value for each
argument before the search can run, so an open argument first has a *provisional* value, its default. The lists of this
file are also the limits of the search in `tuning`.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

from lightning_hybrid.axes import CONTEXT, PIPELINE, TENSOR
from lightning_hybrid.config import HybridConfig

#: The arguments for the sizes of axes of which a user can allow several values.
SIZES = (TENSOR.argument, PIPELINE.argument)
#: The arguments for the sizes of all axes in a model group. If one of them is open, the number of replicas is open too.
ALL_SIZES = (*SIZES, CONTEXT.argument)
#: The largest number of chunks and the kinds of recomputation that a search supports.
MOST_CHUNKS = 4
RECOMPUTE: tuple[bool | str, ...] = (False, "selective", True)
#: The arguments with their defaults, including the default schedule.
USUAL = HybridConfig(schedule="1f1b")

_CONTEXT = (CONTEXT.argument, "context_parallel")
_EXPERTS = "expert_parallel_size"
_ARRANGEMENT = ("tensor_parallel_mode", "tensor_parallel_depth")
#: Arguments that may be open.
_OPEN = (
    *SIZES,
    *_ARRANGEMENT,
    *_CONTEXT,
    "num_microbatches",
    "schedule",
    "num_chunks",
    "tuning.extra_in_flight",
    "zero_stage",
    "zero_size",
    _EXPERTS,
    "recompute",
)
#: Arguments that rule out context parallelism and grids of tensor-parallel ranks unless they have their defaults.
_IN_A_LINE = ("sequence_parallel", "master_weights")
#: Arguments that ``"auto"`` opens even without ``layout="auto"``. In all others, ``"auto"`` has another meaning.
_ALONE = (*SIZES, "schedule", "num_chunks", "zero_stage", "recompute")


def resolve_open(config: HybridConfig) -> tuple[HybridConfig, tuple[str, ...]]:
    """Return the arguments with provisional values of open ones, and the names of the open ones.

    ``schedule=None`` is replaced by the default schedule.

    Args:
        config: The arguments of `HybridStrategy`.

    Raises:
        ValueError: If an argument cannot be combined with an open one, or applies only to a search although no argument
            is open.
    """
    if config.schedule is None:
        has_chunks = isinstance(config.num_chunks, int) and config.num_chunks > 1
        config = config.changed({"schedule": "interleaved_1f1b" if has_chunks else "1f1b"})
    searched = _open_arguments(config)
    _check_open(config, searched)
    found = {name: attrgetter(name)(USUAL) for name in searched}
    if "schedule" in found and config.num_chunks not in (1, "auto"):
        found["schedule"] = "interleaved_1f1b"
    return config.changed(found), searched


def _open_arguments(config: HybridConfig) -> tuple[str, ...]:
    """Return the names of the open arguments."""
    found = [name for name in _ALONE if getattr(config, name) == "auto"]
    if config.layout == "auto":
        closed = _closed(config)
        found += [name for name in _OPEN if name not in closed and _is_usual(config, name)]
        found += [name for name in SIZES if isinstance(getattr(config, name), (list, tuple))]
    return tuple(name for name in _OPEN if name in found)


def _closed(config: HybridConfig) -> set[str]:
    """Return the arguments that keep their defaults, because they cannot be combined with arguments that are set."""
    closed = set() if config.expert_parallel == "data" else {_EXPERTS}
    if not _is_usual(config, *_IN_A_LINE, *_ARRANGEMENT):
        closed.update(_CONTEXT)
    # If the user set the mode, the depth is fixed too.
    if not _is_usual(config, *_IN_A_LINE, *_ARRANGEMENT, CONTEXT.argument):
        closed.update(_ARRANGEMENT)
    return closed


def _is_usual(config: HybridConfig, *names: str) -> bool:
    return all(_is(attrgetter(name)(config), attrgetter(name)(USUAL)) for name in names)


def _is(value: Any, usual: Any) -> bool:
    return type(value) is type(usual) and bool(value == usual)


def _check_open(config: HybridConfig, searched: Sequence[str]) -> None:
    """Check that the fixed arguments can be combined with the open ones."""
    if not searched:
        if config.tuning.memory_limit is not None:
            raise ValueError(
                f"tuning.memory_limit={config.tuning.memory_limit!r} applies only to the layout search, but no search"
                " is requested. Set layout='auto' or recompute='auto', or remove tuning.memory_limit. [LH122]"
            )
        return
    if {"pipeline_parallel_size", "num_chunks"} & set(searched):
        for name in ("partition", "tuning.extra_in_flight", "recompute"):
            value = attrgetter(name)(config)
            if isinstance(value, (list, tuple)) and not all(isinstance(each, str) for each in value):
                raise ValueError(
                    f"{name}={list(value)} sets a value for each stage, but the number of stages is not fixed, because"
                    f" the search chooses {', '.join(searched)}. Set both pipeline_parallel_size and num_chunks, or"
                    f" remove {name}. [LH123]"
                )
    recompute, chunks = config.recompute, config.num_chunks
    if "recompute" not in searched and not any(_is(recompute, each) for each in RECOMPUTE):
        raise ValueError(
            f"The search for {', '.join(searched)} does not support recompute={recompute!r}. Use False, 'selective',"
            " True or 'auto'. Alternatively, set the layout yourself. [LH124]"
        )
    if "num_chunks" not in searched and isinstance(chunks, int) and chunks > MOST_CHUNKS:
        raise ValueError(
            f"The search for {', '.join(searched)} does not support num_chunks={chunks}. Set num_chunks to at most"
            f" {MOST_CHUNKS}, or set the layout yourself. [LH124]"
        )
