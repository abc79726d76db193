"""The objects of a strategy, in three classes by lifetime: the process groups, the attached module, and one run.

::

    World             process groups created ................................................ and destroyed
    AttachedModule          module attached, sharded, its checkpoints ..... another module
    Run                          setup ... steps ... teardown    setup ... steps ... teardown

`HybridStrategy` creates all three in its hooks: `World` and `AttachedModule` in `setup_environment`, `Run` in `setup`.
They are separate, because process groups are expensive and serve several runs, and because the optimizers of a run
refer to the shards of a module after the run.

To *attach* a module is to make its :class:`AttachedModule`. To *divide* it is to replace tensors of other stages by
*placeholders*, which have no values, and to shard the other tensors. The *body* is the set of layers that the pipeline
splits into stages. A *follower* is an object that is notified when parameters move to other stages. A *step* is a call
of the user's `training_step` and so on; the strategy *runs* the steps if Lightning does not call them itself.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import cached_property, partial
from typing import Any, Protocol
from weakref import WeakSet

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import nn

from lightning_hybrid.axes import Sizes
from lightning_hybrid.checkpoint.checkpointer import Checkpointer
from lightning_hybrid.checkpoint.optimizer_state import OptimizerStates
from lightning_hybrid.checkpoint.parts import mark_parts, refuse_calls, refuse_parts
from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.data_parallel.master_weights import MasterWeights, NoMasterWeights
from lightning_hybrid.data_parallel.parameter_map import Follower
from lightning_hybrid.distributed.agreement import RankInfo, agree
from lightning_hybrid.distributed.arrangement import arrange
from lightning_hybrid.distributed.dtensor import is_zero_sharded
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.leaf_readers import LeafFetch
from lightning_hybrid.distributed.mixed_operations import mixed_operations
from lightning_hybrid.distributed.process_group import equally_many_groups
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.distributed.watch.desync import Desync
from lightning_hybrid.distributed.watch.flight_recorder import read_collectives
from lightning_hybrid.distributed.watch.verdict.stall import Position
from lightning_hybrid.memory.offload import Offload
from lightning_hybrid.memory.report import MemoryReport
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.links.step_schedules import find_placement
from lightning_hybrid.pipeline_parallel.p2p import make_channels
from lightning_hybrid.pipeline_parallel.recorder import Recorder
from lightning_hybrid.strategy.checks import check_modules, check_own_parts
from lightning_hybrid.strategy.collectives import StepCollectives
from lightning_hybrid.strategy.gather import AFTER_ERROR, NOT_ASKED, RefusedStep, why_not_gathered
from lightning_hybrid.strategy.layout import is_cut, misplaced_text
from lightning_hybrid.strategy.parallelize import ModuleParallelizer
from lightning_hybrid.strategy.patches import AfterHook, add_callbacks, patches, remove_callbacks
from lightning_hybrid.strategy.summary import memory_table, placed_text
from lightning_hybrid.strategy.watch.run_watch import RunWatch
from lightning_hybrid.strategy.watch.start_watch import StartWatch
from lightning_hybrid.trainer import lightning_internals
from lightning_hybrid.trainer.batch_hooks import SeededBatchHooks, batch_reading_hooks
from lightning_hybrid.trainer.dataloader import DataLoaderPreparer
from lightning_hybrid.trainer.debug.anomaly_detection import AnomalyDetector
from lightning_hybrid.trainer.debug.desync import StepDesync, refusing
from lightning_hybrid.trainer.debug.half_precision import warning_of_half_precision
from lightning_hybrid.trainer.debug.nonfinite_gradients import GradientWatch, NonfiniteGuard, SkippedSteps
from lightning_hybrid.trainer.debug.position import find_position, place_text
from lightning_hybrid.trainer.evaluation_step import EvaluationStep, UncutEvaluationStep
from lightning_hybrid.trainer.exceptions import ExceptionCallback
from lightning_hybrid.trainer.gradient_functions import GradientFunctions
from lightning_hybrid.trainer.manual_step import ManualTrainingStep
from lightning_hybrid.trainer.program.make_program import make_program
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.results.epoch_sync import EpochSync
from lightning_hybrid.trainer.results.terminal import lines_beside_bars
from lightning_hybrid.trainer.resume.resume import ResumeCallback
from lightning_hybrid.trainer.training_step import TrainingStep, UncutTrainingStep


class _InFlight(Protocol):
    """An object that refers to process groups, or has work in flight on them."""

    def abandon(self) -> None:
        """Drop the references and the work, after a failure."""


class World:
    """The objects that exist as long as the process groups, for any number of runs.

    The strategy has already started the group of all ranks. The constructor makes the smaller groups of the device
    mesh, so every rank must call it.

    Args:
        config: The arguments of the strategy.
        sizes: The number of ranks along each axis.
        device: The device of this process.
        start: The watch of this rank before the first run; `RunWatch` continues it.
        ranks: Information about each rank, from the rank itself.

    Attributes:
        config: The argument `config`.
        sizes: The argument `sizes`.
        device: The argument `device`.
        seed: The global seed, from rank 0.
        connections: The connections of the process groups.
        mesh: The device mesh.
        failures: The record of the first failure.
        watch: The watch thread of a run, which looks for failures of other ranks.
        desync: Compares the actions of ranks.
        streams: The random streams of this rank.
        engine: Runs schedules.
        exceptions: The callback that leaves the groups after a failure.
        resume: The callback that resumes from a checkpoint.
        loaders: Prepares data loaders.
        batch_hooks: The callback that seeds batch hooks.
        in_flight: Objects to abandon after a failure, in addition to the engine and the mesh.
    """

    def __init__(
        self,
        config: Settings,
        sizes: Sizes,
        device: torch.device,
        start: StartWatch,
        ranks: Sequence[RankInfo],
    ) -> None:
        self.config, self.sizes, self.device, self.seed = config, sizes, device, ranks[0].seed
        self.connections = connections = start.connections
        before, hosts = read_collectives().last, [each.host for each in ranks]
        axes: dict[str, Any] = {
            "rank_order": config.axis_order,
            "device_type": device.type,
            "timeout": config.time_limit,
        }
        arrangement = arrange(config.tensor_parallel_mode, sizes.tensor, config.tensor_parallel_depth)
        axes |= {"arrangement": arrangement, "writes_together": config.save_distributed_checkpoint}
        axes |= {"zero_size": config.zero_size if config.zero_stage else None}
        axes |= {"expert_parallel_size": config.expert_parallel_size}
        axes |= {"expert_zero_size": config.num_expert_shards(config.num_shards(sizes.num_replicas))}
        placement = find_placement(config, sizes.pipeline)
        with connections.opened(), equally_many_groups(max(each.num_groups for each in ranks)):
            self.mesh = Mesh(sizes, **axes, hosts=hosts)
            channels = make_channels(self.mesh, placement, device, dynamic_shapes=config.dynamic_shapes)
        self.failures, store, watched = start.failures, start.store, start.watched
        groups = [self.mesh.model_ranks(replica) for replica in range(self.mesh.num_replicas)]
        limit = config.seconds_to_time_out
        self.desync = Desync(self.failures, start.board, start.watched_board, model_groups=groups, timeout=limit)
        self.streams = RandomStreams(self.seed, self.mesh.data_rank, device)
        self.engine = Engine(self.mesh.pipeline_rank, channels)
        fetch = LeafFetch(store, watched, start.board.key, lambda: self.failures.failed or self.failures.is_over)
        seen = self.mesh, self.engine, start
        stall, position = config.seconds_to_stall, self._position
        self.watch = RunWatch(*seen, stall=stall, since=before, desync=self.desync, fetch=fetch, position=position)
        self.in_flight: WeakSet[_InFlight] = WeakSet()
        self._mixed_operations = ExitStack()
        self.exceptions = ExceptionCallback(self.failures, self.abandon, self._place)
        self.resume = ResumeCallback(self.mesh, self.streams, device)
        selects = self.mesh.sizes.pipeline > 1 and not config.dynamic_shapes
        given = self.mesh, device, self.resume
        self.loaders = DataLoaderPreparer(
            *given,
            share=config.broadcast_batches,
            fetch=fetch if selects else None,
            predicts_alone=not config.shards_over_replicas,
        )
        self.batch_hooks = SeededBatchHooks(self.streams, alone=self.mesh.model_group.size() == 1)

    def open(self, trainer: Trainer) -> None:
        """Prepare the Trainer for a run, before a :class:`Run` exists. :meth:`close` undoes this.

        Args:
            trainer: The Trainer. Its callbacks, data loading and signal handlers are changed.
        """
        self.loaders.attach(trainer)
        if self.mesh.sizes.tensor > 1 or self.config.shards_over_replicas:
            self._mixed_operations.enter_context(mixed_operations())
        add_callbacks(trainer, self.exceptions)
        if dist.get_world_size() > 1:
            self.watch.open(trainer)
            self.resume.open(trainer)

    def _place(self) -> str:
        """Return this rank and its position, as text."""
        return place_text(self.engine, self.mesh, self.watch.trainer)

    def _position(self) -> Position:
        """Return the position of this rank. Called by the watch thread."""
        trainer = self.watch.trainer
        return Position() if trainer is None else find_position(trainer, self.engine, self.mesh)

    def close(self, trainer: Trainer) -> None:
        """Undo :meth:`open` at the end of a run."""
        self.watch.close()
        self._mixed_operations.close()
        self.loaders.detach(trainer)
        self.resume.close()
        remove_callbacks(trainer)
        self.exceptions.close(trainer)

    def abandon(self) -> None:
        """Drop all work in flight and all references to process groups, after a failure."""
        in_flight: list[_InFlight] = [self.engine, self.mesh, *self.in_flight]
        for each in in_flight:
            each.abandon()


class AttachedModule:
    """The user's module, with its parallelization and its checkpoints, over several runs.

    Args:
        world: The objects of the process groups.
        module: The module, which is attached to the Trainer.
        started: Modules that have received their initial weights, in this run or an earlier run.

    Attributes:
        module: The module.
        parallelizer: Parallelizes the module.
        checkpointer: Saves and loads the module as it is sharded now.
        master_weights: The float32 master weights during a run with half-precision parameters, if the run uses them.
    """

    def __init__(self, world: World, module: LightningModule, started: WeakSet[LightningModule]) -> None:
        self.module, self._started = module, started
        self.parallelizer = self._new_parallelizer(world)
        if module.trainer.ckpt_path is None and module not in started:  # resumed or trained weights are kept
            self.parallelizer.source = world.config.initial_weights
        self._world = world
        self.master_weights: MasterWeights | NoMasterWeights = NoMasterWeights()
        self._before_configure_model: list[nn.Parameter] | None = None
        self._hook: AfterHook | None = None
        self._optimizers = OptimizerStates(module)
        self.checkpointer = self._new_checkpointer()
        world.in_flight.add(self)

    def _new_parallelizer(self, world: World, before: ModuleParallelizer | None = None) -> ModuleParallelizer:
        return ModuleParallelizer(self.module, world.config, world.mesh, world.device, world.seed, before)

    def _new_checkpointer(self) -> Checkpointer:
        world = self._world
        return Checkpointer(self.module, self.parallelizer.parameters, world.config, world.resume, self._optimizers)

    def divide_early(self) -> None:
        """Call :meth:`divide` as soon as the body exists: now, or when `configure_model` or `setup` returns.

        Callbacks that average weights call `configure_model` themselves, and copy the module right after the call.
        """
        mark_parts(self.module)  # after an earlier run, the module may refuse calls
        if is_overridden("configure_model", self.module) and not self.parallelizer.is_done:
            self._before_configure_model = list(self.module.parameters())
            self._hook = AfterHook(self.module, "configure_model", self.divide)
            return
        try:
            self.divide()
        except ValueError:  # raised on every rank
            if not is_overridden("setup", self.module):
                raise
            self._hook = AfterHook(self.module, "setup", self.divide)

    def divide(self) -> None:
        """Shard the module, and put placeholders for parameters of other stages. A second call does nothing.

        All ranks must call this.

        Raises:
            ValueError: If the module differs between ranks; on every rank. Also the errors of
                :meth:`ModuleParallelizer.__call__`.
            TypeError: If the body cannot be split; on every rank.
        """
        if self.parallelizer.is_done:
            return
        check_modules(self.module)
        before, self._before_configure_model = self._before_configure_model, None
        if before is not None and self._world.mesh.sizes.tensor > 1:
            check_own_parts(self.module, before, self._world.mesh)
        self.parallelizer()
        mark_parts(self.module)
        self._started.add(self.module)
        self.checkpointer = self._new_checkpointer()

    def gather(self, run: Run | None) -> None:
        """Gather the full module on every rank. All ranks must call this; it does nothing if nothing is sharded.

        Args:
            run: The run with the module, or ``None``. Its steps raise an error from now on.

        Raises:
            ValueError: If other code has sharded layers of the module; on every rank.
            OSError: If a checkpoint that was still being written could not be written; on every rank.
        """
        if not self._is_divided:
            return
        self.checkpointer.finish()
        if run is not None:
            run.stop_steps()
        self.master_weights.remove()
        self._optimizers.remember_names(self.module.trainer.strategy.optimizers)
        self.parallelizer.undo()
        mark_parts(self.module)
        # The checkpointer stays the same, because it knows which rank has which optimizer states.
        self.parallelizer = self._new_parallelizer(self._world, self.parallelizer)

    @property
    def _is_divided(self) -> bool:
        mesh = self._world.mesh
        is_split = mesh.sizes.num_ranks > mesh.num_replicas
        return self.parallelizer.is_done and (is_split or self._world.config.shards_over_replicas)

    def end_run(self, run: Run | None) -> None:
        """Gather the module after a run if `gather_module_on_teardown` requires it; otherwise mark it as sharded.

        A sharded module refuses uses that need the full module. All ranks must call this, except after a failure or an
        interruption: other ranks may have exited then, so no collective starts.

        Args:
            run: The run, or ``None`` if it had not begun.
        """
        asked, failures = self._world.config.gather_module_on_teardown, self._world.failures
        if not self._is_divided:
            return
        if self.module.trainer.interrupted or failures.failed or failures.is_leaving:
            refuse_parts(self.module, AFTER_ERROR)
            return
        why, is_possible = None if asked else NOT_ASKED, False
        if asked == "auto":
            why, is_possible = why_not_gathered(self.module, self.parallelizer.plan, self._world.mesh)
        if why is None:
            self.gather(run)
            return
        if asked:
            rank_zero_info(why)
        if is_possible:
            refuse_parts(self.module, why)
        else:  # all ranks together can call tensor-parallel layers, but not layers with ZeRO shards
            refuse_calls(self.module, why, is_zero_sharded)

    def detach(self) -> None:
        """Remove the hook that parallelizes the module, because the run is over."""
        if self._hook is not None:
            self._hook.remove()

    def close(self) -> None:
        """Wait for checkpoints that are still being written, without communication; after a failure, do not wait.

        Raises:
            OSError: If this rank could not write a checkpoint.
        """
        if not self._world.failures.failed:
            self.checkpointer.close()

    def abandon(self) -> None:
        """Drop torch's device mesh, which refers to the group of all ranks."""
        lightning_internals.set_device_mesh(self.module, None)


class Run:
    """One run of the Trainer with a parallelized module that is already on its device.

    The constructor is a collective of all ranks: it broadcasts the values of parameters and buffers, so that all ranks
    with a copy begin with equal values. :meth:`install` then changes the Trainer and the module, and :meth:`remove`
    undoes both.

    Args:
        world: The objects of the process groups.
        attached: The module.
        sync_batch_norm: If True, batch norm computes its statistics over the replicas.
        autocasts: True if the precision plugin runs steps under autocast.

    Attributes:
        grad_sync: Synchronizes gradients and parameters with other ranks.
        context: The context of the user's steps; ``None`` if the strategy does not run them, see :func:`is_cut`.
        offload: Moves optimizer states and activations to the host.
        training_step: Runs training batches.
        evaluation_step: Runs evaluation batches.
        nonfinite: Prevents optimizer steps with gradients that are not finite; ``None`` without this check.
        is_installed: True between :meth:`install` and :meth:`remove`.

    Raises:
        ValueError: If the body has changed since the module was parallelized, if `recompute` matches no layer, or if
            nodes do not share the folder of checkpoint directories; on every rank.
        TypeError: If `recompute` needs a body that cannot be split; on every rank.
        OSError: If a node cannot write to the folder of checkpoint directories; on every rank.
    """

    def __init__(self, world: World, attached: AttachedModule, *, sync_batch_norm: bool, autocasts: bool) -> None:
        config, parallelizer = world.config, attached.parallelizer
        self._world, self._attached = world, attached
        self.context: StepContext | None = None
        self.nonfinite: NonfiniteGuard | None = None
        self.is_installed = False
        self.training_step: TrainingStep | ManualTrainingStep | UncutTrainingStep | RefusedStep
        self.evaluation_step: EvaluationStep | UncutEvaluationStep | RefusedStep
        agree(parallelizer.check)
        attached.checkpointer.open()
        with world.connections.opened(), ExitStack() as undo:  # undone also if a later line raises an error
            self.grad_sync = GradientSync(
                parallelizer.parameters,
                sync_batch_norm=sync_batch_norm,
                adds_up=parallelizer.adds_up,
                make_zero=parallelizer.make_zero,
                float32_gradients=config.tuning.float32_gradients,
                rounds_gradients=not config.master_weights,
            )
            undo.callback(self.grad_sync.remove)
            with attached.master_weights.opened():
                self.grad_sync.broadcast_parameters()
            world.in_flight.add(self.grad_sync)
            self.offload = Offload(config.offloaded, world.device)
            around_forwards = parallelizer.around_forwards(self.offload, self.grad_sync.local_parameters)
            self._make_steps(around_forwards, autocasts=autocasts)
            undo.enter_context(parallelizer.parameters.followed_by(*self._followers()))
            self._installed = undo.pop_all()

    def _make_steps(self, around_forwards: Callable[[], AbstractContextManager[None]], *, autocasts: bool) -> None:
        world, module, config = self._world, self._attached.module, self._world.config
        if not is_cut(config, world.sizes, module):
            self.training_step = UncutTrainingStep(
                module, self.grad_sync, world.mesh, world.device, config, around_forwards
            )
            self.evaluation_step = UncutEvaluationStep(module, self.grad_sync)
            return
        self.context = StepContext(
            module,
            self._attached.parallelizer.body,
            self._attached.parallelizer.parameters,
            streams=world.streams,
            failures=world.failures,
            abandon=world.abandon,
            desync=world.desync,
            device=world.device,
            engine=world.engine,
            around_forwards=around_forwards,
            context_parallel=self._attached.parallelizer.context_parallel,
            remembers=not config.dynamic_shapes,
        )
        self.context.program = make_program(
            self.context,
            self._attached.parallelizer.body,
            self.grad_sync,
            num_microbatches=config.num_microbatches,
            frees_early=config.zero_stage == 3 and config.frees_early,
            can_open=self._attached.parallelizer.fits_units,
        )
        if module.automatic_optimization:
            self.training_step = TrainingStep(
                self.context,
                self.grad_sync,
                config,
                place_parameters=self._place_parameters,
                shares_casts=autocasts and config.shares_casts,
            )
        else:
            self.training_step = ManualTrainingStep(self.context, self.grad_sync)
        is_alone = world.mesh.model_group.size() == 1
        self.evaluation_step = (
            UncutEvaluationStep(module, self.grad_sync) if is_alone else EvaluationStep(self.context, self.grad_sync)
        )

    def _followers(self) -> list[Follower]:
        """Return the parts of the run that depend on the places of parameters, in the order of their updates."""
        attached = self._attached
        context = [] if self.context is None else [self.context]
        return [attached.parallelizer, attached.checkpointer, attached.master_weights, self.grad_sync, *context]

    def _place_parameters(self, used: Mapping[str, Collection[int]] | None) -> None:
        """Move parameters outside the layers to the stages that use them in the first training batch.

        `TrainingStep` calls this once, on every rank.

        Args:
            used: The argument of :meth:`ModuleParallelizer.find_outside`.
        """
        parallelizer = self._attached.parallelizer
        outside = parallelizer.find_outside(used)
        if not outside:
            return
        self._attached.checkpointer.finish()  # sockets of an upload must not be taken for sockets of process groups
        with self._world.connections.opened():
            parallelizer.parameters.move(outside)
        rank_zero_info(placed_text(outside))
        misplaced = misplaced_text(self._attached.module, parallelizer.stage_map)
        if misplaced is not None:
            rank_zero_warn(misplaced)

    @property
    def moves_batches(self) -> bool:
        """True if the Trainer's current loop moves batches to the device as a whole.

        In training, microbatches are moved when they are needed, unless a hook reads the batch before. In evaluation of
        a chain (an `nn.Sequential` that the step calls as a whole), only the first and the last stage read batches. On
        the CPU, batches need no copy, so the Trainer moves all of them. It also does so if the strategy does not run
        the steps.
        """
        context, trains = self.context, self._attached.module.trainer.training
        if context is None or self._world.device.type == "cpu":
            return True
        return (not trains and any(map(context.program.has_code, context.layers))) or self._hooks_read[trains]

    @cached_property
    def _hooks_read(self) -> tuple[bool, bool]:
        """True if hooks read evaluation batches, and True if hooks read training batches."""
        module = self._attached.module
        return bool(batch_reading_hooks(module, training=False)), bool(batch_reading_hooks(module))

    @property
    def has_actions(self) -> bool:
        """True if the strategy runs the steps by a schedule, whose actions can be recorded."""
        return self.context is not None

    def record(self) -> Recorder | None:
        """Record the beginning and end of each action of the schedule, until :meth:`stop_recording`.

        The callback `HybridTimeline` calls this.

        Returns:
            The recorder; ``None`` without actions.
        """
        if self.context is not None:
            self.context.recorder = Recorder(self.context.engine, self._world.device)
            return self.context.recorder
        return None

    def stop_recording(self) -> None:
        """Stop recording."""
        if self.context is not None:
            self.context.recorder = None

    def stop_steps(self) -> None:
        """Make all further steps of this run raise an error, before the module is gathered."""
        self.grad_sync.zero.remove()
        self.training_step = self.evaluation_step = RefusedStep()

    def install(
        self,
        trainer: Trainer,
        closure: Callable[..., Closure] | None = None,
        nonfinite: GradientWatch | None = None,
        gradient_functions: GradientFunctions | None = None,
    ) -> None:
        """Install all other changes to the Trainer and the module that a run needs. :meth:`remove` undoes them.

        Args:
            trainer: The Trainer, with its optimizers.
            closure: Creates the closures of automatic optimization; ``None`` if the run only evaluates.
            nonfinite: Checks gradients before an optimizer step; ``None`` if the run only evaluates.
            gradient_functions: Makes functions over gradients, such as `clip_grad_norm_`, use the gradients of all
                ranks; ``None`` if this rank has all gradients.
        """
        world, module, undo = self._world, self._attached.module, self._installed
        self.is_installed = True
        undo.enter_context(lines_beside_bars(world.mesh))
        self.grad_sync.follow(lambda: trainer.strategy.optimizers)
        estimate = partial(self._attached.parallelizer.estimate_memory, trainer.strategy.optimizers)
        add_callbacks(trainer, world.resume, MemoryReport(estimate, memory_table, world.mesh))
        desync = self.context.desync if self.context else StepDesync(module, world.mesh, world.desync, refusing)
        undo.enter_context(desync.noting_reductions(trainer))
        if closure is not None:
            undo.enter_context(lightning_internals.replace_closure(trainer, closure))
        undo.enter_context(warning_of_half_precision(trainer, module))
        if gradient_functions is not None:
            undo.enter_context(gradient_functions.installed())
        if nonfinite is not None:
            undo.enter_context(nonfinite.in_steps(trainer))
        if isinstance(nonfinite, NonfiniteGuard):
            self.nonfinite = nonfinite
            add_callbacks(trainer, SkippedSteps(nonfinite))
        self._detect_anomaly(trainer)
        if self.context is None:
            return
        undo.enter_context(patches(trainer, module, world.mesh))
        if world.mesh.sizes.pipeline > 1:
            undo.enter_context(StepCollectives(world.mesh, self.context).installed())
        undo.enter_context(self.context.metrics.installed())
        source = world.mesh.model_group_rank(self.context.placement.ranks[-1], 0)
        body = self._attached.parallelizer.body
        epoch_sync = EpochSync(module, world.mesh.control_group, source=source, layers=body.layers if body else ())
        add_callbacks(trainer, epoch_sync)
        undo.enter_context(epoch_sync.installed(trainer))
        if world.mesh.model_group.size() > 1:
            add_callbacks(trainer, world.batch_hooks)
        undo.enter_context(world.batch_hooks.installed(module))

    def _detect_anomaly(self, trainer: Trainer) -> None:
        if not lightning_internals.detects_anomaly(trainer) or isinstance(self.training_step, RefusedStep):
            return
        detector = AnomalyDetector(
            self._attached.module,
            self._world.engine,
            unfollowed=nullcontext if self.context is None else self.context.unfollowed,
            scales=getattr(trainer.precision_plugin, "scaler", None) is not None,
        )
        self.training_step.anomaly = detector
        self._installed.callback(detector.remove)

    def remove(self) -> None:
        """Undo :meth:`install` and the hooks of the constructor, and wait for sends in flight."""
        self.is_installed = False
        self._installed.close()
        if not self._world.failures.failed:
            self._world.engine.retire()
            self._world.mesh.retire()
