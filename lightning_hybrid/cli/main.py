"""The commands of ``lightning-hybrid``: training from a YAML file, checks, pictures, estimates, checkpoints."""

from __future__ import annotations

import argparse
import difflib
import logging
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback
from lightning.pytorch.utilities.model_helpers import is_overridden
from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from lightning_hybrid.cli.check import check
from lightning_hybrid.cli.consolidate import consolidate
from lightning_hybrid.cli.dry_run import dry_run
from lightning_hybrid.cli.export import Export, export
from lightning_hybrid.cli.inspect import inspect_checkpoint
from lightning_hybrid.cli.suggest import command as suggestions
from lightning_hybrid.distributed.module_names import fold_numbered
from lightning_hybrid.pipeline_parallel.schedules import SCHEDULES, build
from lightning_hybrid.pipeline_parallel.timeline import simulate
from lightning_hybrid.strategy.layout import describe
from lightning_hybrid.strategy.strategy import HybridStrategy
from lightning_hybrid.strategy.summary import memory_table

PROGRAM = "lightning-hybrid"
_DTYPES = ("float16", "bfloat16", "float32", "float64")
_SIZES = ("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size")


class SaveConfigBesideLogs(SaveConfigCallback):
    """Saves the configuration where logs are; without a logger that is the folder of the user's own `config.yaml`."""

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save it when a run begins."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


class HybridCLI(LightningCLI):
    """A `LightningCLI` whose configuration may name any model, data and strategy by ``class_path``.

    Args:
        model: Class path of the model when neither command line nor configuration names one.
        data: Class path of the data when neither command line nor configuration names one.
        kwargs: Arguments of `LightningCLI`.
    """

    def __init__(self, *, model: str | None = None, data: str | None = None, **kwargs: Any) -> None:
        self._default_classes = {"model": model, "data": data}
        kwargs.setdefault("save_config_callback", SaveConfigBesideLogs)
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        super().__init__(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """The default classes; a configuration may still name others."""
        for key, path in self._default_classes.items():
            if path is not None:
                parser.set_defaults({key: {"class_path": path}})

    def after_fit(self) -> None:
        """Say what came out: progress bars vanish."""
        if self.trainer.is_global_zero:
            metrics = {name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())}
            print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


def main(args: Sequence[str] | None = None, *, model: str | None = None, data: str | None = None) -> None:
    """Run the program ``lightning-hybrid``.

    Args:
        args: The command and its arguments; those of this process by default.
        model: Class path of the model when neither command line nor configuration names one.
        data: Class path of the data when neither command line nor configuration names one.

    Raises:
        SystemExit: After help or wrong usage.
    """
    # Configurations name classes of the user's project, which is where the program is started.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    arguments = list(sys.argv[1:] if args is None else args)
    command = arguments[0] if arguments else None
    if command in COMMANDS:
        COMMANDS[command](arguments[1:])
    elif command in HybridCLI.subcommands():
        HybridCLI(model=model, data=data, args=args if args is None else arguments)
    else:
        _help_and_exit(command)


def _help_and_exit(command: str | None) -> None:
    """Show the commands; anything but a plain request for help is an error."""
    is_requested = command in {"-h", "--help"}
    stream = sys.stdout if is_requested else sys.stderr
    print(HELP, file=stream)
    if command is not None and not is_requested:
        close = difflib.get_close_matches(command, [*COMMANDS, *HybridCLI.subcommands()], n=1)
        advice = f"; did you mean {close[0]!r}?" if close else ""
        print(f"\n{PROGRAM}: there is no command {command!r}{advice}", file=stream)
    raise SystemExit(0 if is_requested else 2)


@contextmanager
def _refusals(parser: argparse.ArgumentParser, *kinds: type[Exception], doing: str = "") -> Iterator[None]:
    """Errors of these kinds, which the user can mend, end the program with their text and status 2.

    Args:
        parser: Of the command.
        kinds: What may be raised inside.
        doing: What comes before the text.
    """
    try:
        yield
    except kinds as error:
        parser.exit(2, f"{parser.prog}: error: {doing}{error}\n")


def _timeline(args: Sequence[str]) -> None:
    """Draw one step of a schedule."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} timeline",
        description="Draw one training step of a pipeline schedule, its bubble and what each rank holds in memory.",
    )
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="1f1b", help="default: %(default)s")
    parser.add_argument("--ranks", type=int, default=4, metavar="N", help="pipeline ranks (default: %(default)s)")
    parser.add_argument(
        "--microbatches", type=int, metavar="N", help="microbatches of a step (default: 4 for each rank)"
    )
    parser.add_argument("--chunks", type=int, metavar="N", help="model chunks per rank (default: 1, interleaved 2)")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture to this file too")
    options = parser.parse_args(args)
    default_chunks = 2 if options.schedule == "interleaved_1f1b" else 1
    chunks = default_chunks if options.chunks is None else options.chunks
    microbatches = 4 * options.ranks if options.microbatches is None else options.microbatches
    with _refusals(parser, ValueError):
        timeline = simulate(build(options.schedule, options.ranks, microbatches, chunks))
    print(timeline.to_text(width=max(80, shutil.get_terminal_size((120, 24)).columns)))
    peaks = "  ".join(f"rank {rank}: {peak:g}" for rank, peak in enumerate(timeline.peak_in_flight))
    print(f"bubble          {timeline.bubble:.1%} of the step, {timeline.bubble_over_ideal:.1%} over the ideal")
    print(f"peak in flight  {peaks} (microbatches whose activations are kept)")
    if options.svg is not None:
        with _refusals(parser, OSError, doing=f"cannot write --svg {options.svg}: "):
            options.svg.write_text(timeline.to_svg(), encoding="utf-8")


def _config_parser(command: str, description: str, example: str) -> argparse.ArgumentParser:
    """The parser of a command that takes a configuration."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} {command}",
        description=description,
        epilog="Other options change the configuration as those of `fit` do, so that the command line of a run is"
        f" understood. Example: {PROGRAM} {command} --config FILE {example}",
    )
    parser.add_argument(
        "--config",
        required=True,
        action="append",
        metavar="FILE",
        help="the configuration; of several, later ones change earlier ones",
    )
    return parser


def _load_config(
    parser: argparse.ArgumentParser, configs: Sequence[str], overrides: Sequence[str]
) -> tuple[HybridCLI, HybridStrategy]:
    """The module, the data and the Trainer of a configuration, and its strategy; nothing is started."""
    words = [word for config in configs for word in ("--config", config)]
    saved, sys.argv = sys.argv, [PROGRAM, *words, *overrides]  # where a LightningCLI looks
    try:
        with _refusals(parser, ValueError, MisconfigurationException):
            cli = HybridCLI(run=False)
    finally:
        sys.argv = saved
    strategy = cli.trainer.strategy
    if not isinstance(strategy, HybridStrategy):
        parser.error(f"the strategy of {', '.join(configs)} is a {type(strategy).__name__}, not a HybridStrategy")
    return cli, strategy


def _plan(args: Sequence[str]) -> None:
    """Show which rank would hold what."""
    description = "Show the layout, the stages and the tensor-parallel plan of a configuration; nothing is started."
    parser = _config_parser(
        "plan", description, "--trainer.devices 8 --trainer.strategy.init_args.partition parameters"
    )
    options, overrides = parser.parse_known_args(args)
    cli, strategy = _load_config(parser, options.config, overrides)
    if is_overridden("configure_model", cli.model):
        cli.model.configure_model()
    with _refusals(parser, ValueError, TypeError):
        print(describe(cli.model, strategy.settings, strategy.sizes))


def _memory(args: Sequence[str]) -> None:
    """Show what each rank would hold."""
    description = (
        "Estimate what the ranks of a configuration would hold of parameters, gradients, optimizer states, activations"
        " and buffers. Nothing is started, and no device is needed: the step runs on shapes."
    )
    parser = _config_parser("memory", description, "--data.batch_size 64")
    parser.add_argument("--ranks", type=int, metavar="N", help="processes, instead of those of the configuration")
    options, overrides = parser.parse_known_args(args)
    world = [] if options.ranks is None else ["--trainer.devices", str(options.ranks), "--trainer.num_nodes", "1"]
    _be_quiet()
    overrides += ["--trainer.accelerator", "cpu", *world]
    cli, strategy = _load_config(parser, options.config, overrides)
    unused = [cli]

    def make() -> tuple[LightningModule, LightningDataModule | None]:
        loaded = unused.pop() if unused else _load_config(parser, options.config, overrides)[0]
        return loaded.model, loaded.datamodule

    trainer_arguments = ("max_epochs", "max_steps", "accumulate_grad_batches", "limit_train_batches")
    with _refusals(parser, ValueError, TypeError, MisconfigurationException):
        result = dry_run(
            make,
            strategy.settings,
            strategy.sizes,
            precision=strategy.precision_plugin,
            **{name: getattr(cli.trainer, name) for name in trainer_arguments},
        )
    print(f"{result.layout}\n\n{memory_table(result.memory)}")


def _suggest(args: Sequence[str]) -> None:
    """Say which layouts are the fastest that fit."""
    parser = _config_parser("suggest", suggestions.DESCRIPTION, "--ranks 8 --memory 40GiB")
    suggestions.add_arguments(parser)
    options, overrides = parser.parse_known_args(args)
    _be_quiet()
    # The sizes of the configuration give way to those that are tried.
    sizes = dict.fromkeys(_SIZES, "1") | {"num_chunks": "1", "zero_stage": "0"}
    world = ["--trainer.accelerator", "cpu", "--trainer.devices", "1", "--trainer.num_nodes", "1"]
    overrides += [*world, *(f"--trainer.strategy.init_args.{name}={value}" for name, value in sizes.items())]
    cli, strategy = _load_config(parser, options.config, overrides)
    unused = [cli]

    def make() -> tuple[LightningModule, LightningDataModule | None]:
        loaded = unused.pop() if unused else _load_config(parser, options.config, overrides)[0]
        return loaded.model, loaded.datamodule

    trainer_arguments = ("max_epochs", "max_steps", "accumulate_grad_batches", "limit_train_batches")
    trainer = {name: getattr(cli.trainer, name) for name in trainer_arguments}
    with _refusals(parser, ValueError, TypeError, MisconfigurationException):
        print(suggestions.suggest(options, make, strategy, **trainer))


def _check(args: Sequence[str]) -> None:
    """Say whether a layout trains with the numbers of one process."""
    description = (
        "Train a few steps in one process and under the layout of a configuration, in float64 on the CPU of this"
        " machine, and compare losses, logged values, gradients and weights. Where they differ, say why. The exit"
        " status is 0 if they are equal, 1 if they differ, 2 if they could not be compared."
    )
    parser = _config_parser("check", description, "--trainer.devices 2 --model.batch_size 4 --steps 3")
    parser.add_argument("--steps", type=int, default=2, metavar="N", help="optimizer steps (default: %(default)s)")
    parser.add_argument(
        "--time-limit", type=float, default=600.0, metavar="S", help="seconds a training may take (default: 600)"
    )
    options, overrides = parser.parse_known_args(args)
    _be_quiet()
    overrides += ["--trainer.accelerator", "cpu", "--trainer.precision", "64-true"]
    cli, strategy = _load_config(parser, options.config, overrides)
    layout = vars(strategy.settings) | dict(zip(_SIZES, strategy.sizes, strict=True))
    if layout.pop("auto_microbatches"):
        layout["num_microbatches"] = "auto"
    names = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
    console = Console(stderr=True)
    with _refusals(parser, ValueError, TypeError, RuntimeError):
        result = check(
            lambda: cli.model,
            lambda: cli.datamodule,
            steps=options.steps,
            trainer={name: getattr(cli.trainer, name) for name in names},
            time_limit=options.time_limit,
            # No bar: its thread would be copied, half at work, with the process.
            progress=lambda text: console.print(f"Training {text}", style="dim") if console.is_terminal else None,
            **layout,
        )
    print(result)
    raise SystemExit(0 if result.equal else 1)


def _be_quiet() -> None:
    """What a run says of its start is not to the point."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)


def _inspect(args: Sequence[str]) -> None:
    """Show what a checkpoint holds."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} inspect",
        description="Show what a checkpoint holds: tensors, optimizers, the layout it was written under. No tensor is"
        " read. Layers that are alike share a line.",
        epilog="No code of the checkpoint runs: what is neither a tensor nor a plain container is shown by its class.",
    )
    parser.add_argument("path", type=Path, metavar="PATH", help="a file, or a directory of shards")
    parser.add_argument("--every-name", action="store_true", help="a line for each tensor")
    options = parser.parse_args(args)
    with _refusals(parser, OSError, ValueError):
        print(inspect_checkpoint(options.path).text(every_name=options.every_name))


def _consolidate(args: Sequence[str]) -> None:
    """Make one file of a directory."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} consolidate",
        description="Turn a checkpoint that is a directory into one ordinary Lightning file. It may be larger than the"
        " memory. Directories of Lightning's FSDPStrategy and ModelParallelStrategy are understood too.",
        epilog="It unpickles what it reads: only use checkpoints that you trust.",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="the checkpoint")
    parser.add_argument("file", type=Path, metavar="FILE", help="the file to write")
    parser.add_argument("--weights-only", action="store_true", help="leave out optimizers, schedulers and callbacks")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")
    options = parser.parse_args(args)
    with _refusals(parser, OSError, ValueError), _progress_bar() as bar:
        task = bar.add_task(options.file.name, total=None)
        consolidate(
            options.directory,
            options.file,
            weights_only=options.weights_only,
            overwrite=options.overwrite,
            progress=lambda done, total: bar.update(task, advance=done, total=total),
        )
    print(f"{options.file}: {options.file.stat().st_size:,} bytes")


def _export(args: Sequence[str]) -> None:
    """Write the weights of a checkpoint as Hugging Face does."""
    parser = argparse.ArgumentParser(
        prog=f"{PROGRAM} export",
        description="Write the weights of a checkpoint, a file or a directory, into a new folder as model.safetensors,"
        " which `from_pretrained` and `safetensors.torch.load_file` open. It may be larger than the memory.",
        epilog="It unpickles what it reads: only use checkpoints that you trust.",
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="the checkpoint")
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder to write: a new one, or an empty one")
    parser.add_argument(
        "--prefix",
        metavar="NAME",
        help="the attribute of the module that holds the model, such as `model.`; names lose it, and others are left"
        " out; found where all names begin with it; '' for names as they are",
    )
    parser.add_argument(
        "--max-shard-size",
        type=_parse_bytes,
        default=5 * 10**9,
        metavar="SIZE",
        help="the most bytes in a file, such as 500MB; 5GB by default",
    )
    parser.add_argument("--dtype", choices=_DTYPES, help="convert floating-point tensors")
    parser.add_argument("--config", type=Path, metavar="PATH", help="the model's config.json, or the folder of one")
    options = parser.parse_args(args)
    with _refusals(parser, OSError, ValueError), _progress_bar() as bar:
        task = bar.add_task(options.folder.name, total=None)
        result = export(
            options.checkpoint,
            options.folder,
            prefix=options.prefix,
            max_shard_size=options.max_shard_size,
            dtype=getattr(torch, options.dtype) if options.dtype else None,
            config=options.config,
            progress=lambda done, total: bar.update(task, advance=done, total=total),
        )
    size = sum((options.folder / file).stat().st_size for file in result.files)
    print(f"{options.folder}: {', '.join(result.files)}; {size:,} bytes\n{_export_text(result)}")


def _export_text(result: Export) -> str:
    """What is not to be seen in the files."""
    lines = [f"{name} is tied to {stored}, and stored once" for name, stored in result.tied.items()]
    if result.prefix:
        lines.insert(0, f"names without {result.prefix!r}")
    elif len(result.first_parts) > 1:
        parts = ", ".join(f"{first!r} ({count})" for first, count in result.first_parts.items())
        lines.insert(0, f"names as they are, beginning with {parts}; to write one part without its prefix: --prefix")
    if result.left_out:
        lines.append(f"left out: {', '.join(name for (name,) in fold_numbered((name,) for name in result.left_out))}")
    if not result.has_config:
        lines.append(
            "no config.json: the checkpoint does not say how the model is configured. `from_pretrained` needs it: give"
            " --config, the folder or file that the model was made from, or call `model.config.save_pretrained(FOLDER)`"
        )
    return "\n".join(lines)


def _parse_bytes(text: str) -> int:
    """Bytes of a size such as ``5GB``, ``500MB`` or ``2GiB``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(i?))?B?", text.strip(), re.IGNORECASE)
    number = (
        0
        if match is None
        else float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index((match[2] or " ").upper())
    )
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size in bytes, such as 5GB, 500MB or 2GiB")
    return int(number)


def _progress_bar() -> Progress:
    """A bar of bytes; where nobody watches there is none."""
    console = Console(stderr=True)
    columns = *Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn()
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


COMMANDS: dict[str, Callable[[Sequence[str]], None]] = {
    "timeline": _timeline,
    "plan": _plan,
    "memory": _memory,
    "suggest": _suggest,
    "check": _check,
    "inspect": _inspect,
    "consolidate": _consolidate,
    "export": _export,
}

HELP = f"""\
usage: {PROGRAM} COMMAND [OPTIONS]

Train a LightningModule with hybrid parallelism.

  fit          train:     {PROGRAM} fit --config FILE
  validate     evaluate on the validation data
  test         evaluate on the test data
  predict      run on new data
  plan         show which rank would hold what:     {PROGRAM} plan --config FILE
  memory       estimate what each rank would hold:     {PROGRAM} memory --config FILE --ranks 8
  suggest      say which layouts are the fastest that fit:     {PROGRAM} suggest --config FILE --ranks 8
  check        compare a layout with one process:     {PROGRAM} check --config FILE
  timeline     draw a pipeline schedule:     {PROGRAM} timeline --schedule 1f1b --ranks 4 --microbatches 8
  inspect      show what a checkpoint holds:     {PROGRAM} inspect PATH
  consolidate  make one file of a checkpoint that is a directory:     {PROGRAM} consolidate DIR FILE
  export       write weights as Hugging Face does:     {PROGRAM} export CHECKPOINT FOLDER

{PROGRAM} COMMAND --help tells the options of a command."""
