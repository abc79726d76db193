"""Which arguments of `HybridStrategy` are left open, to be found at the start, and what is tried for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_hybrid.config import HybridConfig, choices, usual_microbatches
from lightning_hybrid.strategy.auto_layout.candidates import MOST_CHUNKS, RECOMPUTE
from lightning_hybrid.strategy.auto_layout.machine import parse_quantity
from lightning_hybrid.strategy.auto_layout.search import SCHEDULES_TRIED, SearchSpace
from lightning_hybrid.tensor_parallel.context_parallel.attention import KINDS

SIZES = ("tensor_parallel_size", "pipeline_parallel_size")
#: All that say how many ranks do what: with one of them open, so is the number of replicas.
ALL_SIZES = (*SIZES, "context_parallel_size")
_CONTEXT = {"context_parallel_size": 1, "context_parallel": KINDS[0]}
_ARRANGEMENT = {"tensor_parallel_mode": "1d", "tensor_parallel_depth": 1}
#: What may be left open, with its default.
_DEFAULTS: dict[str, Any] = {
    **dict.fromkeys(SIZES, 1),
    **_ARRANGEMENT,
    **_CONTEXT,
    "num_microbatches": "auto",
    "schedule": "1f1b",
    "num_chunks": 1,
    "extra_in_flight": 0,
    "zero_stage": 0,
    "recompute": False,
}
#: Where these are not as by default, sequences cannot be shared, and ranks are in a line.
_IN_A_LINE = {"sequence_parallel": False, "master_weights": False}
#: What ``"auto"`` opens alone: with the others it means something else.
_ALONE = (*SIZES, "schedule", "num_chunks", "zero_stage", "recompute")


def resolve_open(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What stands for open arguments until they are found, which they are (`searched`), and the limit in bytes.

    Args:
        arguments: Of `HybridStrategy`, as they were given.

    Raises:
        ValueError, TypeError: If one of them is not possible, or does not go with what is open.
    """
    searched = _open_arguments(arguments)
    _check_open(arguments, searched)
    limit = _parse_memory_limit(arguments["memory_limit"])
    return {**_provisional(arguments, searched), "searched": searched, "memory_limit": limit}


def _open_arguments(arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments that are to be found at the start."""
    layout = arguments["layout"]
    if layout is not None and layout != "auto":
        raise ValueError(f"layout must be 'auto' or None, got {layout!r}.")
    found = [name for name in _ALONE if isinstance(arguments[name], str) and arguments[name] == "auto"]
    if layout == "auto":
        closed = _closed(arguments)
        found += [name for name, usual in _DEFAULTS.items() if name not in closed and _is(arguments[name], usual)]
        found += [name for name in SIZES if isinstance(arguments[name], (list, tuple))]
    return tuple(name for name in _DEFAULTS if name in found)


def _closed(arguments: Mapping[str, Any]) -> set[str]:
    """What stays as by default because of what is given: neither goes with the other."""

    def differs(usual: Mapping[str, Any]) -> bool:
        return any(not _is(arguments[name], value) for name, value in usual.items())

    closed: set[str] = set()
    if differs(_IN_A_LINE | _ARRANGEMENT):
        closed |= _CONTEXT.keys()
    if differs(_IN_A_LINE | _ARRANGEMENT | {"context_parallel_size": 1}):  # a mode that is given has its depth
        closed |= _ARRANGEMENT.keys()
    return closed


def _is(value: Any, usual: Any) -> bool:
    return type(value) is type(usual) and bool(value == usual)


def _provisional(arguments: Mapping[str, Any], searched: Sequence[str]) -> dict[str, Any]:
    """Nothing is divided."""
    found = {name: _DEFAULTS[name] for name in searched}
    if "schedule" in found and arguments["num_chunks"] not in (1, "auto"):
        found["schedule"] = "interleaved_1f1b"
    return found


def _check_open(arguments: Mapping[str, Any], searched: Sequence[str]) -> None:
    """What is not open has to go with what is."""
    if not searched:
        if arguments["memory_limit"] is not None:
            raise ValueError(
                f"memory_limit={arguments['memory_limit']!r} limits what is searched, and every argument is given. Add"
                " layout='auto' or recompute='auto', or leave it out."
            )
        return
    if {"pipeline_parallel_size", "num_chunks"} & set(searched):
        for name in ("partition", "extra_in_flight", "recompute"):
            value = arguments[name]
            if isinstance(value, (list, tuple)) and not all(isinstance(each, str) for each in value):
                raise ValueError(
                    f"{name}={list(value)} says something for each stage, but how many stages there are is searched"
                    f" ({', '.join(searched)}). Give pipeline_parallel_size and num_chunks too, or leave {name} out."
                )
    recompute, chunks = arguments["recompute"], arguments["num_chunks"]
    if "recompute" not in searched and not any(_is(recompute, each) for each in RECOMPUTE):
        raise ValueError(
            f"recompute={recompute!r} cannot be weighed against other layouts ({', '.join(searched)} are searched):"
            " choose False, 'selective', True or 'auto', or give the layout by hand."
        )
    if "num_chunks" not in searched and isinstance(chunks, int) and chunks > MOST_CHUNKS:
        raise ValueError(
            f"num_chunks={chunks} cannot be weighed against other layouts ({', '.join(searched)} are searched): choose"
            f" at most {MOST_CHUNKS}, or give the layout by hand."
        )


def _parse_memory_limit(value: Any) -> float | None:
    """The bytes of a device that a run may use; ``None`` if that is not said."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise TypeError(f"memory_limit must be a text such as '80GiB', a number of bytes or None, got {value!r}.")
    if isinstance(value, str):
        try:
            return parse_quantity(value)
        except ValueError:
            raise ValueError(f"memory_limit must be a quantity such as '80GiB' or '24GB', got {value!r}.") from None
    if not value > 0:
        raise ValueError(f"memory_limit must be above 0 bytes, got {value!r}.")
    return float(value)


def search_space(config: HybridConfig, sizes: tuple[Any, Any, Any]) -> SearchSpace:
    """What is tried.

    Args:
        config: The arguments, with what stands for the open ones.
        sizes: (data, tensor, pipeline) parallel size as they were given.
    """
    searched = config.searched
    data, tensor, pipeline = sizes
    tried = {
        name: None if name in searched and not isinstance(size, (list, tuple)) else choices(size)
        for name, size in zip(SIZES, (tensor, pipeline), strict=True)
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
        tensor=tried["tensor_parallel_size"],
        tensor_mode=None if "tensor_parallel_mode" in searched else given_mode,
        pipeline=tried["pipeline_parallel_size"],
        context=None if "context_parallel_size" in searched else (config.context_parallel_size,),
        context_kinds=KINDS if "context_parallel" in searched else (config.context_parallel,),
        num_microbatches=None if "num_microbatches" in searched else _numbers(config),
        schedules=schedules or [given],
        zero_stages=range(4) if "zero_stage" in searched else (config.zero_stage,),
        recompute=RECOMPUTE if "recompute" in searched else (_weighed(config.recompute),),
        some_layers="recompute" in searched,
    )


def _numbers(config: HybridConfig) -> Any:
    return usual_microbatches if config.auto_microbatches else lambda pipeline: config.num_microbatches


def _weighed(recompute: Any) -> bool | str:
    assert isinstance(recompute, (bool, str)), "others are refused"
    return recompute
