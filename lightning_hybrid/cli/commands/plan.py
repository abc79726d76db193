"""``lightning-hybrid plan``: the layout, the stages and the tensor-parallel plan of a configuration."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_hybrid.cli.parser import ConfigParser, print_json, print_text

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule

    from lightning_hybrid.cli.hybrid_cli import HybridCLI
    from lightning_hybrid.strategy.strategy import HybridStrategy


def run(args: Sequence[str]) -> None:
    """Print the layout, the stages and the tensor-parallel plan of a configuration; `cli.main` calls this function.

    Args:
        args: The words of the command line after ``plan``.
    """
    description = (
        "Show the layout, the pipeline stages and the tensor-parallel plan of a configuration. With several nodes, also"
        " show how many bytes an optimizer step sends between nodes. The command does not train."
    )
    parser = ConfigParser("plan", description, "--trainer.devices 8 --trainer.strategy.init_args.partition parameters")
    parser.add_json()
    options, overrides = parser.parse_known_args(args)

    from lightning_hybrid.cli.hybrid_cli import be_quiet, load_config, maker
    from lightning_hybrid.cli.progress import count_progress
    from lightning_hybrid.strategy.layout import describe, outline
    from lightning_hybrid.tuning.dry_run.parameters import made_without_memory

    be_quiet()
    with count_progress("Reading the configuration") as progress:
        cli, strategy = load_config(parser, options.config, overrides)
        size = strategy.sizes.num_ranks
        nodes = [rank * strategy.num_nodes // size for rank in range(size)]
        progress("Creating the module", 1, 3)
        with parser.refusing(ValueError, TypeError):
            module = made_without_memory(partial(_configured, maker(options.config, overrides, cli)))
            if options.json:
                data = outline(module, strategy.settings, strategy.sizes, strategy.num_nodes)
            else:
                text = describe(module, strategy.settings, strategy.sizes, list(map(str, nodes)))
        if strategy.num_nodes > 1:
            progress("Running the step on fake tensors", 2, 3)
            make = maker(options.config, overrides)  # a new module, because a step changes the module
            between, sentence = _between_nodes(make, cli, strategy, nodes)
    if options.json:
        print_json(data | ({"between_nodes": between} if strategy.num_nodes > 1 else {}))
    else:
        print_text(f"{text}\n{sentence}" if strategy.num_nodes > 1 else text)


def _configured(make: Callable[[], tuple[LightningModule, Any]]) -> LightningModule:
    """Return the module of a configuration, after `configure_model`."""
    from lightning.pytorch.utilities.model_helpers import is_overridden

    module, _ = make()
    if is_overridden("configure_model", module):
        module.configure_model()
    return module


def _between_nodes(
    make: Callable[[], Any], cli: HybridCLI, strategy: HybridStrategy, nodes: Sequence[int]
) -> tuple[dict[str, Any] | None, str]:
    """Return the bytes that all ranks send between nodes in an optimizer step, as data and as a sentence.

    The data is ``None`` if the step cannot run on fake tensors; the sentence then contains the reason.
    """
    from lightning.fabric.utilities.exceptions import MisconfigurationException
    from rich import filesize

    from lightning_hybrid.cli.suggest.planned import planned_traffic
    from lightning_hybrid.pipeline_parallel.links.traffic import bytes_between_nodes, least_bytes, traffic_text
    from lightning_hybrid.tuning.dry_run.dry_run import step_arguments

    try:
        traffic = planned_traffic(make, strategy, **step_arguments(cli.trainer))
    except (ValueError, TypeError, MisconfigurationException) as error:
        return None, f"It is unknown how many bytes a step sends between nodes: {error}"
    sizes, order = strategy.sizes, strategy.settings.axis_order
    total, of_sums = bytes_between_nodes(sizes, order, nodes, traffic)
    best, least = least_bytes(sizes, order, nodes, traffic)
    found = {"bytes": total, "tensor_bytes": of_sums, "best_rank_order": best, "best_bytes": least}
    usual = f"With launch.rank_order={order!r}, each step sends {filesize.decimal(int(total))} between nodes."
    warning = traffic_text(sizes, order, nodes, traffic)
    return found, usual if warning is None else f"Warning: {warning}"
