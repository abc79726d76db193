"""Suggestions as a table with the YAML to paste, and as plain data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from lightning_hybrid.cli.suggest.cost_model import Cost, Layout, Step
from lightning_hybrid.cli.suggest.machine import Machine
from lightning_hybrid.cli.suggest.search import Suggestions
from lightning_hybrid.strategy.summary import text_table


def as_text(found: Suggestions, machine: Machine, step: Step, batch_size: int) -> str:
    """What a person reads.

    Args:
        found: What was found.
        machine: What ranks were supposed to run on.
        step: What a step does.
        batch_size: Of the loader, as it is configured.
    """
    shown = [cost.layout for cost in found.best] + [group.best for group in found.losers]
    has_extra = any(layout.extra_in_flight for layout in shown)
    sequential = f" x {step.accumulated} accumulated batches" if step.accumulated > 1 else ""
    lines = [
        f"A step of {step.samples} samples{sequential}; {found.num_layouts} layouts, {found.num_simulated} simulated."
        f" Devices of {machine.memory / 2**30:g} GiB, {machine.ranks_per_node} in a node.",
        "",
    ]
    if found.best:
        lines += [
            _best_table(found.best, step),
            "",
            "batch: what the loader of each replica gives; GiB: of the fullest rank; sent: GiB that a rank sends in a",
            "step to ranks that share its layers (tensor), to other stages (pipeline), to its replicas (data)",
            *(["schedule + N,N: microbatches more on their way over each link (extra_in_flight)"] if has_extra else []),
            "",
            "The first of them:",
            "",
            as_yaml(found.best[0], machine, step, batch_size),
        ]
    else:
        lines.append("No layout fits.")
    lines += ["", "Why the others are not among them:", "", _losers_table(found)]
    return "\n".join(lines)


def _best_table(best: Sequence[Cost], step: Step) -> str:
    titles = ("", "data", "tensor", "pipeline", "microbatches", "schedule", "zero", "recompute", "batch")
    rows: list[tuple[str, ...]] = [(*titles, "ms a step", "bubble", "GiB", "sent: tensor", "pipeline", "data")]
    for number, cost in enumerate(best, 1):
        layout = cost.layout
        assert cost.seconds is not None
        assert cost.bubble is not None
        rows.append(
            (
                str(number),
                *map(str, (layout.data, layout.tensor, layout.pipeline, layout.num_microbatches)),
                _schedule(layout),
                str(layout.zero_stage),
                _recompute(layout),
                str(step.samples // layout.data),
                f"{1e3 * cost.seconds:,.2f}",
                f"{cost.bubble:.1%}",
                f"{cost.bytes / 2**30:,.2f}",
                *(f"{sent / 2**30:,.3f}" for sent in cost.sent.values()),
            )
        )
    return text_table(rows, left=(5, 7))


def _losers_table(found: Suggestions) -> str:
    rows = [("why", "layouts", "the one that comes closest", "")]
    for group in found.losers:
        text = " ".join(group.text.split()).split(". ")[0]  # its remedies are other layouts, which are tried too
        rows.append((group.reason, str(group.count), _in_words(group.best), text))
    return text_table(rows, left=(0, 2, 3))


def _schedule(layout: Layout) -> str:
    if layout.pipeline == 1:
        return "-"
    chunks = f" x {layout.num_chunks}" if layout.num_chunks > 1 else ""
    extra = f" + {','.join(map(str, layout.extra_in_flight))}" if layout.extra_in_flight else ""
    return f"{layout.schedule}{chunks}{extra}"


def _recompute(layout: Layout) -> str:
    return {"False": "no", "True": "all"}.get(str(layout.recompute), str(layout.recompute))


def _in_words(layout: Layout) -> str:
    sizes = (("data", layout.data), ("tensor", layout.tensor), ("pipeline", layout.pipeline))
    words = [" x ".join(f"{name} {size}" for name, size in sizes if size > 1) or "one rank"]
    if layout.pipeline > 1:
        words.append(_schedule(layout))
    if layout.num_microbatches > 1:
        words.append(f"{layout.num_microbatches} microbatches")
    if layout.zero_stage:
        words.append(f"zero {layout.zero_stage}")
    if layout.recompute:
        words.append(f"recompute {_recompute(layout)}")
    return ", ".join(words)


def arguments(layout: Layout) -> dict[str, Any]:
    """The arguments of `HybridStrategy` that make a layout; those that are as by default are left out."""
    found = {
        "data_parallel_size": layout.data,
        "tensor_parallel_size": layout.tensor,
        "pipeline_parallel_size": layout.pipeline,
        "num_microbatches": layout.num_microbatches,
        "schedule": layout.schedule,
        "num_chunks": layout.num_chunks,
        "zero_stage": layout.zero_stage,
        "recompute": layout.recompute,
        "extra_in_flight": list(layout.extra_in_flight),
    }
    usual = {"schedule": "1f1b", "num_chunks": 1, "zero_stage": 0, "recompute": False, "extra_in_flight": []}
    return {name: value for name, value in found.items() if name not in usual or value != usual[name]}


def devices(layout: Layout, machine: Machine) -> dict[str, int]:
    """The arguments of the Trainer that start the ranks of a layout: as many on each node."""
    return {"num_nodes": layout.num_ranks // machine.ranks_per_node, "devices": machine.ranks_per_node}


def as_yaml(cost: Cost, machine: Machine, step: Step, batch_size: int) -> str:
    """What to paste into a configuration.

    Args:
        cost: Of the layout.
        machine: What ranks were supposed to run on.
        step: What a step does.
        batch_size: Of the loader, as it is configured.
    """
    layout, batch = cost.layout, step.samples // cost.layout.data
    started = devices(layout, machine)
    lines = [
        "trainer:",
        f"  num_nodes: {started['num_nodes']}",
        f"  devices: {started['devices']}  # of each node",
        "  strategy:",
        "    class_path: lightning_hybrid.HybridStrategy",
        "    init_args:",
        *(f"      {name}: {str(value).lower()}" for name, value in arguments(layout).items()),
    ]
    if batch != batch_size:
        lines.append(f"# and let the loader give batches of {batch} samples instead of {batch_size}, for the same step")
    return "\n".join(lines)


def as_data(found: Suggestions, machine: Machine, step: Step, batch_size: int) -> dict[str, Any]:
    """What a program reads: bytes and seconds.

    Args:
        found: What was found.
        machine: What ranks were supposed to run on.
        step: What a step does.
        batch_size: Of the loader, as it is configured.
    """
    return {
        "samples": step.samples,
        "accumulate_grad_batches": step.accumulated,
        "configured_batch_size": batch_size,
        "machine": asdict(machine),
        "num_layouts": found.num_layouts,
        "num_simulated": found.num_simulated,
        "best": [
            {
                "trainer": devices(cost.layout, machine),
                "strategy": arguments(cost.layout),
                "batch_size": step.samples // cost.layout.data,
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
