"""Exact resume: the callback that saves and restores position, data order, logged values and random numbers.

`World`, which exists as long as the process groups, has one :class:`ResumeCallback`. It calls the methods `open` and
`close` around each run. The checkpointer calls :meth:`ResumeCallback.add_to` and :meth:`ResumeCallback.load`; the
strategy calls :meth:`ResumeCallback.restore` before the first batch. Lightning itself saves only counters of its loops:
a resumed run would use other samples, other random numbers and incomplete means, and could skip a validation.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.axes import POSITIONS, ROLES, Sizes, sizes_in
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object
from lightning_hybrid.distributed.process_group import GroupRef
from lightning_hybrid.distributed.random import (
    RandomStreams,
    derive_seed,
    generator_states,
    seed_generators,
    set_generator_states,
)
from lightning_hybrid.trainer import lightning_internals as internals
from lightning_hybrid.trainer.resume.dataloader_state import dataloader_state, load_dataloader_state, loaders_of
from lightning_hybrid.trainer.resume.logged_state import (
    load_logged_state,
    load_metric_states,
    logged_state,
    metric_states,
    plain_values,
)
from lightning_hybrid.trainer.resume.loop_state import LoopState, has_begun, is_epoch_over
from lightning_hybrid.trainer.resume.replay import ReplayableLoader, loader_generators, set_loader_generators
from lightning_hybrid.trainer.resume.sample_position import in_new_batches
from lightning_hybrid.trainer.run_callback import RunCallback

Coordinate = tuple[int, int, int]  # (data, tensor, pipeline) rank


class ResumeCallback(RunCallback):
    """A callback that adds the position of training to checkpoints, and resumes at the position of a checkpoint.

    A checkpoint has one record for each rank, by its coordinate: the states of its random generators, the positions of
    its loaders, and the values that have accumulated since the epoch began. Context-parallel ranks share a record.
    Under the same layout, each rank loads its own record. Under another layout, the order of the data comes from the
    record of the same data rank if there is one, and otherwise of data rank 0. In that second case, random numbers are
    derived from the record and the data rank.

    Args:
        mesh: The ranks.
        streams: The random streams of this rank.
        device: The device of the model.
    """

    def __init__(self, mesh: Mesh, streams: RandomStreams, device: torch.device) -> None:
        self._changes = ExitStack()  # undoes what this callback has changed in the Trainer
        self._mesh = mesh
        self._group = GroupRef(mesh.decision_group)
        self._streams = streams
        self._device = device
        self._loaded: Mapping[str, Any] | None = None
        self._has_started = False  # True from `restore` until `close`, with or without a checkpoint
        self._ended: tuple[Any, dict[str, Any]] = None, {}  # the progress and the record at the end of a run
        self._validation: dict[str, Any] | None = None  # the state before the current validation
        #: The plain values of metrics before a module's first run, by module; see :func:`plain_values`.
        self._fresh: WeakKeyDictionary[LightningModule, dict[str, Any]] = WeakKeyDictionary()

    # -- saving --------------------------------------------------------------------------------------------------------

    def add_to(self, checkpoint: dict[str, Any], name: str, trainer: Trainer) -> dict[str, Any]:
        """Return a checkpoint with the position of training added to it; every rank must call this method.

        No position is added if no training has begun. The loop states in `checkpoint` may be changed.

        Args:
            checkpoint: The checkpoint.
            name: The key of this package's record in the checkpoint.
            trainer: The Trainer.

        Returns:
            The checkpoint, whose record also contains the position, as tensors and plain values. On global rank 0, it
            contains the records of all ranks.
        """
        fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        # Replayed loaders report an empty state, which a plain Trainer could not load into the user's loaders.
        states = [state for state in fit_loop.pop("combined_loader", []) if state]
        if states:
            fit_loop["combined_loader"] = states
        return {**checkpoint, name: {**checkpoint[name], **self._record(trainer)}}

    def _record(self, trainer: Trainer) -> dict[str, Any]:
        ended, own = self._ended
        if ended != _progress(trainer):
            if trainer.state.fn != TrainerFn.FITTING or not has_begun(trainer):
                return {}
            own = self._snapshot(trainer)
        common = dict(own)
        of_rank = common.pop("rank")
        is_first = self._mesh.context_rank == 0  # context-parallel ranks draw the same numbers around layers
        entry = (self._coordinate, of_rank) if is_first else None
        group = self._group.weak()
        assert group is not None, "the process groups have been destroyed"
        ranks: list[Any] | None = [None] * group.size() if dist.get_rank() == 0 else None
        if group.size() == 1:  # nothing has to be pickled and sent
            ranks = [entry]
        else:
            dist.gather_object(entry, ranks, 0, group=group)
        return {**common, "ranks": dict(filter(None, ranks or ()))}

    @property
    def _coordinate(self) -> Coordinate:
        return self._mesh.data_rank, self._mesh.tensor_rank, self._mesh.pipeline_rank

    def _snapshot(self, trainer: Trainer) -> dict[str, Any]:
        loops = LoopState.of(trainer)
        epoch_loop = trainer.fit_loop.epoch_loop
        # A validation that has not finished runs again from its start.
        repeated = trainer.validating and loops.kind == "batch end"
        state = self._validation if repeated and self._validation is not None else self._evaluation_state(trainer)
        results = [internals.result_collection(loop) for loop in (epoch_loop.val_loop, epoch_loop)]
        reset = results[:1] if loops.in_epoch else results
        names = {entry.meta.metric_attribute for entries in reset for entry in entries.values()}
        return {
            "moment": asdict(loops),
            "streams": state["streams"],
            "reloads": internals.reload_epochs(trainer),
            "accumulated": trainer.accumulate_grad_batches,
            "rank": {
                "generators": state["generators"],
                "loaders": dataloader_state(trainer, loops.batches if loops.in_epoch else None),
                "validation": state["validation"],
                "logged": logged_state(trainer, up_to_date=loops.has_pending_logs),
                # Metrics that Lightning resets before their next use start with fresh states, but keep plain values.
                "metrics": {
                    name: [0, {}, plain] if name in names else [count, states, plain]
                    for name, (count, states, plain) in state["metrics"].items()
                },
            },
        }

    def _evaluation_state(self, trainer: Trainer) -> dict[str, Any]:
        """Return the state that an evaluation changes: random generators, streams, validation loaders and metrics."""
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        has_loaders = internals.combined_loader(val_loop) is not None
        with self._streams.outside():
            generators = generator_states(self._device)
        module = trainer.lightning_module
        return {
            "generators": generators,
            "streams": self._streams.state_dict(),
            "validation": [loader_generators(loader) for loader in loaders_of(val_loop)] if has_loaders else None,
            "metrics": metric_states(module, self._fresh.get(module, {})),
        }

    def _snapshot_before_validation(self, trainer: Trainer) -> None:
        self._validation = self._evaluation_state(trainer)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the plain values of metrics before a validation uses the metrics."""
        self._fresh.setdefault(pl_module, plain_values(pl_module))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Discard the loaders' records of earlier epochs."""
        for loader in loaders_of(trainer.fit_loop):
            if isinstance(loader, ReplayableLoader):
                loader.begin_epoch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If the run ends in the middle of the epoch, save the position now, before the hooks of the end change it."""
        if not is_epoch_over(trainer):
            self._ended = _progress(trainer), self._snapshot(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Save the position before the loaders are closed, because a checkpoint may be saved later."""
        if self._ended[0] != _progress(trainer) and has_begun(trainer):
            self._ended = _progress(trainer), self._snapshot(trainer)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], record: Mapping[str, Any], path: Any, trainer: Trainer) -> None:
        """Keep the record of the checkpoint that the run resumes from, and correct the loop states in the checkpoint.

        Checkpoints that hooks or Lightning's tuners load are ignored; a tuner restores the state before the tuning.

        Args:
            checkpoint: The loaded checkpoint; its loop states are replaced.
            record: This package's record in the checkpoint; it may contain no position.
            path: The path from which the checkpoint was loaded.
            trainer: The Trainer.
        """
        if self._has_started or trainer.state.fn != TrainerFn.FITTING or path != trainer.ckpt_path:
            return
        self._loaded = None
        if not record.get("ranks") or "loops" not in checkpoint:
            return
        self._loaded = record
        fit_loop = LoopState(**record["moment"]).fit_loop_state(checkpoint["loops"]["fit_loop"])
        checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": fit_loop}

    @property
    def is_loaded(self) -> bool:
        """Return True if training is about to resume from a checkpoint."""
        return self._loaded is not None

    def restore(self, trainer: Trainer) -> None:
        """Resume at the position of the loaded checkpoint; called after all hooks that run before the first epoch.

        Every rank must call this method. Without a loaded checkpoint, it only starts to save the state before each
        validation.

        Raises:
            ValueError: If the number of replicas, the batch size or the sampler has changed, and it is unknown which
                samples have been used, or no optimizer step of this run begins after exactly these samples.
        """
        if not self._has_started:
            action = partial(self._snapshot_before_validation, trainer)
            self._changes.enter_context(internals.before_validation(trainer, action))
        self._ended, self._has_started = (None, {}), True
        record, self._loaded = self._loaded, None
        if record is None:
            return
        loops = LoopState(**record["moment"])
        if not loops.is_restored(trainer):  # a tuner runs: Lightning did not restore the loops before it
            iter(internals.data_fetcher(trainer))
            return
        data_rank, own, same_replica = self._find(record)
        loaders = own["loaders"]
        if loops.in_epoch:
            _prepare_accumulation(trainer)
            accumulated = record.get("accumulated", 1)  # older checkpoints have neither this number nor the order
            loops, loaders = in_new_batches(
                trainer, loops, accumulated, loaders, same_replicas=same_replica is not None
            )
            if internals.is_accumulating(trainer):
                rank_zero_warn(_ACCUMULATING)
        internals.set_reload_epochs(trainer, record["reloads"])
        load_dataloader_state(trainer, loaders, loops.epochs)
        _prepare_validation(trainer, own["validation"])
        load_logged_state(trainer, (same_replica or own)["logged"], entries=loops.in_epoch and same_replica is not None)
        if same_replica is not None:
            load_metric_states(trainer.lightning_module, same_replica["metrics"])
        self._streams.load_state_dict(record["streams"])
        set_generator_states(own["generators"], self._device)
        if data_rank != self._mesh.data_rank:
            common = zlib.crc32(own["generators"]["torch"].numpy().tobytes())
            seed_generators(derive_seed(common, self._mesh.data_rank), self._device)
        for callback in trainer.checkpoint_callbacks:
            if isinstance(callback, ModelCheckpoint):
                internals.note_saved_step(callback, trainer.global_step)
        self._changes.enter_context(loops.restarted(trainer))

    def _find(self, record: Mapping[str, Any]) -> tuple[int, dict[str, Any], dict[str, Any] | None]:
        """Return the records that this rank resumes from.

        Returns:
            The data rank whose record this rank loads; that record; and the record with the accumulated values of this
            replica, or ``None`` if the number of replicas has changed. Under another layout, the accumulated values are
            from the stage that computes the loss.
        """
        ranks: Mapping[Coordinate, dict[str, Any]] = record["ranks"]
        layout, mesh, own = record["layout"], self._mesh, self._coordinate
        saved = Sizes(**sizes_in(layout))
        # Context-parallel ranks of the same sequences share a record.
        if all(saved.with_role(role) == mesh.sizes.with_role(role) for role in ROLES if role is not POSITIONS):
            return mesh.data_rank, ranks[own], ranks[own]
        # All ranks of a model group load the same record, so that hooks draw the same numbers on each of them.
        data = mesh.data_rank if (mesh.data_rank, 0, 0) in ranks else 0
        last = mesh.data_rank, 0, saved.pipeline - 1
        is_same = saved.num_replicas == mesh.num_replicas
        return data, ranks[data, 0, 0], ranks[last] if is_same else None

    def open(self, trainer: Trainer) -> None:
        """Start a run from the checkpoint that global rank 0 has found, or from none if rank 0 has found none.

        A node with its own disk may find another checkpoint, or none. The choice is a collective of all ranks, which
        happens later, when the Trainer selects the checkpoint.
        """
        choose = partial(broadcast_object, source=0, group=self._group())
        self._changes.enter_context(internals.choose_checkpoint(trainer, choose))

    def close(self) -> None:
        """End the run, and undo the changes to the Trainer."""
        self._loaded, self._has_started = None, False
        self._changes.close()


def _progress(trainer: Trainer) -> tuple[int, int]:
    """Return the numbers of epochs and batches that have started since training began."""
    epoch, batch = trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_loop.batch_progress.total
    return epoch.ready, batch.ready


def _prepare_accumulation(trainer: Trainer) -> None:
    """Do what `GradientAccumulationScheduler` does at the start of an epoch, because the start is skipped."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def _prepare_validation(trainer: Trainer, states: list[Any] | None) -> None:
    """Make the validation loaders and restore the states of their own generators.

    Args:
        trainer: The Trainer.
        states: The generator states of each loader; ``None`` to discard the loaders until the next validation.
    """
    loop = trainer.fit_loop.epoch_loop.val_loop
    if states is None:
        internals.discard_loaders(loop)
        return
    trainer.validating = True
    loop.setup_data()  # does nothing if the loaders exist
    trainer.training = True
    for loader, own in zip(loaders_of(loop), states, strict=False):
        set_loader_generators(loader, own)


_ACCUMULATING = (
    "The checkpoint was saved between two optimizer steps, while gradients were accumulated. A checkpoint does not"
    " contain gradients, so the next optimizer step lacks the gradients of the batches before the save. To save only"
    " after optimizer steps, use `ModelCheckpoint(every_n_train_steps=...)`."
)
