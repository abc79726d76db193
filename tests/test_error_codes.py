"""Error codes: each error that a user meets has one, and each has an entry in the reference."""

from __future__ import annotations

import ast
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_hybrid
from lightning_hybrid.error_codes import AREAS
from lightning_hybrid.error_codes.entry import CODE, Entry

PACKAGE = Path(lightning_hybrid.__file__).parent
WRITER = runpy.run_path(str(PACKAGE.parent / "docs" / "write_reference.py"))
ENTRIES = {code: entry for entries in AREAS.values() for code, entry in entries.items()}

#: Exceptions with a text for a user.
FOR_USERS = {
    *("ValueError", "TypeError", "WrongUseError", "MisconfigurationException", "RuntimeError", "OSError"),
    *("FileNotFoundError", "FileExistsError", "IsADirectoryError", "NotADirectoryError", "ModuleNotFoundError"),
    *("BodyCallError", "DifferentStepsError", "StateError", "PathChangedError", "AbsentValueError"),
}

#: Functions that raise errors without a code, with the reason.
WITHOUT_CODE = {
    "checkpoint/storage/atomic.py: _exchange": "as the operating system reports it",
    "checkpoint/storage/checksums.py: seek": "a file that torch reads from its beginning to its end",
    "checkpoint/storage/dcp.py: __init__": "a part of the text of a damaged file, which has one",
    "checkpoint/storage/dcp_writer.py: _check_seen": "the text ends with that of a disk that is not shared",
    "checkpoint/storage/dcp_writer.py: finish": "the text ends with that of a disk that is not shared",
    "cli/demo/digits.py: __init__": "the example has as many labels as images",
    "cli/suggest/planned.py: planned_traffic": "the text of another error",
    "distributed/messages/host_messages.py: fill": "a message that both sides have agreed on",
    "distributed/pytree.py: unflatten": "callers have the leaves of the tree",
    "pipeline_parallel/chain.py: _draw": "of the recorder: the step is then run in another way",
    "pipeline_parallel/chain.py: find": "of the recorder: the step is then run in another way",
    "pipeline_parallel/engine.py: _channel": "schedules of the package have their channels",
    "pipeline_parallel/engine.py: run": "callers have a key for each microbatch",
    "pipeline_parallel/frame/discovery.py: _run_on_lengths": "of the recorder: the step is then run in another way",
    "pipeline_parallel/schedules/passes.py: add_communication": "schedules of the package are valid",
    "pipeline_parallel/schedules/validation.py: _fail": "schedules of the package are valid",
    "pipeline_parallel/timeline.py: simulate": "schedules of the package are valid",
    "tuning/dry_run/recorder.py: _time": "callers have a module with values",
    "tuning/module_profile.py: _record": "the text of another error",
    "tuning/process_copy.py: _read": "a part of the text of a layout that is not found",
    "tensor_parallel/attention.py: forward": "as torch reports it",
    "tensor_parallel/auto_plan/trial.py: _required_arguments": "the reason that a plan leaves a module out",
    "tensor_parallel/auto_plan/trial.py: run": "the reason that a plan leaves a module out",
    "trainer/dataloader.py: __len__": "as Python reports it",
}


@cache
def definitions() -> dict[str, list[ast.AST]]:
    """The functions and constants of the package by name."""
    found: dict[str, list[ast.AST]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(node.name, []).append(node)
            elif isinstance(node, ast.Assign):
                for target in node.targets:
                    if isinstance(target, (ast.Name, ast.Attribute)):
                        name = target.id if isinstance(target, ast.Name) else target.attr
                        found.setdefault(name, []).append(node.value)
    return found


def has_code(raised: ast.Call) -> bool:
    """Whether the text of an error has a code: in its own words, or in those of a function or a constant it names."""
    names = [node.id for node in ast.walk(raised) if isinstance(node, ast.Name)]
    names += [node.attr for node in ast.walk(raised) if isinstance(node, ast.Attribute)]
    sources = [raised, *(node for name in names for node in definitions().get(name, ()))]
    return any(CODE.search(text) for source in sources for text in WRITER["texts"](source))


def without_code(path: Path) -> Iterator[str]:
    """The functions in a file that raise an error for users without a code."""

    def look(node: ast.AST, function: str) -> Iterator[str]:
        if isinstance(node, ast.FunctionDef):
            function = node.name
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            kind = ast.unparse(node.exc.func).rpartition(".")[2]
            is_same = [ast.unparse(each) for each in node.exc.args] == ["str(error)"]
            if kind in FOR_USERS and node.exc.args and not is_same and not has_code(node.exc):
                yield f"{path.relative_to(PACKAGE)}: {function}"
        for child in ast.iter_child_nodes(node):
            yield from look(child, function)

    yield from look(ast.parse(path.read_text()), "")


def test_each_error_for_users_has_a_code() -> None:
    found = {each for path in PACKAGE.rglob("*.py") for each in without_code(path)}
    assert sorted(found - WITHOUT_CODE.keys()) == []
    assert sorted(WITHOUT_CODE.keys() - found) == []


def test_codes_are_those_of_the_catalog() -> None:
    assert sorted(WRITER["messages"]()) == sorted(ENTRIES)
    assert sum(map(len, AREAS.values())) == len(ENTRIES)


def test_codes_of_an_area_share_their_hundreds() -> None:
    hundreds = {name: {int(code[2:]) // 100 for code in entries} for name, entries in AREAS.items()}
    assert [len(each) for each in hundreds.values()] == [1] * len(AREAS)
    assert len(set.union(*hundreds.values())) == len(AREAS)


@pytest.mark.parametrize("part", Entry._fields)
def test_each_cause_and_fix_is_a_sentence(part: str) -> None:
    for code, entry in ENTRIES.items():
        text = getattr(entry, part)
        assert text[0].isupper() or text[0] in "`.", code
        assert text.endswith("."), code


def test_a_code_has_one_cause() -> None:
    causes = [entry.cause for entry in ENTRIES.values()]
    assert sorted({cause for cause in causes if causes.count(cause) > 1}) == []


def test_a_message_has_its_code_once_and_at_its_end() -> None:
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in WRITER["texts"](ast.parse(path.read_text())):
            if (found := CODE.findall(text)) and "``" not in text and ">>>" not in text:
                assert len(found) == 1, text
                assert text.endswith(f" [{found[0]}]"), text
