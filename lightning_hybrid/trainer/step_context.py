"""The parts of a pipeline on one rank, put together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import nn

from lightning_hybrid.distributed.failure import FailureStore, WrongUseError, close_groups, is_transport
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.distributed.tree_broadcast import TreeBroadcast
from lightning_hybrid.pipeline_parallel.body import BodyCut, Layers
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.p2p import Channel
from lightning_hybrid.pipeline_parallel.schedules import ChannelKey, Schedule
from lightning_hybrid.pipeline_parallel.stage import Compute
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from lightning_hybrid.tensor_parallel.vocab_parallel import to_plain_tensors
from lightning_hybrid.trainer.results.logger_proxy import LoggerCall, LoggerProxy, make_calls, pack_calls
from lightning_hybrid.trainer.results.logging import Log, LogRecorder, pack_logs, replay, unpack_logs
from lightning_hybrid.trainer.results.metrics import MetricsAcrossStages
from lightning_hybrid.trainer.results.module_attributes import assign_scalars, pack_scalars, scalars

__all__ = ["StepContext", "make_channels"]

_torch_profiles: Callable[[], bool] = getattr(torch.autograd, "_profiler_enabled", lambda: True)

_SERIAL = count()  # what channels remember of one pipeline must not be taken for another's


def make_channels(
    mesh: Mesh, num_chunks: int, device: torch.device, *, dynamic_shapes: bool
) -> dict[ChannelKey, Channel]:
    """One channel for each ordered pair of neighbours and kind of message; on every rank in the same order.

    Args:
        mesh: The ranks.
        num_chunks: Stages per rank; with several, the last rank sends to the first one too.
        device: Where activations live.
        dynamic_shapes: Whether every message carries a header.

    Returns:
        The channels of this rank by (sender, receiver, kind).
    """
    size = mesh.pipeline_parallel_size
    hops = [(rank, rank + 1) for rank in range(size - 1)]
    if num_chunks > 1 and size > 1:
        hops.append((size - 1, 0))
    channels: dict[ChannelKey, Channel] = {}
    for upstream, downstream in hops:
        keys: tuple[ChannelKey, ChannelKey] = (upstream, downstream, "activation"), (downstream, upstream, "gradient")
        for key in keys:
            group = mesh.new_p2p_group(upstream, downstream)
            if group is not None:
                peer = int(mesh.pipeline_rank == min(upstream, downstream))  # the lower rank comes first in the group
                channels[key] = Channel(group, peer, device, dynamic_shapes)
    return channels


class StepContext:
    """What a step through the pipeline is made of.

    Args:
        module: The user's module, with placeholders for what lives elsewhere.
        body: The dotted name of the body and the body; ``None`` if there is one stage.
        stage_map: Which stage holds what.
        mesh: The ranks.
        streams: The random streams.
        board: Where failures are written.
        device: Where this rank computes.
        engine: Runs the schedules; outlives this object.
        around_forwards: Around forwards: what layers keep for backward, and where.

    Attributes:
        num_stages: The number of stages, over all ranks.
        is_first: Whether this rank has the first stage.
        is_last: Whether this rank has the last stage.
        exchange: From the last stage to its model group.
        in_step: Whether a step runs that is cut, so that the user's code does not run on every rank.
    """

    def __init__(
        self,
        module: LightningModule,
        body: tuple[str, nn.Sequential] | None,
        stage_map: StageMap,
        mesh: Mesh,
        streams: RandomStreams,
        board: FailureStore,
        device: torch.device,
        engine: Engine,
        around_forwards: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.module = module
        self._around_forwards = around_forwards
        self.device = device
        self.mesh = mesh
        self.streams = streams
        self.num_ranks = mesh.pipeline_parallel_size
        self.num_stages = len(stage_map.stages)
        self.num_chunks = self.num_stages // self.num_ranks
        self.is_first = mesh.pipeline_rank == 0
        self.is_last = mesh.pipeline_rank == (self.num_stages - 1) % self.num_ranks
        self.cut = BodyCut(*body) if body else None
        self.in_step = False
        source = (self.num_ranks - 1) * mesh.tensor_parallel_size
        self.exchange = TreeBroadcast(mesh.control_group, mesh.model_group, source, device)
        self._recorder = LogRecorder(module)
        self._logger_calls = LoggerProxy(module, is_source=self.exchange.is_source and mesh.data_rank == 0)
        self._calls: list[LoggerCall] = []
        self._scalars: dict[str, Any] = {}
        self.metrics = MetricsAcrossStages(
            module, mesh.data_group, self.exchange, self._recorder.remember_value, is_last=self.exchange.is_source
        )
        self.engine = engine
        self._board = board
        self._serial = next(_SERIAL)
        self._parameters = list(module.parameters())
        self._layers = {
            stage: [body[1][index] for index in stage_map.stages[stage]]
            for stage in range(mesh.pipeline_rank, self.num_stages, self.num_ranks)
            if body
        }

    def layers(self, stage: int, *coordinates: int) -> Layers:
        """The layers of a stage of this rank, drawing from their own random stream.

        Args:
            stage: The stage.
            coordinates: Of the stream, such as (step, micro-batch).
        """

        def run(x: Any) -> Any:
            with self.streams.layers(stage, *coordinates):
                for layer in self._layers[stage]:
                    x = layer(x)
            return x if stage == self.num_stages - 1 else to_plain_tensors(x)

        return run

    def run(self, schedule: Schedule, compute: Compute, keys: Sequence[Hashable], **callbacks: Any) -> list[Any]:
        """Run a schedule on the engine, under the Trainer's profiler; arguments and result are the engine's."""
        silent = isinstance(self._profiler, PassThroughProfiler)
        results = self.engine.run(schedule, compute, keys, profile=None if silent else self.profile, **callbacks)
        if _torch_profiles():
            # A message under way writes its end into the cycle in which it began, which the profiler may have freed.
            self.engine.retire()
        return results

    def profile(self, name: str) -> AbstractContextManager[None]:
        """A range of the Trainer's profiler."""
        return self._profiler.profile(f"[pipeline]{name}")

    @property
    def _profiler(self) -> Profiler:
        profiler: Profiler = self.module.trainer.profiler  # type: ignore[attr-defined]
        return profiler

    def version(self, *, gradients: bool) -> Hashable:
        """What decides which tensors need gradients, beside the batch: equal on all ranks, placeholders included.

        Args:
            gradients: Whether the schedule has a backward.
        """
        return self._serial, gradients, self.module.training, hash(tuple([p.requires_grad for p in self._parameters]))

    @contextmanager
    def step(self, *, num_microbatches: int, counts: Sequence[int] = ()) -> Iterator[list[list[Log]]]:
        """While a step runs: the body is cut, logs are recorded, metrics are local, random numbers leave no trace.

        Args:
            num_microbatches: How often the user's step runs.
            counts: The samples of each micro-batch; nothing if the step runs once, with the whole batch.

        Yields:
            The logs of each micro-batch.
        """
        cut = nullcontext() if self.cut is None else self.cut()
        local = self.metrics.step(num_microbatches=num_microbatches, counts=counts)
        with (
            self.guard(),
            self.streams.isolated(),
            self._around_forwards(),
            local,
            cut,
            self._logger_calls() as self._calls,
            self._recorder() as records,
        ):
            self._scalars = scalars(self.module) if self.is_last else {}
            self.in_step = self.cut is not None
            try:
                yield records
            finally:
                self.in_step = False

    def enter_user_code(self, *coordinates: int, keep: bool) -> None:
        """The user's step is about to run, for one micro-batch.

        Args:
            coordinates: Of the random numbers that it draws.
            keep: Whether its logs count. Code before the body also runs on the first stage, where they do not.
        """
        self.metrics.next_microbatch(keep=keep)
        self._recorder.next_microbatch(keep=keep)
        self._logger_calls.next_microbatch(keep=keep)
        self.streams.seed_user(*coordinates)

    def share(self, outputs: Callable[[], tuple[Any, list[Log]]]) -> Any:
        """Give what the last stage returned and logged to every rank, and log it there.

        Likewise what hooks may ask for: whether training shall stop, and the numbers that the step keeps in attributes.

        Args:
            outputs: Makes (value of the step, merged logs); called on the last stage.

        Returns:
            The value of the step.
        """
        with self.guard():
            if self.exchange.is_source:
                value, logs = outputs()
                for log in logs:
                    if log.metric is not None:
                        log.value = self.metrics.batch_value(log.metric, on_step=self._on_step(log))
                tree = {"value": value, "logs": pack_logs(logs)}
                if self._calls:
                    tree["calls"] = pack_calls(self._calls)
                changed = pack_scalars(self._scalars, scalars(self.module))
                if changed:
                    tree["changed"] = changed
                if self.module.trainer.should_stop:
                    tree["stop"] = ()  # its presence says it, and costs no message
                self.exchange(tree)
            else:
                tree = self.exchange.receive()
                assign_scalars(self.module, tree.get("changed", {}))
            self.module.trainer.should_stop = "stop" in tree
            if "calls" in tree and self.module.trainer.is_global_zero:
                make_calls(tree["calls"], self.module)
        replay(self.module, unpack_logs(tree["logs"]), alone=self.mesh.data_parallel_size == 1)
        return tree["value"]

    def _on_step(self, log: Log) -> bool:
        on_step = log.arguments.get("on_step")
        return self.module.trainer.training if on_step is None else bool(on_step)

    def abandon(self) -> None:
        """Let go of all that would keep connections open, after a failure."""
        self.engine.abandon()
        self.mesh.abandon()
        self.module._device_mesh = None

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Turn a failure in here into one of all ranks, with the text of the first."""
        try:
            yield
        except Exception as error:
            cause = self._board.cause(patience=2.0 if is_transport(error) else 0.0)
            self.abandon()
            if cause is not None:
                close_groups(error)
                raise cause from error
            where = f"Rank {dist.get_rank()} (pipeline rank {self.mesh.pipeline_rank}, data rank {self.mesh.data_rank})"
            if self.engine.position is not None:
                where += f", stage {self.engine.position.stage}, action {self.engine.position},"
            wrong_use = isinstance(error, WrongUseError)
            self._board.report(error, where, verbatim=wrong_use)
            self.engine.position = None
            close_groups(error)
            if wrong_use:
                raise ValueError(str(error)) from error
            raise
