"""The state that the steps of a run share on one rank: the step program, the layers, and the recorders of results."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch import LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler

from lightning_hybrid.distributed.factories import plain_factories
from lightning_hybrid.distributed.failure import WrongUseError, add_note, is_transport
from lightning_hybrid.distributed.mesh import Mesh
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
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
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

_KEYS = count()  # channels outlive a run: what they have learnt for a key of one must not be taken for another's


class StepContext:
    """What a step through the pipeline needs; training and evaluation add the schedule and the weights.

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        body: What is divided into stages; ``None`` if there is one stage.
        stage_map: Which stage holds what.
        mesh: The ranks.
        streams: The random streams.
        failures: Where failures are written.
        abandon: Lets go of everything that is under way.
        desync: Compares what ranks do.
        device: Where this rank computes.
        engine: Runs the schedules; outlives this object.
        around_forwards: Around forwards: what layers keep for backward, and where.
        context_parallel: Gives layers their share of a sequence; ``None`` if sequences are not shared.
        remembers: Whether what is found out about a step holds for later ones with equal shapes.

    Attributes:
        num_stages: The number of stages, over all ranks.
        is_first: Whether this rank has the first stage.
        is_last: Whether this rank has the last stage.
        program: The step program, which the run chooses before the first step.
        remembers: True if findings about a step hold for later steps with equal shapes.
        all_layers: The layers of all stages.
        shards_activations: True if layers may return activations that are sharded over ranks, see :meth:`plain`.
        layers: The layers of each stage of this rank.
        desync: Compares what this rank does with others.
        in_step: Whether a step runs that is cut, so that the user's code does not run on every rank.
        is_following: Whether it is only followed.
        recorder: Notes when the actions of a step begin and end; ``None`` where nobody asks.
        counts: The number of samples of each microbatch of the last training batch.
    """

    counts: Sequence[int] = ()
    program: StepProgram

    def __init__(
        self,
        module: LightningModule,
        body: Body | None,
        stage_map: StageMap,
        mesh: Mesh,
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
        self.module, self.mesh, self.device = module, mesh, device
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
        self._steps: set[Hashable] = set()  # that have been run, where that matters
        self._parameters = list(module.parameters())
        self.all_layers = body.layers if body else ()
        own = self.placement.stages_of(mesh.pipeline_rank)
        self.layers = {
            stage: [body.layers[index] for index in stage_map.stages[stage]] if body else [] for stage in own
        }
        own_layers = [layer for layers in self.layers.values() for layer in layers]
        self._epoch: Any = None  # of which the metrics have been found
        self._watch = BodyWatch(module, body, own_layers) if body else None

    def place_parameters(self, stage_map: StageMap) -> None:
        """Parameters outside of the layers have come to live where they are used.

        Args:
            stage_map: Which stage holds what.
        """
        self.program.place_parameters(stage_map)
        self._parameters = list(self.module.parameters())

    def run_layers(self, stage: int, random: AbstractContextManager[None], x: Any) -> Any:
        """Run the layers of a stage of a chain, which draw from a random stream of their own."""
        x = self.received(x)
        with random:
            for layer in self.layers[stage]:
                x = layer(x)
        if stage < self.num_stages - 1:
            return self.plain(x, to_stage=True)
        return to_plain_tensors(x) if self._has_shared_layers else x  # a sequence in shares stays so around the layers

    def received(self, value: Any) -> Any:
        """What the stage before has sent, as layers take it."""
        return value if self._context_parallel is None else self._context_parallel.enter(value)

    def plain(self, value: Any, *, to_stage: bool = False) -> Any:
        """Plain tensors in the place of what shared layers return, or layers that share a sequence.

        Args:
            value: A tree.
            to_stage: Whether it goes to the next stage.
        """
        if self._context_parallel is not None:
            value = self._context_parallel.leave(value, to_stage=to_stage)
        return to_plain_tensors(value) if self._has_shared_layers else value

    def keys(self, version: Hashable, parts: Sequence[Hashable], plans: Sequence[FramePlan] = ()) -> list[int]:
        """Numbers for what decides the shapes at stage boundaries: equal parts have equal numbers.

        Hashing a signature takes as long as a small layer, so it is done once a microbatch, and not at every message.

        Args:
            version: As :meth:`version` gives it.
            parts: The signature of each microbatch.
            plans: What stages do in the step of each, where steps are followed.
        """
        if plans:
            parts = list(zip(parts, [plan.number for plan in plans], strict=True))
        numbers = [self._keys[version, part] for part in parts]
        while len(self._keys) > MOST_FORMATS:  # on every rank at the same step
            del self._keys[next(iter(self._keys))]
        return numbers

    def may_post_early(self, keys: Sequence[int], *others: Hashable) -> bool:
        """Whether receives may be posted before their messages are sent: not in the first step of a kind on a device.

        There a posted receive is a kernel that runs until its message is there. To load another kernel, at its first
        call, CUDA waits for all of those that run. One host that waits hangs nothing, by the order of the schedule; but
        in a first step all of them load kernels, and wait for messages that another one has not come to send
        (https://docs.nvidia.com/cuda/cuda-c-programming-guide/#lazy-loading). Ranks decide alike, as their keys are
        equal. Where each message says its shapes, a receive cannot start before that is read, so none is ever early.

        Args:
            keys: Of the microbatches, as :meth:`keys` gives them.
            others: What else decides which kernels run.
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
        """A range of what records this step, or else of the Trainer's profiler."""
        if self.recorder is not None:
            return self.recorder.range(name)
        return self._profiler.profile(f"[pipeline]{name}")

    @property
    def profile(self) -> Callable[[str], AbstractContextManager[None]] | None:
        """Makes such ranges; ``None`` if nobody listens."""
        listens = self.recorder is not None or not isinstance(self._profiler, PassThroughProfiler)
        return self.range if listens else None

    @property
    def _profiler(self) -> Profiler:
        profiler: Profiler = self.module.trainer.profiler  # type: ignore[attr-defined]
        return profiler

    def version(self, *, gradients: bool) -> Hashable:
        """What decides which tensors need gradients, beside the batch: equal on all ranks, placeholders included.

        Args:
            gradients: Whether the schedule has a backward.
        """
        with DisableTorchFunctionSubclass():  # dispatch to placeholders takes 20 times as long
            flags = hash(tuple([parameter.requires_grad for parameter in self._parameters]))
        return gradients, self.module.training, flags

    @contextmanager
    def step(self, *, num_microbatches: int, counts: Sequence[int] = ()) -> Iterator[list[list[Log]]]:
        """While a step runs: the body is cut, logs are recorded, metrics are local, random numbers leave no trace.

        Args:
            num_microbatches: How often the user's step runs.
            counts: The samples of each microbatch; nothing if the step runs once, with the whole batch.

        Yields:
            The logs of each microbatch.
        """
        trainer = attached_trainer(self.module)
        epoch = None if trainer is None else (trainer.state.stage, trainer.current_epoch)
        if epoch != self._epoch:  # its first step, after the hooks of its start
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
        """Search the module again for everything that a step has found in it: its state has been restored."""
        self._epoch = None

    def enter_user_code(self, call: StepCall, *, keep: bool) -> tuple[Any, ...]:
        """Prepare logs, metrics and random numbers for the user's step, and return its arguments on the device.

        Args:
            call: The step that is about to run.
            keep: True if its logs and metrics count; False on other stages than the last one.
        """
        if self.metrics.exist:
            if keep:
                self.metrics.next_microbatch()
            else:
                self.metrics.uncounted_microbatch()
        if self.is_last:
            self._recorder.next_microbatch(keep=keep)
        self.streams.seed_user(*call.coordinates)
        # As `call.arguments`, without a further file between the engine and the step.
        batch = call.batch if call.device is None else move_data_to_device(call.batch, call.device)
        return batch, *call.others

    @property
    def is_source(self) -> bool:
        """Return whether this rank sends the result of the step to the others of its model group."""
        return self._results.is_source

    def unfollowed(self) -> AbstractContextManager[None]:
        """Inside, nothing that runs is part of the user's step."""
        return self.program.unfollowed()

    @contextmanager
    def around_discovery(self) -> Iterator[None]:
        """Around a step that is followed: what it logs is seen, and comes nowhere; layers have full parameters."""
        seen = self._recorder.only_seen(), self._logger_proxy.only_seen(), self.metrics.only_seen()
        whole = nullcontext() if self._context_parallel is None else self._context_parallel.paused()
        self.is_following = True
        try:
            with original_classes(self.module), whole, seen[0], seen[1], seen[2]:
                yield
        finally:
            self.is_following = False

    def share(self, outputs: Callable[[], tuple[Any, list[Log]]], choice: Choice | None = None) -> Any:
        """Give what the last stage returned and logged to every rank, and log it there.

        Likewise what hooks may ask for: whether training shall stop, and the numbers that the step keeps in attributes.

        Args:
            outputs: Makes (value of the step, merged logs); called on the last stage.
            choice: On the last stage, how the step is done again; ``None`` if it is over.

        Returns:
            The value of the step; where it is done again, the choice.
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
            tree["stop"] = ()  # its presence says it, and costs no message
        return tree

    @contextmanager
    def unguarded(self) -> Iterator[None]:
        """Let a failure inside be that of whoever catches it, and not end the run."""
        before, self._is_guarded = self._is_guarded, True
        try:
            yield
        finally:
            self._is_guarded = before

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a failure in here into one of all ranks, with the text of the first; inside another guard, nothing."""
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
        """Add to an error out of the user's code the microbatch with which it ran, if there are several.

        Without it, an error about sizes or indices gives no hint that the code did not get the whole batch.
        """
        about_memory = isinstance(error, torch.OutOfMemoryError)
        if len(self.counts) < 2 or about_memory or isinstance(error, WrongUseError) or is_transport(error):
            return
        position, number = self.engine.position, self.program.microbatch
        if position is not None and position.kind.is_compute:
            number = position.microbatch
        if number is not None and number < len(self.counts) and self.module.trainer.training:
            add_note(error, microbatch_text(number, self.counts))
