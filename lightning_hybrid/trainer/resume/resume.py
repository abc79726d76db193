"""Going on exactly where a checkpoint was written: random numbers, data, accumulated values, and what is to be done."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from lightning_utilities.core.rank_zero import rank_zero_warn

from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.random import (
    RandomStreams,
    derive_seed,
    generator_states,
    seed_generators,
    set_generator_states,
)
from lightning_hybrid.trainer.resume.dataloader_state import bring_back, loaders_of, record_positions
from lightning_hybrid.trainer.resume.logged_state import (
    load_logged,
    load_metrics,
    logged,
    metric_states,
    plain_values,
)
from lightning_hybrid.trainer.resume.loop_state import LoopState, has_begun, is_epoch_over, progress
from lightning_hybrid.trainer.resume.own_generators import own_states, set_own_states
from lightning_hybrid.trainer.resume.replay import ReplayableLoader

__all__ = ["ResumeCallback"]

Place = tuple[int, int, int]  # (data, tensor, pipeline) rank


class ResumeCallback(Callback):
    """Remembers where training is, for a checkpoint, and brings it back there.

    Each rank has a record of its own, by its place: the states of its generators, how its loaders came where they are,
    and what has been accumulated since the epoch began. Under the same layout each rank takes its own again. Under
    another one the order of the data is that of the same data rank, or of the first, and random numbers are derived
    from its record.

    Args:
        mesh: The ranks.
        streams: The random streams of this rank.
        device: The device of the model.
    """

    def __init__(self, mesh: Mesh, streams: RandomStreams, device: torch.device) -> None:
        self._mesh = mesh
        self._streams = streams
        self._device = device
        self._loaded: Mapping[str, Any] | None = None
        self._is_on = False  # whether training goes on already, from a checkpoint or not
        self._ended: tuple[Any, dict[str, Any]] = None, {}  # the progress and record of a run when it ended
        self._validation: dict[str, Any] | None = None  # what there was when the present one began
        #: What metrics keep beside their states, before a module's first run.
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
        ended, mine = self._ended
        if ended != progress(trainer):
            if trainer.state.fn != TrainerFn.FITTING or not has_begun(trainer):
                return {}
            mine = self._snapshot(trainer)
        mesh = self._mesh
        ranks: list[Any] = [None] * dist.get_world_size()
        group = mesh.world_group
        dist.gather_object((self._place, mine["rank"]), ranks if dist.get_rank() == 0 else None, 0, group=group)
        common = {key: value for key, value in mine.items() if key != "rank"}
        return {**common, "ranks": dict(ranks) if dist.get_rank() == 0 else {}}

    @property
    def _place(self) -> Place:
        return self._mesh.data_rank, self._mesh.tensor_rank, self._mesh.pipeline_rank

    def _snapshot(self, trainer: Trainer) -> dict[str, Any]:
        moment = LoopState.now(trainer)
        fit_loop = trainer.fit_loop
        val_loop = fit_loop.epoch_loop.val_loop
        reset = [val_loop._results] if moment.in_epoch else [val_loop._results, fit_loop.epoch_loop._results]
        # A validation that is not over is run again.
        repeated = trainer.validating and moment.kind == "batch end"
        now = self._validation if repeated and self._validation is not None else self._now(trainer)
        names = {entry.meta.metric_attribute for results in reset for entry in results.values()}
        return {
            "moment": moment.state_dict(),
            "streams": now["streams"],
            "reloads": [fit_loop._last_train_dl_reload_epoch, val_loop._last_val_dl_reload_epoch],
            "rank": {
                "generators": now["generators"],
                "loaders": record_positions(trainer, moment.batches if moment.in_epoch else None),
                "validation": now["validation"],
                "logged": logged(trainer, up_to_date=moment.is_busy),
                # Those that are reset before they are used again begin anew, but may keep something beside.
                "metrics": {
                    name: [0, {}, plain] if name in names else [count, states, plain]
                    for name, (count, states, plain) in now["metrics"].items()
                },
            },
        }

    def _now(self, trainer: Trainer) -> dict[str, Any]:
        """What an evaluation changes."""
        val_loop = trainer.fit_loop.epoch_loop.val_loop
        own = None
        if val_loop._combined_loader is not None:
            own = [own_states(loader) for loader in loaders_of(val_loop)]
        with self._streams.outside():
            generators = generator_states(self._device)
        module = trainer.lightning_module
        return {
            "generators": generators,
            "streams": self._streams.state_dict(),
            "validation": own,
            "metrics": metric_states(module, self._fresh.get(module, {})),
        }

    def _watch_validation(self, trainer: Trainer) -> None:
        loop = trainer.fit_loop.epoch_loop.val_loop
        run = loop.run

        def watched() -> Any:
            self._validation = self._now(trainer)
            return run()

        loop.__dict__["run"] = watched

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Look at metrics before a validation uses them."""
        self._fresh.setdefault(pl_module, plain_values(pl_module))

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """How loaders came where they are is told from here on."""
        for loader in loaders_of(trainer.fit_loop):
            if isinstance(loader, ReplayableLoader):
                loader.begin_epoch()

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """If the epoch is not over, the run ends in the middle of it; what hooks do now belongs to that end."""
        if not is_epoch_over(trainer):
            self._ended = progress(trainer), self._snapshot(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Loaders are about to be let go, and a checkpoint may be asked for later."""
        if self._ended[0] != progress(trainer) and has_begun(trainer):
            self._ended = progress(trainer), self._snapshot(trainer)

    # -- loading -------------------------------------------------------------------------------------------------------

    def load(self, checkpoint: dict[str, Any], record: Mapping[str, Any], path: Any, trainer: Trainer) -> None:
        """Take the record of the checkpoint that a run begins with, and put the states of its loops in order.

        Others are read too: by hooks, and by Lightning's tuners, which put everything back where it was before them.

        Args:
            checkpoint: As it was read; its loops are changed.
            record: What was saved with it; it may have nothing to go on from.
            path: Where it was read.
            trainer: The Trainer.
        """
        if self._is_on or trainer.state.fn != TrainerFn.FITTING or path != trainer.ckpt_path:
            return
        self._loaded = None
        if not record.get("ranks") or "loops" not in checkpoint:
            return
        self._loaded = record
        fit_loop = LoopState(**record["moment"]).in_order(checkpoint["loops"]["fit_loop"])
        checkpoint["loops"] = {**checkpoint["loops"], "fit_loop": fit_loop}

    @property
    def is_loaded(self) -> bool:
        """Whether training is about to go on from a checkpoint."""
        return self._loaded is not None

    def go_on(self, trainer: Trainer) -> None:
        """After the last hook of the start, before anything of the uninterrupted run: be where the checkpoint was."""
        fit_loop = trainer.fit_loop
        if not self._is_on:
            self._watch_validation(trainer)
        self._ended, self._is_on = (None, {}), True
        record, self._loaded = self._loaded, None
        if record is None:
            return
        moment = LoopState(**record["moment"])
        if not moment.is_restored(trainer):  # a tuner began before Lightning had restored the loops, and never does
            iter(cast(Any, fit_loop._data_fetcher))
            return
        if moment.in_epoch:
            _prepare_accumulation(trainer)
        if moment.in_epoch and fit_loop.epoch_loop._should_accumulate():
            rank_zero_warn(_ACCUMULATING)
        fit_loop._last_train_dl_reload_epoch, fit_loop.epoch_loop.val_loop._last_val_dl_reload_epoch = record["reloads"]
        data_rank, mine = self._find(record)
        bring_back(trainer, mine["loaders"], moment.epochs)
        _prepare_validation(trainer, mine["validation"])
        accumulated = self._find_accumulated(record)
        load_logged(trainer, (accumulated or mine)["logged"], entries=moment.in_epoch and accumulated is not None)
        if accumulated is not None:
            load_metrics(trainer.lightning_module, accumulated["metrics"])
        self._streams.load_state_dict(record["streams"])
        set_generator_states(mine["generators"], self._device)
        if data_rank != self._mesh.data_rank:
            common = zlib.crc32(mine["generators"]["torch"].numpy().tobytes())
            seed_generators(derive_seed(common, self._mesh.data_rank), self._device)
        _note_saved(trainer)
        moment.restart(trainer)

    def _find(self, record: Mapping[str, Any]) -> tuple[int, dict[str, Any]]:
        """The record that this rank goes on from, and the data rank that wrote it."""
        ranks: Mapping[Place, dict[str, Any]] = record["ranks"]
        data, tensor, pipeline = self._place
        if not self._is_same(record["layout"], "data", "tensor", "pipeline"):
            # Ranks of one model group take one record: what hooks draw on each of them is to be the same.
            data, tensor, pipeline = (data if (data, 0, 0) in ranks else 0), 0, 0
        return data, ranks[data, tensor, pipeline]

    def _find_accumulated(self, record: Mapping[str, Any]) -> dict[str, Any] | None:
        """The record with what has been accumulated from this replica's samples; it is where the loss was computed."""
        layout = record["layout"]
        if self._is_same(layout, "data", "tensor", "pipeline"):
            place = self._place
        elif self._is_same(layout, "data"):
            place = self._mesh.data_rank, 0, layout["pipeline_parallel_size"] - 1
        else:
            return None
        return cast(dict[str, Any], record["ranks"][place])

    def _is_same(self, layout: Mapping[str, Any], *axes: str) -> bool:
        names = (f"{axis}_parallel_size" for axis in axes)
        return all(layout[name] == getattr(self._mesh, name) for name in names)

    def close(self, trainer: Trainer) -> None:
        """The run is over."""
        self._loaded, self._is_on = None, False
        trainer.fit_loop.epoch_loop.val_loop.__dict__.pop("run", None)
        LoopState.forget(trainer)


def _prepare_accumulation(trainer: Trainer) -> None:
    """What this callback does at the start of an epoch, which has been."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, GradientAccumulationScheduler):
            trainer.accumulate_grad_batches = callback.get_accumulate_grad_batches(trainer.current_epoch)


def _prepare_validation(trainer: Trainer, states: list[Any] | None) -> None:
    """Have validation loaders, with these states of their own generators, or have none until there is a validation."""
    loop = trainer.fit_loop.epoch_loop.val_loop
    if states is None:
        loop._combined_loader = None
        return
    trainer.validating = True
    loop.setup_data()  # unless it has been done
    trainer.training = True
    for loader, own in zip(loaders_of(loop), states, strict=False):
        set_own_states(loader, own)


def _note_saved(trainer: Trainer) -> None:
    """Checkpoints of this step are there: the next batch, which may be between two steps, must not replace them."""
    for callback in trainer.checkpoint_callbacks:
        if isinstance(callback, ModelCheckpoint):
            every = callback._every_n_train_steps
            if every >= 1 and trainer.global_step % every == 0:
                callback._last_global_step_saved = trainer.global_step


_ACCUMULATING = (
    "The checkpoint was written between two optimizer steps. Gradients are not part of it: the next step goes without"
    " those of the batches before. `ModelCheckpoint(every_n_train_steps=...)` saves at optimizer steps."
)
