"""``lightning-hybrid memory``: an estimate of each rank's memory.

`cli.main` calls :func:`run`. The estimate is from a dry run (`tuning.dry_run`), which executes the first training step
on fake tensors; formulas from the sizes of parameters would miss the activations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from lightning_hybrid.cli.parser import ConfigParser, print_json, print_text, quantity
from lightning_hybrid.tuning.machine import Machine

if TYPE_CHECKING:
    from lightning_hybrid.memory.account import MemoryUsage


def run(args: Sequence[str]) -> None:
    """Print an estimate of each pipeline rank's memory, and if it fits.

    Args:
        args: The words of the command line after ``memory``.

    Raises:
        SystemExit: With 2 if the options are wrong, or training could not start.
    """
    description = (
        "Estimate how much memory each rank needs for parameters, gradients, optimizer states, activations and buffers."
        " The command needs no GPU, because it runs the training step on fake tensors, which have no values."
    )
    parser = ConfigParser("memory", description, "--memory 40GiB --data.batch_size 64")
    group = parser.group("hardware")
    group.add_argument(
        "--ranks", type=int, metavar="N", help="number of processes (default: the number in the configuration)"
    )
    group.add_argument(
        "--memory",
        type=quantity,
        default=Machine.memory,
        metavar="X",
        help="memory that is available to a run on each device (default: 80 GiB)",
    )
    parser.add_json()
    options, overrides = parser.parse_known_args(args)

    from lightning_hybrid.cli.hybrid_cli import run_on_shapes
    from lightning_hybrid.strategy.summary import memory_table

    world = [] if options.ranks is None else ["--trainer.devices", str(options.ranks), "--trainer.num_nodes", "1"]
    strategy, result = run_on_shapes(parser, options.config, overrides + world)
    most = _most(result.memory)
    if options.json:
        ranks = [{**asdict(usage), "total": usage.total} for usage in result.memory]
        fits = None if most is None else most[0] <= options.memory
        print_json({**strategy.sizes.by_argument, "bytes_of_pipeline_ranks": ranks, "fits": fits})
    else:
        print_text(f"{result.layout}\n\n{memory_table(result.memory)}\n{_verdict(most, options.memory)}")


def _most(usages: Sequence[MemoryUsage]) -> tuple[int, int] | None:
    """Return the bytes of the pipeline rank that needs the most, and its index; ``None`` if some bytes are unknown."""
    totals = [usage.total for usage in usages]
    known = [(total, -rank) for rank, total in enumerate(totals) if total is not None]
    total, rank = max(known, default=(0, 0))
    return (total, -rank) if len(known) == len(totals) else None


def _verdict(most: tuple[int, int] | None, memory: float) -> str:
    """Return the line that states if the layout fits."""
    if most is None:
        return "It is unknown whether the layout fits, because part of the memory cannot be estimated."
    total, rank = most
    fits = "Fits" if total <= memory else "Does not fit"
    share = f"{total / memory:.1%} of the {memory / 2**30:.4g} GiB per device"
    return f"{fits}: pipeline rank {rank} needs the most memory, {share}."
