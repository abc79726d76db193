"""The layout of a run, found at its start: the first rank searches, in a copy of its process, and tells the others."""

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
from lightning_hybrid.tuning.search import FOUND_UNSEEN, Suggestions, search
from lightning_hybrid.tuning.search_space import SearchSpace, search_space

_SHARE_OF_TIMEOUT = 0.8  # of the time that others wait for the first rank
_MOST_SHOWN = 3
_BY_HAND = (
    "Set the layout yourself, for example HybridStrategy(pipeline_parallel_size=2). For help, see `lightning-hybrid"
    " suggest` and docs/start/choose-a-layout.md."
)


@dataclass(frozen=True)
class Problem:
    """What is searched for.

    Attributes:
        make: Makes the module and its data.
        config: The arguments of `HybridStrategy`, with what stands for the open ones.
        space: What is tried for them.
        machine: What ranks run on.
        num_ranks: Of the run.
        precision: The precision plugin, for the host.
        trainer: Other arguments of the Trainer, see :func:`step_arguments`.
    """

    make: Callable[[], tuple[LightningModule, Any]]
    config: Settings
    space: SearchSpace
    machine: Machine
    num_ranks: int
    precision: Precision
    trainer: Mapping[str, Any]

    def solve(self) -> Suggestions:
        """The layouts that take the least time for a sample, of those that fit.

        Raises:
            ValueError, TypeError: As at the start of training, or if a step cannot be run on shapes.
        """
        config = replace(self.config, global_batch_size=None)  # what is accumulated, the step says
        given: dict[str, Any] = {"precision": self.precision, "contexts": self.space.context, **self.trainer}
        profile = ModuleProfile(self.make, config, self.num_ranks, self.machine, measure=self.machine.is_here, **given)
        step = LoaderStep(
            profile.batch_size,
            self.trainer["accumulate_grad_batches"],
            config.axis_order,
            config.tuning.reshard_after_forward,
            self.config.global_batch_size,
        )
        model = CostModel(profile, self.machine, step)
        of_profile: Any = {"refuse": profile.refuse, "prepared": profile.recorded_ahead}
        return search(model, self.num_ranks, space=self.space, **of_profile, **FOUND_UNSEEN)


def choose_layout(
    config: Settings,
    sizes: Mapping[str, Any],
    module: LightningModule,
    device: torch.device,
    precision: Precision,
    num_nodes: int,
) -> ChosenLayout:
    """Find what is left open, the same on every rank, and say it; to be called on every rank.

    Args:
        config: The arguments of `HybridStrategy`, with what stands for the open ones.
        sizes: The sizes that the user set, by the labels of the axes; numbers if they are not searched.
        module: The user's module, whole.
        device: Of this rank.
        precision: The precision plugin.
        num_nodes: The number of machines.

    Raises:
        ValueError: If nothing fits, or the module's step cannot be run on shapes; on every rank.
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
    if any(parameter.is_meta for parameter in module.parameters()):  # without values layers cannot be timed
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
    """On the first rank, in a copy of its process: a dry run changes modules and data, draws numbers, makes groups."""
    trainer = module.trainer
    problem = Problem(
        lambda: (_copy_module(module), training_data(trainer)),
        config,
        search_space(config, sizes),
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
            f"{', '.join(config.searched)} cannot be chosen for {type(module).__name__}: {reason} {_BY_HAND} [LH127]"
        ) from error


def _copy_module(module: LightningModule) -> LightningModule:
    """A copy over the same values; what is on a device has none."""
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
    """A plugin under which a step on the host has the dtypes that it has on a device."""
    is_mixed = isinstance(precision, MixedPrecision) and not isinstance(precision, HalfPrecision)
    if is_mixed and precision.device != "cpu":  # type: ignore[attr-defined]
        return MixedPrecision("bf16-mixed", "cpu")  # numbers in float16 have as many bytes
    return precision


def _dtype(module: nn.Module, trainer: Trainer) -> torch.dtype:
    """What products are computed in."""
    if str(trainer.precision).startswith(("16", "bf16")):
        return torch.bfloat16
    dtypes = (parameter.dtype for parameter in module.parameters() if parameter.is_floating_point())
    return next(dtypes, torch.float32)


# -- what is said ------------------------------------------------------------------------------------------------------


def _by_hand(layout: Layout) -> str:
    """What to write for a layout."""
    return f"HybridStrategy({', '.join(f'{name}={value!r}' for name, value in keywords(arguments(layout)).items())})"


def _text(found: Suggestions, config: Settings, machine: Machine, seconds: float) -> str:
    """The layout, the next best ones, and why the others are not among them."""
    limit = "" if math.isinf(machine.memory) else f" that fits in {_size(machine.memory)}"
    lines = [
        f"Found values for {', '.join(config.searched)} in {seconds:.1f} s. The search compared {found.num_layouts}"
        f" layouts. According to estimates, the layout below is the fastest one{limit}.",
        f"To use it without a search: {_by_hand(found.best[0].layout)}",
        _table(found.best[:_MOST_SHOWN]),
    ]
    lines += [
        f"rejected: {group.reason} ({group.count}), such as {in_words(group.best)}: {group.first_sentence}"
        for group in found.losers[:_MOST_SHOWN]
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
        for group in found.losers
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
