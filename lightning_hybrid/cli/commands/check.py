"""``lightning-hybrid check``: comparison of training under a layout with training in one process.

`cli.main` calls :func:`run`. `cli.check` trains and compares; this file has the options, and prints the result.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lightning_hybrid.cli.parser import ConfigParser, print_json, print_text


def run(args: Sequence[str]) -> None:
    """Compare training under a layout with training in one process, or with ``--dry`` only test if training can start.

    Args:
        args: The words of the command line after ``check``.

    Raises:
        SystemExit: With 0 if all values are equal, 1 if values differ, and 2 if they could not be compared. With
            ``--dry``, only with 2, if training cannot start.
    """
    description = (
        "Train a few steps in one process and again under the layout of a configuration, and compare losses, logged"
        " values, gradients and weights. Both runs use float64 on the CPU of this machine. If values differ, print the"
        " cause. In the printed table, < marks values with a relative difference above 1e-8, or above 1e-4 if code"
        " in the step converts values to float32. The exit status is 0 if all values are equal, 1 if values differ, and"
        " 2 if the values could not be compared. With --dry, the command only runs the step on fake tensors, and"
        " parameters use no memory. The exit status is then 0 if training can start, and 2 if it cannot."
    )
    parser = ConfigParser("check", description, "--trainer.devices 2 --model.batch_size 4 --steps 3")
    group = parser.group("training")
    group.add_argument(
        "--steps", type=int, default=2, metavar="N", help="number of optimizer steps (default: %(default)s)"
    )
    group.add_argument(
        "--time-limit",
        type=float,
        default=600.0,
        metavar="S",
        help="time limit for each training run, in seconds (default: 600)",
    )
    group.add_argument(
        "--dry", action="store_true", help="run the step on fake tensors, to check only whether training can start"
    )
    parser.add_json()
    options, overrides = parser.parse_known_args(args)
    if options.dry:
        _run_dry(parser, options, overrides)
        return

    from rich.console import Console

    from lightning_hybrid.cli.check import check
    from lightning_hybrid.cli.hybrid_cli import be_quiet, load_config

    be_quiet()
    overrides += ["--trainer.precision", "64-true"]
    cli, strategy = load_config(parser, options.config, overrides, with_values=True)
    layout = vars(strategy.settings.requested) | strategy.sizes.by_argument
    layout["master_weights"] = False  # float64 training has no master weights
    names = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    console = Console(stderr=True)
    with parser.refusing(ValueError, TypeError, RuntimeError):
        result = check(
            lambda: cli.model,
            lambda: cli.datamodule,
            steps=options.steps,
            trainer={name: getattr(cli.trainer, name) for name in names},
            time_limit=options.time_limit,
            # A progress bar has a thread, which would be copied in the middle of its work when the process is forked.
            progress=lambda text: console.print(f"Training {text}", style="dim") if console.is_terminal else None,
            **layout,
        )
    if options.json:
        print_json(result.as_dict())
    else:
        print_text(str(result))
    raise SystemExit(0 if result.equal else 1)


def _run_dry(parser: ConfigParser, options: argparse.Namespace, overrides: Sequence[str]) -> None:
    from lightning_hybrid.cli.hybrid_cli import run_on_shapes

    _, result = run_on_shapes(parser, options.config, overrides)
    if options.json:
        print_json({"trains": True, "layout": result.layout})
    else:
        text = "Training can start with this layout. Its results were not compared with training in one process."
        print_text(f"{text}\n\n{result.layout}")
