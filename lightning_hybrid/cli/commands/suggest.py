"""``lightning-hybrid suggest``: the fastest layouts that fit in memory, for a number of ranks.

`cli.main` calls :func:`run`. The search is in `tuning`, and ``layout="auto"`` uses it at the start of a run. This
command searches without devices: it takes their figures from options, tries all values of all searched arguments, and
prints several layouts with their costs.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from typing import Any

from lightning_hybrid.axes import AXES
from lightning_hybrid.cli.parser import ConfigParser, positive, print_json, quantity
from lightning_hybrid.tuning.machine import Machine

_DESCRIPTION = (
    "Estimate the memory and step time of many layouts for a given number of ranks. Print the fastest layouts that fit"
    " in memory, and the reasons why other layouts were rejected. The command needs no GPU, because it runs the"
    " training step on fake tensors, which have no values. The hardware options, from --nodes to --overlap, describe"
    " the devices and links. Their defaults describe A100 GPUs with 80 GiB."
)
# These values replace the configuration's values, because the search tries others.
_UNDIVIDED = dict.fromkeys((axis.argument for axis in AXES), 1) | {
    "tensor_parallel_mode": "1d",
    "tensor_parallel_depth": 1,
    "context_parallel": "ulysses",
    "num_chunks": 1,
    "schedule": "1f1b",
    "zero_stage": 0,
    "zero_size": "null",
    "expert_parallel_size": 1,
    "recompute": "false",
    "layout": "null",
    "tuning.memory_limit": "null",
    "global_batch_size": "null",  # `--samples` sets the samples per step
}
# Arguments of `Machine`: the help text and the unit of each option.
_MACHINE = {
    "memory": ("memory that is available to a run on each device, excluding memory used by libraries", "B"),
    "flops": ("speed of matrix multiplications on a device", "FLOP/s"),
    "memory_bandwidth": ("memory bandwidth of a device", "B/s"),
    "node_bandwidth": ("bandwidth of each rank for messages within a node", "B/s"),
    "network_bandwidth": ("bandwidth of each rank for messages between nodes", "B/s"),
}
_SECONDS = {
    "operation_seconds": "minimum time of an operation on a device, in seconds",
    "node_latency": "latency of a message within a node, in seconds",
    "network_latency": "latency of a message between nodes, in seconds",
    "collective_seconds": "fixed overhead of a collective, in seconds",
}


def run(args: Sequence[str]) -> None:
    """Search for the fastest layouts that fit in memory, and print them as text or as JSON.

    Args:
        args: The words of the command line after ``suggest``.

    Raises:
        SystemExit: With 2 if the options are wrong, or the step cannot run on fake tensors.
    """
    parser = ConfigParser("suggest", _DESCRIPTION, "--ranks 8 --memory 40GiB")
    _add_arguments(parser)
    parser.add_json()
    options, overrides = parser.parse_known_args(args)

    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightning_hybrid.cli.hybrid_cli import be_quiet, load_config, maker
    from lightning_hybrid.cli.progress import count_progress
    from lightning_hybrid.cli.suggest.configured import find_configured
    from lightning_hybrid.cli.suggest.report import as_data, as_text
    from lightning_hybrid.tuning.candidates import LoaderStep, Step
    from lightning_hybrid.tuning.cost_model import CostModel
    from lightning_hybrid.tuning.dry_run.dry_run import step_arguments
    from lightning_hybrid.tuning.module_profile import ModuleProfile
    from lightning_hybrid.tuning.search import UNATTENDED, search
    from lightning_hybrid.tuning.search_space import SearchSpace

    be_quiet()
    overrides += ["--trainer.devices", "1", "--trainer.num_nodes", "1"]
    overrides += [f"--trainer.strategy.init_args.{name}={value}" for name, value in _UNDIVIDED.items()]
    cli, strategy = load_config(parser, options.config, overrides)
    trainer = step_arguments(cli.trainer)
    settings = strategy.settings
    if not isinstance(settings.partition, str):
        # A list is only valid for the configuration's number of stages.
        settings = replace(settings, partition="uniform")
    with parser.refusing(ValueError, TypeError, MisconfigurationException):
        machine = _machine(options)
        contexts = None if options.max_context is None else range(1, options.max_context + 1)
        with _short_passes(), count_progress("Running the step on fake tensors") as progress:
            profile = ModuleProfile(
                maker(options.config, overrides, cli),
                settings,
                options.ranks,
                machine,
                contexts=contexts,
                measure=options.measure,
                precision=strategy.precision_plugin,
                **trainer,
            )
            order, reshards = settings.launch.rank_order, settings.tuning.reshard_after_forward
            others = trainer["accumulate_grad_batches"], order, reshards
            step = Step(options.samples or profile.batch_size * options.ranks, *others)
            if options.keep_batch:
                step = LoaderStep(profile.batch_size, *others)
            model = CostModel(profile, machine, step)
            sizes = profile.expert_sizes
            space = SearchSpace(context=contexts, expert_sizes=sizes, some_layers=True)
            how = dict(UNATTENDED) if options.keep_batch else {}
            how |= {"refuse": profile.refuse, "prepared": profile.recorded_ahead, "progress": progress}
            found = search(model, options.ranks, space=space, **how)
    configured = find_configured(cli, profile.batch_size)
    if options.json:
        print_json(as_data(found, machine, step, configured, profile.divided_shares()))
    else:
        print(as_text(found, machine, step, configured, profile.divided_shares()))


@contextmanager
def _short_passes() -> Iterator[None]:
    """Exclude existing objects from garbage collection inside the context, because a pass over them takes 0.2 s."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _add_arguments(parser: ConfigParser) -> None:
    """Add the options of the command."""
    _add_search(parser.group("search"))
    _add_hardware(parser.group("hardware"))


def _add_search(group: Any) -> None:
    group.add_argument("--ranks", type=positive, required=True, metavar="N", help="number of processes")
    samples = group.add_mutually_exclusive_group()
    samples.add_argument(
        "--samples",
        type=positive,
        metavar="N",
        help="number of samples per optimizer step, summed over all replicas (default: the loader's batch size times"
        " the number of ranks)",
    )
    samples.add_argument(
        "--keep-batch",
        action="store_true",
        help="assume that each replica trains on one batch of the loader, and sort layouts by the time per sample, as"
        " HybridStrategy(layout='auto') does",
    )
    group.add_argument(
        "--max-tensor",
        type=positive,
        metavar="N",
        help="largest tensor-parallel size to try (default: the number of ranks per node)",
    )
    group.add_argument(
        "--max-context",
        type=positive,
        metavar="N",
        help="largest context-parallel size to try (default: the number of ranks per node, reduced so that each rank"
        " has at least 1024 positions)",
    )
    group.add_argument(
        "--measure",
        action="store_true",
        help="measure the time of forward passes on this CPU instead of counting their operations",
    )


def _add_hardware(group: Any) -> None:
    usual = Machine()
    group.add_argument(
        "--nodes", type=positive, metavar="K", help="number of nodes (default: enough for 8 ranks per node)"
    )
    for name, (text, unit) in _MACHINE.items():
        default = getattr(usual, name)
        shown = f"{default / 2**30:g} GiB" if name == "memory" else _readable(default, unit)
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=quantity,
            default=default,
            metavar="X",
            help=f"{text} (default: {shown})",
        )
    for name, text in _SECONDS.items():
        group.add_argument(
            f"--{name.replace('_', '-')}",
            type=_seconds,
            default=getattr(usual, name),
            metavar="S",
            help=f"{text} (default: %(default)g)",
        )
    group.add_argument(
        "--overlap",
        type=_share,
        default=usual.overlap,
        metavar="X",
        help="fraction of the compute time that can overlap with sending gradients or ring-attention messages"
        " (default: %(default)g)",
    )


def _readable(value: float, unit: str) -> str:
    """Return a rate with its unit, such as 156 TFLOP/s."""
    prefix, size = ("T", 1e12) if value >= 1e12 else ("G", 1e9)
    return f"{value / size:g} {prefix}{unit}"


def _machine(options: argparse.Namespace) -> Machine:
    """Return the machine that the options describe.

    Raises:
        ValueError: If the nodes cannot have the same number of ranks.
    """
    nodes = options.nodes or -(-options.ranks // Machine.ranks_per_node)
    if options.ranks % nodes:
        raise ValueError(f"--ranks {options.ranks} cannot be split evenly over --nodes {nodes}. [LH1008]")
    given = {field.name: getattr(options, field.name) for field in fields(Machine) if hasattr(options, field.name)}
    return Machine(**{**given, "ranks_per_node": options.ranks // nodes})


def _seconds(text: str) -> float:
    return _number(text, lambda value: value >= 0, "not a time in seconds (0 or more)")


def _share(text: str) -> float:
    return _number(text, lambda value: 0 <= value <= 1, "not a number between 0 and 1")


def _number(text: str, is_good: Callable[[float], bool], what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not is_good(value):
        raise argparse.ArgumentTypeError(f"{text!r} is {what}")
    return value
