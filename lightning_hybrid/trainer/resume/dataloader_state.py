"""Where the loaders of training are, combined and fetched ahead by Lightning, and how they come there again."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, cast

from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.utilities import CombinedLoader
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.trainer.resume.own_generators import own_states, set_own_states
from lightning_hybrid.trainer.resume.replay import ReplayableLoader, TracedIterator

__all__ = ["bring_back", "loaders_of", "record_positions"]


def loaders_of(loop: Any) -> list[Any]:
    """The loaders of one of Lightning's loops; none if it has not asked for them yet."""
    return [] if loop._combined_loader is None else loop._combined_loader.flattened


def record_positions(trainer: Trainer, batches: int | None) -> dict[str, Any] | None:
    """How the training loaders came where they are.

    Args:
        trainer: The Trainer, during training.
        batches: How many of this epoch have been trained with; ``None`` between two epochs.

    Returns:
        Tensors and plain values; ``None`` if the loaders are gone, or were asked for before there was a mesh.
    """
    combined, fetcher = trainer.fit_loop._combined_loader, trainer.fit_loop._data_fetcher
    loaders = loaders_of(trainer.fit_loop)
    if fetcher is None or not all(isinstance(loader, ReplayableLoader) for loader in loaders):
        return None
    record: dict[str, Any] = {"own": [own_states(loader) for loader in loaders]}
    assert combined is not None
    iterator: Any = combined._iterator  # of one of Lightning's modes of combination
    if iterator is None or not all(isinstance(each, TracedIterator) for each in iterator.iterators):
        return None
    record["ended"] = [each.has_ended for each in iterator.iterators]
    if batches is None:
        return {**record, "states": [loader.state_dict() if loader.is_stateful else None for loader in loaders]}
    again = max(0, iterator._idx - batches)  # fetched ahead, or not trained with to the end
    consumed = getattr(iterator, "_consumed", None)
    asked = iterator._idx, again
    return {
        **record,
        "passes": [loader.record(*asked, cycles=consumed is not None) for loader in loaders],
        "again": again,
        "index": iterator._idx - again,
        "consumed": consumed,
        "done": fetcher.done and not again,
    }


def bring_back(trainer: Trainer, record: dict[str, Any] | None, epochs: int) -> None:
    """Bring the loaders to where they were; to be called on every rank.

    Args:
        trainer: The Trainer; its loaders have been made.
        record: From :func:`record_positions`.
        epochs: How many are over.
    """
    combined, fetcher = trainer.fit_loop._combined_loader, cast(Any, trainer.fit_loop._data_fetcher)
    assert combined is not None, "training begins with loaders"
    assert fetcher is not None, "training begins with loaders"
    loaders = combined.flattened
    known = record is not None and len(record["own"]) == len(loaders)
    if not known or not all(isinstance(loader, ReplayableLoader) for loader in loaders):
        rank_zero_warn(_OTHER_LOADERS)
        iter(fetcher)
        return
    assert record is not None
    combined.reset()  # persistent workers that something has started
    if "states" in record:
        for loader, own, state, ended in zip(loaders, record["own"], record["states"], record["ended"], strict=True):
            set_own_states(loader, own)
            if loader.is_stateful and state is not None:
                loader.load_state_dict(state)
                batches = iter(loader)  # of the epoch that is over; the next iterator begins anew
                if ended:
                    next(batches, None)
        return
    _repeat(combined, fetcher, record, epochs)
    for loader in loaders:
        loader.is_resumed()


def _repeat(combined: CombinedLoader, fetcher: Any, record: Mapping[str, Any], epochs: int) -> None:
    """Ask for the batches of the present epoch once more, in the way in which they have been asked for."""
    loaders: list[Any] = combined.flattened
    for loader, own, past in zip(loaders, record["own"], record["passes"], strict=True):
        _set_sampler_epoch(loader, epochs)
        set_own_states(loader, own)
        loader.go_on(past, record["index"], record["again"])
    _DataFetcher.__iter__(fetcher)
    iterator: Any = combined._iterator
    with suppress(StopIteration):  # other data
        for _ in range(record["index"]):
            next(iterator)
    for number, loader in enumerate(loaders):
        if loader.is_stateful and record["consumed"] is not None:
            iterator._consumed[number] = record["consumed"][number]
    if record["again"] and fetcher.length is None and hasattr(fetcher, "batches"):
        with suppress(StopIteration):
            fetcher.batches.append(_DataFetcher.__next__(fetcher))
    fetcher.done = record["done"]
    for loader, batches, ended in zip(loaders, iterator.iterators, record["ended"], strict=True):
        if loader.is_stateful and ended and not record["again"]:
            next(batches, None)  # or it would take what comes next for the rest of this epoch


_OTHER_LOADERS = (
    "The checkpoint does not say where its training loaders were, or there are more or fewer now: the epoch goes on"
    " with a new order of the data."
)
