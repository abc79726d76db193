"""What a configuration says that no suggested layout changes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

import yaml

from lightning_hybrid.cli.hybrid_cli import HybridCLI
from lightning_hybrid.config import HybridConfig

#: Arguments of `HybridStrategy` that say how fast a layout is and what fits, and that are not tried.
_NOT_TRIED = ("partition", "sequence_parallel", "tuning.reshard_after_forward", "offload", "launch.rank_order")


@dataclass(frozen=True)
class Configured:
    """What all layouts that are tried have in common.

    Attributes:
        batch_size: Of the loader.
        fixed: What could be varied and is not, by name.
        arguments: Those of `HybridStrategy` that are not as by default, by name, as YAML has them.
    """

    batch_size: int
    fixed: Mapping[str, Any]
    arguments: Mapping[str, Any]


def find_configured(cli: HybridCLI, batch_size: int) -> Configured:
    """What a configuration says.

    Args:
        cli: The configuration, loaded.
        batch_size: Of its loader.
    """
    given = cli.config.trainer.strategy.init_args
    plain = yaml.safe_load(cli.parser.dump(cli.config))["trainer"]["strategy"]["init_args"]
    usual = HybridConfig().by_name()
    arguments = {name: reduce(getitem, name.split("."), plain) for name, value in usual.items() if given[name] != value}
    fixed = {"accumulate_grad_batches": cli.trainer.accumulate_grad_batches}
    return Configured(batch_size, fixed | {name: given[name] for name in _NOT_TRIED}, arguments)
