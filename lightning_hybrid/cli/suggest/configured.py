"""The values of a configuration that no suggested layout changes.

``lightning-hybrid suggest`` calls :func:`find_configured` after the search, and `report` prints the values: in the
text, because they limit the result of the search, and in the YAML of a layout, because the user would lose them
otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import yaml

from lightning_hybrid.cli.hybrid_cli import HybridCLI
from lightning_hybrid.config import HybridConfig

#: Arguments of `HybridStrategy` that affect speed or memory, but that the search does not vary.
_NOT_TRIED = ("partition", "sequence_parallel", "tuning.reshard_after_forward", "offload", "launch.rank_order")


@dataclass(frozen=True)
class Configured:
    """The values that all layouts in the search have in common.

    Attributes:
        batch_size: The number of samples in a batch of the loader.
        fixed: The arguments that affect speed or memory, but that the search does not vary, by name.
        arguments: The arguments of `HybridStrategy` that differ from their defaults, by name, as in YAML. Names have a
            dot for a part of a group. If the search varies one of them, a layout overrides it.
    """

    batch_size: int
    fixed: Mapping[str, Any]
    arguments: Mapping[str, Any]


def find_configured(cli: HybridCLI, batch_size: int) -> Configured:
    """Return the values of a configuration that the search does not change.

    Args:
        cli: The loaded configuration.
        batch_size: The number of samples in a batch of its loader.
    """
    given = cli.config.trainer.strategy.init_args
    plain = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]["strategy"]["init_args"]
    usual = HybridConfig().by_name()
    arguments = {name: reduce(getitem, name.split("."), plain) for name, value in usual.items() if given[name] != value}
    fixed = {"accumulate_grad_batches": cli.trainer.accumulate_grad_batches}
    return Configured(batch_size, fixed | {name: given[name] for name in _NOT_TRIED}, arguments)
