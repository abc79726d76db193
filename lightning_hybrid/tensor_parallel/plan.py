"""From what the user says to a style for each layer, and the layers made so."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_hybrid.config import UserPlan
from lightning_hybrid.distributed.module_names import name_matches
from lightning_hybrid.tensor_parallel.auto_plan import automatic_plan
from lightning_hybrid.tensor_parallel.fast_paths import leave_fast_paths, take_fast_paths
from lightning_hybrid.tensor_parallel.layers import ParallelLayer, restore_layer
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.sequence_parallel import PlanRow, in_regions
from lightning_hybrid.tensor_parallel.shard import Sharder
from lightning_hybrid.tensor_parallel.styles import STYLES, ParamSplit, find_style

__all__ = ["Plan", "PlanRow", "make_plan"]


_WITH_SUFFIX = ("sequence_region:0", "sequence_region:1", "attention:memory")
_ATTRIBUTES = "divide:"  # "divide:num_heads" divides integers that a module of the user's own computes with


@dataclass(frozen=True)
class Plan:
    """The resolved plan: the same on every rank, for the whole module, whatever a rank holds of it.

    Attributes:
        size: The number of tensor-parallel ranks.
        rows: The layers that take part.
        foreign: Layers with styles of torch.
        reasons: Layers that could not take part, and why.
        adds_up: The parameters, undivided themselves, whose gradients add up over the ranks.
        shapes: The full shape of every divided parameter.
    """

    size: int
    rows: tuple[PlanRow, ...]
    foreign: Mapping[str, ParallelStyle]
    reasons: Mapping[str, str]
    adds_up: frozenset[str]
    shapes: Mapping[str, torch.Size]

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        group: TensorGroup,
        device: torch.device,
        prepare: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Divide what this rank holds of the module, and change its layers.

        Args:
            module: The whole module; parameters of other stages are on the meta device and stay as they are.
            mesh: The tensor-parallel axis.
            group: The same ranks.
            device: Where shards live.
            prepare: Called with the name of a layer before its parameters are divided.
        """
        sharder = Sharder(module, mesh, group, device)
        for row in self.rows:
            layer = module.get_submodule(row.name)
            if row.style.startswith(_ATTRIBUTES):
                for attribute in _attributes(row.style):
                    setattr(layer, attribute, getattr(layer, attribute) // self.size)
                continue
            style = find_style(row.kind, layer)
            assert style is not None
            for division in row.divisions:
                owner, _, name = _join(row.name, division.path).rpartition(".")
                prepare(owner)
                sharder.shard(module.get_submodule(owner), name, division.dim, blocks=division.blocks)
            style.transform(layer, tensor_group=group, sequence_dim=row.sequence_dim, **row.options)
        for name, foreign in self.foreign.items():
            prepare(name)
            if not any(parameter.is_meta for parameter in module.get_submodule(name).parameters()):
                parallelize_module(module, mesh, {name: foreign})
        leave_fast_paths(module)

    def join(self, module: nn.Module, group: TensorGroup) -> None:
        """Let a module that was divided before, by another Trainer, communicate in this one's group."""
        for layer in module.modules():
            if isinstance(layer, ParallelLayer):
                layer.tensor_group = group

    def undo(self, module: nn.Module) -> None:
        """Make the layers what they were; their parameters are joined elsewhere."""
        for row in self.rows:
            layer = module.get_submodule(row.name)
            if row.style.startswith(_ATTRIBUTES):
                for attribute in _attributes(row.style):
                    setattr(layer, attribute, getattr(layer, attribute) * self.size)
            else:
                restore_layer(layer)
        take_fast_paths(module)

    def divisions(self) -> dict[str, ParamSplit]:
        """How parameters are divided, by the names that the plan has for them."""
        return {_join(row.name, each.path): each for row in self.rows for each in row.divisions}

    def text(self) -> str:
        """The plan as a table: module, style, full and local shape; layers alike in one line."""
        lines = [("module", "style", "full", "local")]
        for names, row in _alike(self.rows):
            shapes = [(self.shapes[_join(row.name, each.path)], each) for each in row.divisions]
            full = " ".join(_shape(shape) for shape, _ in shapes)
            local = " ".join(_shape(_local_shape(shape, each.dim, self.size)) for shape, each in shapes)
            lines.append((names, row.style, full, local))
        lines += [(name, type(style).__name__, "", "") for name, style in self.foreign.items()]
        widths = [max(len(line[column]) for line in lines) for column in range(4)]
        table = [
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
        ]
        table.insert(1, "-" * max(map(len, table)))
        table += [f"{name} stays whole: it {reason}" for name, reason in self.reasons.items()]
        return "\n".join(table)


def make_plan(module: nn.Module, wish: UserPlan | str | None, size: int, *, sequence_parallel: bool) -> Plan:
    """Resolve a plan.

    Args:
        module: The whole module; parameters may be on the meta device.
        wish: What the user asks for: styles by name of module, where ``*`` stands for anything between two dots;
            ``"auto"``; or ``None`` for nothing.
        size: The number of tensor-parallel ranks.
        sequence_parallel: Whether activations between layers are divided along sequences, where the plan says so.

    Raises:
        ValueError: If a pattern matches nothing, a style does not exist, or a layer cannot have its style.
    """
    reasons: dict[str, str] = {}
    if wish is None:
        styles: dict[str, Any] = {}
    elif wish == "auto":
        styles, reasons = automatic_plan(module, size, sequence_parallel=sequence_parallel)
    elif isinstance(wish, str):
        raise ValueError(f"tensor_parallel_plan={wish!r} is unknown; pass 'auto', None or a dict of styles by name.")
    else:
        styles = _expand(module, wish)
    foreign = {name: style for name, style in styles.items() if isinstance(style, ParallelStyle)}
    _check_combinations(styles)
    named = [
        (name, part.strip())
        for name, style in styles.items()
        for part in (style.split("+") if name not in foreign else ())
        if part.strip() != "replicate"
    ]
    rows = in_regions(list(_rows(module, named, size)), module, sequence_parallel=sequence_parallel)
    _check_ties(module, rows)
    divided = {_join(row.name, division.path) for row in rows for division in row.divisions}
    shapes = {name: module.get_parameter(name).shape for name in divided}
    return Plan(size, tuple(rows), foreign, reasons, frozenset(_adding_up(module, rows, divided)), shapes)


def _expand(module: nn.Module, wish: UserPlan) -> dict[str, Any]:
    """Names for patterns; of several that match, the last one counts."""
    first = {id(layer): name for name, layer in module.named_modules()}
    every = dict(module.named_modules(remove_duplicate=False))
    names = [name for name in every if name]
    styles: dict[str, Any] = {}
    for pattern, given in wish.items():
        style = "replicate" if given is None else given
        if not isinstance(style, ParallelStyle) and not _is_known(style):
            raise ValueError(
                f"tensor_parallel_plan names the style {style!r} for {pattern!r}; there are {', '.join(STYLES)}, and"
                f" '{_ATTRIBUTES}ATTRIBUTE' for an integer that a module computes with."
            )
        matching = [name for name in names if name_matches(name, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:8]
            raise ValueError(
                f"The pattern {pattern!r} of tensor_parallel_plan matches no module of {type(module).__name__} (a '*'"
                f" stands for anything between two dots). There are, for example, {', '.join(map(repr, close))}."
            )
        styles.update(dict.fromkeys([first[id(every[name])] for name in matching], style))
    return styles


def _check_combinations(styles: Mapping[str, Any]) -> None:
    for name, style in styles.items():
        parts = [part.strip() for part in style.split("+")] if isinstance(style, str) else []
        kinds = [STYLES[part.partition(":")[0]] for part in parts if not part.startswith(_ATTRIBUTES)]
        if sum(kind.mixin is not None for kind in kinds) > 1:
            raise ValueError(f"tensor_parallel_plan gives {name!r} two styles that exclude each other: {style!r}.")


def _is_known(style: object) -> bool:
    if not isinstance(style, str):
        return False
    parts = [part.strip() for part in style.split("+")]
    return all(part.startswith(_ATTRIBUTES) or part in STYLES or part in _WITH_SUFFIX for part in parts)


def _rows(module: nn.Module, styles: Iterable[tuple[str, str]], size: int) -> Iterator[PlanRow]:
    for name, wished in styles:
        layer = module.get_submodule(name)
        if wished.startswith(_ATTRIBUTES):
            for attribute in _attributes(wished):
                number = getattr(layer, attribute, None)
                if not isinstance(number, int) or number % size:
                    raise ValueError(
                        f"{name}.{attribute} is {number!r}, which tensor_parallel_size={size} does not divide"
                        f" (tensor_parallel_plan: {wished!r})."
                    )
            yield PlanRow(name, wished)
            continue
        if any(isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)):
            continue  # the user's `configure_model` has divided it
        style = find_style(wished.partition(":")[0], layer)
        assert style is not None
        reason = style.why_not(layer, size)
        if reason is not None:
            raise ValueError(f"tensor_parallel_plan gives {name!r} the style {wished!r}, but it {reason}.")
        options = {"whole_memory": True} if wished == "attention:memory" else {}
        yield PlanRow(name, wished, tuple(style.divides(layer)), options=options)


def _check_ties(module: nn.Module, rows: Iterable[PlanRow]) -> None:
    """A parameter that is divided in one place must be divided alike in every place."""
    divided: dict[tuple[int, str], tuple[int, int]] = {}
    for row in rows:
        for division in row.divisions:
            owner, _, leaf = _join(row.name, division.path).rpartition(".")
            divided[id(module.get_submodule(owner)), leaf] = division.dim, division.blocks
    places: dict[int, dict[tuple[int, str], str]] = {}
    for name, layer in module.named_modules():
        for leaf, parameter in layer._parameters.items():
            places.setdefault(id(parameter), {})[id(layer), leaf] = _join(name, leaf)
    for place in divided:
        layers = next(found for found in places.values() if place in found)
        if len({divided.get(other) for other in layers}) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, layers.values()))} are one tied parameter, but tensor_parallel_plan divides"
                " them differently. Give both layers styles that divide the same dimension ('vocab' for an embedding"
                " and for the head that shares its weight), or 'replicate'."
            )


def _adding_up(module: nn.Module, rows: Iterable[PlanRow], divided: set[str]) -> Iterator[str]:
    """Parameters that see a share of a sequence, or of the heads."""
    for row in rows:
        layer = module.get_submodule(row.name)
        if row.kind == "sequence_region" or (row.kind in STYLES and STYLES[row.kind].adds_up):
            names = (_join(row.name, path) for path, _ in layer.named_parameters(remove_duplicate=False))
            yield from (name for name in names if name not in divided)


def _alike(rows: Iterable[PlanRow]) -> Iterator[tuple[str, PlanRow]]:
    """Rows that differ only in the first number of their names, under a name with `*`."""
    groups: dict[tuple[Any, ...], list[PlanRow]] = {}
    for row in rows:
        parts = row.name.split(".")
        number = next((place for place, part in enumerate(parts) if part.isdigit()), len(parts))
        pattern = ".".join([*parts[:number], *("*" for _ in parts[number : number + 1]), *parts[number + 1 :]])
        groups.setdefault((pattern, row.style, row.divisions), []).append(row)
    for (pattern, *_), members in groups.items():
        yield (members[0].name if len(members) == 1 else f"{pattern} ({len(members)})"), members[0]


def _local_shape(shape: torch.Size, dim: int, size: int) -> list[int]:
    return [length // size if index == dim else length for index, length in enumerate(shape)]


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def _attributes(style: str) -> list[str]:
    return [name.strip() for name in style.removeprefix(_ATTRIBUTES).split(",")]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
