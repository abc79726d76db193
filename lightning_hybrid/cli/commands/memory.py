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
    parser.add_argument("--ranks", type=int, metavar="N", help="processes, instead of those of the configuration")
    parser.add_json()
    options, overrides = parser.parse_known_args(args)

    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightning_hybrid.cli.hybrid_cli import be_quiet, load_config, maker
    from lightning_hybrid.cli.progress import count_progress
    from lightning_hybrid.strategy.auto_layout.dry_run.dry_run import dry_run
    from lightning_hybrid.strategy.summary import memory_table

    world = [] if options.ranks is None else ["--trainer.devices", str(options.ranks), "--trainer.num_nodes", "1"]
    be_quiet()
    overrides += world
    with count_progress("Reading the configuration") as progress:
        cli, strategy = load_config(parser, options.config, overrides)
        trainer_arguments = ("max_epochs", "max_steps", "accumulate_grad_batches", "limit_train_batches")
        progress("Running the step on shapes", 1, 2)
        with parser.refusing(ValueError, TypeError, MisconfigurationException):
            result = dry_run(
                maker(options.config, overrides, cli),
                strategy.settings,
                strategy.sizes,
                precision=strategy.precision_plugin,
                **{name: getattr(cli.trainer, name) for name in trainer_arguments},
            )
    if options.json:
        axes = ("data", "tensor", "pipeline", "context")
        sizes = (*strategy.sizes, strategy.settings.context_parallel_size)
        ranks = [{**asdict(usage), "total": usage.total} for usage in result.memory]
        of_axes = {f"{axis}_parallel_size": size for axis, size in zip(axes, sizes, strict=True)}
        print_json({**of_axes, "bytes_of_pipeline_ranks": ranks})
    else:
        print(f"{result.layout}\n\n{memory_table(result.memory)}")
