"""``lightning-hybrid memory``: what each rank would hold of a configuration's training."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from lightning_hybrid.cli.parser import ConfigParser, print_json


def run(args: Sequence[str]) -> None:
    """Show what each rank would hold."""
    description = (
        "Estimate what the ranks of a configuration would hold of parameters, gradients, optimizer states, activations"
        " and buffers. Nothing is started, and no device is needed: the step runs on shapes."
    )
    parser = ConfigParser("memory", description, "--data.batch_size 64")
    parser.add_argument("--ranks", type=int, metavar="N", help="number of processes (default: from the configuration)")
    parser.add_json()
    options, overrides = parser.parse_known_args(args)

    from lightning_hybrid.cli.hybrid_cli import run_on_shapes
    from lightning_hybrid.strategy.summary import memory_table

    world = [] if options.ranks is None else ["--trainer.devices", str(options.ranks), "--trainer.num_nodes", "1"]
    strategy, result = run_on_shapes(parser, options.config, overrides + world)
    if options.json:
        axes = ("data", "tensor", "pipeline", "context")
        sizes = (*strategy.sizes, strategy.settings.context_parallel_size)
        ranks = [{**asdict(usage), "total": usage.total} for usage in result.memory]
        of_axes = {f"{axis}_parallel_size": size for axis, size in zip(axes, sizes, strict=True)}
        print_json({**of_axes, "bytes_of_pipeline_ranks": ranks})
    else:
        print(f"{result.layout}\n\n{memory_table(result.memory)}")
