"""Generator of the parts of pages that come from the program: arguments, hooks, functions, commands, outputs, versions.

``python docs/write_reference.py`` writes them; with ``--check`` it fails if a page differs from the program. A comment
in a page names the part that follows it, such as ``<!-- written: arguments zero_stage -->`` or
``<!-- written: output timeline --ranks 4 -->``, and ``<!-- end -->`` ends it.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import os
import re
import shlex
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import lightning_hybrid  # noqa: E402
from lightning_hybrid import Faults, HybridStrategy, Launch, Tuning  # noqa: E402
from lightning_hybrid.cli.main import COMMANDS, LIGHTNING_COMMANDS  # noqa: E402
from lightning_hybrid.cli.parser import OPTIONS_OF_FIT, PROGRAM, Parser  # noqa: E402
from lightning_hybrid.error_codes import AREAS  # noqa: E402
from lightning_hybrid.error_codes.entry import CODE  # noqa: E402

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest and Sphinx bring the same thing
    import tomli as tomllib

DOCS = ROOT / "docs"
WIDTH = 90  # of command lines in pages
WORDS = 12  # of a message under its error code
GROUPS = (Faults, Launch, Tuning)  # of arguments
PLACE = re.compile(r"<!-- written: (\w+)(.*?) -->\n.*?<!-- end -->", re.DOTALL)

# -- docstrings --------------------------------------------------------------------------------------------------------


class Docstring:
    """A docstring in the style of Google, as Markdown.

    Args:
        documented: What has it.
        page: The page it is for, from where links go.
    """

    def __init__(self, documented: Any, page: Path) -> None:
        self.page = page
        parts = re.split(r"^([A-Z]\w+)::?\n(?=\n*    )", inspect.getdoc(documented) or "", flags=re.MULTILINE)
        self.text = parts[0].strip()
        self.sections = {
            name: textwrap.dedent(text).strip() for name, text in zip(parts[1::2], parts[2::2], strict=True)
        }

    def paragraphs(self) -> list[str]:
        """What stands before the sections."""
        return [self.inline(paragraph) for paragraph in self.text.split("\n\n")]

    def items(self, section: str) -> dict[str, str]:
        """What a section says of each name."""
        found = re.findall(r"^(\S.*?): (.*?)(?=^\S|\Z)", self.sections.get(section, ""), re.MULTILINE | re.DOTALL)
        return {name: self.inline(text) for name, text in found}

    def inline(self, text: str) -> str:
        """A paragraph: names in code, and those of the reference as links."""
        text = re.sub(r"``(.+?)``", r"`\1`", " ".join(text.split()))
        return re.sub(r":\w+:`(?:\w+\.)*(\w+)`", lambda match: self.link(match[1]), text)

    def link(self, name: str) -> str:
        """To where the reference says it."""
        home = HOMES[name]
        return f"[`{name}`]({'' if home == self.page else home.name}#{name.lower()})"


def homes() -> dict[str, Path]:
    """The page of each name that has a heading."""
    found = {}
    for page in sorted((DOCS / "reference").glob("*.md")):
        for kind, names in PLACE.findall(page.read_text()):
            found.update({last_part(name): page for name in names.split() if kind in ("arguments", "members")})
    return found


def last_part(dotted: str) -> str:
    """The name itself, of ``module:Class.name``."""
    return re.split("[.:]", dotted)[-1]


HOMES = homes()

# -- what can be written -----------------------------------------------------------------------------------------------


def arguments(page: Path, *names: str) -> Iterator[str]:
    """Arguments of `HybridStrategy`, or parts of its groups, a heading each."""
    texts: dict[str, str] = {}
    parameters: dict[str, inspect.Parameter] = {}
    for kind in (HybridStrategy, *GROUPS):
        texts |= Docstring(kind, page).items("Args")
        parameters |= inspect.signature(kind).parameters
    for name in names:
        parameter = parameters[name]
        yield f"### `{name}`"
        yield f"`{as_type(parameter.annotation)}`, by default `{as_value(parameter.default)}`. {texts[name]}"


def argument_table(page: Path, name: str = "HybridStrategy") -> Iterator[str]:
    """All arguments of `HybridStrategy`, or of one of its groups, a row each."""
    kind = getattr(lightning_hybrid, name)
    texts = Docstring(kind, page).items("Args")
    rows = [
        f"| [`{argument}`](#{argument}) | `{as_value(parameter.default)}` | {first_sentence(texts[argument])} |"
        for argument, parameter in inspect.signature(kind).parameters.items()
    ]
    yield "\n".join(["| argument | default | meaning |", "|---|---|---|", *rows])


def members(page: Path, *names: str) -> Iterator[str]:
    """Functions, methods, classes and exceptions by their dotted names, a heading each."""
    for dotted in names:
        value, name = found(dotted), last_part(dotted)
        yield f"### `{name}`"
        if isinstance(value, str):  # an attribute
            yield Docstring(found(dotted.rpartition(".")[0]), page).items("Attributes")[name]
            continue
        docstring = Docstring(value, page)
        is_called = "Args" in docstring.sections or inspect.isfunction(value)
        if is_called:
            yield f"`{name}{call(value)}`"
        yield from docstring.paragraphs()
        if "Args" in docstring.sections:
            types = inspect.signature(value).parameters
            items = docstring.items("Args").items()
            yield listed({f"`{name}` (`{as_type(types[name].annotation)}`)": text for name, text in items})
        elif "Attributes" in docstring.sections:
            attributes = docstring.items("Attributes") | properties(value, page)
            yield listed({f"`{name}`": text for name, text in attributes.items()})
        if "Returns" in docstring.sections:
            yield f"**Returns** {docstring.inline(docstring.sections['Returns'])}"
        if "Raises" in docstring.sections:
            yield "**Raises**"
            yield listed({f"`{name}`": text for name, text in docstring.items("Raises").items()})
        if example := docstring.sections.get("Example"):
            yield f"```python\n{re.sub('^>>> ', '', example, flags=re.MULTILINE)}\n```"


def properties(value: type, page: Path) -> dict[str, str]:
    """What a class computes of its attributes."""
    public = {name: each for name, each in vars(value).items() if isinstance(each, property) and name[0] != "_"}
    return {name: Docstring(each, page).paragraphs()[0] for name, each in public.items()}


def listed(items: dict[str, str]) -> str:
    """A list of names and what is said of them."""
    return "\n".join(f"- {name}: {text}" for name, text in items.items())


def commands(page: Path) -> Iterator[str]:
    """All commands of the program."""
    texts = {**LIGHTNING_COMMANDS, **COMMANDS}
    yield listed(
        {f"[`{name}`](#{name})" if name in COMMANDS else f"`{name}`": text for name, (text, _) in texts.items()}
    )


def command(page: Path, name: str) -> Iterator[str]:
    """What a command does, and its options."""
    parser = parser_of(name)
    yield parser.description or ""
    options = {}
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction) or is_common(action):
            continue
        value = "" if action.nargs == 0 or not action.option_strings else f" {action.metavar or action.dest.upper()}"
        words = "`, `".join(option + value for option in action.option_strings) or action.metavar or action.dest.upper()
        text = (action.help or "") % vars(action)
        if action.required and action.option_strings:
            text += "; required"
        options[f"`{words}`"] = text
    if options:
        yield listed(options)
    if parser.epilog:
        yield re.sub(rf"({PROGRAM} .*)", r"`\1`", parser.epilog.removeprefix(OPTIONS_OF_FIT).lstrip())


def is_common(action: argparse.Action) -> bool:
    """Return whether several commands have an option, so that the top of the page describes it."""
    return "--json" in action.option_strings or (action.required and "--config" in action.option_strings)


def output(page: Path, *words: str) -> Iterator[str]:
    """A command of the program and its output, run in the checkout."""
    environment = {**os.environ, "COLUMNS": "100", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    line = [sys.executable, "-m", "lightning_hybrid", *words]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode:
        raise SystemExit(f"{page.name}: {shlex.join(words)} failed:\n{done.stderr}")
    text = "\n".join(line.rstrip() for line in done.stdout.rstrip().splitlines())
    yield f"```console\n$ {command_line(words)}\n{text}\n```"


def command_line(words: Sequence[str]) -> str:
    """Return a command over as many lines as it needs; an option and its value are on one line."""
    parts = re.split(r" (?=--)", shlex.join([PROGRAM, *words]))
    lines = [parts[0]]
    for part in parts[1:]:
        if len(f"{lines[-1]} {part}") > WIDTH:
            lines.append(f"    {part}")
        else:
            lines[-1] += f" {part}"
    return " \\\n".join(lines)


def versions(page: Path) -> Iterator[str]:
    """What the package needs, what its extras add, and what the tests run with."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested = dict(re.findall(r"^([\w-]+)==([^\s;]+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE))
    extras = project["optional-dependencies"]
    rows = [f"| Python | `{project['requires-python']}` | | always |"]
    needed = {"always": project["dependencies"], "extra `hf`": extras["hf"], "extra `examples`": extras["examples"]}
    for reason, packages in needed.items():
        for package in packages:
            name, wanted = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", package).groups()  # type: ignore[union-attr]
            rows.append(f"| {name} | `{wanted}` | {tested.get(name, '')} | {reason} |")
    yield "\n".join(["| | versions | tested with | needed |", "|---|---|---|---|", *rows])


def errors(page: Path, area: str) -> Iterator[str]:
    """Write the errors of an area, a heading each: how a message begins, the cause and the fix.

    If a code has several messages, the most telling one is shown: the one with the most fixed words.
    """
    for code, entry in AREAS[area].items():
        yield f"### {code}"
        yield f"`{max(map(beginning, messages()[code]), key=fixed_words)}`"
        yield entry.cause
        yield f"**Fix:** {entry.fix}"


WRITERS: dict[str, Callable[..., Iterator[str]]] = {
    writer.__name__: writer
    for writer in (arguments, argument_table, members, commands, command, output, versions, errors)
}

# -- names, types, values ----------------------------------------------------------------------------------------------


def found(dotted: str) -> Any:
    """What has the name ``module:Class.name``; the name itself, if it is an attribute that instances have."""
    module, names = dotted.split(":")
    value = import_module(module)
    for name in names.split("."):
        value = getattr(value, name, dotted)
    return value


def as_type(annotation: Any) -> str:
    """A type as a reader takes it: its choices instead of `Literal`."""
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    return re.sub(r"Literal\[(.*?)\]", lambda match: match[1].replace(", ", " | "), text).replace("'", '"')


def as_value(value: Any) -> str:
    """A default as it is written."""
    if isinstance(value, timedelta):
        return f"timedelta(minutes={value // timedelta(minutes=1)})"
    if inspect.isfunction(value):
        return "..."
    return repr(value).replace("'", '"')


def call(function: Any) -> str:
    """The arguments of a function with their defaults, without types."""
    words, keywords = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind is parameter.KEYWORD_ONLY and not keywords:
            words.append("*")
            keywords = True
        star = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
        default = "" if parameter.default is parameter.empty else f"={as_value(parameter.default)}"
        if name != "self":
            words.append(f"{star}{name}{default}")
    return f"({', '.join(words)})"


def first_sentence(text: str) -> str:
    """For a row of a table."""
    return text.split(". ")[0].rstrip(".")


def texts(tree: ast.AST) -> Iterator[str]:
    """The texts in source, with ``…`` for values."""
    if isinstance(tree, ast.JoinedStr):
        yield "".join(part.value if isinstance(part, ast.Constant) else "…" for part in tree.values)  # type: ignore[misc]
    elif isinstance(tree, ast.Constant) and isinstance(tree.value, str):
        yield tree.value
    is_formatted = isinstance(tree, ast.JoinedStr)
    for child in ast.iter_child_nodes(tree):
        if not (is_formatted and isinstance(child, ast.Constant)):
            yield from texts(child)


@cache
def messages() -> dict[str, list[str]]:
    """The messages in the source of the package, by the codes at their ends."""
    found: dict[str, list[str]] = {}
    for path in sorted(Path(lightning_hybrid.__file__).parent.rglob("*.py")):
        for text in texts(ast.parse(path.read_text())):
            code = re.search(rf" {CODE.pattern}$", text)
            if code and text[: code.start()] not in found.setdefault(code[1], []):
                found[code[1]].append(text[: code.start()])
    return found


def beginning(message: str) -> str:
    """Return the first sentence of a message, at most :data:`WORDS` of its words, without marks of code."""
    line = " ".join(re.sub("…+", "…", message.replace("`", "")).split())
    words = re.split(r"(?<=[.?])(?<!\.\.\.) ", line)[0].rstrip(".").split()
    return " ".join(words[:WORDS]) + (" …" if len(words) > WORDS else "")


def fixed_words(text: str) -> int:
    """Return the number of words that contain no value."""
    return sum("…" not in word for word in text.split())


def parser_of(name: str) -> argparse.ArgumentParser:
    """The parser that a command makes, when it is about to parse."""

    class Found(Exception):  # noqa: N818
        pass

    def parse(self: argparse.ArgumentParser, *args: Any) -> None:
        raise Found(self)

    with mock.patch.object(Parser, "parse_known_args", parse):
        try:
            import_module(f"lightning_hybrid.cli.commands.{name}").run([])
        except Found as end:
            return end.args[0]  # type: ignore[no-any-return]
    raise AssertionError(name)


def written(page: Path) -> str:
    """The page with everything that is to be written."""

    def write(match: re.Match[str]) -> str:
        blocks = WRITERS[match[1]](page, *shlex.split(match[2]))
        return f"<!-- written: {match[1]}{match[2]} -->\n\n" + "\n\n".join(blocks) + "\n\n<!-- end -->"

    return PLACE.sub(write, page.read_text())


def main() -> None:
    """Write, or check."""
    for page in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]:
        text = written(page)
        if text == page.read_text():
            continue
        if "--check" in sys.argv:
            sys.exit(f"{page.relative_to(ROOT)} is not what the program says; run `python docs/write_reference.py`.")
        page.write_text(text)


if __name__ == "__main__":
    main()
