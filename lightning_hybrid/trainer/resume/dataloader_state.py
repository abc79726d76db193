"""Where the loaders of training are, combined and fetched ahead by Lightning, and how they come there again."""

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
    """The loaders of one of Lightning's loops; none if it has not asked for them yet."""
    combined = internals.combined_loader(loop)
    return [] if combined is None else combined.flattened


def dataloader_state(trainer: Trainer, batches: int | None) -> dict[str, Any] | None:
    """How the training loaders came where they are.

    Args:
        trainer: The Trainer, during training.
        batches: How many of this epoch have been trained with; ``None`` between two epochs.

    Returns:
        Tensors and plain values; ``None`` if the loaders are gone, or were asked for before there was a mesh.
    """
    combined, fetcher = internals.combined_loader(trainer.fit_loop), internals.data_fetcher(trainer)
    if combined is None or fetcher is None:
        return None
    loaders, iterator = combined.flattened, internals.batch_iterator(combined)
    if iterator is None or not all(isinstance(loader, ReplayableLoader) for loader in loaders):
        return None
    if not iterator.iterators:  # an epoch is about to begin
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
    repeated = max(0, fetched - batches)  # fetched ahead, or not trained with to the end
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
    """Bring the loaders to where they were; to be called on every rank.

    Args:
        trainer: The Trainer; its loaders have been made.
        state: From :func:`dataloader_state`.
        epochs: How many are over.
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
    internals.end_loaders(combined)  # persistent workers that something has started
    if "states" in state:
        for loader, own, loader_state, ended in zip(
            loaders, state["own"], state["states"], state["ended"], strict=True
        ):
            set_loader_generators(loader, own)
            if loader.is_stateful and loader_state is not None:
                loader.load_state_dict(loader_state)
                batches = iter(loader)  # of the epoch that is over; the next iterator begins anew
                if ended:
                    next(batches, None)
        return
    _replay(combined, fetcher, state, epochs)
    for loader in loaders:
        loader.mark_resumed()


def _replay(combined: CombinedLoader, fetcher: Any, state: Mapping[str, Any], epochs: int) -> None:
    """Ask for the batches of the present epoch once more, in the way in which they have been asked for."""
    loaders: list[Any] = combined.flattened
    for loader, own, records in zip(loaders, state["own"], state["passes"], strict=True):
        internals.set_sampler_epoch(loader, epochs)
        set_loader_generators(loader, own)
        loader.replay(records, state["index"], state["again"])
    internals.start_fetching(fetcher)
    iterator = internals.batch_iterator(combined)
    with suppress(StopIteration):  # other data
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
            next(batches, None)  # or it would take what comes next for the rest of this epoch


_OTHER_LOADERS = (
    "The checkpoint does not contain the positions of the training loaders, or the number of loaders has changed. The"
    " rest of the epoch uses the data in a new order."
)
