"""The tensor-parallel plan: from the user's argument to a style for each layer, and its application to the module.

`strategy.parallelize` calls this file before the first step of a run: :func:`plan_texts` (all ranks compare the user's
plan), :func:`make_plan`, and :meth:`Plan.apply`. `strategy.checks` calls :func:`check_styles` when the strategy is
created. `strategy.gather` calls :meth:`Plan.undo` when the full module is gathered. The dry run of `tuning` uses the
same functions. torch's `parallelize_module` alone does not suffice: its styles make activations DTensors, know neither
packed projections nor heads, and find no layers.

Terms: a *style*, such as ``"colwise"``, names the parallel layer into which a layer is turned. A *layout*, such as
``"S(0)"``, shards one parameter or buffer, and the unchanged code of its module runs on DTensors. A *region* is a
module with the style ``"sequence_region"``, inside which activations are sharded (sequence parallelism, and ranks in
squares or cubes).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from lightning_hybrid.config import UserPlan
from lightning_hybrid.distributed.arrangement import Arrangement, line
from lightning_hybrid.distributed.module_names import join_names, name_matches, named_tensors
from lightning_hybrid.tensor_parallel.auto_plan.auto_plan import auto_plan
from lightning_hybrid.tensor_parallel.grid.styles import GridMode
from lightning_hybrid.tensor_parallel.layers import (
    ParallelLayer,
    disable_fastpath,
    restore_fastpath,
    restore_layer,
)
from lightning_hybrid.tensor_parallel.layouts.layout import STAGE_AXES, divided_dim, is_layout, layout_text
from lightning_hybrid.tensor_parallel.mappings import TensorGroup
from lightning_hybrid.tensor_parallel.mode import Mode
from lightning_hybrid.tensor_parallel.shard import Sharder
from lightning_hybrid.tensor_parallel.styles import (
    LAYOUT,
    STYLES,
    WRAPPERS,
    ParamSplit,
    PlanRow,
    layout_dims,
    layout_style,
)

_PLAN = "tensor_parallel_plan"
_WITH_SUFFIX = ("sequence_region:0", "sequence_region:1", "attention:memory")  # all styles with a fixed suffix


@dataclass(frozen=True)
class Plan:
    """The resolved plan. It describes the full module, so it is the same on every rank.

    Attributes:
        size: The number of tensor-parallel ranks.
        rows: The layers that are parallelized, with one row for each style of a layer.
        torch_styles: The layers with styles of torch, by name. They are not in `rows`.
        reasons: The layers that the automatic plan could not parallelize, each with the reason as the end of a
            sentence. Empty for a plan of the user.
        partial_grads: The names of the unsharded parameters whose gradients are partial sums over the ranks. Gradient
            synchronization all-reduces them.
        shapes: The full shape of every parameter and buffer that `rows` shard, by name.
        mode: The way in which layers are sharded over the arrangement of the ranks.
    """

    size: int
    rows: tuple[PlanRow, ...]
    torch_styles: Mapping[str, ParallelStyle]
    reasons: Mapping[str, str]
    partial_grads: frozenset[str]
    shapes: Mapping[str, torch.Size]
    mode: Mode

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        group: TensorGroup,
        device: torch.device,
        prepare: Callable[[str], None] = lambda name: None,
    ) -> None:
        """Shard the parameters of this rank's stages, and parallelize the layers of all stages, in place.

        All ranks of the group must call it, because the first rank broadcasts the values of each parameter. It also
        disables torch's fused inference of transformer layers.

        Args:
            module: The full module. Parameters of other stages are on the meta device and are not changed.
            mesh: The tensor-parallel axis, or the axes of the arrangement.
            group: The group of the same ranks.
            device: The device of the shards.
            prepare: Called with the name of a module before each of its parameters is sharded, for example to
                initialize the module.
        """
        sharder = Sharder(module, mesh, group, device)
        for row in self.rows:
            layer = module.get_submodule(row.name)
            for path, split in row.parameters().items():
                owner, _, name = path.rpartition(".")
                prepare(owner)
                sharder.shard(module.get_submodule(owner), name, split)
            style = self.mode.find_style(row.style, layer)
            options = {**row.options, "layout_mesh": mesh} if row.kind == LAYOUT else row.options
            style.apply(layer, tensor_group=group, sequence_dim=row.sequence_dim, **options)
        for name, torch_style in self.torch_styles.items():
            prepare(name)
            if not any(parameter.is_meta for parameter in module.get_submodule(name).parameters()):
                parallelize_module(module, mesh, {name: torch_style})
        disable_fastpath(module)

    def set_tensor_group(self, module: nn.Module, group: TensorGroup) -> None:
        """Set the group of a module that another Trainer has parallelized before."""
        for layer in module.modules():
            if isinstance(layer, ParallelLayer):
                layer.tensor_group = group

    def undo(self, module: nn.Module) -> None:
        """Turn the layers back into the original layers. The caller unshards their parameters before.

        Layers with styles of torch are not changed.
        """
        for row in self.rows:
            restore_layer(module.get_submodule(row.name))
        restore_fastpath(module)

    def param_splits(self) -> dict[str, ParamSplit]:
        """Return the sharding of the parameters and buffers, by their dotted names in the full module."""
        return {name: split for row in self.rows for name, split in row.parameters().items()}


def make_plan(
    module: nn.Module,
    requested: UserPlan | str | None,
    size: int,
    *,
    sequence_parallel: bool,
    arrangement: Arrangement | None = None,
    axes: Sequence[str] = STAGE_AXES,
    experts: Iterable[str] = (),
) -> Plan:
    """Resolve a plan. The module does not change.

    The automatic plan runs copies of some blocks of the module (`auto_plan.trial`). Its results could differ between
    machines, so the caller makes it on one rank and sends it to the others.

    Args:
        module: The full module; parameters may be on the meta device.
        requested: The user's plan: styles by module name and layouts by parameter or buffer name, where ``*`` matches
            anything between two dots; or ``"auto"``; or ``None`` for no plan.
        size: The number of tensor-parallel ranks.
        sequence_parallel: True if activations in the plan's sequence regions are sharded along the sequence.
        arrangement: The arrangement of the ranks; a line by default.
        axes: The axes of the ranks that hold one stage, from the outermost on. Layouts name these axes.
        experts: The names of modules that have the style ``"experts"`` if the user's plan does not name them.

    Raises:
        ValueError: If a pattern matches nothing, a style does not exist, a layer cannot have its style, styles or
            layouts exclude each other, or a tied parameter would be sharded differently under its names.
    """
    check_styles(requested)
    mode = _mode_of(line(size) if arrangement is None else arrangement)
    reasons: dict[str, str] = {}
    if requested is None:
        styles: dict[str, Any] = {}
    elif isinstance(requested, str):
        styles, reasons = auto_plan(module, size, mode, sequence_parallel=sequence_parallel)
    else:
        styles = _expand(module, requested, axes)
    for name in experts:
        styles.setdefault(name, "experts")
        reasons.pop(name, None)
    torch_styles = {name: style for name, style in styles.items() if isinstance(style, ParallelStyle)}
    named = [(name, style) for name, style in styles.items() if name not in torch_styles]
    _check_combinations(named)
    mode.check(styles)
    rows = mode.find_regions(list(_rows(module, named, size, mode)), module, sequence_parallel=sequence_parallel)
    _check_layouts(rows)
    _check_ties(module, rows)
    sharded = {name for row in rows for name in row.parameters()}
    shapes = {name: tensor.shape for name, tensor in named_tensors(module) if name in sharded}
    partial_grads = frozenset(_partial_grads(module, rows)) - sharded
    return Plan(size, tuple(rows), torch_styles, reasons, partial_grads, shapes, mode)


def _mode_of(arrangement: Arrangement) -> Mode:
    return Mode(arrangement) if arrangement.is_line else GridMode(arrangement)


def plan_texts(requested: UserPlan | str | None) -> dict[str, str]:
    """Return a plan as texts that the ranks compare: the order of the entries, and each style, by name in messages.

    Args:
        requested: As for :func:`make_plan`.
    """
    if not isinstance(requested, Mapping):
        return {_PLAN: repr(requested)}
    return {_PLAN: repr([*requested])} | {f"{_PLAN}[{key!r}]": _style_text(style) for key, style in requested.items()}


def _style_text(style: object) -> str:
    if not isinstance(style, ParallelStyle):
        return repr(style)
    options = ", ".join(f"{name}={_option_text(value)}" for name, value in sorted(vars(style).items()))
    return f"{type(style).__name__}({options})"


def _option_text(value: object) -> str:
    """Return a text that is the same on every rank. Sets, tensors and other objects are replaced by their type."""
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_option_text, value))})"
    is_plain = value is None or isinstance(value, (bool, int, float, str, Placement))
    return repr(value) if is_plain else type(value).__name__


def check_styles(requested: UserPlan | str | None) -> None:
    """Check the styles of a plan without a module.

    Args:
        requested: As for :func:`make_plan`.

    Raises:
        ValueError: If a style does not exist, or if the plan is a string other than ``"auto"``.
    """
    if isinstance(requested, str) and requested != "auto":
        raise ValueError(
            f"tensor_parallel_plan={requested!r} is not a valid plan. Pass 'auto', None, or a dict from module names to"
            " styles. [LH102]"
        )
    for pattern, style in requested.items() if isinstance(requested, Mapping) else ():
        if style is None or is_layout(style) or isinstance(style, ParallelStyle) or _is_known(style):
            continue
        names = [name for name in STYLES if name != LAYOUT]
        close = difflib.get_close_matches(str(style), [*names, "S(0)", "S(1)"], n=1, cutoff=0.5)
        raise ValueError(
            f"tensor_parallel_plan gives {pattern!r} the unknown style"
            f" {style!r}. {f'Did you mean {close[0]!r}? ' if close else ''}The styles are {', '.join(names)}."
            " 'divide:ATTRIBUTE' divides an integer attribute of a module, such as a number of heads, by the number of"
            " shards. For a parameter or buffer, give a layout instead of a style, such as 'S(0)'. [LH502]"
        )


def check_names(module: nn.Module, requested: UserPlan, axes: Sequence[str] = STAGE_AXES) -> None:
    """Check the names and styles of a plan that is not used because there is only one tensor-parallel rank.

    So a typo is found before the run that uses several ranks.

    Args:
        module: The full module.
        requested: The user's plan.
        axes: As for :func:`make_plan`.

    Raises:
        ValueError: If a pattern matches nothing, or a style does not exist.
    """
    check_styles(requested)
    _expand(module, requested, axes)


def _expand(module: nn.Module, requested: UserPlan, axes: Sequence[str]) -> dict[str, Any]:
    """Return the styles by module name. If several patterns match a module, the last one counts.

    Layouts of several parameters of a module are joined into one style of the module. An entry ``None`` is
    ``"replicate"``. A module with several names gets its first name.
    """
    first = {id(layer): name for name, layer in module.named_modules()}
    layers = dict(module.named_modules(remove_duplicate=False))
    names = [name for name in layers if name]
    styles: dict[str, Any] = {}
    for pattern, given in requested.items():
        style = "replicate" if given is None else given
        if is_layout(style):
            for owner, dims in _placed_tensors(module, pattern, style, axes).items():
                _add_layouts(styles, owner, dims)
            continue
        matching = [name for name in names if name_matches(name, pattern)]
        if not matching:
            close = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or names[:8]
            raise ValueError(
                f"The pattern {pattern!r} in tensor_parallel_plan matches no module of {type(module).__name__}. Use a"
                f" name such as {', '.join(map(repr, close))}. In a pattern, '*' matches any text without a dot."
                " [LH501]"
            )
        styles.update(dict.fromkeys([first[id(layers[name])] for name in matching], style))
    return styles


def _add_layouts(styles: dict[str, Any], owner: str, dims: Mapping[str, int | None]) -> None:
    """Add the split dimensions of parameters to the layout of their module. They replace earlier entries.

    Args:
        styles: The styles by module name, to which the layout is added.
        owner: The name of the module.
        dims: The split dimension of each parameter and buffer, by name; ``None`` if every rank has the full tensor.

    Raises:
        ValueError: If the module has a style already.
    """
    before = styles.get(owner, "")
    is_layout_too = isinstance(before, str) and before.startswith(f"{LAYOUT}:")
    if before and not is_layout_too:
        raise ValueError(
            f"tensor_parallel_plan gives {owner!r} the style {before!r}, which already shards its parameters, but also"
            f" gives a layout to its parameter {next(iter(dims))!r}. Remove the style or the layout. [LH506]"
        )
    every = {**(layout_dims(before) if is_layout_too else {}), **dims}
    divided = {name: dim for name, dim in every.items() if dim is not None}
    if divided:
        styles[owner] = layout_style(divided)
    else:
        styles.pop(owner, None)


def _placed_tensors(
    module: nn.Module, pattern: str, layout: str | Mapping[str, str], axes: Sequence[str]
) -> dict[str, dict[str, int | None]]:
    """Return the split dimension of each parameter and buffer that a pattern matches, by module and tensor name.

    The dimension is ``None`` if every rank has the full tensor.

    Raises:
        ValueError: If the pattern matches nothing, the layout is not supported, or a buffer has a layout already.
    """
    found: dict[str, dict[str, int | None]] = {}
    tensors = dict(named_tensors(module))
    matching = [name for name in tensors if name_matches(name, pattern)]
    if not matching:
        close = difflib.get_close_matches(pattern, tensors, n=3, cutoff=0.4) or list(tensors)[:8]
        raise ValueError(
            f"tensor_parallel_plan gives {pattern!r} the layout {layout!r}, but {type(module).__name__} has no"
            f" parameter or buffer with this name. Use a name such as {', '.join(map(repr, close))}. [LH507]"
        )
    for name in matching:
        tensor = tensors[name]
        if isinstance(tensor, DTensor) and not isinstance(tensor, nn.Parameter):
            raise ValueError(
                f"tensor_parallel_plan gives {name!r} the layout {layout!r}, but this tensor already has a layout:"
                f" {layout_text(tensor)}. Remove the entry from the plan, or create the tensor as a plain tensor."
                " [LH508]"
            )
        owner, _, leaf = name.rpartition(".")
        found.setdefault(owner, {})[leaf] = divided_dim(layout, axes, tensor, name)
    return found


def _parts(style: str) -> list[str]:
    """Return the styles that an entry such as ``"divide:num_heads + mask_per_head:8"`` joins."""
    return [part.strip() for part in style.split("+")]


def _is_known(style: object) -> bool:
    return isinstance(style, str) and all(
        part in (STYLES.keys() - WRAPPERS - {LAYOUT})
        or part in _WITH_SUFFIX
        or (part.partition(":")[0] in WRAPPERS and part.partition(":")[2])
        for part in _parts(style)
    )


def _check_combinations(styles: Iterable[tuple[str, str]]) -> None:
    """Raise an error if a module has two styles that each replace its computation, or the same wrapper twice."""
    beside = [STYLES[kind] for kind in WRAPPERS]
    for name, style in styles:
        names = [part.partition(":")[0] for part in _parts(style)]
        kinds = [STYLES[name] for name in names]
        has_two = sum(kind.mixin is not None and kind not in beside for kind in kinds) > 1
        if has_two or max(map(names.count, WRAPPERS)) > 1:
            raise ValueError(
                f"tensor_parallel_plan gives {name!r} two styles that cannot be combined: {style!r}. [LH504]"
            )


def _rows(module: nn.Module, styles: Iterable[tuple[str, str]], size: int, mode: Mode) -> Iterator[PlanRow]:
    """Yield a row for each style of each layer, or raise an error if the layer cannot have the style.

    Layers that the user's `configure_model` has sharded get no row.
    """
    arrangement = mode.arrangement
    feature_parts = arrangement.feature_parts
    for name, style in ((name, part) for name, joined in styles for part in _parts(joined) if part != "replicate"):
        layer = module.get_submodule(name)
        options = _options(style)
        for attribute in options.get("divided", ()):
            number = getattr(layer, attribute, None)
            if not isinstance(number, int) or number % feature_parts:
                where = "" if arrangement.is_line else f" with tensor_parallel_mode={arrangement.mode!r}"
                raise ValueError(
                    f"{name}.{attribute} is {number!r}, which cannot be divided over tensor_parallel_size={size} ranks."
                    f" The style {style!r} in tensor_parallel_plan needs a multiple of {feature_parts}{where}. [LH503]"
                )
        if any(isinstance(parameter, DTensor) for parameter in layer.parameters(recurse=False)):
            continue  # the user's `configure_model` has already sharded it
        found = mode.find_style(style, layer)
        reason = found.unsupported_reason(layer, size)
        if reason is not None:
            raise ValueError(
                f"tensor_parallel_plan gives {name!r} the style {style!r}, but this module {reason}. [LH505]"
            )
        yield PlanRow(name, style, tuple(found.param_splits(layer)), options=options)


def _options(style: str) -> dict[str, Any]:
    """Return the attributes of the parallel layer that the text after the colon of a style sets."""
    kind, _, suffix = style.partition(":")
    names = tuple(name.strip() for name in suffix.split(","))
    if kind == "divide":
        return {"divided": names}
    if kind == "local_rng":
        return dict(zip(("first", "last"), names, strict=True))
    if kind == "narrow_input":
        return {"takers": names}
    if kind == "mask_per_head":
        return {"total_heads": int(suffix)}
    if kind == LAYOUT:
        return {"layout_dims": layout_dims(style)}
    return {"memory_is_replicated": True} if style == "attention:memory" else {}


def _check_ties(module: nn.Module, rows: Iterable[PlanRow]) -> None:
    """Raise an error if a tied parameter is sharded differently under its names."""
    splits: dict[tuple[int, str], ParamSplit] = {}
    for row in rows:
        for name, split in row.parameters().items():
            owner, _, leaf = name.rpartition(".")
            splits[id(module.get_submodule(owner)), leaf] = replace(split, path="")
    ties: dict[int, dict[str, ParamSplit | None]] = {}
    for name, layer in module.named_modules():
        for leaf, tensor in (*layer._parameters.items(), *layer._buffers.items()):
            ties.setdefault(id(tensor), {})[join_names(name, leaf)] = splits.get((id(layer), leaf))
    for tied in ties.values():
        if len(set(tied.values())) > 1:
            raise ValueError(
                f"{' and '.join(map(repr, tied))} are names of one tied parameter, but tensor_parallel_plan shards it"
                " differently under each name. Give both layers styles that shard the same dimension ('vocab' for an"
                " embedding and its tied head), or give both the style 'replicate'. [LH510]"
            )


def _check_layouts(rows: Iterable[PlanRow]) -> None:
    """Raise an error if a module with layouts contains parallel layers, or is in a sequence region.

    The code of such a module, and of its submodules, runs on DTensors.
    """
    names = {row.name: row.style for row in rows if row.kind != LAYOUT}
    for row in rows:
        if row.kind != LAYOUT:
            continue
        inside = next((name for name in names if name.startswith(f"{row.name}.") or not row.name), None)
        if inside is not None or row.sequence_dim is not None:
            beside = (
                f"its submodule {inside!r} has the style {names[inside]!r}"
                if inside
                else "this module is inside a 'sequence_region'"
            )
            raise ValueError(
                f"tensor_parallel_plan gives a layout to a parameter or buffer of {row.name!r}, but {beside}. A module"
                " can have layouts only if it contains no tensor-parallel layers and is not inside a 'sequence_region'."
                " [LH511]"
            )


def _partial_grads(module: nn.Module, rows: Iterable[PlanRow]) -> Iterator[str]:
    """Yield the names of the parameters of layers that compute on sequence shards, or on shards of the features."""
    for row in rows:
        if row.kind in STYLES and STYLES[row.kind].partial_grads:
            layer = module.get_submodule(row.name)
            yield from (name for name, _ in layer.named_parameters(row.name, remove_duplicate=False))
