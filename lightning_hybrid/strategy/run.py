"""All that one rank is made of, from the settings: mesh, division of the module, pipeline, data, checkpoints."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import count
from typing import Any, cast
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.distributed.tensor.experimental import implicit_replication

from lightning_hybrid.checkpoint.checkpointer import Checkpointer
from lightning_hybrid.checkpoint.weights import Source
from lightning_hybrid.config import HybridConfig
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.agreement import agree
from lightning_hybrid.distributed.failure import FailureStore, close_groups
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.distributed.tree_broadcast import broadcast_object
from lightning_hybrid.memory.measure import MemoryReport
from lightning_hybrid.memory.offload import Offload
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.strategy.after_hook import AfterHook
from lightning_hybrid.strategy.checks import check_trainer
from lightning_hybrid.strategy.gather import refuse_step
from lightning_hybrid.strategy.parallelize import ModuleParallelizer
from lightning_hybrid.strategy.patches import Patches
from lightning_hybrid.strategy.summary import memory_table
from lightning_hybrid.trainer.batch_hooks import SeededTransfer, onlookers
from lightning_hybrid.trainer.batch_start import BatchStart
from lightning_hybrid.trainer.evaluation_step import EvaluationStep
from lightning_hybrid.trainer.exceptions import ExceptionCallback
from lightning_hybrid.trainer.loading import DataLoaderPreparer
from lightning_hybrid.trainer.results.epoch_sync import EpochSync
from lightning_hybrid.trainer.resume.resume import ResumeCallback
from lightning_hybrid.trainer.step_context import StepContext, make_channels
from lightning_hybrid.trainer.training_step import TrainingStep

__all__ = ["RunState"]

_RUNS = count()  # names the failure board of each set of process groups


class RunState:
    """Makes and holds the parts of this rank.

    Args:
        settings: The settings.
        sizes: (data, tensor, pipeline) parallel size.
        device: The device of this process.
        started: Modules that have had their initial weights, in this run or an earlier one.

    Attributes:
        mesh: The ranks.
        board: Where failures are written.
        departure: Leaves after one.
        grad_sync: What this rank has in common with others.
        continuation: Goes on where a checkpoint was written.
        loading: Prepares loaders.
        archive: Saves and loads; there once the module has been divided.
        transfer: Around batch-transfer hooks.
        is_cut: Whether steps are.
        is_gathered: Whether the module was divided and is whole again.
        pipeline: What a step is made of; ``None`` if Lightning's own way is right, because nothing is cut.
        training: Runs training batches, likewise.
        evaluation: Runs evaluation batches, likewise.
    """

    def __init__(
        self,
        settings: HybridConfig,
        sizes: tuple[int, int, int],
        device: torch.device,
        started: WeakSet[LightningModule],
    ) -> None:
        self._settings, self._started = settings, started
        self._device, self._sizes = device, sizes
        self.is_cut = self.is_gathered = False
        self.mesh = Mesh(*sizes, rank_order=settings.rank_order, device_type=device.type, timeout=settings.timeout)
        world = dist.group.WORLD
        assert world is not None
        self.board = FailureStore(world.get_group_store(), broadcast_object(str(next(_RUNS)), 0, world))
        self.departure = ExceptionCallback(self.board, self.abandon)
        self._seed: int = broadcast_object(torch.initial_seed(), 0, world)
        self._streams = RandomStreams(self._seed, self.mesh.data_rank, device)
        self.continuation = ResumeCallback(self.mesh, self._streams, device)
        self.loading = DataLoaderPreparer(self.mesh, device, self.continuation, share=settings.broadcast_batches)
        if dist.get_backend() == "nccl":
            self.board.watch(close_groups)
        self._engine: Engine | None = None
        self._hook: AfterHook | None = None
        self._module: LightningModule | None = None
        self.pipeline: StepContext | None = None
        self._boundary: EpochSync | None = None
        self._adjustments: Patches | None = None
        self.batch_start = BatchStart(self._streams)
        self.transfer = SeededTransfer(self._streams, alone=self.mesh.model_group.size() == 1)
        self._mixing = ExitStack()
        self._moves_microbatches: bool | None = None
        self._callbacks: list[Callback] = []
        self.training: TrainingStep | None = None
        self.evaluation: EvaluationStep | None = None

    def attach(self, module: LightningModule) -> None:
        """From here on this is the user's module."""
        if module is not self._module:
            self._module, self._division = module, self._new_division(module)
            self.is_cut = self._settings.cut(self._sizes, module)
            if module.trainer.ckpt_path is None and module not in self._started:  # what is resumed or trained wins
                self._division.source = self._settings.initial_weights
        self.loading.attach(module.trainer)
        if self.mesh.tensor_parallel_size > 1 or self._settings.zero_stage:
            # Optimizers and callbacks compute with lists of parameters, of which some are divided and some are not.
            self._mixing.enter_context(implicit_replication())
        self.departure.install(module.trainer)
        check_trainer(module.trainer, module, num_stages=self._division.num_stages)

    def divide_early(self) -> None:
        """Put placeholders as soon as there is a body: now, or on leaving the hook that makes it, whoever calls that.

        Callbacks that average weights do, and copy the module right after it.
        """
        assert self._module is not None
        if is_overridden("configure_model", self._module) and not self._division.is_done:
            self._hook = AfterHook(self._module, "configure_model", self.divide)
            return
        try:
            self.divide()
        except ValueError:  # on every rank
            if not is_overridden("setup", self._module):
                raise
            self._hook = AfterHook(self._module, "setup", self.divide)

    def divide(self) -> None:
        """Put placeholders for what other stages hold; once for each module.

        Raises:
            ValueError: If there is no body, or it has fewer layers than there are stages; on every rank.
            TypeError: If the body cannot be divided; on every rank.
        """
        if self._division.is_done:
            return
        assert self._module is not None
        self._division()
        self._started.add(self._module)
        self.is_gathered = False
        self.archive = self._new_archive(self._module)

    def _new_division(self, module: LightningModule) -> ModuleParallelizer:
        return ModuleParallelizer(module, self._settings, self.mesh, self._device, self._seed)

    def _new_archive(self, module: LightningModule) -> Checkpointer:
        return Checkpointer(module, self._division.stage_map, self.mesh, self._settings, self.continuation)

    def load_weights(self, source: Source) -> None:
        """Take weights from elsewhere, on every rank."""
        self._division.load(source)

    def gather(self) -> None:
        """Undo the division, on every rank."""
        is_whole = self.mesh.model_group.size() == 1 and not self._settings.zero_stage
        if is_whole or self._module is None or not self._division.is_done:
            return
        self.archive.finish()
        if hasattr(self, "grad_sync") and self.grad_sync.wholes is not None:
            self.grad_sync.wholes.remove()
        self._division.undo()
        self._division, self.is_gathered = self._new_division(self._module), True
        self.archive = self._new_archive(self._module)
        self.training = self.evaluation = cast(Any, refuse_step)

    # -- putting the parts together ------------------------------------------------------------------------------------

    def assemble(self, *, sync_batch_norm: bool) -> None:
        """Make the parts that need the module on its device; all ranks start with equal values.

        Raises:
            ValueError: If the body is not the one that was divided; on every rank.
        """
        module = self._module
        assert module is not None
        settings = self._settings
        agree(self._division.check)
        self.archive.open()
        stage_map, adds_up = self._division.stage_map, self._division.adds_up
        options: dict[str, Any] = {
            "sync_batch_norm": sync_batch_norm,
            "adds_up": adds_up,
            "wholes": self._division.make_wholes(),
            "wide": settings.float32_gradients,
        }
        self.grad_sync = GradientSync(module, stage_map, self.mesh, **options)
        self.grad_sync.broadcast_parameters()
        self.offload = Offload(settings.offload, self._device)
        self.around_forwards = self._division.around_forwards(self.offload, self.grad_sync.forms)
        if not self.is_cut:
            self.pipeline = self.training = self.evaluation = None
            return
        if self._engine is None:
            channels = make_channels(
                self.mesh, settings.num_chunks, self._device, dynamic_shapes=settings.dynamic_shapes
            )
            self._engine = Engine(self.mesh.pipeline_rank, channels)
        parts = module, self._division.body, stage_map, self.mesh, self._streams, self.board, self._device, self._engine
        self.pipeline = StepContext(*parts, self.around_forwards)
        self.training = TrainingStep(
            self.pipeline,
            self.grad_sync,
            schedule=settings.schedule,
            num_microbatches=settings.num_microbatches,
            loss_reduction=settings.loss_reduction,
        )
        self.evaluation = EvaluationStep(
            self.pipeline, settings.num_microbatches, dynamic_shapes=settings.dynamic_shapes
        )

    def install(self, trainer: Trainer) -> None:
        """Take the places in the Trainer and the module that are needed during a run."""
        estimate = partial(self._division.estimate_memory, trainer.strategy.optimizers)
        self._callbacks = [self.continuation, MemoryReport(estimate, memory_table, self.mesh), self.batch_start]
        trainer.callbacks[:0] = self._callbacks[:2]  # type: ignore[attr-defined]
        if self.grad_sync.wholes is not None:
            self.grad_sync.wholes.follow(trainer.strategy.optimizers)
        if self.pipeline is None or self._module is None:
            return
        mesh = self.mesh
        self._moves_microbatches = None
        self._adjustments = Patches(self._module, mesh)
        self._adjustments.install(trainer)
        self.pipeline.metrics.install()
        source = (mesh.pipeline_parallel_size - 1) * mesh.tensor_parallel_size
        layers = list(self._division.body[1]) if self._division.body else ()
        self._boundary = EpochSync(self._module, mesh.control_group, source=source, layers=layers)
        self._boundary.install(trainer)
        if mesh.model_group.size() > 1:
            trainer.callbacks.insert(0, self.batch_start)  # type: ignore[attr-defined]
        self.transfer.install(self._module)

    def remove(self, trainer: Trainer) -> None:
        """Undo :meth:`attach` and :meth:`install`, and take hooks off parameters."""
        self._mixing.close()
        self.loading.detach(trainer)
        if self._hook is not None:
            self._hook.forget()
        self.continuation.close(trainer)
        self.departure.remove(trainer)
        trainer.callbacks = [each for each in trainer.callbacks if each not in self._callbacks]  # type: ignore[attr-defined]
        if hasattr(self, "grad_sync"):
            self.grad_sync.remove()
        if self.pipeline is None or self._boundary is None or self._module is None or self._adjustments is None:
            return
        self._adjustments.remove()
        self.pipeline.metrics.remove()
        self._boundary.remove(trainer)
        self.batch_start.close()
        self._boundary = None
        self.transfer.remove(self._module)
        if not self.board.failed:
            self.pipeline.engine.retire()

    def close(self) -> None:
        """Wait for what is still being written.

        Raises:
            OSError: If it could not be written.
        """
        if hasattr(self, "archive") and not self.board.failed:
            self.archive.close()

    def abandon(self) -> None:
        """Let go of everything that is under way, after a failure."""
        if self._engine is not None:
            self._engine.abandon()
        self.mesh.abandon()
        if self._module is not None:
            self._module._device_mesh = None
        if hasattr(self, "grad_sync"):
            self.grad_sync.abandon()

    # -- data and random numbers -----------------------------------------------------------------------------------

    @property
    def moves_microbatches(self) -> bool:
        """Whether training batches stay on the host, and their micro-batches move when they are needed."""
        if self._moves_microbatches is None and self._module is not None:
            on_cuda = self.is_cut and self._device.type == "cuda"
            self._moves_microbatches = on_cuda and not onlookers(self._module)
        return bool(self._moves_microbatches)

    def next_evaluation(self) -> int:
        """A number for each evaluation batch."""
        return self._streams.next_number("evaluation batches")
