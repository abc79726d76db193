"""How the commands read their options and refuse what cannot be."""

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
#: The greatest width of what commands print, of a terminal on a laptop.
COLUMNS = 100
#: Begins the last lines of the help of commands that take a configuration.
OPTIONS_OF_FIT = "This command also accepts all options of `fit`."


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """What to add to the complaint about a word: the nearest one of those that there are, if one is near.

    Example:
        >>> did_you_mean("fitt", ["fit", "plan"]), did_you_mean("xyz", ["fit", "plan"])
        ("; did you mean 'fit'?", '')
    """
    close = difflib.get_close_matches(word, list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def with_advice(message: str, known: str) -> str:
    """A parser's complaint about options, with the option that was probably meant.

    Args:
        message: The complaint.
        known: The help of the parser, which names all its options.
    """
    unknown = re.search(r"unrecognized arguments: (--[\w.-]+)", message)
    return message + did_you_mean(unknown[1], re.findall(r"--[\w.-]+", known)) if unknown else message


class Parser(argparse.ArgumentParser):
    """The options of one command.

    Args:
        command: Its name.
        kwargs: Arguments of `ArgumentParser`.
    """

    def __init__(self, command: str, **kwargs: Any) -> None:
        super().__init__(prog=f"{PROGRAM} {command}", **kwargs)
        self._groups: dict[str, Any] = {}

    def add_choice(self, option: str, words: Sequence[str], **kwargs: Any) -> None:
        """An option whose value is one of these words.

        Args:
            option: Its name.
            words: What it may be.
            kwargs: Arguments of `add_argument`.
        """

        def parse(word: str) -> str:
            if word in words:
                return word
            advice = did_you_mean(word, words)
            raise argparse.ArgumentTypeError(f"invalid choice: {word!r} (choose from {', '.join(words)}){advice}")

        self.add_argument(option, type=parse, metavar=f"{{{','.join(words)}}}", **kwargs)

    def add_json(self) -> None:
        """The option for programs that read what is printed."""
        self.group("output").add_argument("--json", action="store_true", help="print JSON")

    def group(self, title: str) -> Any:  # argparse has no public name for it
        """Return the options that the help shows under a title, including options that were added before.

        Args:
            title: The title.
        """
        if title not in self._groups:
            self._groups[title] = self.add_argument_group(title)
        return self._groups[title]

    @override
    def error(self, message: str) -> NoReturn:
        """Say what is wrong, and what may have been meant."""
        super().error(f"{with_advice(message, self.format_help())} [LH1001]")

    @contextmanager
    def refusing(self, *kinds: type[Exception], doing: str = "") -> Iterator[None]:
        """Errors of these kinds, which the user can mend, end the program with their text and status 2.

        Args:
            kinds: What may be raised inside.
            doing: What comes before the text.
        """
        try:
            yield
        except kinds as error:
            text = "\n".join([str(error), *getattr(error, "__notes__", ())])
            self.exit(2, f"{self.prog}: error: {doing}{text}\n")


class ConfigParser(Parser):
    """The options of a command that takes a configuration.

    Args:
        command: Its name.
        description: What it does.
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
    """A path to write to, as the type of an option."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text!r} is not a local path; write to a local disk, then copy the result")
    return Path(text)


def positive(text: str) -> int:
    """The value of an option that counts something: 1 or more."""
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def quantity(text: str) -> float:
    """The value of an option such as ``80GiB`` or ``2TB/s``."""
    from lightning_hybrid.config import parse_quantity  # which imports torch

    try:
        return parse_quantity(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def wrapped(text: str, indent: str = "") -> list[str]:
    """Return the lines of a paragraph, at most :data:`COLUMNS` wide.

    Args:
        text: The paragraph.
        indent: What the lines after the first begin with.
    """
    return textwrap.wrap(text, COLUMNS, subsequent_indent=indent, break_on_hyphens=False)


def print_text(text: str) -> None:
    """Print it for a person: sentences that are wider than :data:`COLUMNS` in several lines."""
    for line in text.splitlines():
        print("\n".join(wrapped(line, "  ")) if len(line) > COLUMNS else line)


def print_json(value: Any) -> None:
    """Print it for a program."""
    print(json.dumps(value, indent=2, allow_nan=False))
