"""The state that the steps of a run share on one rank: the step program, the layers, and the recorders of results.

`Run` makes one :class:`StepContext`, unless it runs the user's steps as they are. `TrainingStep`, `ManualTrainingStep`,
`EvaluationStep`, `MicrobatchComparison` and the step program use it for each batch: :meth:`StepContext.step` around the
user's code, :meth:`StepContext.enter_user_code` before each call of it, and :meth:`StepContext.share` after the last
stage has finished. One object holds all this, because training and evaluation differ only in their schedules and
weights, and because communication keys and findings of earlier steps must outlive a step.

To *trace* a step is to run its code with fake tensors and to record its calls. A *model group* is the set of ranks that
together hold one replica of the model.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import Tensor

from lightning_hybrid.data_parallel.parameter_map import ParameterMap
from lightning_hybrid.distributed.factories import plain_factories
from lightning_hybrid.distributed.failure import WrongUseError, add_note, is_transport
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.distributed.watch.desync import Desync
from lightning_hybrid.distributed.watch.failures import Failures
from lightning_hybrid.pipeline_parallel.body import Body, BodyWatch
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.frame.path_change import Choice
from lightning_hybrid.pipeline_parallel.frame.plan import FramePlan
from lightning_hybrid.pipeline_parallel.p2p import MOST_FORMATS
from lightning_hybrid.pipeline_parallel.recorder import Recorder
from lightning_hybrid.pipeline_parallel.splitting.split_watch import microbatch_text
from lightning_hybrid.tensor_parallel.context_parallel.context_parallel import ContextParallel
from lightning_hybrid.tensor_parallel.layers import original_classes
from lightning_hybrid.tensor_parallel.shape_errors import explain_shape_error
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from lightning_hybrid.torch_internals import DisableTorchFunctionSubclass, is_profiling
from lightning_hybrid.trainer.debug.desync import StepDesync
from lightning_hybrid.trainer.debug.position import place_text
from lightning_hybrid.trainer.lightning_internals import attached_trainer
from lightning_hybrid.trainer.program.program import StepCall, StepProgram
from lightning_hybrid.trainer.results.logger_proxy import LoggerProxy, make_calls, pack_calls
from lightning_hybrid.trainer.results.logging import Log, LogRecorder, pack_logs, replay, unpack_logs
from lightning_hybrid.trainer.results.metrics import MetricsAcrossStages
from lightning_hybrid.trainer.results.module_attributes import assign_scalars, pack_scalars, scalars

_KEYS = count()  # unique in the process: channels outlive a run, and must not confuse keys of different runs


class StepContext:
    """The objects that every step of a run needs. Training and evaluation add the schedule and the weights.

    Args:
        module: The user's module, with placeholders for parameters of other stages.
        body: The layers that are divided into stages; ``None`` if there is one stage.
        parameters: The places of the module's tensors.
        streams: The random streams.
        failures: Reports a failure of this rank to the other ranks.
        abandon: Abandons all communication in flight, after a failure.
        desync: Compares the actions of ranks.
        device: The device of this rank.
        engine: Runs the schedules. It outlives this object.
        around_forwards: Makes the context of forwards, which decides what layers keep for backward, and where.
        context_parallel: Splits sequences over ranks; ``None`` without context parallelism.
        remembers: True if findings about a step hold for later steps with equal shapes.

    Attributes:
        module, streams, device, engine: As above.
        parameter_map: The argument `parameters`.
        mesh: The ranks, from the parameter map.
        placement: The pipeline rank of each stage, from the parameter map.
        num_stages: The number of stages, over all ranks.
        is_first: True if this rank has the first stage.
        is_last: True if this rank has the last stage.
        program: The step program, which the run sets before the first step. It may replace itself during a run.
        remembers: True if findings about a step hold for later steps with equal shapes.
        all_layers: The layers of all stages.
        shards_activations: True if layers may return activations that are sharded over ranks, see :meth:`plain`.
        layers: The layers of each stage of this rank.
        desync: Compares the steps of this rank with other ranks.
        in_step: True during a step that is divided into stages. `StepCollectives` then refuses collectives of the
            user's code over several stages.
        is_following: True while the step is only traced.
        recorder: Records the start and end of each action in a step; ``None`` if no recording is requested.
        metrics: The metrics of the module, which only the last stage updates.
        counts: The number of samples of each microbatch of the current or last training batch; empty before.
    """

    counts: Sequence[int] = ()
    program: StepProgram

    def __init__(
        self,
        module: LightningModule,
        body: Body | None,
        parameters: ParameterMap,
        *,
        streams: RandomStreams,
        failures: Failures,
        abandon: Callable[[], None],
        desync: Desync,
        device: torch.device,
        engine: Engine,
        around_forwards: Callable[[], AbstractContextManager[None]],
        context_parallel: ContextParallel | None,
        remembers: bool,
    ) -> None:
        self.module, self.mesh, self.device = module, parameters.mesh, device
        self.parameter_map = parameters
        mesh, stage_map = parameters.mesh, parameters.stage_map
        self.streams, self.engine = streams, engine
        self.placement = stage_map.placement
        self.num_stages = self.placement.num_stages
        self.is_first: bool = mesh.pipeline_rank == self.placement.ranks[0]
        self.is_last: bool = mesh.pipeline_rank == self.placement.ranks[-1]
        self.remembers = remembers
        self._has_shared_layers, self._context_parallel = mesh.sizes.tensor > 1, context_parallel
        self.shards_activations = self._has_shared_layers or context_parallel is not None
        self.in_step, self.is_following = False, False
        self.recorder: Recorder | None = None
        self._failures, self._abandon = failures, abandon
        self.desync = StepDesync(module, mesh, desync, self.guard)
        self._around_forwards = around_forwards
        source = mesh.model_group_rank(self.placement.ranks[-1], 0)
        self._results = mesh.tree_broadcast("results", source, device)
        self._recorder = LogRecorder(module)
        is_source = self._results.is_source and mesh.data_rank == 0
        self._logger_proxy = LoggerProxy(module, self._recorder, is_source=is_source, unfollowed=self.unfollowed)
        self._scalars: dict[str, Any] = {}
        self._is_guarded, self._num_shared = False, 0
        self.metrics = MetricsAcrossStages(
            module,
            mesh.data_group,
            self._results,
            self._recorder.remember_value,
            is_last=self._results.is_source,
            unfollowed=self.unfollowed,
            plain=self.plain if self.shards_activations else None,
        )
        self._keys: defaultdict[Hashable, int] = defaultdict(_KEYS.__next__)
        self._steps: set[Hashable] = set()  # steps that have run, on devices where this matters
        self._parameters = list(module.parameters())
        self.all_layers = body.layers if body else ()
        own = self.placement.stages_of(mesh.pipeline_rank)
        self.layers = {
            stage: [body.layers[index] for index in stage_map.stages[stage]] if body else [] for stage in own
        }
        own_layers = [layer for layers in self.layers.values() for layer in layers]
        self._epoch: Any = None  # the epoch for which metrics were searched
        self._watch = BodyWatch(module, body, own_layers) if body else None

    def release_parameters(self) -> None:
        """Do nothing before parameters move; see :class:`Follower`."""

    def take_parameters(self, placeholders: Mapping[int, Tensor]) -> None:
        """Use the parameters outside the layers that this rank has now; see :class:`Follower`."""
        self.program.parameters_moved()
        self._parameters = list(self.module.parameters())

    def run_layers(self, stage: int, random: AbstractContextManager[None], x: Any) -> Any:
        """Run the layers of a stage of a chain, and return their output.

        Args:
            stage: The stage.
            random: The context with the random stream of the layers.
            x: The output of the previous stage; on the first stage, the input of the chain.
        """
        x = self.received(x)
        with random:
            for layer in self.layers[stage]:
                x = layer(x)
        if stage < self.num_stages - 1:
            return self.plain(x, to_stage=True)
        # Sequences stay sharded in the code around the layers.
        return to_plain_tensors(x) if self._has_shared_layers else x

    def received(self, value: Any) -> Any:
        """Return the output of the previous stage in the form that layers take, with sequences sharded."""
        return value if self._context_parallel is None else self._context_parallel.enter(value)

    def plain(self, value: Any, *, to_stage: bool = False) -> Any:
        """Return a tree in which sharded activations of layers are replaced by plain tensors.

        Args:
            value: A tree.
            to_stage: True if the value is sent to the next stage.
        """
        if self._context_parallel is not None:
            value = self._context_parallel.leave(value, to_stage=to_stage)
        return to_plain_tensors(value) if self._has_shared_layers else value

    def keys(self, version: Hashable, parts: Sequence[Hashable], plans: Sequence[FramePlan] = ()) -> list[int]:
        """Return a number for each microbatch: equal numbers mean equal shapes at stage boundaries.

        Hashing a signature takes as long as a small layer, so it is done once per microbatch instead of once per
        message.

        Args:
            version: A value for everything else that determines the shapes, equal on all ranks: the result of
                :meth:`version`, or the key of a step.
            parts: The signature of each microbatch, or another value that determines its shapes.
            plans: The plan of each microbatch's step, if steps are traced; also part of the key.
        """
        if plans:
            parts = list(zip(parts, [plan.number for plan in plans], strict=True))
        numbers = [self._keys[version, part] for part in parts]
        while len(self._keys) > MOST_FORMATS:  # on every rank at the same step
            del self._keys[next(iter(self._keys))]
        return numbers

    def may_post_early(self, keys: Sequence[int], *others: Hashable) -> bool:
        """Return True if receives may be posted before their messages are sent, and remember that this step has run.

        On a GPU, this is False in the first step of a kind. There, a posted receive is a kernel that runs until its
        message arrives. Loading another kernel at its first call makes CUDA wait for all running kernels. If only one
        host waits, the order of the schedule prevents a deadlock. But in a first step, all hosts load kernels, and wait
        for messages that other hosts have not sent yet
        (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading). All ranks decide alike, because their
        keys are equal. If messages contain their shapes, a receive cannot start before the shapes are read, so no
        receive is posted early.

        Args:
            keys: The keys of the microbatches, from :meth:`keys`.
            others: Other values that determine which kernels run.
        """
        if not self.engine.posts_kernels:
            return True
        if self.engine.has_dynamic_shapes:
            return False
        step = frozenset(keys), len(keys) > 1, others
        if step in self._steps:
            return True
        if len(self._steps) >= MOST_FORMATS:
            self._steps.clear()
        self._steps.add(step)
        return False

    def range(self, name: str) -> AbstractContextManager[None]:
        """Return a named range of the recorder of this step, or of the Trainer's profiler without a recorder."""
        if self.recorder is not None:
            return self.recorder.range(name)
        return self._profiler.profile(f"[pipeline]{name}")

    @property
    def profile(self) -> Callable[[str], AbstractContextManager[None]] | None:
        """Return the function :meth:`range`; ``None`` if neither a recorder nor a profiler is active."""
        listens = self.recorder is not None or not isinstance(self._profiler, PassThroughProfiler)
        return self.range if listens else None

    @property
    def _profiler(self) -> Profiler:
        profiler: Profiler = self.module.trainer.profiler  # type: ignore[attr-defined]
        return profiler

    def version(self, *, gradients: bool) -> Hashable:
        """Return a value that determines which tensors need gradients, and if the module is in training mode.

        It includes placeholders, so all ranks of a model group get the same value.

        Args:
            gradients: True if the schedule has a backward.
        """
        with DisableTorchFunctionSubclass():  # dispatch to placeholders would take 20 times as long
            flags = hash(tuple([parameter.requires_grad for parameter in self._parameters]))
        return gradients, self.module.training, flags

    @contextmanager
    def step(self, *, num_microbatches: int, counts: Sequence[int] = ()) -> Iterator[list[list[Log]]]:
        """Prepare the module for a step: cut the body, record logs, keep metrics local, and protect the random state.

        In the first step of an epoch, this also searches the module for metrics, because hooks may have replaced them.

        Args:
            num_microbatches: The number of runs of the user's step.
            counts: The number of samples of each microbatch; empty if microbatches have no weights.

        Yields:
            A list that receives the logs of each microbatch, on the last stage.

        Raises:
            Exception: Any error inside the context, after :meth:`guard` has reported it.
        """
        trainer = attached_trainer(self.module)
        epoch = None if trainer is None else (trainer.state.stage, trainer.current_epoch)
        if epoch != self._epoch:  # the first step of the epoch, after the hooks of its start
            self._epoch = epoch
            with self.guard():
                self.metrics.find()
        has_metrics = self.metrics.exist
        local = self.metrics.step(num_microbatches=num_microbatches, counts=counts) if has_metrics else nullcontext()
        with (
            self.guard(),
            self.streams.isolated(),
            self._around_forwards(),
            local,
            plain_factories() if self._has_shared_layers else nullcontext(),
            self.program.entered(repeats=num_microbatches > 1),
            self._logger_proxy(),
            self._recorder() as records,
        ):
            if self._watch is not None:
                self._watch.check()
            self._scalars = scalars(self.module) if self.is_last else {}
            self.in_step = self.num_stages > 1
            try:
                yield records
            finally:
                self.in_step = False
            if is_profiling():
                self.engine.retire()

    def forget_step(self) -> None:
        """Prepare to run the step again, after the state of the module was restored.

        The next step searches the module for metrics again, and actions that were recorded are forgotten.
        """
        self._epoch = None
        if self.recorder is not None:
            self.recorder.clear()

    def enter_user_code(self, call: StepCall, *, keep: bool) -> tuple[Any, ...]:
        """Prepare logs, metrics and random numbers for the user's step, and return its arguments on the device.

        Args:
            call: The step that is about to run.
            keep: True if its logs and metrics count; False on other stages than the last stage.
        """
        if self.metrics.exist:
            if keep:
                self.metrics.next_microbatch()
            else:
                self.metrics.uncounted_microbatch()
        if self.is_last:
            self._recorder.next_microbatch(keep=keep)
        self.streams.seed_user(*call.coordinates)
        # Equivalent to `call.arguments`, but without another frame between the engine and the step.
        batch = call.batch if call.device is None else move_data_to_device(call.batch, call.device)
        return batch, *call.others

    @property
    def is_source(self) -> bool:
        """Return True if this rank sends the result of the step to the other ranks of its model group."""
        return self._results.is_source

    def unfollowed(self) -> AbstractContextManager[None]:
        """Return a context for code that is not part of the user's step; see :meth:`StepProgram.unfollowed`."""
        return self.program.unfollowed()

    @contextmanager
    def around_discovery(self) -> Iterator[None]:
        """Enter the context of a step that is traced: layers have full parameters, and logged values are discarded."""
        seen = self._recorder.only_seen(), self._logger_proxy.only_seen(), self.metrics.only_seen()
        whole = nullcontext() if self._context_parallel is None else self._context_parallel.paused()
        self.is_following = True
        try:
            with original_classes(self.module), whole, seen[0], seen[1], seen[2]:
                yield
        finally:
            self.is_following = False

    def share(self, outputs: Callable[[], tuple[Any, list[Log]]], choice: Choice | None = None) -> Any:
        """Send the results of the last stage to every rank of the model group, and log its values there.

        This is a collective operation of the model group. In addition to the value and the logs, the message contains
        `trainer.should_stop`, the numbers and texts that the step has stored in attributes of the module, and calls of
        loggers. All ranks set the attributes and `trainer.should_stop`, and global rank 0 makes the calls. If the step
        runs again, only the choice is sent.

        Args:
            outputs: Returns the value of the step and the merged logs; called only on the rank that sends, see
                :attr:`is_source`.
            choice: On that rank, the way to run the step again; ``None`` if the step is complete.

        Returns:
            The value of the step; the choice if the step runs again.
        """
        trainer = self.module.trainer
        self._num_shared += 1
        self._results.about = self._num_shared
        with self.guard():
            if self._results.is_source:
                tree: dict[str, Any] = {"again": tuple(choice)} if choice else self._pack(*outputs())
                self._results(tree)
            else:
                tree = self._results.receive()
            if "again" in tree:
                return Choice(*tree["again"])
            if not self._results.is_source and "changed" in tree:
                assign_scalars(self.module, tree["changed"])
            trainer.should_stop = "stop" in tree
            if "calls" in tree and trainer.is_global_zero:
                make_calls(tree["calls"], self.module)
        logs = unpack_logs(tree["logs"], self.device)
        if self.desync.has_replicas and trainer.training:
            self.desync.note_logs(logs)
        replay(self.module, logs, alone=self.mesh.num_replicas == 1, on_epoch=not trainer.training)
        return tree["value"]

    def _pack(self, value: Any, logs: list[Log]) -> dict[str, Any]:
        trainer = self.module.trainer
        for log in logs:
            if log.metric is not None:
                on_step = log.arguments.get("on_step")
                by_step = trainer.training if on_step is None else bool(on_step)
                log.value = self.metrics.batch_value(log.metric, on_step=by_step)
        tree = {"value": value, "logs": pack_logs(logs)}
        if self._logger_proxy.calls:
            tree["calls"] = pack_calls(self._logger_proxy.calls)
        changed = pack_scalars(self._scalars, scalars(self.module))
        if changed:
            tree["changed"] = changed
        if trainer.should_stop:
            tree["stop"] = ()  # the key alone is the message, and an empty tuple adds no message
        return tree

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Let a failure inside the context reach the caller instead of ending the run."""
        before, self._is_guarded = self._is_guarded, True
        try:
            yield
        finally:
            self._is_guarded = before

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Report a failure inside the context to all ranks, which then fail with its message; do nothing if nested.

        Raises:
            ValueError: If this rank has raised a `WrongUseError`, with the same message.
            Exception: Another error of this rank; or the failure of another rank, if it is the cause.
        """
        if self._is_guarded:
            yield
            return
        self._is_guarded = True
        try:
            yield
        except Exception as error:
            explain_shape_error(error, self.module)
            self._note_microbatch(error)
            where = place_text(self.engine, self.mesh, self.module.trainer)
            wrong_use = isinstance(error, WrongUseError)
            cause = self._failures.leave(error, where, self._abandon, verbatim=wrong_use)
            if cause is not None:
                raise cause from error
            self.engine.position = None
            if wrong_use:
                raise ValueError(str(error)) from error
            raise
        finally:
            self._is_guarded = False

    def _note_microbatch(self, error: Exception) -> None:
        """Add to an error from the user's code a note about its microbatch, if there are several microbatches.

        Without the note, an error about sizes or indices does not show that the code did not receive the whole batch.
        """
        about_memory = isinstance(error, torch.OutOfMemoryError)
        if len(self.counts) < 2 or about_memory or isinstance(error, WrongUseError) or is_transport(error):
            return
        position, number = self.engine.position, self.program.microbatch
        if position is not None and position.kind.is_compute:
            number = position.microbatch
        if number is not None and number < len(self.counts) and self.module.trainer.training:
            add_note(error, microbatch_text(number, self.counts))
