"""Directives that read the program, so that the reference is what the program is."""

from __future__ import annotations

import inspect
import io
import os
import re
from collections.abc import Iterator
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any
from unittest import mock

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from lightning_hybrid import HybridStrategy, ModuleHooks
from lightning_hybrid.cli.main import main

try:
    import tomllib
except ImportError:  # Python 3.10, where Sphinx brings the same thing
    import tomli as tomllib

PYPROJECT = Path(__file__).parent.parent / "pyproject.toml"


def argument_texts(documented: Any) -> dict[str, str]:
    """The section ``Args`` of a docstring: what it says of each argument, by name."""
    section = re.search(r"^Args:\n(.*?)(?=^\S|\Z)", inspect.getdoc(documented) or "", re.MULTILINE | re.DOTALL)
    assert section is not None, documented
    items = re.findall(r"^    (\w+): (.*?)(?=^    \w|\Z)", section[1], re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.split()) for name, text in items}


class FromProgram(SphinxDirective):
    """Reads from the program, which is no file that Sphinx watches: its page is made anew each time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.env.note_reread()


class StrategyArguments(FromProgram):
    """Arguments of `HybridStrategy`, by name: type, default, and what the docstring says."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:
        """Entries that can be linked to by their names."""
        texts, parameters = argument_texts(HybridStrategy), inspect.signature(HybridStrategy).parameters
        lines = ["```{eval-rst}"]
        for name in self.arguments[0].split():
            kind, default = parameters[name].annotation, parameters[name].default
            lines += [f".. confval:: {name}", f"   :type: ``{kind}``", f"   :default: ``{default!r}``", ""]
            lines += ["   " + re.sub(r":meth:`(\w+)`", r":meth:`lightning_hybrid.HybridStrategy.\1`", texts[name]), ""]
        return self.parse_text_to_nodes("\n".join([*lines, "```"]))


class HookTable(FromProgram):
    """The optional hooks of a module, one row each."""

    def run(self) -> list[nodes.Node]:
        """A table of signatures and first sentences."""
        lines = ["| hook | what it is |", "|---|---|"]
        for name, hint in inspect.get_annotations(ModuleHooks).items():
            lines.append(f"| `{name}: {hint}` | {_first_sentence(_attribute_text(name))} |".replace(" | S", r" \| S"))
        for name, method in vars(ModuleHooks).items():
            if not name.startswith("_") and inspect.isfunction(method):
                arguments = str(inspect.signature(method)).replace("|", r"\|").replace("'", "")
                lines.append(f"| `{name}{arguments}` | {_first_sentence(inspect.getdoc(method) or '')} |")
        return self.parse_text_to_nodes("\n".join(lines))


def _attribute_text(name: str) -> str:
    found = re.search(rf"^    {name}: (.*)", inspect.getdoc(ModuleHooks) or "", re.MULTILINE | re.DOTALL)
    assert found is not None, name
    return found[1]


def _first_sentence(text: str) -> str:
    text = " ".join(text.split("\n\n")[0].split())
    return re.sub(r":\w+:`(\w+)`", r"`\1`", text).replace("``", "`").replace("|", r"\|")


class ProgramHelp(FromProgram):
    """What a command prints with ``--help``; without an argument, the program itself."""

    optional_arguments = 1

    def run(self) -> list[nodes.Node]:
        """A block of text."""
        text = io.StringIO()
        with redirect_stdout(text), mock.patch.dict(os.environ, COLUMNS="92", NO_COLOR="1"), suppress(SystemExit):
            main([*self.arguments, "--help"])
        return self.parse_text_to_nodes(f"```text\n{text.getvalue().strip()}\n```")


class Requirements(FromProgram):
    """What the package needs, and what its extras add."""

    def run(self) -> list[nodes.Node]:
        """A table, made from `pyproject.toml`."""
        rows = "\n".join(f"| {name} | {versions} | {needed} |" for name, versions, needed in requirements())
        return self.parse_text_to_nodes(f"| | versions | needed |\n|---|---|---|\n{rows}")


def requirements() -> Iterator[tuple[str, str, str]]:
    """Name, versions and what for."""
    project = tomllib.loads(PYPROJECT.read_text())["project"]
    yield "Python", f"`{project['requires-python']}`", "always"
    extras = project["optional-dependencies"]
    needed = {"always": project["dependencies"], "extra `hf`": extras["hf"], "extra `examples`": extras["examples"]}
    for reason, packages in needed.items():
        for package in packages:
            name, versions = re.fullmatch(r"([\w-]+(?:\[\w+\])?)(.*)", package).groups()  # type: ignore[union-attr]
            yield name, f"`{versions}`", reason


def setup(app: Sphinx) -> dict[str, Any]:
    """Tell Sphinx the directives."""
    app.add_directive("strategy-arguments", StrategyArguments)
    app.add_directive("hook-table", HookTable)
    app.add_directive("program-help", ProgramHelp)
    app.add_directive("requirements", Requirements)
    return {"parallel_read_safe": True}
