"""Parsers of the commands' options, with suggestions for wrong options, and functions that print results.

Each module of `cli.commands` makes a :class:`Parser`, or a :class:`ConfigParser` if the command has ``--config``; its
other options then override the configuration. The module imports neither torch nor Lightning, because ``--help`` and
wrong options should not take seconds. For this reason, `LightningCLI` is not the parser of these commands.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from typing_extensions import override

PROGRAM = "lightning-hybrid"
#: The maximum width of the commands' output, which fits a terminal on a laptop.
COLUMNS = 100
#: The beginning of the last lines in the help of commands with a configuration.
OPTIONS_OF_FIT = "This command also accepts all options of `fit`."


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """Return the text to add to an error about a word: the most similar known word, or an empty text.

    Example:
        >>> did_you_mean("fitt", ["fit", "plan"]), did_you_mean("xyz", ["fit", "plan"])
        ("; did you mean 'fit'?", '')
    """
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def with_advice(message: str, known: str) -> str:
    """Return a parser's error about an option, with the option that was probably meant.

    Args:
        message: The error.
        known: The help of the parser, which contains all its options.
    """
    unknown = re.search(r"unrecognized arguments: (--[\w.-]+)", message)
    return message + did_you_mean(unknown[1], re.findall(r"--[\w.-]+", known)) if unknown else message


class Parser(argparse.ArgumentParser):
    """The parser of one command's options.

    Args:
        command: The name of the command.
        kwargs: Arguments of `ArgumentParser`.
    """

    def __init__(self, command: str, **kwargs: Any) -> None:
        super().__init__(prog=f"{PROGRAM} {command}", **kwargs)
        self._groups: dict[str, Any] = {}

    def add_choice(self, option: str, words: Sequence[str], **kwargs: Any) -> None:
        """Add an option whose value is one of several words.

        Args:
            option: The name of the option.
            words: The words.
            kwargs: Arguments of `add_argument`.
        """

        def parse(word: str) -> str:
            if word in words:
                return word
            advice = did_you_mean(word, words)
            raise argparse.ArgumentTypeError(f"invalid choice: {word!r} (choose from {', '.join(words)}){advice}")

        self.add_argument(option, type=parse, metavar=f"{{{','.join(words)}}}", **kwargs)

    def add_json(self) -> None:
        """Add the option ``--json``."""
        self.group("output").add_argument("--json", action="store_true", help="print JSON")

    def group(self, title: str) -> Any:  # argparse has no public type for it
        """Return the group of options under a title in the help, which is created at the first call.

        Args:
            title: The title.
        """
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    @override
    def error(self, message: str) -> NoReturn:
        """Print the error with the option that was probably meant, and exit with status 2."""
        super().error(f"{with_advice(message, self.format_help())} [LH1001]")

    @contextmanager
    def refusing(self, *kinds: type[Exception], doing: str = "") -> Iterator[None]:
        """Print errors of these kinds, which the user can fix, and exit with status 2, inside the context.

        Args:
            kinds: The kinds of errors. Other errors are raised with their traceback.
            doing: A text before the error.
        """
        try:
            yield
        except kinds as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            self.exit(2, f"{self.prog}: error: {doing}{text}\n")


class ConfigParser(Parser):
    """The parser of a command with a configuration.

    Args:
        command: The name of the command.
        description: The description of the command.
        example: Other options of a typical call.
    """

    def __init__(self, command: str, description: str, example: str) -> None:
        super().__init__(
            command,
            description=description,
            epilog=f"{OPTIONS_OF_FIT} Example: {PROGRAM} {command} --config FILE {example}",
        )
        self.group("configuration").add_argument(
            "--config",
            required=True,
            action="append",
            metavar="FILE",
            help="configuration file; later files override earlier files",
        )


def on_disk(text: str) -> Path:
    """Return a local path, for an option with a path to write to."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a local path; write to a local disk, then copy the result")
    return Path(text)


def positive(text: str) -> int:
    """Return a positive integer, for an option with a number of things."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def quantity(text: str) -> float:
    """Return the number of a value with a unit, such as ``80GiB`` or ``2TB/s``."""
    from lightning_hybrid.config import parse_quantity  # imports torch

    try:
        return parse_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph, at most :data:`COLUMNS` wide.

    Args:
        text: The paragraph.
        indent: The beginning of each line after the first.
    """
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def print_text(text: str) -> None:
    """Print a text, with lines wider than :data:`COLUMNS` wrapped."""
    for line in text.splitlines():
        print("\n".join(wrapped(line, "  ")) if len(line) > COLUMNS else line)


def print_json(value: Any) -> None:
    """Print a value as JSON."""
    print(json.dumps(value, indent=2, allow_nan=False))
