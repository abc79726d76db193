"""Resuming exactly where a checkpoint was written: random numbers, data, logged values, and what is to be done."""

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
    """Records where training is, for a checkpoint, and brings it back there.

    Each rank has a record of its own, by its coordinate: the states of its generators, how its loaders came where they
    are, and what was added up since the epoch began. Under the same layout each rank takes its own again. Under
    another one the order of the data is that of the same data rank, or of the first, and random numbers are derived
    from its record.

    Args:
        mesh: The ranks.
        streams: The random streams of this rank.
        device: The device of the model.
    """

    def __init__(self, mesh: Mesh, streams: RandomStreams, device: torch.device) -> None:
        self._changes = ExitStack()  # what a run has changed in the Trainer
        self._mesh = mesh
        self._group = GroupRef(mesh.decision_group)
        self._streams = streams
        self._device = device
        self._loaded: Mapping[str, Any] | None = None
        self._has_started = False  # whether the first batch is next or over, from a checkpoint or not
        self._ended: tuple[Any, dict[str, Any]] = None, {}  # the progress and record of a run when it ended
        self._validation: dict[str, Any] | None = None  # what there was when the present one began
        #: What metrics have beside their states, before a module's first run.
        self._fresh: WeakKeyDictionary[LightningModule, dict[str, Any]] = WeakKeyDictionary()

    # -- saving --------------------------------------------------------------------------------------------------------

    def add_to(self, checkpoint: dict[str, Any], name: str, trainer: Trainer) -> dict[str, Any]:
        """A checkpoint with where training is, of tensors and plain values; to be called on every rank.

        Args:
            checkpoint: The checkpoint.
            name: Of the record in it.
            trainer: The Trainer.

        Returns:
            The checkpoint with a longer record, on global rank 0 with that of every rank.
        """
        fit_loop = checkpoint["loops"]["fit_loop"]["state_dict"]
        # A loader that has been brought back says that it has a state, but a plain Trainer has nobody to give it to.
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
        is_first = self._mesh.context_rank == 0  # of those that share sequences, and draw the same around layers
        entry = (self._coordinate, of_rank) if is_first else None
        group = self._group.weak()
        assert group is not None, "the process groups have been destroyed"
        ranks: list[Any] | None = [None] * group.size() if dist.get_rank() == 0 else None
        if group.size() == 1:  # nothing has to be pickled
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
        # A validation that is not over is run again.
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
                # Those that are reset before they are used again begin anew, but may have something beside.
                "metrics": {
                    name: [0, {}, plain] if name in names else [count, states, plain]
                    for name, (count, states, plain) in state["metrics"].items()
                },
            },
        }

    def _evaluation_state(self, trainer: Trainer) -> dict[str, Any]:
        """What an evaluation changes."""
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
        """Look at metrics before a validation uses them."""
        self._fresh.setdefault(pl_module, plain_values(pl_module))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """How loaders came where they are is recorded from here on."""
        for loader in loaders_of(trainer.fit_loop):
            if isinstance(loader, ReplayableLoader):
                loader.begin_epoch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If the epoch is not over, the run ends in the middle of it; what hooks do now belongs to that end."""
        if not is_epoch_over(trainer):
            self._ended = _progress(trainer), self._snapshot(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loaders are about to be closed, and a checkpoint may be asked for later."""
        if self._ended[0] != _progress(trainer) and has_begun(trainer):
            self._ended = _progress(trainer), self._snapshot(trainer)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], record: Mapping[str, Any], path: Any, trainer: Trainer) -> None:
        """Take the record of the checkpoint that a run begins with, and put the states of its loops in order.

        Others are read too: by hooks, and by Lightning's tuners, which put everything back where it was before them.

        Args:
            checkpoint: As it was read; its loops are changed.
            record: What was saved with it; it may have nothing to continue from.
            path: Where it was read.
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
        """Whether training is about to continue from a checkpoint."""
        return self._loaded is not None

    def restore(self, trainer: Trainer) -> None:
        """After the last hook of the start, before anything of the uninterrupted run: be where the checkpoint was."""
        if not self._has_started:
            action = partial(self._snapshot_before_validation, trainer)
            self._changes.enter_context(internals.before_validation(trainer, action))
        self._ended, self._has_started = (None, {}), True
        record, self._loaded = self._loaded, None
        if record is None:
            return
        loops = LoopState(**record["moment"])
        if not loops.is_restored(trainer):  # a tuner began before Lightning had restored the loops, and never does
            iter(internals.data_fetcher(trainer))
            return
        data_rank, own, same_replica = self._find(record)
        loaders = own["loaders"]
        if loops.in_epoch:
            _prepare_accumulation(trainer)
            accumulated = record.get("accumulated", 1)  # of older checkpoints neither this nor the order is known
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
        """What this rank continues from.

        Returns:
            The data rank whose record it takes, that record, and the one with what was added up from this replica's
            samples, which is where the loss was computed; ``None`` if there were more or fewer replicas.
        """
        ranks: Mapping[Coordinate, dict[str, Any]] = record["ranks"]
        layout, mesh, own = record["layout"], self._mesh, self._coordinate
        saved = Sizes(**sizes_in(layout))
        # Ranks that hold positions of the same sequences share a record.
        if all(saved.with_role(role) == mesh.sizes.with_role(role) for role in ROLES if role is not POSITIONS):
            return mesh.data_rank, ranks[own], ranks[own]
        # Ranks of one model group take one record: what hooks draw on each of them is to be the same.
        data = mesh.data_rank if (mesh.data_rank, 0, 0) in ranks else 0
        last = mesh.data_rank, 0, saved.pipeline - 1
        is_same = saved.num_replicas == mesh.num_replicas
        return data, ranks[data, 0, 0], ranks[last] if is_same else None

    def open(self, trainer: Trainer) -> None:
        """A run begins: from the checkpoint that the first rank has found, if it has found one.

        A machine with a disk of its own may find another one, or none.
        """
        choose = partial(broadcast_object, source=0, group=self._group())
        self._changes.enter_context(internals.choose_checkpoint(trainer, choose))

    def close(self) -> None:
        """The run is over."""
        self._loaded, self._has_started = None, False
        self._changes.close()


def _progress(trainer: Trainer) -> tuple[int, int]:
    """How many epochs and batches have begun since training began."""
    epoch, batch = trainer.fit_loop.epoch_progress.total, trainer.fit_loop.epoch_loop.batch_progress.total
    return epoch.ready, batch.ready


def _prepare_accumulation(trainer: Trainer) -> None:
    """What this callback does at the start of an epoch, which has been."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def _prepare_validation(trainer: Trainer, states: list[Any] | None) -> None:
    """Have validation loaders, with these states of their own generators, or have none until there is a validation."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if states is None:
        internals.discard_loaders(loop)
        return
    trainer.validating = True
    loop.setup_data()  # unless it has been done
    trainer.training = True
    for loader, own in zip(loaders_of(loop), states, strict=False):
        set_loader_generators(loader, own)


_ACCUMULATING = (
    "The checkpoint was saved between two optimizer steps, while gradients were accumulated. A checkpoint does not"
    " contain gradients, so the next optimizer step lacks the gradients of the batches before the save. To save only"
    " after optimizer steps, use `ModelCheckpoint(every_n_train_steps=...)`."
)
