"""The Trainer's collectives: values are reduced over the replicas, and decisions are made by all ranks.

Lightning calls them as methods of `HybridStrategy`. :class:`StepCollectives` is separate: in a pipeline's steps, it
refuses calls of `torch.distributed` that would wait forever.

Lightning's `DDPStrategy` reduces values over all processes. Here, the ranks of one replica work on the same samples, so
values must be reduced over one rank of each replica.

A *step* is a call of the user's `training_step`, `validation_step` and so on. With several stages, stages do not run
the same code in a step: around a chain (an `nn.Sequential` that the step calls as a whole), only the first and the last
stage run it; otherwise all stages run it, but each skips the computations of other stages. To *trace* a step (*follow*
it, in names) is to run its code on fake tensors before its first run.
"""

from __future__ import annotations

import functools
import inspect
import sys
import threading
from abc import abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.strategy import TBroadcast
from torch import Tensor
from typing_extensions import override

from lightning_hybrid.axes import Sizes
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.mesh import Mesh
from lightning_hybrid.distributed.messages.tree_broadcast import broadcast_object, reduce_over
from lightning_hybrid.distributed.process_group import has_nccl
from lightning_hybrid.distributed.replaced import replaced_attributes
from lightning_hybrid.distributed.tensor_bytes import tell_autograd
from lightning_hybrid.trainer.program.step_context import StepContext

_Method = TypeVar("_Method", bound=Callable[..., Any])


def outside_of_steps(method: _Method) -> _Method:
    """Make a method raise an error in a step.

    All ranks must call the method at the same place, but stages do not run the same code in a step.

    Args:
        method: A method of :class:`ReplicaCollectives`, or of a class that inherits from it.
    """

    @functools.wraps(method)
    def checked(self: ReplicaCollectives, *args: Any, **kwargs: Any) -> Any:
        if self.in_step:
            raise WrongUseError(
                f"`strategy.{method.__name__.lstrip('_')}` was called in a step, possibly by a method such as"
                " `trainer.save_checkpoint`. All ranks must call it, but with a pipeline, a step runs only on the first"
                " and the last stage. Call it in a hook instead, such as `on_train_batch_end` or"
                " `on_validation_epoch_end`. [LH443]"
            )
        return method(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


#: Functions of `torch.distributed` in which ranks wait for each other, with the argument that each function writes.
_WRITES: dict[str, str | None] = {
    **dict.fromkeys(("all_reduce", "broadcast", "irecv", "recv", "reduce", "scatter"), "tensor"),
    **dict.fromkeys(
        ("all_to_all_single", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"), "output"
    ),
    **dict.fromkeys(("all_gather_into_tensor", "all_gather_single"), "output_tensor"),
    **dict.fromkeys(("barrier", "isend", "monitored_barrier", "send"), None),
    "all_gather": "tensor_list",
    "all_gather_object": "object_list",
    "all_to_all": "output_tensor_list",
    "broadcast_object_list": "object_list",
    "gather": "gather_list",
    "gather_object": "object_gather_list",
    "scatter_object_list": "scatter_object_output_list",
}
_PACKAGE = str(Path(__file__).parents[1])


class StepCollectives:
    """Refuses collectives of `torch.distributed` over several stages in the user's step, which other stages never join.

    :class:`~.run.Run` installs this class with several pipeline ranks. Collectives over ranks of one pipeline rank,
    such as the replicas, are allowed. This class notifies autograd of the tensors that they write, because torch does
    not do this. While a step is only traced, and not run, allowed collectives do nothing, because replicas may trace
    different steps. Calls from this package, from other threads, and from compiled code are not checked.

    Functions that were imported by name before the run are not checked. If such a call waits forever, the watch threads
    of the ranks detect it.

    Args:
        mesh: The device mesh.
        context: The context of the step, which knows if the user's step runs or is traced.
    """

    def __init__(self, mesh: Mesh, context: StepContext) -> None:
        self._context = context
        everyone = range(dist.get_world_size())
        self._stage = {rank for rank in everyone if mesh.pipeline_rank_of(rank) == mesh.pipeline_rank}
        self._thread = 0

    def installed(self) -> AbstractContextManager[None]:
        """Replace torch's functions inside the context, for the calling thread, which must be the thread of steps."""
        self._thread = threading.get_ident()
        functions = {name: getattr(dist, name) for name in _WRITES if hasattr(dist, name)}
        return replaced_attributes(dist, **{name: self._checked(name, each) for name, each in functions.items()})

    def _checked(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def checked(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():  # the compiler knows torch's functions, but not this function
                return original(*args, **kwargs)
            context = self._context
            # Other threads write checkpoints during steps.
            if not context.in_step or threading.get_ident() != self._thread:
                return original(*args, **kwargs)
            is_ours = sys._getframe(1).f_code.co_filename.startswith(_PACKAGE)
            if is_ours and not context.is_following:
                with context.unfollowed():
                    return original(*args, **kwargs)
            arguments = inspect.signature(original).bind(*args, **kwargs).arguments
            if not is_ours:
                self._check(name, arguments.get("group"))
            if context.is_following:
                return _Finished() if arguments.get("async_op") else None
            with context.unfollowed():
                work = original(*args, **kwargs)
                tell_autograd(arguments.get(_WRITES[name] or ""))
            return work

        return checked

    def _check(self, name: str, group: dist.ProcessGroup | None) -> None:
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        if not self._stage.issuperset(ranks):
            raise WrongUseError(
                f"`torch.distributed.{name}` over ranks {ranks} was called in a step. With a pipeline, a step runs once"
                " per microbatch, and its code after the layers runs only on the last stage. The other ranks would"
                " never join this call. Make the call in a hook, such as `on_train_batch_end`. Alternatively, use"
                ' `self.log(..., sync_dist=True)`, or pass `group=self.device_mesh["data_parallel"].get_group()` to'
                " limit the call to the replicas. [LH442]"
            )


class _Finished:
    """Handle of a collective that has finished, as with `async_op`."""

    def wait(self, *_: Any) -> bool:
        """Return True at once."""
        return True

    is_completed = is_success = wait


class ReplicaCollectives(ParallelStrategy):
    """Base class of `HybridStrategy`: reduces and gathers values over the replicas.

    Barriers, broadcasts and decisions include all ranks. All methods are collectives, unless there is only one rank or
    no process group.

    Attributes:
        sizes: The number of ranks along each axis.
    """

    def __init__(self) -> None:
        super().__init__()
        self.sizes = Sizes()  # final once the number of processes is known
        # The last broadcast, as (object of this rank, object that all ranks received).
        self._latest: tuple[Any, Any] = (None, None)
        self._log_dir: tuple[Any, Any] | None = None  # the last broadcast of `trainer.log_dir`

    @property
    @abstractmethod
    def mesh(self) -> Mesh:
        """The device mesh."""

    @property
    @abstractmethod
    def is_alone(self) -> bool:
        """True without process groups: before a run, or after they were destroyed."""

    @property
    @abstractmethod
    def in_step(self) -> bool:
        """True while a step runs that is split into several stages, so that ranks do not run the same code."""

    @override
    def reduce(self, tensor: Tensor | Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over `group`. ``None`` and the group of all ranks mean the replicas."""
        if group is dist.group.WORLD:
            group = None
        if not isinstance(tensor, Tensor) or (group is None and self.sizes.num_replicas == 1) or self.is_alone:
            return tensor
        return reduce_over(tensor, self.mesh.data_group if group is None else group, reduce_op)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Gather a tensor over `group`. ``None`` and the group of all ranks mean the replicas.

        Over the replicas, the result has shape ``(replicas, ...)``, or ``(...)`` with one replica.
        """
        if group is None or group is dist.group.WORLD:
            if self.is_alone or self.mesh.num_replicas == 1:
                return tensor
            group = self.mesh.data_group
        return super().all_gather(tensor, group=group, sync_grads=sync_grads)

    @override
    @outside_of_steps
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Return True if the decision is True on all processes, or with ``all=False`` on any process."""
        if self.is_alone:
            return decision
        votes = torch.tensor(int(decision), device=self.root_device)
        dist.all_reduce(votes)
        return int(votes) == self.world_size if all else int(votes) > 0

    @override
    @outside_of_steps
    def barrier(self, name: str | None = None) -> None:
        """Wait for every process."""
        if not dist.is_initialized():
            return
        on_device = self.root_device.type == "cuda" and has_nccl()
        dist.barrier(device_ids=[self.root_device.index] if on_device else None)

    @override
    def broadcast(self, obj: TBroadcast, src: int = 0) -> TBroadcast:
        """Send the object of process `src` to every process. In a pipeline's step, only `trainer.log_dir` works."""
        if not dist.is_initialized():
            return obj
        if self.in_step and self._log_dir is not None and src == 0 and self._log_dir[0] == obj:
            answer: TBroadcast = self._log_dir[1]
            return answer
        return self._broadcast(obj, src)

    @outside_of_steps
    def _broadcast(self, obj: TBroadcast, src: int) -> TBroadcast:
        world = dist.group.WORLD
        assert world is not None
        answer: TBroadcast = broadcast_object(obj, src, world)
        self._latest = obj, answer
        return answer

    def remember_log_dir(self, trainer: Trainer) -> None:
        """Read `trainer.log_dir` on all ranks, and keep its value for steps.

        The attribute calls :meth:`broadcast`, which a step cannot do. In a step, it returns the kept value instead.

        Args:
            trainer: The Trainer; every rank must call this.
        """
        _ = trainer.log_dir
        self._log_dir = self._latest
