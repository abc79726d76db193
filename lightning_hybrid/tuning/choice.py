"""The choice of a layout when a run starts: rank 0 searches in a copy of its process, and broadcasts the result.

If the user has left arguments of `HybridStrategy` open (``layout="auto"``, or ``"auto"`` for some arguments), the
strategy calls :func:`choose_layout` on every rank, between the creation of the process group and of the device mesh. It
loads the function through :mod:`~lightning_hybrid.strategy.layout_search`, because `tuning` imports the strategy.

::

    every rank    measure devices and links --> wait ---------------------> receive the result
    rank 0        measure devices and links --> search in a forked copy --> broadcast, log

The search runs dry runs, which are training steps on fake tensors. They change modules and data, draw random numbers
and create process groups, so they run in a forked copy. Only rank 0 searches: the search uses all processors of its
node and times layers on CPUs, so several ranks would disturb each other and could choose different layouts.
"""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins.precision import HalfPrecision, MixedPrecision, Precision
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_hybrid.axes import Sizes
from lightning_hybrid.config import Settings
from lightning_hybrid.distributed.agreement import agree
from lightning_hybrid.distributed.dtensor import copy_attributes
from lightning_hybrid.error_codes.entry import without_code
from lightning_hybrid.expert_parallel.experts import expert_sizes
from lightning_hybrid.strategy.layout_search import ChooseLayout, ChosenLayout
from lightning_hybrid.strategy.open_arguments import SIZES
from lightning_hybrid.strategy.summary import text_table
from lightning_hybrid.trainer.lightning_internals import training_data
from lightning_hybrid.tuning.arguments import arguments, every_argument, in_words, keywords
from lightning_hybrid.tuning.candidates import Layout, LoaderStep
from lightning_hybrid.tuning.cost_model import Cost, CostModel
from lightning_hybrid.tuning.dry_run.dry_run import step_arguments
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.measure import measure_machine, usable_memory
from lightning_hybrid.tuning.module_profile import ModuleProfile
from lightning_hybrid.tuning.process_copy import run_in_copy
from lightning_hybrid.tuning.search import UNATTENDED, Suggestions, search
from lightning_hybrid.tuning.search_space import SearchSpace, search_space

_SHARE_OF_TIMEOUT = 0.8  # limit of the search, as a share of the time that the other ranks wait for rank 0
_MOST_SHOWN = 3  # layouts, and reasons for which others were rejected, in the log
_BY_HAND = (
    "Set the layout yourself, for example HybridStrategy(pipeline_parallel_size=2). For help, see `lightning-hybrid"
    " suggest` and docs/start/choose-a-layout.md."
)


@dataclass(frozen=True)
class Problem:
    """The problem that a search solves. Rank 0 makes it, and its copy calls :meth:`solve`.

    Attributes:
        make: Makes the module and its data, for a dry run. It is called for each dry run.
        config: The arguments of `HybridStrategy`, with provisional values of the open ones.
        space: The values that are tried for the open arguments.
        machine: The devices of all nodes and the links between them.
        num_ranks: The number of ranks of the run.
        precision: The precision plugin, for a step on the CPU.
        trainer: Other arguments of the Trainer by name, as :func:`step_arguments` returns them.
    """

    make: Callable[[], tuple[LightningModule, Any]]
    config: Settings
    space: SearchSpace
    machine: Machine
    num_ranks: int
    precision: Precision
    trainer: Mapping[str, Any]

    def solve(self) -> Suggestions:
        """Search for the layouts that fit and take the least time per sample.

        Raises:
            ValueError, TypeError: As at the start of training, or if the step cannot run on fake tensors.
            Exception: Any other error of Lightning or of the module.
        """
        config = replace(self.config, global_batch_size=None)  # `LoaderStep` has the number of accumulated batches
        given: dict[str, Any] = {"precision": self.precision, "contexts": self.space.context, **self.trainer}
        profile = ModuleProfile(self.make, config, self.num_ranks, self.machine, measure=self.machine.is_here, **given)
        step = LoaderStep(
            profile.batch_size,
            self.trainer["accumulate_grad_batches"],
            config.launch.rank_order,
            config.tuning.reshard_after_forward,
            self.config.global_batch_size,
        )
        model = CostModel(profile, self.machine, step)
        of_profile: Any = {"refuse": profile.refuse, "prepared": profile.recorded_ahead}
        return search(model, self.num_ranks, space=self.space, **of_profile, **UNATTENDED)


def choose_layout(
    config: Settings,
    sizes: Mapping[str, Any],
    module: LightningModule,
    device: torch.device,
    precision: Precision,
    num_nodes: int,
) -> ChosenLayout:
    """Choose the open arguments, see :class:`~lightning_hybrid.strategy.layout_search.ChooseLayout`.

    Every rank must call it, because it runs collectives to measure links and to broadcast the result. Rank 0 forks its
    process and logs the result. If ``recompute="auto"`` is the only open argument, the device is the CPU and memory is
    not limited, nothing is recomputed, and no search takes place.

    Raises:
        ValueError: If no layout fits, or the search fails or takes too long; with the same text on every rank.
    """
    memory = usable_memory(device, config.tuning.memory_bytes)
    if config.searched == ("recompute",) and math.isinf(memory):
        rank_zero_info(
            "recompute='auto': no activations are recomputed, because the device is the CPU and tuning.memory_limit is"
            " not set."
        )
        return ChosenLayout(Sizes(**sizes), {"recompute": False})
    start = time.monotonic()
    machine = measure_machine(device, _dtype(module, module.trainer), num_nodes, memory)
    is_first = dist.get_rank() == 0
    if any(parameter.is_meta for parameter in module.parameters()):  # layers without values cannot be timed
        machine = replace(machine, is_here=False)
    found: list[Any] = [agree(lambda: _search(config, sizes, module, machine, precision) if is_first else None)]
    dist.broadcast_object_list(found, src=0)
    suggestions: Suggestions = found[0]
    if not suggestions.best:
        raise ValueError(_nothing_fits(suggestions, machine, type(module).__name__))
    if is_first:
        rank_zero_info(_text(suggestions, config, machine, time.monotonic() - start))
    return _chosen(suggestions.best[0].layout, config)


_: ChooseLayout = choose_layout  # mypy checks that it implements the interface: the strategy loads it by its name


def _chosen(layout: Layout, config: Settings) -> ChosenLayout:
    every = every_argument(layout)
    return ChosenLayout(layout.sizes, {name: every[name] for name in config.searched if name not in SIZES})


def _search(
    config: Settings, sizes: Mapping[str, Any], module: LightningModule, machine: Machine, precision: Precision
) -> Suggestions:
    """Search on rank 0, in a copy of its process.

    A dry run changes modules and data, draws random numbers and creates process groups. None of it may stay.

    Raises:
        ValueError: If the search fails or takes too long, or if this system cannot copy a process.
    """
    trainer = module.trainer
    problem = Problem(
        lambda: (_copy_module(module), training_data(trainer)),
        config,
        search_space(config, sizes, expert_sizes(module, dist.get_world_size())),
        machine,
        dist.get_world_size(),
        _on_host(precision),
        step_arguments(trainer),
    )
    limit = _SHARE_OF_TIMEOUT * config.seconds_to_time_out
    try:
        return run_in_copy(problem.solve, time_limit=limit)
    except (ValueError, TypeError, RuntimeError, TimeoutError) as error:
        more = " To allow more time, increase HybridStrategy(timeout=...)." if isinstance(error, TimeoutError) else ""
        reason = f"{without_code(error).rstrip('.')}.{more}"
        raise ValueError(
            f"The layout search cannot choose {', '.join(config.searched)} for {type(module).__name__}. {reason}"
            f" {_BY_HAND} [LH127]"
        ) from error


def _copy_module(module: LightningModule) -> LightningModule:
    """Return a copy of a module, in which tensors on a device are on the meta device.

    Parameters on the CPU share their memory with the original, and buffers on the CPU are copied.
    """
    memo: dict[int, Any] = {}
    for parameter in module.parameters():
        value = parameter.data if parameter.device.type == "cpu" else torch.empty_like(parameter, device="meta")
        memo[id(parameter)] = made = nn.Parameter(value, parameter.requires_grad)
        copy_attributes(parameter, made)
    for buffer in module.buffers():
        if buffer.device.type != "cpu":
            memo[id(buffer)] = torch.empty_like(buffer, device="meta")
    return copy.deepcopy(module, memo)


def _on_host(precision: Precision) -> Precision:
    """Return a precision plugin with which a step on the CPU has dtypes of the same sizes as on the device."""
    is_mixed = isinstance(precision, MixedPrecision) and not isinstance(precision, HalfPrecision)
    if is_mixed and precision.device != "cpu":  # type: ignore[attr-defined]
        return MixedPrecision("bf16-mixed", "cpu")  # float16 and bfloat16 have the same size
    return precision


def _dtype(module: nn.Module, trainer: Trainer) -> torch.dtype:
    """Return the dtype of matrix multiplications."""
    if str(trainer.precision).startswith(("16", "bf16")):
        return torch.bfloat16
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return next(dtypes, torch.float32)


# -- texts -------------------------------------------------------------------------------------------------------------


def _by_hand(layout: Layout) -> str:
    """Return the code that sets a layout."""
    return f"HybridStrategy({', '.join(f'{name}={value!r}' for name, value in keywords(arguments(layout)).items())})"


def _text(found: Suggestions, config: Settings, machine: Machine, seconds: float) -> str:
    """Return the text about the chosen layout, the next best ones, and the reasons for which others were rejected."""
    limit = "" if math.isinf(machine.memory) else f" that fits in {_size(machine.memory)}"
    lines = [
        f"Found values for {', '.join(config.searched)} in {seconds:.1f} s. The search compared {found.num_layouts}"
        f" layouts. According to estimates, the layout below is the fastest one{limit}.",
        f"To use it without a search: {_by_hand(found.best[0].layout)}",
        _table(found.best[:_MOST_SHOWN]),
    ]
    lines += [
        f"rejected: {group.reason} ({group.count}), such as {in_words(group.best)}: {group.first_sentence}"
        for group in found.rejected[:_MOST_SHOWN]
    ]
    lines.append(
        f"measured: {machine.flops / 1e9:,.0f} GFLOP/s, memory {machine.memory_bandwidth / 1e9:,.1f} GB/s,"
        f" {1e6 * machine.operation_seconds:,.1f} us per operation; between ranks {_link_text(machine)}, plus"
        f" {1e6 * machine.collective_seconds:,.0f} us per collective"
    )
    return "\n".join(lines)


def _link_text(machine: Machine) -> str:
    inside = f"{1e6 * machine.node_latency:,.0f} us, {machine.node_bandwidth / 1e9:,.2f} GB/s"
    between = f"{1e6 * machine.network_latency:,.0f} us, {machine.network_bandwidth / 1e9:,.2f} GB/s"
    return inside if inside == between else f"{inside} within a node, {between} between nodes"


def _table(best: tuple[Cost, ...]) -> str:
    rows: list[tuple[str, ...]] = [("", "layout", "samples/step", "ms/step", "samples/s", "highest memory")]
    for number, cost in enumerate(best, 1):
        assert cost.seconds is not None
        step = f"{1e3 * cost.seconds:,.2f}", f"{1 / cost.seconds_of_sample:,.0f}"
        rows.append((str(number), in_words(cost.layout), str(cost.samples), *step, _size(cost.bytes)))
    return text_table(rows, left=(1,))


def _nothing_fits(found: Suggestions, machine: Machine, name: str) -> str:
    reasons = [
        f"{group.count} {'was' if group.count == 1 else 'were'} rejected: {group.reason}, such as"
        f" {in_words(group.best)}: {group.first_sentence}"
        for group in found.rejected
    ]
    if not reasons:
        return f"For {name}, no combination of the allowed sizes matches the number of processes. {_BY_HAND} [LH129]"
    limit = "" if math.isinf(machine.memory) else f" with tuning.memory_limit={_size(machine.memory)}"
    return (
        f"None of the {found.num_layouts} layouts of {name} can be used{limit}. {'; '.join(reasons)}. Start more"
        f" processes, allow more memory, or use a smaller batch. {_BY_HAND} [LH128]"
    )


def _size(size: float) -> str:
    if size >= 2**30:
        return f"{size / 2**30:,.2f} GiB"
    return f"{size / 2**20:,.1f} MiB" if size >= 2**20 else f"{size / 2**10:,.1f} KiB"
