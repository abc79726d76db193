"""Traffic of a configuration between nodes, from the cost model of the layout search.

``lightning-hybrid plan`` calls :func:`planned_traffic` if there are several nodes. The cost model counts the messages
of layers in a dry run, because the bytes of activations cannot be derived from the parameters.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningDataModule, LightningModule

from lightning_hybrid.distributed.sizes import accumulated_batches
from lightning_hybrid.pipeline_parallel.links.traffic import Traffic
from lightning_hybrid.strategy.strategy import HybridStrategy
from lightning_hybrid.tuning.candidates import Layout, Step
from lightning_hybrid.tuning.cost_model import CostModel
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.module_profile import ModuleProfile


def planned_traffic(
    make: Callable[[], tuple[LightningModule, LightningDataModule | None]], strategy: HybridStrategy, **trainer: Any
) -> Traffic:
    """Return the bytes that an optimizer step sends, from a step on fake tensors.

    Args:
        make: Returns the user's module and its data. The step changes the module.
        strategy: The strategy of the configuration, without open arguments.
        trainer: Other arguments of the Trainer, as :func:`step_arguments` returns them.

    Raises:
        ValueError, TypeError: The errors of the start of training, or if a step cannot run on fake tensors.
    """
    config, sizes = strategy.settings, strategy.sizes
    tensor, pipeline = sizes.tensor, sizes.pipeline
    chunks = config.num_chunks if pipeline > 1 else 1
    # The number of recomputed layers does not matter.
    recompute = "selective" if config.recompute == "selective" else bool(config.recompute)
    number, zero = config.num_microbatches, config.zero_stage
    options = number, config.schedule, chunks, zero, recompute
    mode = (config.tensor_parallel_mode, config.tensor_parallel_depth) if tensor > 1 else ("1d", 1)
    context = sizes.context, config.context_parallel
    replicas = config.zero_size, config.expert_parallel_size
    layout = Layout(sizes.data, tensor, pipeline, *options, (), *context, *mode, *replicas)
    num_ranks = layout.num_ranks
    machine, precision = Machine(ranks_per_node=num_ranks // strategy.num_nodes), strategy.precision_plugin
    open_config = replace(config, global_batch_size=None)  # the accumulation of batches is computed below
    given: dict[str, Any] = {"contexts": (sizes.context,), "precision": precision, **trainer}
    profile = ModuleProfile(make, open_config, num_ranks, machine, only=layout, **given)
    refused = profile.refuse(layout)
    if refused is not None:
        raise ValueError(refused[1])
    accumulated = int(trainer["accumulate_grad_batches"])
    if config.global_batch_size is not None:
        accumulated = accumulated_batches(config.global_batch_size, profile.batch_size, sizes.data)
    number = min(number, profile.batch_size)
    layout = replace(layout, num_microbatches=number)
    order, reshards = config.launch.rank_order, config.tuning.reshard_after_forward
    step = Step(profile.batch_size * sizes.data, accumulated, order, reshards)
    model = CostModel(profile, machine, step)
    sent = model.estimate(layout).sent
    links: dict[int, float] = {}
    for stage, cost in enumerate(model.stages(layout)[:-1] if pipeline > 1 else ()):
        link = stage % pipeline
        # Each link sends activations, and gradients of the same size.
        links[link] = links.get(link, 0.0) + 2 * number * accumulated * cost.output
    return Traffic(sent["data"] - sent["rows"], sent["tensor"], links, sent["rows"], layout.zero_size)
