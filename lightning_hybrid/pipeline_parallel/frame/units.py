"""The search for units: the modules that run on exactly one stage each, such as transformer blocks.

`pipeline_parallel.body.find_body` calls :func:`find_units` or :func:`named_units` before the module is split into
stages. Then it groups units into *rows* with :func:`side_by_side` and :func:`spread`: all units of a row are on the
same stage, such as a layer and its frozen copy. Model classes have no common name for their layers, so
:func:`find_units` searches for the lists that hold most parameters.

A *container* is an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`. A *numbered row* of names differs only in the
number at the end (``layer1``, ``layer2``). A *teacher* is a frozen module from which a trained module, the *student*,
learns.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Hashable, Iterator, Sequence
from functools import cache

from torch import nn

from lightning_hybrid.distributed.module_names import join_names, name_matches

# Containers with a smaller fraction of the parameters hold no units, unless they are part of a numbered row.
_LEAST_SHARE = 0.15
# A unit larger than an average stage by this factor is replaced by the members of the lists inside it.
_TOO_LARGE = 1.5

#: Modules with their dotted names.
Units = list[tuple[str, nn.Module]]


def is_container(module: nn.Module) -> bool:
    """Return True if a module is an `nn.ModuleList`, `nn.ModuleDict` or `nn.Sequential`, and is not empty."""
    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential)) and len(module) > 0


def named_units(module: nn.Module, patterns: Sequence[str]) -> Units:
    """Return the units that the user names, in the order of the patterns.

    Args:
        module: The user's module.
        patterns: Dotted names; ``*`` matches anything between two dots. A name of a container means its members.

    Raises:
        ValueError: If a pattern matches nothing, or if a unit is part of another unit.
    """
    parts = dict(module.named_modules(remove_duplicate=False))
    units: dict[nn.Module, str] = {}
    for pattern in patterns:
        found = [(name, part) for name, part in parts.items() if name and name_matches(name, pattern)]
        if not found:
            raise ValueError(
                f"body={list(patterns)!r}: {pattern!r} does not match a submodule of {type(module).__name__}. [LH302]"
            )
        for name, part in found:
            members = _members(name, part) if is_container(part) else [(name, part)]
            units |= {member: path for path, member in members if member not in units}
    _check_disjoint(units)
    return [(name, part) for part, name in units.items()]


def find_units(module: nn.Module, num_stages: int) -> Units:
    """Find the units of a module that the user has not named.

    The units are the members with parameters of the outermost containers that each hold at least 15% of the parameters,
    and of smaller containers in the same numbered row. If no container is that large and there is only one outermost
    container with parameters, its members are the units. If there are fewer units than stages, or if a unit is more
    than 1.5 times as large as an average stage, the members of the containers inside the largest unit replace this
    unit. If both a teacher and the trained part of the module have such containers, each part is compared with its own
    size, and the trained part comes first.

    Args:
        module: The user's module.
        num_stages: The number of stages.

    Returns:
        The units with their names. Empty if no container is large enough.
    """
    count = cache(_count)
    total = max(1, count(module))
    beside = _lists_beside_teachers(module)
    containers = beside or list(_containers(module, "", total)) or _lone(module)
    units = [member for name, part in containers for member in _members(name, part)]
    units = [(name, part) for name, part in units if count(part)]
    closed: set[nn.Module] = set()
    while True:
        size, index = max(
            ((count(part), at) for at, (_, part) in enumerate(units) if part not in closed), default=(0, -1)
        )
        if index < 0 or (len(units) >= num_stages and size * num_stages <= _TOO_LARGE * total):
            return _disjoint(units)
        inner = [member for name, part in _inner(*units[index]) for member in _members(name, part) if count(member[1])]
        if inner:
            units[index : index + 1] = inner
        else:
            closed.add(units[index][1])


def has_lists_beside_teacher(module: nn.Module) -> bool:
    """Return True if both a teacher and the trained part of the module have lists of layers."""
    return bool(_lists_beside_teachers(module))


def _lists_beside_teachers(module: nn.Module) -> Units:
    """Find the lists of the trained part and of its teachers; return an empty list if either part has none."""
    teachers = {name: module.get_submodule(name) for name in _teachers(module)}
    teaching = sum(map(_count, teachers.values()))
    total = _count(module) - teaching
    if teaching < max(1, _LEAST_SHARE * total):
        return []
    trained = list(_containers(module, "", total, leaves_out=teachers))
    taught = [
        each
        for name, part in teachers.items()
        if _count(part) >= _LEAST_SHARE * teaching
        for each in ([(name, part)] if is_container(part) else _containers(part, name, teaching))
    ]
    return [*trained, *taught] if trained and taught else []


def _teachers(module: nn.Module) -> list[str]:
    """Return the names of frozen modules with "teacher" in their name that are not copies of a trained module.

    Only the name distinguishes a teacher from a frozen encoder whose outputs the trained layers read.
    """
    named = [(name, part) for name, part in module.named_modules() if "teacher" in name.rpartition(".")[2].lower()]
    frozen = [name for name, part in named if _count(part) and not _is_trained(part)]
    if not frozen or not _is_trained(module):
        return []
    copies = [name for name, _ in frozen_copies(module)]
    outer = [f"{name}." for name in (*frozen, *copies)]
    return [name for name in frozen if name not in copies and not name.startswith(tuple(outer))]


def spread(module: nn.Module, rows: Sequence[Units], num_stages: int) -> list[Units]:
    """Distribute the layers of teachers over the rows of the student, so that each stage gets layers of both.

    ::

        student.0  student.1  student.2     row 0: student.0, teacher.0, teacher.1
        teacher.0  ...........  teacher.5   row 1: student.1, teacher.2, teacher.3     row 2: student.2, ...

    A teacher is a frozen module with "teacher" in its name; frozen copies are already in the rows of their originals.

    Args:
        module: The user's module.
        rows: The rows of :func:`side_by_side`.
        num_stages: The number of stages. If the student has fewer layers, its layers are distributed over the rows of
            the teacher if the teacher has more.

    Returns:
        The rows.
    """
    names = _teachers(module)
    taught = [row for row in rows if not any(row[0][0].startswith(f"{name}.") for name in names)]
    teaching = [row for row in rows if row not in taught]
    if not taught or not teaching:
        return list(rows)
    longer = taught if len(taught) >= num_stages else max(taught, teaching, key=len)
    made: list[Units] = [[] for _ in longer]
    for each in (taught, teaching):
        for number, row in enumerate(each):
            made[number * len(longer) // len(each)] += row
    return made


def side_by_side(module: nn.Module, units: Units) -> list[Units]:
    """Group units into rows that stay on one stage: a layer and its frozen copy form one row.

    A hook that moves the weights of a teacher towards its student then finds both on the same stage.
    :func:`frozen_copies` finds the copies.

    Args:
        module: The user's module.
        units: The units.

    Returns:
        The rows. A unit without a copy is a row of its own.
    """
    by_name = dict(units)
    copy_of: dict[str, str] = {}
    for copy_name, original in frozen_copies(module):
        for name in by_name:
            twin = f"{copy_name}{name.removeprefix(original)}"
            if name.startswith(f"{original}.") and twin in by_name:
                copy_of.setdefault(name, twin)
    copies = set(copy_of.values())
    rows = [(name, copy_of[name]) if name in copy_of else (name,) for name in by_name if name not in copies]
    return [[(name, by_name[name]) for name in row] for row in rows]


def frozen_copies(module: nn.Module) -> Iterator[tuple[str, str]]:
    """Find frozen modules that have the class, parameter names and shapes of a trained module, such as EMA teachers.

    Args:
        module: The user's module.

    Yields:
        The name of the copy and the name of its original. Modules inside a frozen module are not returned separately.
    """
    if all(parameter.requires_grad for parameter in module.parameters()):
        return  # nothing is frozen, and counting the parameters of every module is slow
    named = [(name, part) for name, part in module.named_modules() if name and _count(part)]
    frozen: dict[str, nn.Module] = {}
    outermost = ""
    for name, part in named:
        if not _is_trained(part) and not (outermost and name.startswith(f"{outermost}.")):
            frozen[name], outermost = part, name
    kinds, originals = set(map(type, frozen.values())), dict[Hashable, str]()
    for name, part in named:
        if type(part) in kinds and _is_trained(part):
            originals.setdefault(_kind_of(part), name)
    for name, part in frozen.items():
        original = originals.get(_kind_of(part))
        if original is not None:
            yield name, original


def has_teacher(module: nn.Module) -> bool:
    """Return True if there is a frozen copy of a trained module. Layers of one list are not copies of each other.

    `trainer.losses.repeated_writes` then watches for writes of parameters. The name of the copy does not matter.

    Args:
        module: The user's module.
    """
    return any(
        name.rpartition(".")[0] != original.rpartition(".")[0]
        or not is_container(module.get_submodule(name.rpartition(".")[0]))
        for name, original in frozen_copies(module)
    )


def _is_trained(module: nn.Module) -> bool:
    """Return True if a parameter of a module requires a gradient."""
    return any(parameter.requires_grad for parameter in module.parameters())


def _kind_of(module: nn.Module) -> Hashable:
    """Return the class of a module, and the names and shapes of its parameters."""
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def _disjoint(units: Units) -> Units:
    """Remove units that are listed twice, are part of an earlier unit, or contain an earlier unit."""
    chosen: dict[nn.Module, str] = {}
    inside: set[nn.Module] = set()
    for name, part in units:
        parts = set(part.modules())
        if part not in inside and not parts & chosen.keys():
            chosen[part] = name
            inside |= parts
    return [(name, part) for part, name in chosen.items()]


def stands_in_row(module: nn.Module, name: str) -> bool:
    """Return True if a container is one of several in a numbered row, such as ``layer3`` and ``layer4``."""
    parent, _, leaf = name.rpartition(".")
    siblings = module.get_submodule(parent).named_children() if name else ()
    return len([key for key, child in siblings if is_container(child) and _row(key) == _row(leaf) != leaf]) > 1


def _containers(
    module: nn.Module, prefix: str, total: int, leaves_out: Collection[str] = ()
) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost containers that hold many of the parameters, in the order in which they were created.

    Args:
        module: The module to search.
        prefix: The dotted name of the module.
        total: The number of parameters to compare with.
        leaves_out: The names of modules to leave out.
    """
    if not prefix and is_container(module):
        yield "", module
        return
    named = ((join_names(prefix, name), child) for name, child in module.named_children())
    children = [(name, child) for name, child in named if name not in leaves_out]
    rows = {_row(name) for name, child in children if is_container(child) and _count(child) >= _LEAST_SHARE * total}
    for name, child in children:
        if is_container(child) and (_count(child) >= _LEAST_SHARE * total or (_row(name) in rows and _count(child))):
            yield name, child
        elif _count(child) >= _LEAST_SHARE * total:
            yield from _containers(child, name, total, leaves_out)


def _lone(module: nn.Module) -> Units:
    """Return the only outermost container with parameters; an empty list if there are several or none."""
    found = [(name, part) for name, part in _inner("", module) if _count(part)]
    return found if len(found) == 1 else []


def _inner(name: str, part: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Find the outermost containers inside a unit; the unit itself if it is a container."""
    if is_container(part):
        yield name, part
        return
    for child_name, child in part.named_children():
        yield from _inner(join_names(name, child_name), child)


def _members(name: str, container: nn.Module) -> Units:
    """Return the layers in a container. A list among them, which cannot be called, is replaced by its members."""
    members = [(join_names(name, key), member) for key, member in container.named_children()]
    opened = [_members(*each) if _is_plain_list(each[1]) else [each] for each in members]
    return [layer for layers in opened for layer in layers]


def _is_plain_list(module: nn.Module) -> bool:
    """Return True if a module is a container that cannot be called."""
    return is_container(module) and type(module).forward is nn.Module.forward


def _row(name: str) -> str:
    """Replace the number at the end of a name by ``*``. A name without a number is unchanged."""
    return re.sub(r"\d+$", "*", name)


def _check_disjoint(units: dict[nn.Module, str]) -> None:
    """Raise an error if a unit is part of another unit."""
    for unit, name in units.items():
        for path, part in unit.named_modules():
            if path and part in units:
                raise ValueError(
                    f"body names both {name!r} and its submodule {units[part]!r}. Name only one of them. [LH304]"
                )


def _count(module: nn.Module) -> int:
    """Return the number of parameter elements of a module; a tied parameter counts once."""
    return sum(parameter.numel() for parameter in module.parameters())
