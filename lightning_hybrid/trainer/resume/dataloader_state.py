"""The positions of the training loaders: saved in a checkpoint, and restored in a resumed run.

`ResumeCallback` calls :func:`dataloader_state` on every rank when a checkpoint is saved and when training ends. If
training resumes from a checkpoint, it calls :func:`load_dataloader_state` in `on_train_start`.

In the middle of an epoch, the loaders fetch the same batches again, with the same random numbers. A loader that has a
`state_dict` loads its own state instead. Between two epochs, only random generators and such states are restored.
Lightning combines several loaders and may fetch a batch ahead; the state contains the position of each loader.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.trainer import lightning_internals as internals
from lightning_hybrid.trainer.resume.replay import (
    ReplayableIterator,
    ReplayableLoader,
    loader_generators,
    set_loader_generators,
)


def loaders_of(loop: Any) -> list[Any]:
    """Return the loaders of the fit loop or an evaluation loop; an empty list if it has not requested them yet."""
    combined = internals.combined_loader(loop)
    return [] if combined is None else combined.flattened


def dataloader_state(trainer: Trainer, batches: int | None) -> dict[str, Any] | None:
    """Return the positions of the training loaders of this rank.

    Args:
        trainer: The Trainer, during training.
        batches: The number of batches of this epoch that have been trained on; ``None`` between two epochs.

    Returns:
        A dictionary of tensors and plain values. ``None`` if the loaders are gone, have no iterators yet, or were
        requested before the strategy could wrap them in :class:`ReplayableLoader`. Its keys are::

            "own"          for each loader, the states of its generators
            "ended"        for each loader, True at its end
            "states"       between two epochs: for each loader, its own state, or None
            "passes"       in an epoch: for each loader, the records to replay, see ReplayableLoader.record
            "index"        in an epoch: the number of batches to skip
            "again"        in an epoch: the number of fetched batches to return again
            "consumed"     in an epoch: for each loader, True if it has started again; None if loaders never do
            "done"         in an epoch: True if no batch is left
            "num_batches"  in an epoch: the Trainer's number of batches of the epoch
            "orders"       in an epoch: for each loader, its ReplicaOrder as a dictionary, or None
    """
    combined, fetcher = internals.combined_loader(trainer.fit_loop), internals.data_fetcher(trainer)
    if combined is None or fetcher is None:
        return None
    loaders, iterator = combined.flattened, internals.batch_iterator(combined)
    if iterator is None or not all(isinstance(loader, ReplayableLoader) for loader in loaders):
        return None
    if not iterator.iterators:  # the next epoch has not made its iterators yet
        return None
    if not all(isinstance(each, ReplayableIterator) for each in iterator.iterators):
        return None
    state: dict[str, Any] = {
        "own": [loader_generators(loader) for loader in loaders],
        "ended": [each.has_ended for each in iterator.iterators],
    }
    if batches is None:
        return {**state, "states": [loader.state_dict() if loader.is_stateful else None for loader in loaders]}
    fetched, consumed = internals.num_fetched(iterator), internals.begun_anew(iterator)
    repeated = max(0, fetched - batches)  # batches that were fetched ahead or whose training step did not finish
    return {
        **state,
        "passes": [loader.record(fetched, repeated, cycles=consumed is not None) for loader in loaders],
        "again": repeated,
        "index": fetched - repeated,
        "consumed": consumed,
        "done": fetcher.done and not repeated,
        "num_batches": trainer.num_training_batches,
        "orders": [None if loader.order is None else asdict(loader.order) for loader in loaders],
    }


def load_dataloader_state(trainer: Trainer, state: dict[str, Any] | None, epochs: int) -> None:
    """Restore the positions of the training loaders before the first batch; every rank must call this function.

    Args:
        trainer: The Trainer, whose loaders exist.
        state: The result of :func:`dataloader_state` in the earlier run, perhaps in batches of another size. If it is
            ``None`` or has another number of loaders, a warning is given, and the data is used in a new order.
        epochs: The number of finished epochs.
    """
    combined, fetcher = internals.combined_loader(trainer.fit_loop), internals.data_fetcher(trainer)
    assert combined is not None, "training must begin with loaders"
    assert fetcher is not None, "training must begin with loaders"
    loaders = combined.flattened
    if (
        state is None
        or len(state["own"]) != len(loaders)
        or not all(isinstance(loader, ReplayableLoader) for loader in loaders)
    ):
        rank_zero_warn(_OTHER_LOADERS)
        iter(fetcher)
        return
    internals.end_loaders(combined)  # other code may have started persistent workers
    if "states" in state:
        for loader, own, loader_state, ended in zip(
            loaders, state["own"], state["states"], state["ended"], strict=True
        ):
            set_loader_generators(loader, own)
            if loader.is_stateful and loader_state is not None:
                loader.load_state_dict(loader_state)
                batches = iter(loader)  # the finished epoch's iterator; the next iterator starts the next epoch
                if ended:
                    next(batches, None)
        return
    _replay(combined, fetcher, state, epochs)
    for loader in loaders:
        loader.mark_resumed()


def _replay(combined: CombinedLoader, fetcher: Any, state: Mapping[str, Any], epochs: int) -> None:
    """Fetch the batches of the current epoch again; a loader with its own state returns ``None`` for each of them."""
    loaders: list[Any] = combined.flattened
    for loader, own, records in zip(loaders, state["own"], state["passes"], strict=True):
        internals.set_sampler_epoch(loader, epochs)
        set_loader_generators(loader, own)
        loader.replay(records, state["index"], state["again"])
    internals.start_fetching(fetcher)
    iterator = internals.batch_iterator(combined)
    with suppress(StopIteration):  # the data may be shorter than in the earlier run
        for _ in range(state["index"]):
            next(iterator)
    consumed = internals.begun_anew(iterator)
    for number, loader in enumerate(loaders):
        if loader.is_stateful and consumed is not None and state["consumed"] is not None:
            consumed[number] = state["consumed"][number]
    if state["again"] and fetcher.length is None and hasattr(fetcher, "batches"):
        with suppress(StopIteration):
            internals.fetch_ahead(fetcher)
    fetcher.done = state["done"]
    for loader, batches, ended in zip(loaders, iterator.iterators, state["ended"], strict=True):
        if loader.is_stateful and ended and not state["again"]:
            next(batches, None)  # without this call, the rest of this epoch would use the data of the next epoch


_OTHER_LOADERS = (
    "The checkpoint does not contain the positions of the training loaders, or the number of loaders has changed. The"
    " rest of the epoch uses the data in a new order."
)
