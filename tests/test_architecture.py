"""The shape of the house: floors, imports and budgets, read from the source without importing it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = "lightning_hybrid"
ROOT = Path(__file__).parent.parent / PACKAGE

# A room is a module or a sub-package. It imports rooms of lower floors only.
FLOORS = (
    {"schedule", "partition", "pytree", "places", "sizes", "version"},  # 0: plain data
    {"timeline", "microbatch", "outputs", "header", "placement", "trays"},  # 1
    {"mesh", "random", "shards"},  # 2: where torch.distributed begins
    # 3: parts
    {"p2p", "exchange", "stage", "tensor_parallel", "data_parallel", "clipping", "materialize", "failure"}
    | {"recompute", "own_generators", "offload"},
    {"engine", "gradients", "storage", "retracing", "memory"},  # 4
    # 5: where Lightning begins
    {"step", "optimization", "logging", "logger_calls", "metrics", "data", "transfer", "precision", "checkpoint"}
    | {"refusals", "settings", "summary", "processes", "attributes", "adjustments", "collectives", "batch_start"}
    | {"accumulations", "moment", "after_hook", "positions", "arguments", "departure"},
    # 6 to 8: a step through the pipeline, put together
    {"completion", "gathering", "pipeline", "epoch", "record", "weights", "continuation", "layout", "accounting"}
    | {"reckoning"},
    {"division", "training", "evaluation", "archive", "consolidate", "loading"},
    {"assembly", "inspection", "forecast"},
    {"saving"},
    {"stepping"},
    {"strategy"},  # 11
    {"cli"},  # 12: the door
    {"__init__", "__main__"},  # the door plate: what `import lightning_hybrid` and `python -m lightning_hybrid` find
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# The lowest floor that may import a library, and rooms that may not whatever their floor.
LOWEST_FLOOR = {"torch.distributed": 2, "lightning": 5, "torchmetrics": 5, "jsonargparse": 12}
WITHOUT_TORCH = {"schedule", "partition", "timeline"}

MODULE_LINES = {"strategy": 450}
DEFAULT_MODULE_LINES = 300
FUNCTION_LINES = 60


def room_of(path: Path, root: Path) -> str:
    return path.relative_to(root).with_suffix("").parts[0]


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


def import_violations(room: str, rooms: set[str], tree: ast.Module) -> Iterator[tuple[int, str]]:
    floor = FLOOR_OF[room]
    for line, name in imports(tree):
        if name.startswith("."):
            yield line, f"relative import; write 'from {PACKAGE}...'"
        elif within(name, PACKAGE):
            target = next((part for part in name.split(".")[1:2] if part in rooms), "__init__")
            if target in FLOOR_OF and target != room and FLOOR_OF[target] >= floor:
                yield line, f"{room} (floor {floor}) imports {target} (floor {FLOOR_OF[target]}); imports point down"
        elif within(name, "torch") and room in WITHOUT_TORCH:
            yield line, f"{room} is plain data and does without torch"
        for library, lowest in LOWEST_FLOOR.items():
            if within(name, library) and floor < lowest:
                yield line, f"{library} begins on floor {lowest}; {room} is on floor {floor}"


def private_torch(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Private names of torch move with every release: only inside ``try``, with a public fall-back."""
    guarded = {id(node) for block in ast.walk(tree) if isinstance(block, ast.Try) for node in ast.walk(block)}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)) and id(node) not in guarded:
            module = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (module + alias.name for alias in node.names):
                if within(name, "torch") and any(part.startswith("_") for part in name.split(".")):
                    yield node.lineno, f"private import {name} without a feature check (try) and a public fall-back"


def budget_violations(room: str, source: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    budget, length = MODULE_LINES.get(room, DEFAULT_MODULE_LINES), len(source.splitlines())
    if length > budget:
        yield 1, f"{length} lines; the budget of this module is {budget}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert node.end_lineno is not None
            length = node.end_lineno - node.lineno + 1 - len((ast.get_docstring(node) or "").splitlines())
            if length > FUNCTION_LINES:
                yield node.lineno, f"{node.name} has {length} lines; the budget of a function is {FUNCTION_LINES}"


def face_violations(tree: ast.Module) -> Iterator[tuple[int, str]]:
    if not ast.get_docstring(tree):
        yield 1, "no module docstring"
    targets = [
        target
        for node in tree.body
        for target in (node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)])
    ]
    if not any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
        yield 1, "no __all__"


def violations(root: Path) -> list[str]:
    """Everything wrong in a package, as ``file:line: what``."""
    found = []
    paths = sorted(root.rglob("*.py"))
    rooms = {room_of(path, root) for path in paths} | set(FLOOR_OF)
    for path in paths:
        source = path.read_text()
        tree, room = ast.parse(source), room_of(path, root)
        complaints = [*private_torch(tree), *budget_violations(room, source, tree), *face_violations(tree)]
        if room in FLOOR_OF:
            complaints += import_violations(room, rooms, tree)
        else:
            complaints.append((1, f"{room} stands on no floor; give it one in FLOORS of {Path(__file__).name}"))
        found += [f"{path.relative_to(root.parent)}:{line}: {text}" for line, text in sorted(set(complaints))]
    return found


def test_the_house_stands() -> None:
    found = violations(ROOT)
    assert not found, "\n" + "\n".join(found)


def test_no_room_stands_twice() -> None:
    assert len(FLOOR_OF) == sum(len(rooms) for rooms in FLOORS)


PLANTED = {
    "an import that points up": (
        "engine.py",
        "from lightning_hybrid.strategy import HybridStrategy",
        "engine (floor 4)",
    ),
    "an import on one floor": ("p2p.py", "import lightning_hybrid.stage", "imports stage (floor 3)"),
    "a late import": ("mesh.py", "def f():\n    from lightning_hybrid import engine", "imports engine (floor 4)"),
    "the package itself": ("engine.py", "from lightning_hybrid import HybridStrategy", "imports __init__"),
    "a relative import": ("mesh.py", "from .schedule import build", "relative import"),
    "torch in plain data": ("schedule/action.py", "import torch.nn", "does without torch"),
    "torch.distributed too low": ("microbatch.py", "import torch.distributed as dist", "begins on floor 2"),
    "torch.distributed by attribute": ("pytree.py", "import torch\ntorch.distributed.barrier()", "begins on floor 2"),
    "lightning too low": ("engine.py", "from lightning.pytorch import Trainer", "begins on floor 5"),
    "a private import": ("mesh.py", "from torch.distributed import _functional_collectives", "private import"),
    "a module without a floor": ("attic.py", "", "stands on no floor"),
    "a long module": ("mesh.py", "x = 1\n" * 300, "the budget of this module is 300"),
    "a long function": ("mesh.py", "def f():\n" + "    x = 1\n" * 60, "f has 61 lines"),
}


def write_room(root: Path, file: str, body: str, head: str = '"""A room."""\n__all__ = []\n') -> None:
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


def test_missing_docstring_and_all_are_caught(tmp_path: Path) -> None:
    write_room(tmp_path / PACKAGE, "mesh.py", "x = 1", head="")
    assert [text.split(": ")[1] for text in violations(tmp_path / PACKAGE)] == ["no __all__", "no module docstring"]


def test_sound_house_is_left_in_peace(tmp_path: Path) -> None:
    write_room(tmp_path / PACKAGE, "schedule/build.py", "from lightning_hybrid.schedule.action import Action")
    write_room(
        tmp_path / PACKAGE, "strategy.py", "import lightning.pytorch\nfrom lightning_hybrid.engine import Engine"
    )
    write_room(tmp_path / PACKAGE, "mesh.py", "try:\n    from torch import _C\nexcept ImportError:\n    _C = None")
    assert violations(tmp_path / PACKAGE) == []
