"""Texts about the layout: tables of stages, tensor-parallel layers and memory, and the effective batch size.

`strategy.layout`, `ModuleParallelizer`, `Run` and `HybridStrategy` log these texts on rank 0 when a run starts. The
commands `plan`, `memory`, `suggest` and `inspect` print the same tables. Nothing here communicates.

The *body* is the set of layers that the pipeline splits into stages; parameters *outside* are all others, such as the
embedding. A *plan* states how tensor parallelism shards each layer, with one *row* per layer and style. A *holder* of a
stage is a rank that has its parameters.
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import groupby, zip_longest
from typing import Any

from torch import nn

from lightning_hybrid.axes import PIPELINE, Sizes
from lightning_hybrid.distributed.module_names import fold_numbered, pattern_of
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.pipeline_parallel.schedules import Schedule
from lightning_hybrid.pipeline_parallel.stage_map import StageMap, locate
from lightning_hybrid.tensor_parallel.plan import Plan
from lightning_hybrid.tensor_parallel.styles import PlanRow

_MOST = 5  # the most classes of modules that the line about unsharded weights lists
_COLUMNS = 100  # the maximum width of a table
_NARROWEST = 16  # the minimum width of a column of texts


@dataclass(frozen=True)
class StageRow:
    """A stage, as a row of the table.

    Attributes:
        stage: The global index of the stage.
        rank: The pipeline rank of the stage.
        layers: The indices of its layers in the body.
        kinds: The classes of its layers, such as ``"4 x Block"``.
        in_layers: The number of parameters in its layers; tied parameters count once.
        outside: The number of its other parameters.
        share: This stage's fraction of the sum over all stages, which counts parameters of several stages repeatedly.
    """

    stage: int
    rank: int
    layers: range
    kinds: str
    in_layers: int
    outside: int
    share: float

    @property
    def num_parameters(self) -> int:
        """The number of all parameters of the stage."""
        return self.in_layers + self.outside


def stage_rows(module: nn.Module, layers: Sequence[nn.Module], stage_map: StageMap) -> list[StageRow]:
    """Return the rows of the table of stages.

    Args:
        module: The user's module, with or without placeholders.
        layers: The layers of the body.
        stage_map: The assignment of parameters to stages.
    """
    held: list[dict[int, int]] = [{} for _ in stage_map.stages]
    for found in locate(module.named_parameters(remove_duplicate=False), stage_map):
        for stage in found.stages:
            held[stage][id(found.tensor)] = found.tensor.numel()
    total = max(1, sum(sum(counts.values()) for counts in held))
    rows = []
    for stage, (positions, counts) in enumerate(zip(stage_map.stages, held, strict=True)):
        everything, in_layers = sum(counts.values()), _count([layers[index] for index in positions])
        kinds, outside = _kinds(layers, positions), everything - in_layers
        rank = stage_map.placement.ranks[stage]
        rows.append(StageRow(stage, rank, positions, kinds, in_layers, outside, everything / total))
    return rows


def _count(layers: Sequence[nn.Module]) -> int:
    parameters = {id(parameter): parameter for layer in layers for parameter in layer.parameters()}
    return sum(parameter.numel() for parameter in parameters.values())


def _kinds(layers: Sequence[nn.Module], positions: range) -> str:
    runs = [(kind, len(list(run))) for kind, run in groupby(type(layers[index]).__name__ for index in positions)]
    text = ", ".join(kind if count == 1 else f"{count} x {kind}" for kind, count in runs)
    return _short(text)


def _short(text: str) -> str:
    return text if len(text) <= 48 else f"{text[:45]}..."


def ranks_of_stages(sizes: Sizes, rank_order: str) -> list[list[int]]:
    """Return the global ranks that hold the stages of each pipeline rank.

    Args:
        sizes: The number of ranks along each axis.
        rank_order: The axes from the outermost to the innermost, joined by ``-``.
    """
    distance = sizes.stride(PIPELINE, rank_order)
    return [
        [rank for rank in range(sizes.num_ranks) if rank // distance % sizes.pipeline == at]
        for at in range(sizes.pipeline)
    ]


def stage_holders(sizes: Sizes, rank_order: str, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Return the global ranks and the nodes of each pipeline rank, as texts.

    Args:
        sizes: The argument of :func:`ranks_of_stages`.
        rank_order: The argument of :func:`ranks_of_stages`.
        hosts: The node of each global rank.
    """
    held = ranks_of_stages(sizes, rank_order)
    return [(_short(_ranges(ranks)), _short(", ".join(dict.fromkeys(hosts[rank] for rank in ranks)))) for ranks in held]


def _ranges(numbers: Sequence[int]) -> str:
    """Return ascending numbers with consecutive numbers as ranges: ``"0-3, 8"``."""
    grouped = groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])
    runs = [[number for _, number in run] for _, run in grouped]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def stage_table(
    rows: Sequence[StageRow], body: str, *, is_estimate: bool, holders: Sequence[tuple[str, str]] = ()
) -> str:
    """Return the table of stages. The total counts a parameter once for each stage that has it.

    Args:
        rows: The stages.
        body: The dotted name of the body.
        is_estimate: True before the first training batch. The title then says that parameters outside the layers are
            on estimated stages.
        holders: The global ranks and nodes of each pipeline rank, which replace the pipeline rank in the table.
    """
    has_outside = any(row.outside for row in rows)
    titles = ("in layers", "outside, est." if is_estimate else "outside") if has_outside else ()
    where = ("ranks", "node") if holders else ("pp rank",)
    cells: list[tuple[str, ...]] = [("stage", *where, f"layers of {body!r}", "", *titles, "parameters", "share")]
    for row in rows:
        layers = f"{row.layers.start}-{row.layers.stop - 1}" if len(row.layers) > 1 else f"{row.layers.start}"
        share = f"{100 * row.share:.1f}%"
        place = holders[row.rank] if holders else (str(row.rank),)
        cells.append((str(row.stage), *place, layers, row.kinds, *_numbers([row], has_outside), share))
    cells.append(("total", *("" for _ in where), "", "", *_numbers(rows, has_outside), ""))
    return text_table(cells, left=(2, 3, 4) if holders else (2, 3))


def _numbers(rows: Sequence[StageRow], has_outside: bool) -> list[str]:
    """Return the numbers of parameters of some stages: in layers and outside, if there are any outside, and all."""
    counts = [(row.in_layers, row.outside, row.num_parameters) for row in rows]
    return [f"{sum(column):,}" for column in zip(*counts, strict=True)][0 if has_outside else 2 :]


def outside_text(module: nn.Module, layers: Sequence[nn.Module], where: str) -> str:
    """Return a text about the number of parameters outside the layers; empty if there are none.

    Args:
        module: The user's module.
        layers: The layers of the body.
        where: The end of the text, about the stages of these parameters.
    """
    total, outside = _count([module]), sum(count for _, count in outside_parts(module, layers))
    return f"not in layers: {outside:,} parameters ({100 * outside / total:.1f}%), {where}" if outside else ""


def placed_text(outside: Mapping[str, Collection[int]]) -> str:
    """Return a text about the stages of parameters outside the layers.

    Args:
        outside: The stages of each parameter, by name.
    """
    places = [f"{name} on stage {' and '.join(map(str, sorted(stages)))}" for name, stages in outside.items()]
    return f"Parameters outside the layers: {', '.join(places)}"


def outside_parts(module: nn.Module, layers: Sequence[nn.Module]) -> list[tuple[str, int]]:
    """Return the submodules with parameters outside the layers: their names and numbers of these parameters.

    Args:
        module: The user's module.
        layers: The layers of the body.
    """
    inside = {id(parameter) for layer in layers for parameter in layer.parameters()}
    found = []
    for name, part in module.named_modules():
        own = [parameter for parameter in part.parameters(recurse=False) if id(parameter) not in inside]
        inside |= set(map(id, own))
        if own:
            found.append((name, sum(parameter.numel() for parameter in own)))
    return found


def memory_table(estimates: Sequence[MemoryUsage], peaks: Sequence[int] = ()) -> str:
    """Return a table of the memory of each pipeline rank, in GiB.

    Parts that are unknown on all ranks are left out, and then the total is left out too. A part that is unknown on some
    ranks is ``"?"`` there.

    Args:
        estimates: The estimate for each pipeline rank, in bytes.
        peaks: The peak memory of the device's allocator on each pipeline rank in bytes; empty if it is unknown.
    """
    every = [field.name for field in fields(MemoryUsage)]
    names = [name for name in every if any(getattr(usage, name) is not None for usage in estimates)]
    names += ["total"] if names == every else []
    columns = {name: [getattr(usage, name) for usage in estimates] for name in names}
    if peaks:
        columns["allocator's peak"] = list(peaks)
    digits = _digits(max(value or 0 for values in columns.values() for value in values))
    rows = [
        [f"pipeline rank {rank}", *(_gibibytes(values[rank], digits) for values in columns.values())]
        for rank in range(len(estimates))
    ]
    return text_table([["GiB", *columns], *rows], left=(0,))


def _digits(largest: int) -> int:
    """Return the number of decimals that show three digits of a number of bytes, in GiB."""
    return min(5, max(1, 2 - math.floor(math.log10(max(1, largest) / 2**30))))


def _gibibytes(value: int | None, digits: int) -> str:
    return "?" if value is None else f"{value / 2**30:,.{digits}f}"


def text_table(rows: Sequence[Sequence[str]], left: Collection[int] | None = None) -> str:
    """Return a table. If it has more than 100 columns, the texts of its widest column are wrapped.

    Args:
        rows: The titles, then the cells of each row.
        left: The indices of the columns with texts, which are aligned to the left; ``None`` for all columns.
    """
    texts = range(len(rows[0])) if left is None else left
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * (len(widths) - 1) - _COLUMNS
    if excess > 0 and texts:
        widest = max(texts, key=lambda column: widths[column])
        widths[widest] = min(widths[widest], max(widths[widest] - excess, _NARROWEST))
    titles, *others = ([*_row_lines(row, widths, texts)] for row in rows)
    lines = [line for of_row in others for line in of_row]
    return "\n".join([*titles, "-" * max(map(len, titles + lines)), *lines])


def _row_lines(row: Sequence[str], widths: Sequence[int], texts: Collection[int]) -> Iterator[str]:
    cells = [
        textwrap.wrap(cell, max(1, width), break_on_hyphens=False) for cell, width in zip(row, widths, strict=True)
    ]
    for parts in zip_longest(*cells, fillvalue=""):
        aligned = (
            part.ljust(width) if column in texts else part.rjust(width)
            for column, (part, width) in enumerate(zip(parts, widths, strict=True))
        )
        yield "  ".join(aligned).rstrip()


def divided_share(plan: Plan, module: nn.Module) -> float:
    """Return the fraction of the parameters that are sharded over the tensor-parallel ranks.

    Args:
        plan: The plan.
        module: The module.
    """
    parameters = {id(parameter): parameter.numel() for parameter in module.parameters()}
    return sum(parameters[each] for each in _divided(plan, module)) / max(1, sum(parameters.values()))


def plan_table(plan: Plan, module: nn.Module) -> str:
    """Return a table of tensor-parallel layers: module, style, full and local shape, with similar layers in one line.

    Args:
        plan: The plan.
        module: The full module, or the sharded one with placeholders.
    """
    rows: list[tuple[str, ...]] = []
    for row in plan.rows:
        shapes = _shapes(plan, row).values()
        full, local = (" ".join(_shape(pair[at]) for pair in shapes) for at in (0, 1))
        rows.append((row.name, row.style, full, local))
    rows = fold_numbered(rows) + [(name, type(style).__name__, "", "") for name, style in plan.torch_styles.items()]
    table = text_table([("module", "style", "full", "local"), *rows])
    share = f"sharded: {100 * divided_share(plan, module):.1f}% of the parameters"
    return "\n".join([table, share, *_whole(plan, module)])


def plan_rows(plan: Plan) -> list[dict[str, Any]]:
    """Return the tensor-parallel layers as strings, lists and dictionaries, for programs.

    Args:
        plan: The plan.
    """
    rows = [
        {
            "module": row.name,
            "style": row.style,
            "parameters": {
                name: {"shape": list(full), "local_shape": list(local)}
                for name, (full, local) in _shapes(plan, row).items()
            },
        }
        for row in plan.rows
    ]
    torch_styles = plan.torch_styles.items()
    return rows + [{"module": name, "style": type(style).__name__, "parameters": {}} for name, style in torch_styles]


def _shapes(plan: Plan, row: PlanRow) -> dict[str, tuple[Sequence[int], Sequence[int]]]:
    """Return the full and the local shape of each parameter that a row of the plan shards."""
    found: dict[str, tuple[Sequence[int], Sequence[int]]] = {}
    for name, split in row.parameters().items():
        full = plan.shapes[name]
        found[name] = full, split.local_shape(full, plan.size)
    return found


def _whole(plan: Plan, module: nn.Module) -> list[str]:
    """Return lines about parameters that are not sharded.

    First come modules for which the plan states a reason, then other weights, by the class of their parent module.
    """
    sizes = {id(parameter): parameter.numel() for parameter in module.parameters()}
    total = max(1, sum(sizes.values()))
    for divided in _divided(plan, module):
        sizes.pop(divided)
    counts: dict[tuple[str, str], int] = {}
    for name, reason in plan.reasons.items():
        own = sum(sizes.pop(id(parameter), 0) for parameter in module.get_submodule(name).parameters())
        alike = sum(other == reason for other in plan.reasons.values()) > 1
        key = pattern_of(name) if alike else name, reason
        counts[key] = counts.get(key, 0) + own
    lines = [f"not sharded: {name} {reason} ({100 * n / total:.1f}%)" for (name, reason), n in counts.items()]
    unknown: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if parameter.ndim > 1 and id(parameter) in sizes:
            block = module.get_submodule(".".join(name.split(".")[:-2]))
            unknown[type(block).__name__] += sizes.pop(id(parameter))
    if unknown:
        listed = ", ".join(f"{kind} ({100 * count / total:.1f}%)" for kind, count in unknown.most_common(_MOST))
        lines.append(f"not sharded (no matching plan entry): weights in {listed}")
    return lines


def _divided(plan: Plan, module: nn.Module) -> set[int]:
    """Return the identities of the sharded parameters."""
    parameters = dict(module.named_parameters(remove_duplicate=False))  # a plan may also shard buffers
    names = {name for row in plan.rows for name in row.parameters()} & parameters.keys()
    divided = {id(parameters[name]) for name in names}
    return divided | {id(each) for name in plan.torch_styles for each in module.get_submodule(name).parameters()}


def _shape(shape: Iterable[int]) -> str:
    return "x".join(map(str, shape))


def layout_text(sizes: Sizes, schedule: Schedule, *, bubble: float) -> str:
    """Return the layout in one line.

    Args:
        sizes: The number of ranks along each axis.
        schedule: The schedule of a training step.
        bubble: The fraction of the step in which an average rank is idle.
    """
    layout = f"Layout: {sizes} = {sizes.num_ranks} processes"
    if schedule.num_stages == 1 and schedule.num_microbatches == 1:
        return layout
    chunks = f", {schedule.num_chunks} chunks per rank" if schedule.num_chunks > 1 else ""
    return (
        f"{layout}; schedule {schedule.name!r}{chunks}, {schedule.num_microbatches} microbatches,"
        f" bubble {100 * bubble:.1f}%"
    )


def batch_text(
    batch_size: int | None, replicas: int, accumulated: int, *, num_microbatches: int, requested: int
) -> str:
    """Return the effective batch size in one line.

    Args:
        batch_size: The batch size of the loader on each replica; ``None`` if it is unknown.
        replicas: The data-parallel size.
        accumulated: The number of batches per optimizer step.
        num_microbatches: The number of microbatches for a batch of this size, which may be less than requested.
        requested: The number of microbatches in the line about the layout.
    """
    parts = f"{_counted(replicas, 'replica')} x {_counted(accumulated, 'accumulated batch', 'es')}"
    if batch_size is None:
        return f"Effective batch: the loader's batch x {parts}"
    text = f"Effective batch: {batch_size} samples x {parts} = {batch_size * replicas * accumulated} per optimizer step"
    if requested == 1:
        return text
    number = min(num_microbatches, batch_size)
    size = -(-batch_size // number)
    if number < requested:
        return f"{text}; {number} instead of {requested} microbatches, {_counted(size, 'sample')} each"
    return f"{text}; microbatches of {size}"


def _counted(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{plural if number != 1 else ''}"
