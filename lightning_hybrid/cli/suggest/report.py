"""Suggested layouts as a table with YAML for the configuration, and as data for programs.

``lightning-hybrid suggest`` prints the result of :func:`as_text`, or with ``--json`` the result of :func:`as_data`. The
log of ``layout="auto"`` is shorter, and is written by `tuning.choice`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import yaml

from lightning_hybrid.cli.parser import wrapped
from lightning_hybrid.cli.suggest.configured import Configured
from lightning_hybrid.strategy.summary import text_table
from lightning_hybrid.tuning.arguments import (
    arguments,
    every_argument,
    in_words,
    mode_text,
    nested,
    recompute_text,
    schedule_text,
    zero_text,
)
from lightning_hybrid.tuning.candidates import Layout, LoaderStep, Step
from lightning_hybrid.tuning.cost_model import Cost
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.search import DOES_NOT_FIT, Suggestions

_TIGHT = 0.05  # a fraction of the memory: if less is free, the estimate is too rough to determine if a layout fits
_TIGHT_TEXT = (
    f"GiB !: less than {_TIGHT:.0%} of the memory is free. The estimate may be too low, so test the layout first"
)
_SENT = {"tensor": "tp", "context": "cp", "pipeline": "pp", "data": "dp"}
_MOSTLY_WHOLE = 0.5  # a fraction of the parameters: if tensor parallelism shards less, a plan may be missing


def as_text(
    found: Suggestions, machine: Machine, step: Step, configured: Configured, divided: Mapping[int, float]
) -> str:
    """Return the suggestions as text.

    Args:
        found: The result of the search.
        machine: The devices and links of the ranks.
        step: The step that the layouts must run.
        configured: The values from the configuration.
        divided: The fraction of the parameters that 1D tensor parallelism shards, by the tensor-parallel size.
    """
    shown = [cost.layout for cost in found.best] + [group.best for group in found.rejected]
    sequential = f" in each of {step.accumulated} accumulated batches" if step.accumulated > 1 else ""
    problem = f"Each step has {step.samples} samples{sequential}."
    if isinstance(step, LoaderStep):
        samples = f"{step.samples} samples{sequential or ' per step'}"
        problem = f"Each replica trains on {samples}. Layouts are sorted by the time per sample."
    fixed = ", ".join(f"{name}={value!r}" for name, value in configured.fixed.items())
    lines = [
        *wrapped(
            f"{problem} The search compared {found.num_layouts:,} layouts and simulated {found.num_simulated:,} of"
            f" them. Devices: {machine.ranks_per_node} per node, with {machine.memory / 2**30:g} GiB each."
        ),
        *wrapped(f"Values from the configuration that the search did not change: {fixed}."),
        *wrapped(_fits_text(found, machine)),
    ]
    if found.best:
        lines += [
            "",
            *_layouts_table(found.best),
            "",
            *_costs_table(found.best, machine, step),
            "",
            *(line for part in _legend(found.best, machine) for line in wrapped(part, "  ")),
            "",
            "Configuration of layout 1:",
            "",
            as_yaml(found.best[0], machine, step, configured),
        ]
    lines += _whole_lines({layout.tensor for layout in shown if layout.tensor_mode == "1d"}, divided)
    lines += ["", "Why other layouts were rejected:", ""]
    for group in found.rejected:
        closest = f"{in_words(group.best)}: {group.first_sentence}"
        lines += wrapped(f"- {group.reason} ({group.count:,}), such as {closest}", "  ")
    return "\n".join(lines)


def _fits_text(found: Suggestions, machine: Machine) -> str:
    """Return the line about the memory of the fastest layout, or about the missing memory."""
    memory = f"{machine.memory / 2**30:,.2f} GiB"
    if found.best:
        return f"Fits: the fastest layout needs up to {found.best[0].bytes / 2**30:,.2f} GiB of the {memory} per rank."
    smallest = [group for group in found.rejected if group.reason == DOES_NOT_FIT]
    needed = f" Even the layout with the lowest memory use needs {smallest[0].text}." if smallest else ""
    return f"Does not fit: no layout can be used with {memory} per device.{needed}"


def _whole_lines(sizes: Collection[int], divided: Mapping[int, float]) -> list[str]:
    """Return advice if tensor parallelism leaves most parameters unsharded."""
    shares = {size: divided[size] for size in sorted(sizes) if 0 < divided.get(size, 0.0) < _MOSTLY_WHOLE}
    if not shares:
        return []
    listed = ", ".join(f"tensor_parallel_size={size} shards {100 * share:.1f}%" for size, share in shares.items())
    text = (
        f"Tensor parallelism leaves most parameters unsharded: {listed} of them. To see why, run `lightning-hybrid"
        f" plan` with tensor_parallel_size={min(shares)}. To shard more parameters, write a tensor_parallel_plan."
    )
    return ["", *wrapped(text)]


def _has_experts(best: Sequence[Cost]) -> bool:
    """Return True if a layout shards experts over replicas."""
    return any(cost.layout.experts > 1 for cost in best)


def _is_tight(cost: Cost, machine: Machine) -> bool:
    return cost.bytes > (1 - _TIGHT) * machine.memory


def _layouts_table(best: Sequence[Cost]) -> list[str]:
    layouts = [cost.layout for cost in best]
    return _table(
        {
            "data": [str(layout.data) for layout in layouts],
            "tensor": [str(layout.tensor) for layout in layouts],
            "pipeline": [str(layout.pipeline) for layout in layouts],
            "tensor mode": [mode_text(layout) if layout.tensor > 1 else "-" for layout in layouts],
            "context": [f"{each.context} {each.context_kind}" if each.context > 1 else "1" for each in layouts],
            "schedule": [
                schedule_text(replace(layout, extra_in_flight=())) + (" +" if layout.extra_in_flight else "")
                for layout in layouts
            ],
            "zero": list(map(zero_text, layouts)),
            **({"experts": [f"over {layout.experts}" for layout in layouts]} if _has_experts(best) else {}),
            "recompute": list(map(_recomputed, layouts)),
        },
        always=("data", "tensor", "pipeline"),
        left=("tensor mode", "context", "schedule", "experts", "recompute"),
    )


def _table(columns: Mapping[str, list[str]], always: Collection[str], left: Collection[str]) -> list[str]:
    """Return a table of numbered layouts. Columns with equal cells are replaced by a line above the table.

    Args:
        columns: The cells by title.
        always: The titles of columns that are always in the table.
        left: The titles of columns with texts.
    """
    number = len(next(iter(columns.values())))
    varies = {title: number == 1 or title in always or len(set(cells)) > 1 for title, cells in columns.items()}
    alike = ", ".join(f"{title} {cells[0]}" for title, cells in columns.items() if not varies[title])
    shown = {title: cells for title, cells in columns.items() if varies[title]}
    numbers = [str(each) for each in range(1, number + 1)]
    rows = [("", *shown), *zip(numbers, *shown.values(), strict=True)]
    texts = [at for at, title in enumerate(shown, 1) if title in left]
    return [*wrapped(f"The same in all layouts: {alike}." if alike else ""), text_table(rows, left=texts)]


def _recomputed(layout: Layout) -> str:
    if not isinstance(layout.recompute, tuple):
        return recompute_text(layout)
    least, most = min(layout.recompute), max(layout.recompute)
    return f"layers {most}" if least == most else f"layers {least}-{most}"


def _costs_table(best: Sequence[Cost], machine: Machine, step: Step) -> list[str]:
    seconds = [cost.seconds or 0.0 for cost in best]
    columns = {
        "batch": [f"{step.batch(cost.layout.data)} in {cost.layout.num_microbatches}" for cost in best],
        "ms/step": [f"{1e3 * each:,.{2 if each < 10 else 0}f}" for each in seconds],
    }
    if isinstance(step, LoaderStep):
        columns["samples/s"] = [f"{1 / cost.seconds_of_sample:,.0f}" for cost in best]
    columns["bubble"] = [f"{cost.bubble or 0.0:.1%}" for cost in best]
    columns["GiB"] = [f"{cost.bytes / 2**30:,.2f}{' !' if _is_tight(cost, machine) else ''}" for cost in best]
    for axis, short in (_SENT | ({"tokens": "ep"} if _has_experts(best) else {})).items():
        columns[f"{short} sent"] = [f"{cost.sent[axis] / 2**30:,.3f}" for cost in best]
    return _table(columns, always=("ms/step", "GiB"), left=())


def _legend(best: Sequence[Cost], machine: Machine) -> list[str]:
    """Return the explanations of the columns."""
    parts = [
        "batch: samples per replica and number of microbatches; GiB: memory of the rank that needs the most;"
        " tp, cp, pp, dp sent: GiB that a rank sends per step for tensor, context, pipeline and data parallelism"
    ]
    if _has_experts(best):
        parts.append("ep sent: GiB that a rank sends per step to replicas with other experts")
    if any(isinstance(cost.layout.recompute, tuple) for cost in best):
        parts.append("recompute: number of layers per stage that are recomputed")
    if any(cost.layout.extra_in_flight for cost in best):
        parts.append("schedule +: extra microbatches in flight on some links (tuning.extra_in_flight)")
    if any(_is_tight(cost, machine) for cost in best):
        parts.append(_TIGHT_TEXT)
    return parts


def strategy_arguments(layout: Layout, configured: Configured) -> dict[str, Any]:
    """Return the arguments of `HybridStrategy` for a layout, with the configuration's unchanged arguments."""
    chosen = every_argument(layout)
    others = {name: value for name, value in configured.arguments.items() if name not in chosen}
    return nested(arguments(layout) | others)


def devices(layout: Layout, machine: Machine) -> dict[str, int]:
    """Return the arguments of the Trainer for a layout, with the same number of ranks on each node."""
    return {"num_nodes": layout.num_ranks // machine.ranks_per_node, "devices": machine.ranks_per_node}


def as_yaml(cost: Cost, machine: Machine, step: Step, configured: Configured) -> str:
    """Return YAML for the configuration, with a comment if the batch size of the loader must change.

    Args:
        cost: The layout with its cost.
        machine: The devices and links of the ranks.
        step: The step that the layout must run.
        configured: The values from the configuration.
    """
    layout, batch = cost.layout, step.batch(cost.layout.data)
    started = devices(layout, machine)
    written = yaml.safe_dump(strategy_arguments(layout, configured), sort_keys=False)
    lines = [
        "trainer:",
        f"  num_nodes: {started['num_nodes']}",
        f"  devices: {started['devices']}  # per node",
        "  strategy:",
        "    class_path: lightning_hybrid.HybridStrategy",
        "    init_args:",
        *(f"      {line}" for line in written.splitlines()),
    ]
    if batch != configured.batch_size:
        usual = configured.batch_size
        lines.append(
            f"# also set the batch size of the loader to {batch} instead of {usual}, to keep the samples per step"
        )
    return "\n".join(lines)


def as_data(
    found: Suggestions, machine: Machine, step: Step, configured: Configured, divided: Mapping[int, float]
) -> dict[str, Any]:
    """Return the suggestions as data for programs, in bytes and seconds.

    Args:
        found: The result of the search.
        machine: The devices and links of the ranks.
        step: The step that the layouts must run.
        configured: The values from the configuration.
        divided: The fraction of the parameters that 1D tensor parallelism shards, by the tensor-parallel size.
    """
    return {
        "samples": step.samples,
        "accumulate_grad_batches": step.accumulated,
        "configured_batch_size": configured.batch_size,
        "not_varied": dict(configured.fixed),
        "divided_by_tensor": dict(divided),
        "machine": asdict(machine),
        "num_layouts": found.num_layouts,
        "num_simulated": found.num_simulated,
        "best": [
            {
                "trainer": devices(cost.layout, machine),
                "strategy": strategy_arguments(cost.layout, configured),
                "batch_size": step.batch(cost.layout.data),
                "seconds": cost.seconds,
                "bubble": cost.bubble,
                "bytes": cost.bytes,
                "memory": [{**asdict(usage), "total": usage.total} for usage in cost.memory],
                "sent_bytes": cost.sent,
                "parts_seconds": cost.parts,
            }
            for cost in found.best
        ],
        "others": [
            {"why": group.reason, "layouts": group.count, "closest": nested(arguments(group.best)), "text": group.text}
            for group in found.rejected
        ],
    }
