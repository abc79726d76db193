"""Suggestions as a table with the YAML to paste, and as plain data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import yaml

from lightning_hybrid.cli.suggest.configured import Configured
from lightning_hybrid.strategy.auto_layout.arguments import (
    arguments,
    every_argument,
    in_words,
    mode_text,
    recompute_text,
    schedule_text,
)
from lightning_hybrid.strategy.auto_layout.candidates import Layout, LoaderStep, Step
from lightning_hybrid.strategy.auto_layout.cost_model import Cost
from lightning_hybrid.strategy.auto_layout.machine import Machine
from lightning_hybrid.strategy.auto_layout.search import Suggestions
from lightning_hybrid.strategy.summary import text_table

_TIGHT = 0.05  # a share of the memory: where less is free, the account is too rough to tell whether a layout fits
_TIGHT_TEXT = f"GiB !: less than {_TIGHT:.0%} of the memory is free, and the account is an estimate: try it first"
_MOSTLY_WHOLE = 0.5  # a share of the parameters: where tensor parallelism divides less, a plan may be missing


def as_text(
    found: Suggestions, machine: Machine, step: Step, configured: Configured, divided: Mapping[int, float]
) -> str:
    """What a person reads.

    Args:
        found: What was found.
        machine: What ranks were supposed to run on.
        step: What a step does.
        configured: What the configuration says.
        divided: The share of the parameters that tensor parallelism divides over ranks in a line, by their number.
    """
    shown = [cost.layout for cost in found.best] + [group.best for group in found.losers]
    has_extra = any(layout.extra_in_flight for layout in shown)
    sequential = f" x {step.accumulated} accumulated batches" if step.accumulated > 1 else ""
    problem = f"A step of {step.samples} samples"
    if isinstance(step, LoaderStep):
        problem = f"Batches of {step.samples} samples for each replica, of which the time of a sample counts"
    lines = [
        f"{problem}{sequential}; {found.num_layouts} layouts, {found.num_simulated} simulated."
        f" Devices of {machine.memory / 2**30:g} GiB, {machine.ranks_per_node} in a node.",
        f"Not varied, as configured: {', '.join(f'{name}={value!r}' for name, value in configured.fixed.items())}.",
        "",
    ]
    if found.best:
        lines += [
            _best_table(found.best, machine, step),
            "",
            "batch: what the loader of each replica gives; GiB: of the fullest rank; sent: GiB that a rank sends in a",
            "step to ranks that share its layers (tensor) or sequences (context), to other stages (pipeline), and of",
            "gradients and parameters (data)",
            *(["schedule + N,N: microbatches more on their way over each link (extra_in_flight)"] if has_extra else []),
            *([_TIGHT_TEXT] if any(_is_tight(cost, machine) for cost in found.best) else []),
            "",
            "The first of them:",
            "",
            as_yaml(found.best[0], machine, step, configured),
        ]
    else:
        lines.append("No layout fits.")
    lines += _whole_lines({layout.tensor for layout in shown if layout.tensor_mode == "1d"}, divided)
    lines += ["", "Why the others are not among them:", "", _losers_table(found)]
    return "\n".join(lines)


def _whole_lines(sizes: Collection[int], divided: Mapping[int, float]) -> list[str]:
    """What to do where tensor parallelism leaves most of the module whole on each rank."""
    shares = {size: divided[size] for size in sorted(sizes) if 0 < divided.get(size, 0.0) < _MOSTLY_WHOLE}
    if not shares:
        return []
    listed = ", ".join(f"tensor {size} divides {100 * share:.1f} %" for size, share in shares.items())
    return [
        "",
        f"Of the parameters {listed}, and each rank holds all others: see what `plan` says with tensor_parallel_size"
        f" {min(shares)}, and give the layers a tensor_parallel_plan.",
    ]


def _is_tight(cost: Cost, machine: Machine) -> bool:
    return cost.bytes > (1 - _TIGHT) * machine.memory


def _best_table(best: Sequence[Cost], machine: Machine, step: Step) -> str:
    sizes = ("data", "tensor", "pipeline", "tensor mode", "context")
    titles = ("", *sizes, "microbatches", "schedule", "zero", "recompute", "batch")
    rates = ("samples/s",) if isinstance(step, LoaderStep) else ()
    sent_by = ("sent: tensor", "context", "pipeline", "data")
    rows: list[tuple[str, ...]] = [(*titles, "ms a step", *rates, "bubble", "GiB", *sent_by)]
    for number, cost in enumerate(best, 1):
        layout = cost.layout
        assert cost.seconds is not None
        assert cost.bubble is not None
        rows.append(
            (
                str(number),
                *map(str, (layout.data, layout.tensor, layout.pipeline)),
                mode_text(layout) if layout.tensor > 1 else "-",
                f"{layout.context} {layout.context_kind}" if layout.context > 1 else "1",
                str(layout.num_microbatches),
                schedule_text(layout),
                str(layout.zero_stage),
                recompute_text(layout),
                str(step.batch(layout.data)),
                f"{1e3 * cost.seconds:,.2f}",
                *(f"{1 / cost.seconds_of_sample:,.0f}" for _ in rates),
                f"{cost.bubble:.1%}",
                f"{cost.bytes / 2**30:,.2f}{' !' if _is_tight(cost, machine) else ''}",
                *(f"{sent / 2**30:,.3f}" for sent in cost.sent.values()),
            )
        )
    return text_table(rows, left=(4, 7, 9))


def _losers_table(found: Suggestions) -> str:
    rows = [("why", "layouts", "the one that comes closest", "")]
    for group in found.losers:
        text = " ".join(group.text.split()).split(". ")[0]  # its remedies are other layouts, which are tried too
        rows.append((group.reason, str(group.count), in_words(group.best), text))
    return text_table(rows, left=(0, 2, 3))


def strategy_arguments(layout: Layout, configured: Configured) -> dict[str, Any]:
    """The arguments of `HybridStrategy` that make a layout, and those of the configuration that no layout changes."""
    chosen = every_argument(layout)
    return arguments(layout) | {name: value for name, value in configured.arguments.items() if name not in chosen}


def devices(layout: Layout, machine: Machine) -> dict[str, int]:
    """The arguments of the Trainer that start the ranks of a layout: as many on each node."""
    return {"num_nodes": layout.num_ranks // machine.ranks_per_node, "devices": machine.ranks_per_node}


def as_yaml(cost: Cost, machine: Machine, step: Step, configured: Configured) -> str:
    """What to paste into a configuration.

    Args:
        cost: Of the layout.
        machine: What ranks were supposed to run on.
        step: What a step does.
        configured: What the configuration says.
    """
    layout, batch = cost.layout, step.batch(cost.layout.data)
    started = devices(layout, machine)
    written = yaml.safe_dump(strategy_arguments(layout, configured), sort_keys=False)
    lines = [
        "trainer:",
        f"  num_nodes: {started['num_nodes']}",
        f"  devices: {started['devices']}  # of each node",
        "  strategy:",
        "    class_path: lightning_hybrid.HybridStrategy",
        "    init_args:",
        *(f"      {line}" for line in written.splitlines()),
    ]
    if batch != configured.batch_size:
        usual = configured.batch_size
        lines.append(f"# and let the loader give batches of {batch} samples instead of {usual}, for the same step")
    return "\n".join(lines)


def as_data(
    found: Suggestions, machine: Machine, step: Step, configured: Configured, divided: Mapping[int, float]
) -> dict[str, Any]:
    """What a program reads: bytes and seconds.

    Args:
        found: What was found.
        machine: What ranks were supposed to run on.
        step: What a step does.
        configured: What the configuration says.
        divided: The share of the parameters that tensor parallelism divides, by its size.
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
            {"why": group.reason, "layouts": group.count, "closest": arguments(group.best), "text": group.text}
            for group in found.losers
        ],
    }
