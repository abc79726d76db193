"""``lightning-hybrid plan``: which rank would hold what of a configuration's module."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lightning_hybrid.cli.parser import ConfigParser, print_json


def run(args: Sequence[str]) -> None:
    """Show which rank would hold what."""
    description = "Show the layout, the stages and the tensor-parallel plan of a configuration; nothing is started."
    parser = ConfigParser("plan", description, "--trainer.devices 8 --trainer.strategy.init_args.partition parameters")
    parser.add_json()
    options, overrides = parser.parse_known_args(args)

    from lightning.pytorch.utilities.model_helpers import is_overridden

    from lightning_hybrid.cli.hybrid_cli import be_quiet, load_config
    from lightning_hybrid.strategy.layout import describe, outline

    be_quiet()
    cli, strategy = load_config(parser, options.config, overrides)
    if is_overridden("configure_model", cli.model):
        cli.model.configure_model()
    with parser.refusing(ValueError, TypeError):
        if options.json:
            print_json(outline(cli.model, strategy.settings, strategy.sizes, strategy.num_nodes))
        else:
            size = math.prod(strategy.sizes)
            hosts = [str(rank * strategy.num_nodes // size) for rank in range(size)]
            print(describe(cli.model, strategy.settings, strategy.sizes, hosts))
