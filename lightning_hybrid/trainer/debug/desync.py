"""Comparison of steps between ranks, and with `Faults(detect_desync=True)` also of values, to the last bit.

Ranks that run different steps wait for each other forever, or compute wrong results without an error. Two classes
compare them:

- :class:`StepDesync` is always active. `StepContext` has one; a run without a context makes its own. Training and
  evaluation steps call it before each batch, and it compares shapes, modes and logged keys when they change.
- :class:`DesyncDetector` compares checksums of batches, parameters and random states. `HybridStrategy` calls it before
  each training step if the user has requested it, because it takes time and is a collective of all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn

from lightning_hybrid.data_parallel.zero.param import is_expert, is_shard
from lightning_hybrid.distributed.agreement import unequal_text
from lightning_hybrid.distributed.dtensor import is_tensor_parallel, to_local
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.random import RandomStreams
from lightning_hybrid.distributed.watch.desync import Desync, DesyncWatch
from lightning_hybrid.pipeline_parallel.splitting.microbatch import signature_text
from lightning_hybrid.torch_internals import DisableTorchFunctionSubclass
from lightning_hybrid.trainer.dataloader import checksum
from lightning_hybrid.trainer.lightning_internals import before_log_reductions
from lightning_hybrid.trainer.results.logging import Log

_MOST = 5  # parameters in one message

Shared = tuple[str, tuple[str | int, ...]]
"""The name of a value, and the mesh coordinates that two ranks must have in common to have the same value."""


@contextmanager
def refusing() -> Iterator[None]:
    """Turn a `WrongUseError` into a plain `ValueError`; the guard of :class:`StepDesync` in a run without a context."""
    try:
        yield
    except WrongUseError as error:
        raise ValueError(str(error)) from error


class StepDesync:
    """A record of the batches and logged keys of steps, which is compared between ranks when it changes.

    If nothing has changed, only a counter is increased and no message is sent. If a record is new, the rank waits for
    the other ranks of the group. If a record has changed to a known one, the watch thread compares it later. A
    difference ends all ranks.

    Args:
        module: The user's module, after it was parallelized.
        mesh: The ranks.
        desync: Compares records between the ranks of a group: the model group, or the replicas.
        guard: Returns a context that turns a failure into an error on all ranks.

    Attributes:
        has_replicas: If True, logged values are compared over replicas.
    """

    def __init__(
        self,
        module: LightningModule,
        mesh: Mesh,
        desync: Desync,
        guard: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._module, self._desync, self._guard = module, desync, guard
        self._has_peers = mesh.model_group.size() > 1
        self.has_replicas = mesh.num_replicas > 1
        self._last_key = ""

    def note_batch(self, step: str, version: Hashable, parts: Sequence[Hashable], counts: Sequence[int] = ()) -> None:
        """Compare everything that determines the messages of a batch over the model group, before the batch runs.

        Args:
            step: The name of the user's step.
            version: The result of :meth:`StepContext.version`, which changes if other tensors require gradients.
            parts: The signature of each microbatch; of the whole batch in evaluation and in manual optimization.
            counts: The number of samples in each microbatch; empty without microbatches.
        """

        def describe() -> dict[str, str]:
            with DisableTorchFunctionSubclass():
                trained = sum(parameter.requires_grad for parameter in self._module.parameters())
            return {
                "mode": "training" if self._module.training else "evaluation",
                "number of trainable parameters": f"{trained} (checksum {zlib.crc32(repr(version).encode())})",
                "microbatches": f"{len(parts)} of {list(counts)} samples" if counts else str(len(parts)),
                "batch": str(list(map(signature_text, dict.fromkeys(parts)))),
            }

        if self._has_peers:
            alike = tuple(
                [(part, len(list(equal))) for part, equal in groupby(parts)]
            )  # runs of equal parts, to keep the record of a batch short
            self._note(self._desync.model_group, step, (version, alike, tuple(counts)), describe)

    def note_logs(self, logs: Sequence[Log]) -> None:
        """Compare the keys of values that replicas reduce immediately, after a training step has logged them."""
        reduced = (log for log in logs if log.metric is not None or log.arguments.get("sync_dist"))
        names = tuple([log.name for log in reduced if log.arguments.get("on_step") is not False])
        self._note(self._desync.replicas, "training_step", names, lambda: {"logged keys": str(list(names))})

    def noting_reductions(self, trainer: Trainer) -> AbstractContextManager[None]:
        """While entered, compare the keys of logged values that replicas are about to reduce, in steps and hooks."""
        if not self.has_replicas:
            return nullcontext()
        return before_log_reductions(trainer, self._note_reduction, self._note_epoch_end)

    def _note_reduction(self, key: str) -> None:
        """Compare the key of a value that replicas reduce immediately, or that a hook outside of batches logs.

        Args:
            key: The hook and the name of the value, such as ``"training_step.loss"``.
        """
        where = f"the log call after {self._last_key!r}" if self._last_key else "the first log call"
        self._last_key = key
        self._note(self._desync.replicas, where, key, lambda: {"key": key})

    def _note_epoch_end(self, keys: Sequence[str]) -> None:
        """Compare the keys of values that are reduced at the end of an epoch of training or evaluation.

        Args:
            keys: The hook and the name of each value that is about to be reduced, in order.
        """
        stage, names = self._module.trainer.state.stage, list(keys)
        where = f"an epoch of {'' if stage is None else stage.value}"
        self._note(self._desync.replicas, where, tuple(names), lambda: {"logged keys": str(names)})

    def _note(self, watch: DesyncWatch, where: str, key: Hashable, describe: Callable[[], dict[str, str]]) -> None:
        if watch.keys.get(where) == key:
            watch.events += 1
            return
        with self._guard():
            watch.note(where, key, describe)


class DesyncDetector:
    """A comparison of batches, parameters and random streams between all ranks that must have equal values.

    Args:
        module: The user's module, after it was parallelized.
        mesh: The ranks.
        streams: The random streams.
    """

    def __init__(self, module: nn.Module, mesh: Mesh, streams: RandomStreams) -> None:
        self._module, self._mesh, self._streams = module, mesh, streams

    @torch.no_grad()
    def __call__(self, batch: Any, step: int) -> None:
        """Compare the values before a training step; every rank must call this method.

        Args:
            batch: The batch of this replica.
            step: The number of the batch since training began.

        Raises:
            ValueError: If values differ that must be equal; on every rank, with the same message.
        """
        mesh = self._mesh
        own: dict[Shared, int] = {
            ("batch", (mesh.data_rank,)): checksum(batch),
            ("random state", ()): zlib.crc32(repr(sorted(self._streams.state_dict().items())).encode()),
            **self._parameters(),
        }
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, own)
        texts = []
        for key in dict.fromkeys(key for values in everyone for key in values):
            values = {rank: str(values[key]) for rank, values in enumerate(everyone) if key in values}
            if len(set(values.values())) > 1:
                texts.append(unequal_text(key[0], values))
        if texts:
            more = f" And {len(texts) - _MOST} others." if len(texts) > _MOST else ""
            raise ValueError(
                f"Before training batch {step}, checksums differ between ranks that must have the same values."
                f" {' '.join(texts[:_MOST])}{more} {_ADVICE} [LH210]"
            )

    def _parameters(self) -> dict[Shared, int]:
        """Return a checksum of each parameter of this rank, by the parameter and the ranks with the same values."""
        mesh = self._mesh
        found: dict[Shared, Tensor] = {}
        for name, parameter in self._module.named_parameters():
            if parameter.is_meta:
                continue
            # Tensor-parallel ranks compute equal values, but not always to the last bit.
            coordinates: tuple[str | int, ...] = ("tensor", mesh.tensor_rank) if mesh.sizes.tensor > 1 else ()
            kind = "shard of parameter" if is_tensor_parallel(parameter) else "parameter"
            if is_shard(parameter):
                groups = mesh.experts if is_expert(parameter) else mesh.zero
                coordinates = (*coordinates, "shard", groups.rank * groups.num_expert_ranks + groups.expert_rank)
            found[f"{kind} {name}", coordinates] = _bits(to_local(parameter))
        if not found:
            return {}
        return dict(zip(found, torch.stack(list(found.values())).tolist(), strict=True))


def _bits(tensor: Tensor) -> Tensor:
    """Return the sum of the bits as integers, shape ``()``, on the tensor's device; it changes with each bit."""
    flat = tensor.detach().contiguous().flatten()
    if flat.is_complex():
        flat = torch.view_as_real(flat).flatten()
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ADVICE = (
    "These values were changed on only some ranks, for example by code under `if self.global_rank == ...`, by random"
    " numbers from a private generator, or by weights that were loaded on one rank."
)
