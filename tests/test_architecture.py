"""The shape of the house that `lint-imports` cannot say, read from the source without importing it."""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import private_names

PACKAGE = "lightning_hybrid"
ROOT = Path(__file__).parent.parent / PACKAGE

MOST_FOLDERS, MOST_FILES = 12, 7  # at the top
FILES_IN_A_FOLDER = 12

# Reasons to look, no walls: what is longer has been looked at, and says why here.
MODULE_LINES, FUNCTION_LINES = 500, 60
LONGER: dict[str, str] = {
    "cli/check.py": "the comparison of a layout with one process, and the text of each of its results",
    "config.py": "all arguments, with their texts and checks",
    "pipeline_parallel/engine.py": "one algorithm, with the drawings and proofs that it needs",
    "pipeline_parallel/splitting/microbatch.py": "the rules by which a batch is split, and their texts",
    "tuning/cost_model.py": "one formula for the time of a step, term by term",
    "pipeline_parallel/frame/discovery.py": "one algorithm: how each tensor of a step gets its name",
    "pipeline_parallel/frame/frame.py": "the cut of a step, and the texts of all that it refuses",
    "pipeline_parallel/frame/discovery.py::_absent": "the attempts to run a call without values, in their order",
    "pipeline_parallel/frame/plan.py::make_part": "a field a line: what a stage does of a step",
    "pipeline_parallel/frame/running.py": "one mode: how a stage makes, skips or repeats its calls",
    "pipeline_parallel/frame/stage_states.py": "the copies and differences of one set of kinds of containers",
    "distributed/pytree.py": "trees: how they are taken apart, put together and compared, which belongs in one file",
    "data_parallel/grad_sync.py": "when gradients are reduced, over which ranks, and by which number they are divided",
    "tensor_parallel/layers.py": "a class for each kind of sharded layer, half of it docstrings",
    "pipeline_parallel/p2p.py": "both sides of a message: what one of them knows of formats, the other must know too",
    "tuning/dry_run/dry_run.py": "a Trainer's run up to its first step, and the estimates that it gives",
    "strategy/layout.py": "what a layout is made of, and the texts of all that it refuses",
    "strategy/run.py": "what lives as long as a run, in the order in which it is made",
    "strategy/strategy.py": "all that Lightning asks of a strategy, a method each, and the texts of arguments",
    "trainer/program/step_context.py::__init__": "an attribute a line",
    "trainer/training_step.py": "a step, and the forwards of its comparison, share their pieces",
    "trainer/training_step.py::__call__": "a step, one thing after the other",
    "trainer/microbatch_comparison.py": "when batches are compared, and all that follows from what is found",
    "trainer/lightning_internals.py": "everything private of Lightning is in one file, half of it says why",
}

# Folders with more files than usual have been looked at too.
FULLER: dict[str, str] = {
    "distributed": "what every package stands on, a file for each word of the field: mesh, failure, agreement, random",
    "trainer": "what a run does beside the loops of Lightning: a file for each part of a step and each thing around it",
    "strategy": "what Lightning asks of a strategy: a file for each thing that lives with a run or a module",
    "tensor_parallel": "a file for each kind of sharded layer, and for each part of a plan",
    "pipeline_parallel/frame": "the followed step: a file for each thing that its plan knows",
}

# These know no processes.
WITHOUT_PROCESSES = {
    "distributed/pytree.py",
    "distributed/module_names.py",
    "pipeline_parallel/splitting/microbatch.py",
    "pipeline_parallel/stage_map.py",
    "checkpoint/tree_paths.py",
    "trainer/results/outputs.py",
}


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything imported, wherever the import stands; names used as ``torch.x`` too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "torch":
            yield node.lineno, f"torch.{node.attr}"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def import_violations(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    for line, name in imports(tree):
        if name.startswith("."):
            yield line, f"relative import; write 'from {PACKAGE}...'"
        if path in WITHOUT_PROCESSES and within(name, "torch.distributed"):
            yield line, f"{path} knows no processes"


def sizes_without_reason(path: str, source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    length = len(source.splitlines())
    if length > MODULE_LINES and path not in LONGER:
        yield 1, f"{length} lines: look at it, and say in LONGER why it stays"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
            if length > FUNCTION_LINES and f"{path}::{node.name}" not in LONGER:
                yield node.lineno, f"{node.name} has {length} lines: look at it, and say in LONGER why it stays"


def face_violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not ast.get_docstring(tree):
        yield 1, "no module docstring"


def folder_violations(root: Path) -> Iterator[str]:
    entries = [each for each in root.iterdir() if each.name != "__pycache__"]
    folders = [each for each in entries if each.is_dir()]
    if len(folders) > MOST_FOLDERS or len(entries) - len(folders) > MOST_FILES:
        yield f"{PACKAGE}: more than {MOST_FOLDERS} folders or {MOST_FILES} files at the top"
    for folder in (each for each in root.rglob("*") if each.is_dir()):
        count = len([path for path in folder.glob("*.py") if path.name != "__init__.py"])
        if count > FILES_IN_A_FOLDER and str(folder.relative_to(root)) not in FULLER:
            yield f"{folder.relative_to(root.parent)}: {count} files, at most {FILES_IN_A_FOLDER}"


def violations(root: Path) -> list[str]:
    """Everything wrong in a package, as ``file:line: what``."""
    found = list(folder_violations(root))
    for path in sorted(root.rglob("*.py")):
        source, name = path.read_text(), str(path.relative_to(root))
        tree = ast.parse(source)
        complaints = [
            *sizes_without_reason(name, source, tree),
            *face_violations(tree),
            *import_violations(name, tree),
        ]
        found += [f"{path.relative_to(root.parent)}:{line}: {text}" for line, text in sorted(set(complaints))]
    return found


def test_the_house_stands() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_reasons_are_for_what_is_there() -> None:
    """A reason that is no longer needed goes."""
    for name in LONGER:
        path, _, function = name.partition("::")
        source = (ROOT / path).read_text()
        assert function or len(source.splitlines()) > MODULE_LINES, name
    assert all((ROOT / path).exists() for path in WITHOUT_PROCESSES)


def test_private_names_of_libraries_are_in_their_registers() -> None:
    found = private_names.violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_all_that_is_public_is_shown() -> None:
    import lightning_hybrid

    assert dir(lightning_hybrid) == sorted(lightning_hybrid.__all__)


PLANTED = {
    "a relative import": ("distributed/mesh.py", "from .schedules import build", "relative import"),
    "processes in plain data": (
        "pipeline_parallel/splitting/microbatch.py",
        "import torch.distributed as dist",
        "knows no processes",
    ),
    "processes by attribute": (
        "distributed/pytree.py",
        "import torch\ntorch.distributed.barrier()",
        "knows no processes",
    ),
    "a long module": ("distributed/mesh.py", "x = 1\n" * 500, "502 lines: look at it"),
    "a long function": ("distributed/mesh.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
}


def write_room(root: Path, file: str, body: str, head: str = '"""A room."""\n') -> None:
    path = root / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(head + body + "\n")


@pytest.mark.parametrize(("file", "body", "complaint"), PLANTED.values(), ids=PLANTED)
def test_planted_violation_is_caught(tmp_path: Path, file: str, body: str, complaint: str) -> None:
    write_room(tmp_path / PACKAGE, file, body)
    found = violations(tmp_path / PACKAGE)
    assert len(found) == 1, found
    assert complaint in found[0]
    assert found[0].startswith(f"{PACKAGE}/{file}:")


def test_a_missing_docstring_is_caught(tmp_path: Path) -> None:
    write_room(tmp_path / PACKAGE, "distributed/mesh.py", "x = 1", head="")
    assert [text.split(": ")[1] for text in violations(tmp_path / PACKAGE)] == ["no module docstring"]


def test_full_folders_are_caught(tmp_path: Path) -> None:
    for number in range(FILES_IN_A_FOLDER + 1):
        write_room(tmp_path / PACKAGE, f"memory/room{number}.py", "")
    for number in range(MOST_FILES + 1):
        write_room(tmp_path / PACKAGE, f"room{number}.py", "")
    found = violations(tmp_path / PACKAGE)
    assert [text.split(":")[0] for text in found] == [PACKAGE, f"{PACKAGE}/memory"]


def test_sound_house_is_left_in_peace(tmp_path: Path) -> None:
    write_room(tmp_path / PACKAGE, "memory/account.py", f"from {PACKAGE}.distributed.mesh import Mesh")
    write_room(tmp_path / PACKAGE, "memory/__init__.py", "", head='"""A wing."""')
    write_room(tmp_path / PACKAGE, "distributed/mesh.py", "from torch import Tensor")
    assert violations(tmp_path / PACKAGE) == []


CONTRACTS = {
    "an import that points up": ("distributed/mesh.py", "from lightning_hybrid.strategy import strategy"),
    "the search of layouts in the core": ("strategy/layout_search.py", "from lightning_hybrid.tuning import choice"),
    "an import between neighbours' wings": (
        "pipeline_parallel/engine.py",
        "from lightning_hybrid.data_parallel import bucket",
    ),
    "a circle inside a wing": (
        "pipeline_parallel/schedules/actions.py",
        "from lightning_hybrid.pipeline_parallel.schedules import passes",
    ),
    "Lightning too low": ("pipeline_parallel/engine.py", "from lightning.pytorch import Trainer"),
    "torch in plain data": ("pipeline_parallel/schedules/actions.py", "import torch"),
    "a file that no layer has": ("attic.py", ""),
}


@pytest.mark.parametrize(("file", "line"), CONTRACTS.values(), ids=CONTRACTS)
def test_contracts_of_imports_can_be_broken(tmp_path: Path, file: str, line: str) -> None:
    shutil.copytree(ROOT, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT.parent / "pyproject.toml", tmp_path)
    with (tmp_path / PACKAGE / file).open("a") as file_at:
        file_at.write(f"\n{line}\n")
    check = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    environment = {"PYTHONPATH": str(tmp_path), "PATH": ""}
    found = subprocess.run(
        [sys.executable, "-c", check], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert found.returncode == 1
    assert "BROKEN" in found.stdout, found.stdout + found.stderr
