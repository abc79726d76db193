"""Resuming in an epoch with another number of replicas or another batch size, after the samples that were trained on.

`ResumeCallback.restore` calls :func:`in_new_batches` if training resumes in the middle of an epoch. A count of batches
alone would skip or repeat samples, because a batch of all replicas has another number of samples.

With batches of ``b`` samples on each of ``n`` replicas, ``k`` batches use the first ``k n b`` samples of one order,
which is the same for every number of replicas. ::

    samples of the epoch    0  1  2  3 | 4  5  6  7 | 8  9 10 11
    2 replicas, b = 2       batch 0    | batch 1    |               saved here
    1 replica,  b = 2                               | batch 4 ...   resumes here
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning.pytorch import Trainer
from lightning_utilities.core.rank_zero import rank_zero_info

from lightning_hybrid.trainer.resume.dataloader_state import loaders_of
from lightning_hybrid.trainer.resume.loop_state import LoopState
from lightning_hybrid.trainer.resume.replay import ReplicaOrder


def in_new_batches(
    trainer: Trainer, loops: LoopState, accumulated: int, loaders: Mapping[str, Any] | None, *, same_replicas: bool
) -> tuple[LoopState, Mapping[str, Any] | None]:
    """Convert a position in batches of an earlier run into batches of this run, and update the Trainer's progress.

    Batches after the last optimizer step are trained on again, because a checkpoint contains no gradients.

    Args:
        trainer: The Trainer, before training resumes in the middle of an epoch.
        loops: The position at which the checkpoint was saved.
        accumulated: The number of batches per optimizer step in the earlier run.
        loaders: The positions of the loaders, from :func:`.dataloader_state`; ``None`` if they are unknown.
        same_replicas: True if the number of replicas has not changed.

    Returns:
        The positions of the loops and of the loaders in batches of this run. If a batch of all replicas has the same
        samples as before, ``loops`` and ``loaders`` are returned unchanged.

    Raises:
        ValueError: If it is unknown which samples have been used, if the sampler has changed, or if no optimizer step
            of this run starts after exactly these samples.
    """
    before = (
        None if loaders is None else _only([order and ReplicaOrder(**order) for order in loaders.get("orders", ())])
    )
    now = _only([getattr(loader, "order", None) for loader in loaders_of(trainer.fit_loop)])
    if loaders is None or before is None or now is None:
        if same_replicas:
            return loops, loaders
        raise ValueError(_UNKNOWN)
    if before == now or (same_replicas and before.num_samples == now.num_samples):
        return loops, loaders
    if before.sampler != now.sampler:
        raise ValueError(
            "The sampler has changed since the checkpoint was saved in the middle of an epoch, and so has the number of"
            f" replicas or the batch size. {before.sampler} determined the order of the samples, but now {now.sampler}"
            f" determines a different order. {_INSTEAD} [LH935]"
        )
    is_over = loaders["done"] or loops.batches >= loaders["num_batches"]
    batches = int(trainer.num_training_batches)
    if not is_over:
        steps = loops.batches // accumulated
        used, at_once = steps * accumulated * before.num_samples, trainer.accumulate_grad_batches * now.num_samples
        if used % at_once:
            raise ValueError(
                f"The checkpoint was saved after {used} samples of an epoch ({before.num_samples} per batch of all"
                f" replicas together). An optimizer step now uses {at_once} samples ({now.num_samples} per batch x"
                f" {trainer.accumulate_grad_batches} accumulated batches). {used} is not a multiple of {at_once}, so no"
                " step starts at this position. To make sure that a step starts there, set the same"
                f" HybridStrategy(global_batch_size=...) in both runs. {_INSTEAD} [LH936]"
            )
        batches = min(used // now.num_samples, batches)
    _set_batches(trainer, batches)
    rank_zero_info(
        f"All replicas together now use {now.num_samples} samples per batch instead of {before.num_samples}. The epoch"
        f" resumes after {batches} batches of the new size, which replace {loops.batches} batches of the old size."
    )
    is_whole = is_over or loops.batches % accumulated == 0
    return replace(loops, batches=batches, kind=loops.kind if is_whole else "batch"), _moved(loaders, batches, is_over)


def _only(orders: Sequence[ReplicaOrder | None]) -> ReplicaOrder | None:
    return orders[0] if len(orders) == 1 else None


def _set_batches(trainer: Trainer, batches: int) -> None:
    progress = trainer.fit_loop.epoch_loop.batch_progress
    current: Any = progress.current
    total: Any = progress.total
    for name in ("ready", "started", "processed", "completed"):
        setattr(total, name, getattr(total, name) - getattr(current, name) + batches)
        setattr(current, name, batches)


def _moved(loaders: Mapping[str, Any], batches: int, is_over: bool) -> dict[str, Any]:
    """Return the state of a loader that has returned a number of batches.

    Args:
        loaders: The saved state of the loader.
        batches: The number of batches.
        is_over: True if the epoch of the loader is over.
    """
    record = loaders["passes"][0][-1]
    # The order was drawn when the iterator was made, or with its first batch.
    generators = {event: states for event, states in record["generators"].items() if event <= 1}
    num_events = max(1 + batches, min(2, record["events"]))
    return {
        **loaders,
        "passes": [[{"generators": generators, "events": num_events}]],
        "again": 0,
        "index": batches,
        "done": is_over,
        "ended": [is_over],
    }


_INSTEAD = (
    "Resume from a checkpoint saved at the end of an epoch, or use the same number of replicas and the same batches as"
    " when this checkpoint was saved."
)
_UNKNOWN = (
    "The checkpoint was saved in the middle of an epoch, with a different number of replicas, and it is not known which"
    " samples of the epoch have been used. The used samples are known only for a single `DataLoader` that has a"
    " `batch_size`, a dataset with a length, no custom batch sampler and no loader state. The strategy or a"
    f" `DistributedSampler` must have sharded its samples. {_INSTEAD} [LH934]"
)
