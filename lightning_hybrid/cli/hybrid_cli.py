"""Training from YAML files, and loading of the module, data and strategy that they describe.

::

    fit, validate, test, predict, demo    HybridCLI         trains, in one process of each rank
    check, plan, suggest                  load_config       only creates the objects, on the CPU
    memory, check --dry                   run_on_shapes     load_config, and the first step on fake tensors

Lightning's `LightningCLI` trains from the same files. This file adds short errors, a default model class, and loading
without devices: an estimate must not need the GPUs of the run, or memory for the parameters.
"""

from __future__ import annotations

import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.warnings import PossibleUserWarning
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI, SaveConfigCallback

from lightning_hybrid.cli.complaints import constructor_error, in_words, with_path
from lightning_hybrid.cli.parser import PROGRAM, ConfigParser, Parser, with_advice
from lightning_hybrid.cli.progress import count_progress
from lightning_hybrid.error_codes.entry import CODE
from lightning_hybrid.error_codes.printing import is_printed_here
from lightning_hybrid.strategy.strategy import HybridStrategy
from lightning_hybrid.tuning.dry_run.dry_run import DryRun, dry_run, step_arguments
from lightning_hybrid.tuning.dry_run.parameters import made_without_memory


class SaveConfigBesideLogs(SaveConfigCallback):
    """Saves the configuration with the logs.

    Without a logger, nothing is saved, because the folder may be the folder of the user's own `config.yaml`.
    """

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Save the configuration when a run begins, if there is a logger."""
        if trainer.loggers:
            super().setup(trainer, pl_module, stage)


#: Matches, in a command line with zeros between words, a part of a group of the strategy's arguments whose value is
#: null.
_NO_PART = re.compile(r"(?<![^\0])(--trainer\.strategy\.(?:init_args\.)?(?!init_args\b)\w+)\.(\w+)([=\0])null(?![^\0])")


class HybridCLIParser(LightningArgumentParser):
    """A parser that prints an error in one line, with the name that was probably meant. Each node prints it once.

    Args:
        args: Arguments of `LightningArgumentParser`.
        kwargs: Keyword arguments of `LightningArgumentParser`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if Path(sys.argv[0]).name == "__main__.py":  # `python -m lightning_hybrid`
            kwargs.setdefault("prog", PROGRAM)
        super().__init__(*args, **kwargs)

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, *others: Any, **kwargs: Any
    ) -> Any:
        """Parse the command line. Rewrites ``null`` for a part of a group, because jsonargparse reads it as "None"."""
        words = sys.argv[1:] if args is None else args
        text = _NO_PART.sub(r"\1\3{\2: null}", "\0".join(words))
        return super().parse_args(text.split("\0") if words else [], *others, **kwargs)

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Print an error with a code and a suggestion, and exit with status 2; raise it if the parser must not exit."""
        if not self.exit_on_error:
            super().error(message, ex)
        named = re.search(r"Expected a dot import path string: (hybrid\w*)", message)
        if not CODE.search(message):
            text = (getattr(ex, "subcommand_parser", None) or self).format_help()
            message = f"{in_words(with_advice(message, text), text)} [LH1002]"
        if named:
            message = (
                f"trainer.strategy: the strategy name {named[1]!r} does not accept arguments. Write the strategy as"
                " {class_path: lightning_hybrid.HybridStrategy, init_args: {...}} [LH1002]"
            )
        self.exit(2, f"error: {message}\n" if is_printed_here() else None)


class HybridCLI(LightningCLI):
    """A `LightningCLI` whose configuration may contain any model, data and strategy by ``class_path``.

    Args:
        model: The class path of the model, if neither the command line nor the configuration contains it.
        data: The class path of the data, if neither the command line nor the configuration contains it.
        kwargs: Arguments of `LightningCLI`.
    """

    def __init__(self, *, model: str | None = None, data: str | None = None, **kwargs: Any) -> None:
        self._default_classes = {"model": model, "data": data}
        kwargs.setdefault("parser_class", HybridCLIParser)
        kwargs.setdefault("save_config_callback", SaveConfigBesideLogs)
        kwargs.setdefault("save_config_kwargs", {"overwrite": True})
        super().__init__(**kwargs)

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Set the default classes. A configuration may contain others."""
        for key, path in self._default_classes.items():
            if path is not None:
                parser.set_defaults({key: {"class_path": path}})

    def instantiate_classes(self) -> None:
        """Create the Trainer, the module and the data.

        An error of this package about an argument is printed with the path of the argument, and ends the program with
        status 2. All other errors are raised, with a note that names the class.
        """
        try:
            super().instantiate_classes()
        except Exception as error:
            config = self.config if self.subcommand is None else self.config[self.subcommand]
            text = with_path(str(error), [key for key in config.keys() if key.startswith("trainer.strategy.")])  # noqa: SIM118
            if text is not None:
                self.parser.error(text, error)
            raise constructor_error(error)  # noqa: B904 - jsonargparse's own error only hides it

    def after_fit(self) -> None:
        """Print the metrics, because progress bars disappear."""
        if self.trainer.is_global_zero:
            metrics = {name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())}
            print("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))


class DryCLI(HybridCLI):
    """A configuration that is loaded without starting anything. The CPU replaces devices that may not exist."""

    def before_instantiate_classes(self) -> None:
        """Set the accelerator to the CPU, and count the devices before that, as Lightning would do."""
        trainer = self.config.trainer
        if trainer.devices in ("auto", "-1", -1) and trainer.accelerator in ("auto", "gpu", "cuda"):
            trainer.devices = max(torch.cuda.device_count(), 1)
        trainer.accelerator = "cpu"


def load_config(
    parser: Parser, configs: Sequence[str], overrides: Sequence[str], *, with_values: bool = False
) -> tuple[HybridCLI, HybridStrategy]:
    """Load a configuration without starting anything.

    The user's classes are created, so their code runs. Errors that the user can fix are printed, and end the program
    with status 2.

    Args:
        parser: The parser of the command, which prints errors and exits.
        configs: The paths of files. Later files override earlier files.
        overrides: Options that override the files.
        with_values: If True, the parameters of the module have values. If False, they have no memory, unless the code
            of the module needs their values and they are small.

    Returns:
        The configuration with its module, data and Trainer; and its strategy.

    Raises:
        SystemExit: With 2 if the configuration is wrong, has another strategy, or has open arguments.
    """
    load = partial(_load, configs, overrides, parser.prog)
    with parser.refusing(ValueError, OSError, MisconfigurationException):
        cli = load() if with_values else made_without_memory(load)
    strategy = cli.trainer.strategy
    if not isinstance(strategy, HybridStrategy):
        parser.error(
            f"the strategy in {', '.join(configs)} is a {type(strategy).__name__}, not a HybridStrategy [LH1003]"
        )
    if strategy.settings.searched:
        parser.error(
            f"{', '.join(strategy.settings.searched)} in {', '.join(configs)} will be chosen when training starts, but"
            " this command needs fixed values. Set fixed values, for example with"
            " --trainer.strategy.init_args.layout=null and the values that `lightning-hybrid suggest` prints [LH1004]"
        )
    return cli, strategy


def _load(configs: Sequence[str], overrides: Sequence[str], program: str = PROGRAM) -> HybridCLI:
    """Create the objects of a configuration. `sys.argv` has other values meanwhile."""
    words = [word for config in configs for word in ("--config", config)]
    saved, sys.argv = sys.argv, [program, *words, *overrides]  # LightningCLI reads this
    try:
        return DryCLI(run=False)
    finally:
        sys.argv = saved


def maker(
    configs: Sequence[str], overrides: Sequence[str], cli: HybridCLI | None = None
) -> Callable[[], tuple[LightningModule, LightningDataModule | None]]:
    """Return a function that returns a new module and the data of a configuration, because a step may change a module.

    Args:
        configs: The argument of :func:`load_config`.
        overrides: The argument of :func:`load_config`.
        cli: The configuration, if it has been loaded. The first call returns its module and data. All other calls load
            the configuration again.
    """
    unused = [] if cli is None else [cli]

    def make() -> tuple[LightningModule, LightningDataModule | None]:
        loaded = unused.pop() if unused else _load(configs, overrides)
        return loaded.model, loaded.datamodule

    return make


def be_quiet() -> None:
    """Hide log lines and warnings about the start of a run until the process ends, because no run starts."""
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\.")
    warnings.filterwarnings("ignore", category=PossibleUserWarning)


def run_on_shapes(
    parser: ConfigParser, configs: Sequence[str], overrides: Sequence[str]
) -> tuple[HybridStrategy, DryRun]:
    """Run the first training step of a configuration without processes, devices and memory for parameters.

    The commands ``memory`` and ``check --dry`` call it. Parameters get values if the code of the module needs them and
    they are small.

    Args:
        parser: The parser of the command, which prints errors and exits.
        configs: The argument of :func:`load_config`.
        overrides: The argument of :func:`load_config`.

    Returns:
        The strategy of the configuration, and the results of the step.

    Raises:
        SystemExit: With 2 if the configuration is wrong, or training could not start.
    """
    be_quiet()
    with count_progress("Reading the configuration") as progress:
        cli, strategy = load_config(parser, configs, overrides)
        progress("Running the step on fake tensors", 1, 2)
        with parser.refusing(ValueError, TypeError, MisconfigurationException):
            result = dry_run(
                maker(configs, overrides, cli),
                strategy.settings,
                strategy.sizes,
                precision=strategy.precision_plugin,
                **step_arguments(cli.trainer),
            )
    return strategy, result
