"""The program ``lightning-hybrid``, which runs the command that the user names.

A command is imported only when it runs, because importing PyTorch takes seconds and ``timeline`` does not need it.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

from lightning_hybrid.cli.parser import PROGRAM, did_you_mean
from lightning_hybrid.version import __version__, environment

#: The commands of Lightning's `LightningCLI`: a description and an example of arguments.
LIGHTNING_COMMANDS = {
    "fit": ("train", "--config FILE"),
    "validate": ("evaluate on the validation data", "--config FILE --ckpt_path FILE"),
    "test": ("evaluate on the test data", "--config FILE --ckpt_path FILE"),
    "predict": ("predict on new data", "--config FILE --ckpt_path FILE"),
}
#: The commands of this package, each in a module of `cli.commands`.
COMMANDS = {
    "demo": ("train a built-in example", "--ranks 2"),
    "plan": ("show which layers each rank has", "--config FILE"),
    "memory": ("estimate the memory of each rank", "--config FILE --ranks 8"),
    "suggest": ("sort layouts by estimated speed", "--config FILE --ranks 8"),
    "check": ("compare training under a layout with training in one process", "--config FILE"),
    "timeline": ("draw a pipeline schedule", "--ranks 4 --microbatches 8"),
    "inspect": ("show the contents of a checkpoint", "PATH"),
    "consolidate": ("convert a checkpoint directory to one file", "DIR FILE"),
    "export": ("export weights in Hugging Face format", "CHECKPOINT FOLDER"),
}


def main(args: Sequence[str] | None = None, *, model: str | None = None, data: str | None = None) -> None:
    """Run the program ``lightning-hybrid``.

    Args:
        args: The command and its arguments. Default: the arguments of this process.
        model: The class path of the model for ``fit``, ``validate``, ``test`` and ``predict``, if neither the command
            line nor the configuration contains it.
        data: The class path of the data for these commands, in the same case.

    Raises:
        SystemExit: With 2 if the command is missing or unknown, if its arguments are wrong, or if it cannot do its
            work; with 0 after the help of a command; with 0 or 1 as the result of ``check``; and with 141 if the reader
            of the output has closed the pipe.
    """
    # Configurations contain classes of the user's project, which is usually in the working directory.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    arguments = list(sys.argv[1:] if args is None else args)
    command = arguments[0] if arguments else ""
    with _ended_by_closed_pipe():
        if command in COMMANDS:
            import_module(f"lightning_hybrid.cli.commands.{command}").run(arguments[1:])
        elif command in LIGHTNING_COMMANDS:
            from lightning_hybrid.cli.hybrid_cli import HybridCLI

            HybridCLI(model=model, data=data, args=args if args is None else arguments)
        elif command == "--version":
            print("\n".join(f"{name} {text}" for name, text in ((PROGRAM, __version__), *environment())))
        elif command in {"-h", "--help"}:
            print(_help())
        else:
            complaint = f"\n{PROGRAM}: unknown command {command!r}{did_you_mean(command, _all_words())}"
            print(_help() + (f"\n{complaint}" if arguments else ""), file=sys.stderr)
            raise SystemExit(2)


@contextmanager
def _ended_by_closed_pipe() -> Iterator[None]:
    """Exit without a traceback if the reader of the output closes the pipe, as in ``| head``."""
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        if not any(events & select.POLLERR for _, events in poll.poll(0)):
            raise  # the error is about another pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for output that is flushed at exit
        raise SystemExit(128 + signal.SIGPIPE) from None


def _all_words() -> list[str]:
    return [*LIGHTNING_COMMANDS, *COMMANDS, "--help", "--version"]


def _help() -> str:
    commands = {**LIGHTNING_COMMANDS, **COMMANDS}
    width, text_width = max(map(len, commands)), max(len(text) for text, _ in commands.values())
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [OPTIONS]",
            "",
            "Train a LightningModule with hybrid parallelism.",
            "",
            *(f"  {name:{width}}  {text:{text_width}}  {example}" for name, (text, example) in commands.items()),
            "",
            f"Example: {PROGRAM} timeline --ranks 4 --microbatches 8",
            f"Options of a command: {PROGRAM} COMMAND --help",
            f"Strategy arguments: {PROGRAM} fit --trainer.strategy.help lightning_hybrid.HybridStrategy",
            f"Versions: {PROGRAM} --version",
        ]
    )
