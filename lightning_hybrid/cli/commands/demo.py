"""``lightning-hybrid demo``: training of a Vision Transformer on handwritten digits, without a download.

`cli.main` calls :func:`run`. The module and the data are in `cli.demo`; they are ordinary Lightning code, and the
options of this command only choose a layout.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_hybrid.cli.parser import OPTIONS_OF_FIT, PROGRAM, Parser, positive

_CONFIG = Path(__file__).parent.parent / "demo" / "vit.yaml"


def run(args: Sequence[str]) -> None:
    """Train the demo. This process becomes rank 0, and Lightning starts the others with the changed `sys.argv`.

    Args:
        args: The words of the command line after ``demo``.

    Raises:
        SystemExit: With 2 if the options are wrong, or scikit-learn is not installed.
    """
    parser = Parser(
        "demo",
        description="Train a Vision Transformer on handwritten digits. The command runs on the CPU and downloads"
        " nothing. If the number of ranks is even, the model is split into 2 pipeline stages. If the number is a"
        " multiple of 4, the layers are also sharded over 2 tensor-parallel ranks. If there are more ranks than one"
        " replica needs, the other ranks train additional replicas.",
        epilog=f"{OPTIONS_OF_FIT} `--print_config` prints the configuration. Example:"
        f" {PROGRAM} demo --ranks 2 --trainer.max_steps 20",
    )
    parser.add_argument(
        "--ranks", type=positive, default=4, metavar="N", help="number of processes (default: %(default)s)"
    )
    options, overrides = parser.parse_known_args(args)

    from lightning_hybrid.cli.demo.digits import load_digits
    from lightning_hybrid.cli.hybrid_cli import HybridCLI

    with parser.refusing(ModuleNotFoundError):
        load_digits()
    # LightningCLI reads these arguments, and Lightning starts the other ranks with them.
    sys.argv[1:] = ["fit", "--config", str(_CONFIG), *_layout(options.ranks), *overrides]
    HybridCLI()


def _layout(ranks: int) -> list[str]:
    sizes = {"pipeline_parallel_size": 1 if ranks % 2 else 2, "tensor_parallel_size": 1 if ranks % 4 else 2}
    options = [f"--trainer.strategy.init_args.{name}={size}" for name, size in sizes.items()]
    return [f"--trainer.devices={ranks}", *options]
