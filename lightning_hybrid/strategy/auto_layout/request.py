"""Which arguments of `HybridStrategy` are left open, to be found at the start, and what is tried for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from lightning_hybrid.axes import AXES, CONTEXT, DATA, PIPELINE, TENSOR
from lightning_hybrid.config import HybridConfig, Settings, choices, usual_microbatches
from lightning_hybrid.strategy.auto_layout.candidates import MOST_CHUNKS, RECOMPUTE
from lightning_hybrid.strategy.auto_layout.search import SCHEDULES_TRIED, SearchSpace
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS

SIZES = (TENSOR.argument, PIPELINE.argument)
#: All that say how many ranks do what: with one of them open, so is the number of replicas.
ALL_SIZES = (*SIZES, CONTEXT.argument)
_CONTEXT = (CONTEXT.argument, "context_parallel")
_ARRANGEMENT = ("tensor_parallel_mode", "tensor_parallel_depth")
#: Arguments that may be left open.
_OPEN = (
    *SIZES,
    *_ARRANGEMENT,
    *_CONTEXT,
    "num_microbatches",
    "schedule",
    "num_chunks",
    "tuning.extra_in_flight",
    "zero_stage",
    "recompute",
)
#: Where these are not as by default, sequences cannot be shared, and ranks are in a line.
_IN_A_LINE = ("sequence_parallel", "master_weights")
#: What ``"auto"`` opens alone: with the others it means something else.
_ALONE = (*SIZES, "schedule", "num_chunks", "zero_stage", "recompute")
_USUAL = HybridConfig(schedule="1f1b")


def resolve_open(config: HybridConfig) -> tuple[HybridConfig, tuple[str, ...]]:
    """Return the arguments with provisional values of open ones, and the names of the open ones.

    Args:
        config: The arguments of `HybridStrategy`.

    Raises:
        ValueError: If one of them does not go with what is open.
    """
    if config.schedule is None:
        has_chunks = isinstance(config.num_chunks, int) and config.num_chunks > 1
        config = config.changed({"schedule": "interleaved_1f1b" if has_chunks else "1f1b"})
    searched = _open_arguments(config)
    _check_open(config, searched)
    found = {name: attrgetter(name)(_USUAL) for name in searched}
    if "schedule" in found and config.num_chunks not in (1, "auto"):
        found["schedule"] = "interleaved_1f1b"
    return config.changed(found), searched


def _open_arguments(config: HybridConfig) -> tuple[str, ...]:
    """The arguments that are to be found at the start."""
    found = [name for name in _ALONE if getattr(config, name) == "auto"]
    if config.layout == "auto":
        closed = _closed(config)
        found += [name for name in _OPEN if name not in closed and _is_usual(config, name)]
        found += [name for name in SIZES if isinstance(getattr(config, name), (list, tuple))]
    return tuple(name for name in _OPEN if name in found)


def _closed(config: HybridConfig) -> set[str]:
    """Return the arguments that keep their defaults, because they cannot be combined with arguments that are set."""
    closed: set[str] = set()
    if not _is_usual(config, *_IN_A_LINE, *_ARRANGEMENT):
        closed.update(_CONTEXT)
    if not _is_usual(config, *_IN_A_LINE, *_ARRANGEMENT, CONTEXT.argument):  # a mode that is given has its depth
        closed.update(_ARRANGEMENT)
    return closed


def _is_usual(config: HybridConfig, *names: str) -> bool:
    return all(_is(attrgetter(name)(config), attrgetter(name)(_USUAL)) for name in names)


def _is(value: Any, usual: Any) -> bool:
    return type(value) is type(usual) and bool(value == usual)


def _check_open(config: HybridConfig, searched: Sequence[str]) -> None:
    """What is not open has to go with what is."""
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


def search_space(config: Settings, sizes: Mapping[str, Any]) -> SearchSpace:
    """What is tried.

    Args:
        config: The arguments, with what stands for the open ones.
        sizes: The sizes that the user set, by the labels of the axes.
    """
    searched = config.searched
    data = sizes[DATA.label]
    tried = {
        axis: None if axis.argument in searched and not isinstance(size, (list, tuple)) else choices(size)
        for axis, size in ((axis, sizes[axis.label]) for axis in AXES if axis is not DATA)
    }
    given_mode = config.tensor_parallel_mode, config.tensor_parallel_depth
    given, has_extra = (config.schedule, config.num_chunks), any(config.extra_of_links(2))
    schedules = [
        pair
        for pair in SCHEDULES_TRIED
        if ("schedule" in searched or pair[0] == given[0]) and ("num_chunks" in searched or pair[1] == given[1])
        if pair[0] != "gpipe" or not has_extra  # it has all in flight already
    ]
    return SearchSpace(
        data=None if data == "auto" else (data,),
        tensor=tried[TENSOR],
        tensor_mode=None if "tensor_parallel_mode" in searched else given_mode,
        pipeline=tried[PIPELINE],
        context=tried[CONTEXT],
        context_kinds=KINDS if "context_parallel" in searched else (config.context_parallel,),
        num_microbatches=None if "num_microbatches" in searched else _numbers(config),
        schedules=schedules or [given],
        zero_stages=range(4) if "zero_stage" in searched else (config.zero_stage,),
        recompute=RECOMPUTE if "recompute" in searched else (_weighed(config.recompute),),
        some_layers="recompute" in searched,
    )


def _numbers(config: Settings) -> Any:
    return usual_microbatches if config.auto_microbatches else lambda pipeline: config.num_microbatches


def _weighed(recompute: Any) -> bool | str:
    assert isinstance(recompute, (bool, str)), "others are refused"
    return recompute
