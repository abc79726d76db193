"""What the ranks of a run hold, said once: reckoned when training begins, measured after the first optimizer step."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from functools import cache
from typing import Any, cast

import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.data_parallel.zero.zero import ZeroParameters
from lightning_hybrid.distributed.dtensor import local_gradient
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.distributed.tree_broadcast import broadcast_object
from lightning_hybrid.memory.account import MemoryUsage, SavedTensorMeter, bytes_of, most_kept
from lightning_hybrid.pipeline_parallel.schedules import Schedule
from lightning_hybrid.strategy.summary import memory_table

__all__ = ["MemoryReport"]

_log = logging.getLogger("lightning.pytorch")


class MemoryReport(Callback):
    """Looks at the steps until the first one in which optimizers step, and never again.

    The ranks of the first replica do that; and nobody does where nobody would read it, as this level of logging is
    switched off. It only looks: what it cannot count it leaves open.

    Args:
        grad_sync: Knows what is whole at a time, and what travels.
        mesh: The ranks.
        reckon: What this rank will hold, but for activations; it is asked once.
        schedule: Of a step with so many micro-batches.
        counts_activations: Whether what autograd keeps is counted too. That takes hooks on saved tensors, which not
            every step stands.
    """

    def __init__(
        self,
        grad_sync: GradientSync,
        mesh: Mesh,
        reckon: Callable[[], MemoryUsage],
        schedule: Callable[[int], Schedule],
        *,
        counts_activations: bool,
    ) -> None:
        self._grad_sync, self._mesh, self._schedule = grad_sync, mesh, schedule
        self._reckoned = cache(reckon)
        self._counts_activations = counts_activations
        self._looks = False
        self._visits: Counter[int] = Counter()
        self._keeping: SavedTensorMeter | None = None
        self._parameters = self._gradients = 0
        self._wrapped: list[tuple[Any, str]] = []

    def __deepcopy__(self, memo: dict[int, Any]) -> MemoryReport:
        """What is watched knows it, and callbacks copy that with the module."""
        return self

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is reckoned."""
        if self._mesh.data_rank > 0:
            return
        if not broadcast_object(_log.isEnabledFor(logging.INFO), 0, self._mesh.control_group):
            return
        self._say("Memory of a rank, reckoned", lambda: [self._reckoned()])
        self._module, self._first, self._looks = pl_module, trainer.global_step, True
        self._watch()

    @contextmanager
    def __call__(self, batch: Any) -> Iterator[None]:
        """Look at one batch: to be entered around its forward at least."""
        if not self._looks or not self._counts_activations:
            yield
            return
        self._visits.clear()
        most = 0 if self._keeping is None else self._keeping.most
        self._keeping = SavedTensorMeter(most)
        others = (*self._grad_sync.local_parameters(), *self._module.buffers(), *flatten(batch)[0])
        self._keeping.leave_out(each for each in others if isinstance(each, Tensor))
        with self._keeping():
            yield

    def _watch(self) -> None:
        """Look before gradients are reduced, and after parameters are unsharded."""
        sync = self._grad_sync
        forward_begins = sync.forward_begins

        def look_at_stage(stage: int) -> None:
            forward_begins(stage)
            self._look(stage)

        sync.forward_begins = look_at_stage  # type: ignore[method-assign]
        self._wrapped = [(sync, "forward_begins")]
        before = [(sync, "backward_ends"), *((buckets, "_launch") for buckets in sync._all)]
        after = [(sync, "finish"), *((each, "unshard") for each in self._prefetchers)]
        for owner, name in (*before, *after):
            method, looks_after = getattr(owner, name), (owner, name) in after

            def wrapped(
                *args: Any, method: Callable[..., Any] = method, looks_after: bool = looks_after, **kwargs: Any
            ) -> None:
                if not looks_after:
                    self._look(None)
                method(*args, **kwargs)
                if looks_after:
                    self._look(None)

            setattr(owner, name, wrapped)
            self._wrapped.append((owner, name))

    @property
    def _prefetchers(self) -> Sequence[Any]:
        zero = self._grad_sync.zero
        return (zero._prefetcher, *zero._stage_prefetchers.values()) if isinstance(zero, ZeroParameters) else ()

    @property
    def _groups(self) -> Sequence[Any]:
        return self._grad_sync.zero._all if isinstance(self._grad_sync.zero, ZeroParameters) else ()

    def _look(self, stage: int | None) -> None:
        if stage is not None and self._keeping is not None:
            self._keeping.label = stage, self._visits[stage]
            self._visits[stage] += 1
        members = self._grad_sync.local_parameters()
        gathered = [shards for group in self._groups for _, shards, _ in group._in_flight]
        reduced = [bucket._flat for buckets in self._grad_sync._all for bucket in buckets._buckets]
        gradients = [gradient for gradient in map(local_gradient, members) if gradient is not None]
        self._parameters = max(self._parameters, bytes_of([*members, *gathered]))
        self._gradients = max(self._gradients, bytes_of([*gradients, *reduced]))

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        """Say what was measured, once all that a step needs has been there."""
        if not self._looks or trainer.global_step == self._first:
            return
        self._say(
            "Memory of a rank, measured in the first step (and reckoned)",
            lambda: [replace(self._reckoned(), activations=self._foreseen()), self._measured(trainer)],
        )
        self.close()

    def close(self) -> None:
        """Let go of everything."""
        self._looks, self._keeping = False, None
        for owner, name in self._wrapped:
            vars(owner).pop(name, None)
        self._wrapped = []
        self._module = cast(Any, None)

    def _foreseen(self) -> int | None:
        """What autograd keeps by the schedule, from what it kept of the first micro-batch."""
        if self._keeping is None or not self._visits:
            return None
        kept = {stage: self._keeping.together([(stage, 0)]) for stage in self._visits}
        return most_kept(self._schedule(max(self._visits.values())), self._mesh.pipeline_rank, kept)

    def _measured(self, trainer: Trainer) -> MemoryUsage:
        states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
        values = [value for state in states if isinstance(state, Mapping) for value in state.values()]
        kept = None if self._keeping is None else self._keeping.most
        held = bytes_of(flatten(values)[0])
        return MemoryUsage(self._parameters, self._gradients, held, kept, bytes_of(self._module.buffers()))

    def _say(self, title: str, account: Callable[[], list[MemoryUsage]]) -> None:
        """Gather what the ranks of the first replica say, and log it."""
        try:
            accounts = account()
        except Exception:  # an account is no reason to end a run
            _log.debug("What this rank holds could not be counted.", exc_info=True)
            accounts = []
        group = self._mesh.control_group
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, accounts, group=group)
        if not self._mesh.is_first or not all(every):
            return
        size = self._mesh.tensor_parallel_size
        heaviest = [max(every[at : at + size], key=_weight) for at in range(0, len(every), size)]
        columns = [list(column) for column in zip(*heaviest, strict=True)]
        _log.info("%s:\n%s", title, memory_table(*columns))


def _weight(accounts: Sequence[MemoryUsage]) -> int:
    account = accounts[-1]
    return sum(getattr(account, field.name) or 0 for field in fields(account))
