"""Arguments of `HybridStrategy`, with their defaults and checks."""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor.parallel import ParallelStyle

from lightning_hybrid.axes import ALWAYS, AXES, complete_order, sizes_in
from lightning_hybrid.error_codes.printing import print_once_per_node

_T = TypeVar("_T")
_P = ParamSpec("_P")
_Class = TypeVar("_Class", bound=type)
_Config = TypeVar("_Config", bound="HybridConfig")

#: The type of `HybridStrategy(recompute=...)`, which selects the layers to recompute.
Recompute = bool | int | float | str | list[int] | list[str]

#: A tensor-parallel plan: styles by module name, or placements by name of a parameter or buffer. In a name, ``*``
#: matches any text without a dot.
UserPlan = Mapping[str, str | Mapping[str, str] | ParallelStyle]

_LEAST_HEARTBEAT = timedelta(seconds=3)
_WORDS: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    str: "a string",
    list[int]: "a list of integers",
    list[str]: "a list of names",
    NoneType: "None",
}

_VALUES: dict[Any, tuple[Any, ...]] = {bool: (True, False), NoneType: (None,)}

# -- constructors ------------------------------------------------------------------------------------------------------


def takes(
    config: Callable[_P, _Config],
) -> Callable[[Callable[[_T, _Config], None]], Callable[Concatenate[_T, _P], None]]:
    """Give a constructor the signature of a dataclass.

    The decorated constructor receives one instance of the dataclass, made of the arguments of the call.

    Args:
        config: The dataclass.
    """

    def decorate(init: Callable[[_T, _Config], None]) -> Callable[Concatenate[_T, _P], None]:
        @functools.wraps(config.__init__, assigned=("__annotations__",))
        def __init__(self: _T, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            init(self, config(*args, **kwargs))

        return __init__

    return decorate


def explains_errors(kind: _Class) -> _Class:
    """Make a class report errors in the arguments of its constructor better.

    An error about an unknown argument names the argument that the user probably means. Only one process of each node
    prints an error.

    Args:
        kind: A class whose constructor has a name for every argument.
    """
    init = kind.__init__  # type: ignore[misc]
    parameters = dict(itertools.islice(inspect.signature(init).parameters.items(), 1, None))

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            for name in kwargs:
                if name not in parameters:
                    advice = suggestion(name, parameters) or f"its arguments are {', '.join(parameters)}."
                    raise TypeError(f"{kind.__name__} has no argument {name!r}; {advice} [LH112]")
            init(self, *args, **kwargs)
        except (TypeError, ValueError):
            print_once_per_node()
            raise

    kind.__init__ = checked  # type: ignore[misc]
    return kind


def suggestion(name: str, parameters: Mapping[str, inspect.Parameter]) -> str:
    """Return advice about an unknown argument: its group, or the argument that the user probably means.

    Args:
        name: The unknown argument.
        parameters: The arguments that exist.

    Returns:
        The advice; an empty string if no argument is similar.
    """
    owners = group_of_parts(parameters)
    close = [name] if name in owners else difflib.get_close_matches(name, [*parameters, *owners], n=1)
    if not close:
        return ""
    if close[0] not in owners:
        return f"did you mean {close[0]!r}?"
    group = owners[close[0]]
    written = f"{group}={type(parameters[group].default).__name__}({close[0]}=...)"
    return f"`{name}` belongs to `{group}`: {written}" if name in owners else f"did you mean {written}?"


def group_of_parts(parameters: Mapping[str, inspect.Parameter]) -> dict[str, str]:
    """Return the group of each argument that is in a group. A group is an argument whose default is a dataclass.

    Args:
        parameters: The arguments of `HybridStrategy`.
    """
    defaults = {group: each.default for group, each in parameters.items() if is_dataclass(each.default)}
    return {part.name: group for group, default in defaults.items() for part in fields(default)}


def check_types(arguments: Any) -> None:
    """Raise an error if a field of a dataclass has a value of another type than its annotation.

    Args:
        arguments: The instance.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is not one of the allowed values.
    """
    group = f"{type(arguments).__name__.lower()}." if isinstance(arguments, _Group) else ""
    of_fields = _kinds(type(arguments))  # type: ignore[arg-type]
    for each in fields(arguments):
        value, kinds = getattr(arguments, each.name), of_fields[each.name]
        if any(_is_of(value, kind) for kind in kinds):
            continue
        options = [option for kind in kinds for option in get_args(kind) if get_origin(kind) is Literal]
        plain = [kind for kind in kinds if get_origin(kind) is not Literal]
        name, text = f"{group}{each.name}", f"got {value!r} ({type(value).__name__})"
        if not plain or (int not in plain and type(value) in map(type, options)):
            values = [*options, *(value for kind in plain for value in _VALUES[kind])]
            words = [f"one of {', '.join(map(repr, values))}"] if len(values) > 2 else [*map(repr, values)]
            raise ValueError(f"{name} must be {_either(words)}, {text}. [LH102]")
        words = [*(_WORDS.get(kind, f"a {(get_origin(kind) or kind).__name__}") for kind in plain), *map(repr, options)]
        raise TypeError(f"{name} must be {_either(words)}{each.metadata.get('advice', '')}, {text}. [LH101]")


def _either(words: Sequence[str]) -> str:
    """Join alternatives to English text: ``"an integer, a string or None"``."""
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


@functools.cache
def _kinds(kind: type) -> dict[str, tuple[Any, ...]]:
    """Return the types that each field of a dataclass may have."""
    hints = get_type_hints(kind)
    unions = UnionType, Union
    return {name: get_args(hint) if get_origin(hint) in unions else (hint,) for name, hint in hints.items()}


def _is_of(value: Any, kind: Any) -> bool:
    """Return whether a value has a type, which may be a `Literal`."""
    if get_origin(kind) is Literal:
        return any(type(value) is type(option) and value == option for option in get_args(kind))  # 1 == 1.0 == True
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    plain = get_origin(kind) or kind
    return isinstance(value, (list, tuple) if plain is list else plain)


def as_duration(value: float | timedelta | None) -> timedelta | None:
    """Return a time as a `timedelta`. A number is a time in seconds, and ``None`` stays ``None``."""
    return timedelta(seconds=value) if isinstance(value, (int, float)) else value


def check_duration(name: str, value: float | timedelta | None) -> None:
    """Raise an error if a time is not positive. ``None`` is allowed.

    Args:
        name: The name of the argument.
        value: The time, in seconds if it is a number.

    Raises:
        ValueError: If the time is not positive.
    """
    duration = as_duration(value)
    if duration is not None and duration <= timedelta(0):
        raise ValueError(f"{name} must be positive or None, got {value}. [LH104]")


def parse_quantity(text: str) -> float:
    """Return the number in a text such as ``80GiB``, ``300GB`` or ``156TFLOP``, in units without a prefix.

    Raises:
        ValueError: If the text is not a quantity above 0.

    Example:
        >>> parse_quantity("2KiB")
        2048.0
    """
    match = re.fullmatch(
        r"(\d+(?:\.\d+)?(?:e\d+)?)\s*(?:([kmgtp])(i?))?(?:B|FLOPS?)?(?:/s)?", text.strip(), re.IGNORECASE
    )
    if match is None or float(match[1]) <= 0:
        raise ValueError(f"{text!r} is not a quantity such as 80GiB, 300GB or 156TFLOP [LH125]")
    return float(float(match[1]) * (1024 if match[3] else 1000) ** " kmgtp".index((match[2] or " ").lower()))


# -- arguments ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, repr=False)  # jsonargparse requires base classes to be dataclasses
class _Group:
    """Group of arguments. Its `repr` shows only values that differ from the defaults."""

    def __repr__(self) -> str:
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        given = [f"{name}={value!r}" for name, value in values.items() if value != getattr(type(self), name)]
        return f"{type(self).__name__}({', '.join(given)})"


@explains_errors
@dataclass(frozen=True, repr=False)
class Faults(_Group):
    """Settings for detecting lost ranks, deadlocks, diverging ranks and non-finite gradients.

    Args:
        heartbeat_timeout: Time after which a rank that sends no heartbeat is considered lost. All other ranks then exit
            with an error that names the lost rank. Possible causes are a stopped process, a failed node and a network
            failure. A rank sends heartbeats even while it computes, loads data or saves a checkpoint. The minimum is 3
            seconds. ``None`` turns this check off.
        stall_timeout: Time after which the job ends with an error if ranks are waiting for each other and no rank makes
            progress. The error shows where each rank is in the code, and names the rank that the other ranks are
            waiting for. The job does not end while that rank computes, compiles, loads data, saves a checkpoint or is
            otherwise busy. The maximum is 80% of ``HybridStrategy(timeout=...)``, and larger values are reduced to this
            maximum. ``None`` turns this check off.
        detect_desync: If True, ranks compare checksums before each training batch to detect whether they have diverged.
            The checksums cover the batch, the random state, and the parameters that exist on several replicas or
            stages. Only ranks of the same replica compare batches. This check is slow, so use it only for debugging. If
            False, ranks compare only properties that determine which messages they exchange, such as the number of
            microbatches and the shapes of the tensors in a batch.
        on_nonfinite: Action to take if a gradient on any rank is NaN or infinite before an optimizer step. ``"raise"``
            raises an error on every rank. ``"skip"`` skips the step, so that parameters and optimizer states do not
            change, and logs the number of skipped steps as ``"skipped_steps"``. ``"ignore"`` performs the step, and
            shows a warning the first time. With ``precision="16-mixed"``, NaN or infinite gradients occur in normal
            training, and the gradient scaler skips the affected steps. Therefore, ``"raise"`` is not supported with
            this precision.
        compare_microbatches: If True, the first training step determines how to combine the losses of microbatches. To
            do so, the step computes the loss of the same samples twice without a backward pass: once as one microbatch,
            and once as two microbatches. If the loss is a sum over samples, the losses of the microbatches are added.
            If the loss is a mean over targets, the losses of microbatches and replicas are weighted by their numbers of
            targets. If the loss is neither a sum nor a mean over samples or targets, ``num_microbatches="auto"``
            selects one microbatch. If you set a number of microbatches for such a loss, the strategy uses this number,
            but shows a warning. If this argument is False, the losses of microbatches and replicas are averaged without
            a comparison.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """

    heartbeat_timeout: float | timedelta | None = timedelta(minutes=1)
    stall_timeout: float | timedelta | None = timedelta(minutes=8)
    detect_desync: bool = False
    on_nonfinite: Literal["raise", "skip", "ignore"] = "ignore"
    compare_microbatches: bool = True

    def __post_init__(self) -> None:
        check_types(self)
        check_duration("faults.stall_timeout", self.stall_timeout)
        heartbeat = as_duration(self.heartbeat_timeout)
        if heartbeat is not None and heartbeat < _LEAST_HEARTBEAT:
            raise ValueError(
                f"`faults.heartbeat_timeout` must be at least {_LEAST_HEARTBEAT} or None, got {heartbeat}. Ranks can"
                " send heartbeats up to two seconds apart. [LH104]"
            )


@explains_errors
@dataclass(frozen=True, repr=False)
class Launch(_Group):
    """Settings that control how processes are started and how ranks are numbered.

    Args:
        start_method: How the strategy starts the processes of a node. This setting has no effect if a launcher such as
            `torchrun` starts the processes. ``"popen"`` runs the script once for each process. ``"fork"``, ``"spawn"``
            and ``"forkserver"`` run the method that you call on the Trainer, such as `fit`, in worker processes. The
            worker processes return the weights, the metrics and the path of the best checkpoint to the main process.
            ``"auto"`` selects ``"fork"`` in a notebook and ``"popen"`` otherwise.
        process_group_backend: Backend of the `torch.distributed` process groups. Default: NCCL on CUDA and Gloo on the
            CPU.
        rank_order: Order of the parallel axes for numbering ranks, from the outermost to the innermost axis. Ranks
            along the innermost axis have consecutive numbers. With context parallelism, the order can include ``cp``.
            If the order does not include ``cp``, the strategy inserts ``cp`` before ``tp``.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """

    start_method: Literal["auto", "popen", "spawn", "fork", "forkserver"] = "auto"
    process_group_backend: str | None = None
    rank_order: str = "pp-dp-tp"

    def __post_init__(self) -> None:
        check_types(self)
        keys = self.rank_order.split("-")
        if len(keys) > len({*keys}) or not {axis.key for axis in ALWAYS} <= {*keys} <= {axis.key for axis in AXES}:
            optional = [f" With {axis.argument} > 1, it can also name {axis.key}." for axis in AXES if axis.is_optional]
            raise ValueError(
                f"launch.rank_order must name each of the axes {', '.join(axis.key for axis in ALWAYS)} once, from the"
                f" outermost to the innermost, joined by '-', such as 'pp-dp-tp'.{''.join(optional)} Got"
                f" {self.rank_order!r}. [LH113]"
            )
        backend = self.process_group_backend
        names = [] if backend is None else [part.rpartition(":")[2] for part in backend.split(",")]
        known = [name for name in dist.Backend.backend_list if name != dist.Backend.UNDEFINED]
        if unknown := [name for name in names if name.lower() not in known]:
            raise ValueError(
                f"launch.process_group_backend={backend!r} names the unknown backend {unknown[0]!r}. Use one of"
                f" {', '.join(map(repr, known))}, or one for each type of device, such as 'cpu:gloo,cuda:nccl'. [LH102]"
            )


@explains_errors
@dataclass(frozen=True, repr=False)
class Tuning(_Group):
    """Settings that trade memory for speed or precision.

    Args:
        extra_in_flight: Number of extra microbatches that the ranks before a stage boundary keep in flight, beyond the
            number that the schedule needs. Extra microbatches hide the network latency between nodes. An int applies to
            all boundaries. A list contains one value for each boundary between neighboring pipeline ranks. Each extra
            microbatch needs memory for its activations on the ranks before the boundary. The training results are
            bitwise identical for all values. ``"auto"`` measures the links between nodes in the first three steps. For
            each of these links, ``"auto"`` then uses the smallest value that hides the latency. On CUDA devices,
            ``"auto"`` uses a smaller value if there is too little free memory for the activations. For links within a
            node, ``"auto"`` uses 0.
        reshard_after_forward: Determines when ZeRO stage 3 reshards the parameters of a layer. FSDP2 has an argument
            with the same name and purpose. ``True`` reshards the parameters after each forward and backward pass of the
            layer, which requires the least memory. ``False`` reshards the parameters only after the last backward pass
            of the layer in a step, so that all microbatches of the step use the same all-gather. ``"auto"`` means
            ``False`` if there are several microbatches, and ``True`` otherwise.
        float32_gradients: If True, gradients of half-precision parameters (``precision="bf16-true"``) are summed in
            float32 over microbatches and ranks.
        memory_limit: The layout search chooses only layouts that need at most this amount of memory per device. Pass a
            string such as ``"80GiB"`` or ``"24GB"``, or a number of bytes. Default: all memory of a CUDA device, and no
            limit on the CPU. Set the limit below the memory of the device, because libraries need memory too.

    Raises:
        ValueError, TypeError: If an argument is invalid.
    """

    extra_in_flight: int | list[int] | Literal["auto"] = 0
    reshard_after_forward: bool | Literal["auto"] = "auto"
    float32_gradients: bool = False
    memory_limit: float | str | None = None

    def __post_init__(self) -> None:
        check_types(self)
        extra = self.extra_in_flight
        for number in () if isinstance(extra, str) else (extra,) if isinstance(extra, int) else extra:
            if not _is_of(number, int):
                raise TypeError(
                    f"tuning.extra_in_flight must be an integer, a list of integers or 'auto', got {extra!r}. [LH101]"
                )
            if number < 0:
                raise ValueError(f"tuning.extra_in_flight must be at least 0, got {extra!r}. [LH103]")
        if self.memory_bytes is not None and not self.memory_bytes > 0:
            raise ValueError(f"tuning.memory_limit must be more than 0 bytes, got {self.memory_limit!r}. [LH103]")

    @property
    def memory_bytes(self) -> float | None:
        """Limit on the memory per device in the layout search, in bytes; ``None`` means no limit."""
        if not isinstance(self.memory_limit, str):
            return self.memory_limit
        try:
            return parse_quantity(self.memory_limit)
        except ValueError:
            raise ValueError(
                f"tuning.memory_limit must be a quantity such as '80GiB' or '24GB', got {self.memory_limit!r}. [LH125]"
            ) from None


@dataclass(frozen=True)
class HybridConfig:
    """Arguments of `HybridStrategy`, as the user passes them. `HybridStrategy` documents them."""

    data_parallel_size: int | Literal["auto"] = "auto"
    tensor_parallel_size: int | list[int] | Literal["auto"] = 1
    pipeline_parallel_size: int | list[int] | Literal["auto"] = 1
    num_microbatches: int | Literal["auto"] = "auto"
    schedule: str | None = None
    num_chunks: int | Literal["auto"] = 1
    partition: str | list[int] = "uniform"
    body: str | list[str] | None = None
    tensor_parallel_mode: Literal["1d", "2d", "2.5d", "3d"] = "1d"
    tensor_parallel_depth: int = 1
    tensor_parallel_plan: dict[str, str | dict[str, str]] | str | None = "auto"
    sequence_parallel: bool = False
    context_parallel_size: int = field(default=1, metadata={"advice": " (to search for it, set layout='auto')"})
    context_parallel: Literal["ulysses", "ring", "all_gather"] = "ulysses"
    global_batch_size: int | None = None
    zero_stage: Literal[0, 1, 2, 3, "auto"] = 0
    zero_size: int | None = None
    expert_parallel_size: int = 1
    expert_parallel: Literal["data", "tensor"] = "data"
    recompute: bool | int | float | str | list[int] | list[str] = field(
        default=False, metadata={"advice": ", such as True, 'selective' or 4"}
    )
    offload: str | list[str] | None = None
    master_weights: bool = False
    broadcast_batches: bool = True
    loss_reduction: Literal["mean", "sum"] = "mean"
    dynamic_shapes: bool = False
    save_distributed_checkpoint: bool = False
    async_save: bool = False
    gather_module_on_teardown: bool | Literal["auto"] = "auto"
    initial_weights: str | Path | None = None
    timeout: float | timedelta | None = timedelta(minutes=10)
    layout: Literal["auto"] | None = None
    faults: Faults = Faults()
    launch: Launch = Launch()
    tuning: Tuning = Tuning()

    def __post_init__(self) -> None:
        check_types(self)
        check_duration("timeout", self.timeout)
        if self.zero_size is not None and self.zero_size < 2:
            raise ValueError(f"zero_size must be at least 2, got {self.zero_size}. [LH103]")
        if self.expert_parallel_size < 1:
            raise ValueError(f"expert_parallel_size must be at least 1, got {self.expert_parallel_size}. [LH103]")
        if self.expert_parallel == "tensor" and self.expert_parallel_size > 1:
            raise ValueError(
                f"expert_parallel='tensor' shards experts over the tensor-parallel ranks, but expert_parallel_size="
                f"{self.expert_parallel_size} shards them over replicas. Remove one of the two. [LH146]"
            )

    def changed(self: _Config, arguments: Mapping[str, Any]) -> _Config:
        """Return a copy with other values.

        Args:
            arguments: The new values by argument name. A name such as ``"tuning.memory_limit"`` changes a part of a
                group.
        """
        changes: dict[str, Any] = {}
        for name, value in arguments.items():
            group, _, part = name.partition(".")
            changes[group] = replace(changes.get(group, getattr(self, group)), **{part: value}) if part else value
        return replace(self, **changes)

    def by_name(self) -> dict[str, Any]:
        """Return the value of each argument. A part of a group has a name such as ``tuning.memory_limit``."""
        names = [each.name for each in fields(HybridConfig)]
        groups = {name: fields(value) for name in names if is_dataclass(value := getattr(self, name))}
        flat = [name for name in names if name not in groups]
        parts = [f"{name}.{each.name}" for name, of_group in groups.items() for each in of_group]
        return {name: attrgetter(name)(self) for name in (*flat, *parts)}


@dataclass(frozen=True)
class Settings(HybridConfig):
    """Arguments of a run, with numbers in place of ``"auto"`` and ``None``.

    Attributes:
        requested: The arguments as the user passed them.
        searched: The names of the arguments that the layout search determines when the run starts. Until then, they
            have provisional values.
    """

    num_microbatches: int = 1
    schedule: str = "1f1b"
    num_chunks: int = 1
    zero_stage: Literal[0, 1, 2, 3] = 0
    requested: HybridConfig = HybridConfig()
    searched: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Skip the checks of the base class.

        The user's arguments are already checked, and the layout search makes thousands of instances.
        """

    @classmethod
    def of(cls, requested: HybridConfig, provisional: HybridConfig, searched: tuple[str, ...]) -> Settings:
        """Return the settings for the user's arguments.

        Args:
            requested: The arguments as the user passed them.
            provisional: The same arguments, with provisional values for the searched arguments.
            searched: The names of the arguments that the layout search determines.
        """
        values: dict[str, Any] = vars(provisional) | {"requested": requested, "searched": searched}
        if provisional.num_microbatches == "auto":
            values["num_microbatches"] = usual_microbatches(preferred(values["pipeline_parallel_size"]))
        return cls(**values)

    @property
    def requested_sizes(self) -> dict[str, Any]:
        """The sizes that the user set, by the labels of the axes: a number, a list of numbers, or ``"auto"``."""
        return sizes_in(vars(self.requested))

    @property
    def auto_microbatches(self) -> bool:
        """True if the run may use fewer microbatches, because of batch norm or the loss."""
        return self.requested.num_microbatches == "auto"

    @property
    def offloaded(self) -> tuple[str, ...]:
        """The kinds of tensors that are kept in host memory."""
        return (self.offload,) if isinstance(self.offload, str) else tuple(self.offload or ())

    @property
    def axis_order(self) -> str:
        """The keys of the axes that exist, from the outermost to the innermost axis."""
        optional = [axis.key for axis in AXES if axis.is_optional and getattr(self, axis.argument) > 1]
        return complete_order(self.launch.rank_order, optional)

    def extra_of_links(self, num_ranks: int) -> tuple[int, ...]:
        """Return `extra_in_flight` for each link between neighboring ranks of a pipeline.

        Args:
            num_ranks: The number of pipeline ranks.

        Returns:
            One number per link; zeros for ``"auto"``, which measures the links in the first steps.
        """
        extra = 0 if isinstance(self.tuning.extra_in_flight, str) else self.tuning.extra_in_flight
        return (extra,) * (num_ranks - 1) if isinstance(extra, int) else tuple(extra)

    @property
    def time_limit(self) -> timedelta | None:
        """The time limit of a collective; ``None`` for torch's default."""
        return as_duration(self.timeout)

    @property
    def seconds_to_time_out(self) -> float:
        """The time limit of a collective in seconds, with torch's default in place of ``None``."""
        return (self.time_limit or default_pg_timeout).total_seconds()

    @property
    def seconds_to_stall(self) -> float | None:
        """The time without progress after which the job ends, in seconds; ``None`` for no limit.

        It is at most 80% of the time limit of a collective. After that limit, ranks can no longer report where they
        are.
        """
        limit = as_duration(self.faults.stall_timeout)
        return None if limit is None else min(limit.total_seconds(), 0.8 * self.seconds_to_time_out)

    @property
    def seconds_of_heartbeat(self) -> float | None:
        """The time without a heartbeat after which a rank is lost, in seconds; ``None`` for no limit."""
        limit = as_duration(self.faults.heartbeat_timeout)
        return None if limit is None else limit.total_seconds()

    def num_shards(self, num_replicas: int) -> int:
        """Return the number of replicas over which ZeRO shards a parameter; 1 if ZeRO is not used."""
        return (self.zero_size or num_replicas) if self.zero_stage else 1

    def num_expert_shards(self, num_shards: int) -> int:
        """Return the number of replicas with the same experts over which ZeRO shards the experts.

        Args:
            num_shards: The number of replicas over which ZeRO shards other parameters.
        """
        return 1 if num_shards % self.expert_parallel_size else num_shards // self.expert_parallel_size

    @property
    def shards_over_replicas(self) -> bool:
        """True if replicas hold different parts of the parameters: with ZeRO and with expert parallelism."""
        return self.zero_stage > 0 or self.expert_parallel_size > 1

    @property
    def shares_casts(self) -> bool:
        """True if the microbatches of a step share the copies of parameters that autocast makes."""
        return self.zero_stage < 3 or not self.frees_early

    @property
    def frees_early(self) -> bool:
        """True if ZeRO stage 3 reshards a layer after each use."""
        reshards = self.tuning.reshard_after_forward
        return self.num_microbatches == 1 if reshards == "auto" else reshards


# -- sizes -------------------------------------------------------------------------------------------------------------


def choices(size: int | Sequence[int]) -> tuple[int, ...]:
    """Return the sizes that an axis may have, in order of preference."""
    return (size,) if isinstance(size, int) else tuple(size)


def preferred(size: int | Sequence[int]) -> int:
    """Return the size that an axis has while the number of processes is unknown: the first possible size."""
    return choices(size)[0]


def usual_microbatches(pipeline_parallel_size: int) -> int:
    """Return the number of microbatches for ``num_microbatches="auto"``."""
    return 4 * pipeline_parallel_size if pipeline_parallel_size > 1 else 1
