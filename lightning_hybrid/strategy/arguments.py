"""The arguments of `HybridStrategy`, checked by themselves."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_hybrid.distributed.mesh import AXES
from lightning_hybrid.memory.activation_checkpoint.policy import check_recompute
from lightning_hybrid.memory.offload import check_offload
from lightning_hybrid.pipeline_parallel.schedules import SCHEDULES

__all__ = ["check_arguments"]

_AT_LEAST_ONE = ("tensor_parallel_size", "pipeline_parallel_size", "num_chunks")
_AUTO = ("data_parallel_size", "num_microbatches")
_KINDS: dict[str, tuple[type, ...]] = {
    "schedule": (str,),
    "partition": (str, list, tuple),
    "body": (str, type(None)),
    "tensor_parallel_plan": (str, dict, type(None)),
    "sequence_parallel": (bool,),
    "float32_gradients": (bool,),
    "broadcast_batches": (bool,),
    "gather_module_on_teardown": (bool,),
    "initial_weights": (str, Path, type(None)),
    "dynamic_shapes": (bool,),
    "save_distributed_checkpoint": (bool,),
    "async_save": (bool,),
    "rank_order": (str,),
    "process_group_backend": (str, type(None)),
    "timeout": (timedelta, type(None)),
}


def check_arguments(**arguments: Any) -> None:
    """Check the arguments of `HybridStrategy` by themselves.

    Args:
        arguments: As they were given.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not possible.
    """
    for name in (*_AT_LEAST_ONE, *_AUTO):
        value = arguments[name]
        if name in _AUTO and value == "auto":
            continue
        choices = " or 'auto'" if name in _AUTO else ""
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer{choices}, got {value!r} ({type(value).__name__}).")
        if value < 1:
            raise ValueError(f"{name} must be at least 1{choices}, got {value}.")
    for name, kinds in _KINDS.items():
        if not isinstance(arguments[name], kinds):
            expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
            raise TypeError(f"{name} must be {expected}, got {arguments[name]!r} ({type(arguments[name]).__name__}).")
    _check_choice("schedule", arguments["schedule"], tuple(SCHEDULES))
    _check_choice("zero_stage", arguments["zero_stage"], (0, 1, 2, 3))
    _check_choice("zero_frees", arguments["zero_frees"], ("auto", "step", "microbatch"))
    _check_choice("loss_reduction", arguments["loss_reduction"], ("mean", "sum"))
    if sorted(str(arguments["rank_order"]).split("-")) != sorted(AXES):
        raise ValueError(
            f"rank_order must name the axes {', '.join(AXES)} once each, from the outermost to the innermost, joined by"
            f" '-', such as 'pp-dp-tp'; got {arguments['rank_order']!r}."
        )
    if arguments["num_chunks"] > 1 and arguments["schedule"] == "1f1b":
        raise ValueError(
            f"schedule='1f1b' runs one chunk per rank, got num_chunks={arguments['num_chunks']}. Use"
            " schedule='interleaved_1f1b', or num_chunks=1."
        )
    _check_partition(arguments)
    check_offload(arguments["offload"])
    check_recompute(arguments["recompute"], arguments["pipeline_parallel_size"], arguments["num_chunks"])


def _check_choice(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices or isinstance(value, bool):
        raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def _check_partition(arguments: dict[str, Any]) -> None:
    partition = arguments["partition"]
    num_stages = arguments["pipeline_parallel_size"] * arguments["num_chunks"]
    if isinstance(partition, (list, tuple)):
        if len(partition) != num_stages or not all(isinstance(count, int) and count >= 1 for count in partition):
            raise ValueError(
                f"partition={list(partition)} must give the number of layers, at least 1, of each of the {num_stages}"
                f" stages: pipeline_parallel_size ({arguments['pipeline_parallel_size']}) x num_chunks"
                f" ({arguments['num_chunks']})."
            )
    elif partition not in ("uniform", "parameters"):
        raise ValueError(f"partition must be 'uniform', 'parameters' or a list of layers per stage, got {partition!r}.")
