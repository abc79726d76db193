"""Gradients summed over a group, in flat buckets that are reduced while backward still runs.

`GradientSync` makes the buckets, and decides when they are summed: once per optimizer step, or with ZeRO stages 2 and 3
in each backward of a stage. torch's `DistributedDataParallel` is not used. It wraps one module and one backward, but a
stage runs many backwards in the order of a schedule, and some parameters are on several stages.

A bucket is *launched* when its collective starts. Buckets are *armed* for a backward whose gradients are final.

The parameters p0 ... p5 of a model get their gradients in the order p5 ... p0, so buckets are filled from the end::

    backward    g5  g4  g3  g2  g1  g0
                 |   |   |   |   |   |
    bucket 0   [g5  g4 | 1 1]  |   |   |     its last gradient has arrived: packed, scaled, `.grad` freed, and
                       `- - - all-reduce - - - >         reduced while backward continues
    bucket 1             [g3  g2  g1 | 1 1 1]
                                     `- - - - >  a bucket starts after the earlier ones: one order on every rank
    bucket 2                       [g0 | 1]

The numbers after the bar are 1 for gradients that this rank has. If their sum over the ranks is positive, a rank used
the parameter, and the other ranks contributed zeros. If the sum is 0, no rank used it, and its gradient stays ``None``,
as in a single process.

The idea of buckets that overlap with backward is from *PyTorch Distributed: Experiences on Accelerating Data Parallel
Training* (Li et al., 2020, https://arxiv.org/abs/2006.15704).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.hooks import RemovableHandle

from lightning_hybrid.data_parallel.all_reduce import Pending, start_all_reduce
from lightning_hybrid.distributed.dtensor import give_gradient, local_gradient, redistribute_grad, to_local
from lightning_hybrid.distributed.process_group import GroupRef

BUCKET_BYTES = 25 * 2**20

# The first bucket is small, because a collective that starts earlier overlaps more with backward.
FIRST_BUCKET_BYTES = 2**20


class GradientBuckets:
    """Multiplies the gradients of some parameters by a factor, and sums them over a group.

    One reduction is ``arm(); backward(); launch_rest(); finish()``. A bucket is sent when the armed backward has
    completed its gradients, which include the gradients of earlier microbatches in ``.grad``. With the default buckets,
    ``.grad`` then contains the sum, bitwise equal on every rank. With the buckets of ZeRO, each rank gets only its rows
    of the sum, in the gradient of its shard.

    Every rank of the group passes the same parameters (shape, dtype, order, ``requires_grad``), and makes the same
    calls, because each bucket is a collective. Ranks may use different parameters in a step. Parameters may be frozen
    and unfrozen between steps. Launching frees ``.grad``, and :meth:`finish` sets it again.

    Args:
        parameters: The parameters in the order of the model; dense, of any dtypes and devices. If a parameter is
            sharded over other ranks, its local shard is reduced.
        group: The ranks with a copy of each parameter.
        scale: The factor for each gradient before the sum; ``1 / group.size()`` gives the mean.
        bucket_bytes: The size in bytes at which a bucket is complete.
        overlap: If True, a bucket starts as soon as it has its last gradient; otherwise all start in
            :meth:`launch_rest`.
        make_buckets: Puts trainable parameters into buckets, in the order in which backward should complete them. ZeRO
            passes this function, to make other buckets; ``bucket_bytes`` is then unused.
        max_in_flight: The largest number of buckets in flight at the same time; ``None`` for no limit. At the limit,
            the next launch first finishes the oldest bucket.
        mask_group: The same ranks with a backend for the host, for groups in which a rank lacks gradients in every
            step. Ranks then exchange in this group which gradients they have, and no host waits for its device.

    Example::

        buckets = GradientBuckets(list(model.parameters()), group, scale=1 / group.size())
        for microbatch in microbatches[:-1]:
            loss(model, microbatch).backward()
        buckets.arm()
        loss(model, microbatches[-1]).backward()
        buckets.launch_rest()
        buckets.finish()
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        group: ProcessGroup,
        *,
        scale: float,
        bucket_bytes: int = BUCKET_BYTES,
        overlap: bool = True,
        make_buckets: Callable[[Sequence[nn.Parameter]], list[Bucket]] | None = None,
        max_in_flight: int | None = None,
        mask_group: ProcessGroup | None = None,
    ) -> None:
        self.parameters = list(parameters)
        self._group = GroupRef(group)
        self._mask_group = None if mask_group is None else GroupRef(mask_group)
        self.scale = scale
        self.bucket_bytes = bucket_bytes
        self.overlap = overlap
        self._make_buckets = make_buckets or self._by_size
        self._max_in_flight = max_in_flight
        self._buckets: list[Bucket] = []
        self._trainable: list[bool] = []
        self._handles: list[RemovableHandle] = []
        self._armed = False
        self._num_launched = self._num_finished = 0

    def arm(self) -> None:
        """Mark the next backward as the last one before the reduction: each gradient that it completes is final.

        Without `overlap`, it only puts parameters into buckets.
        """
        assert self._num_launched == 0, "call `finish()` before the next step's `arm()`"
        self._rebuild()
        self._armed = self.overlap

    @property
    def is_launched(self) -> bool:
        """True if a bucket has been launched since the last :meth:`finish`."""
        return self._num_launched > 0

    def launch_rest(self) -> None:
        """Start the remaining buckets after this backward. Parameters without a gradient contribute zeros.

        Without :meth:`arm` and :meth:`launch_complete`, all buckets start here.
        """
        if not self._armed:
            self._rebuild()
        self._armed = False
        for bucket in self._buckets[self._num_launched :]:
            self._launch(bucket)

    def launch_complete(self, parameters: Container[int]) -> None:
        """Start the next buckets, up to the first one with a parameter outside the given ones.

        ZeRO calls this in a backward, when the gradients of the given parameters are final or will stay ``None``.

        Args:
            parameters: The identities of the parameters.
        """
        self._rebuild()
        for bucket in self._buckets[self._num_launched :]:
            if not all(id(parameter) in parameters for parameter in bucket.parameters):
                break
            self._launch(bucket)

    def finish(self) -> None:
        """Wait for the sums, and set the gradients. :class:`AllReduceBucket` sets them to views of its flat tensor.

        The gradient of a parameter that no rank used stays ``None``. Without a ``mask_group``, a rank that lacks a
        gradient reads from its device if another rank has this gradient, so its host waits for the device.

        Raises:
            RuntimeError: If a parameter received another gradient after its bucket had started.
        """
        assert self._num_launched == len(self._buckets), "call `launch_rest()` before `finish()`"
        for bucket in self._buckets[self._num_finished :]:
            bucket.wait()
        for bucket in self._buckets[self._num_finished :]:
            bucket.finish()
        self._num_launched = self._num_finished = 0

    def abandon(self) -> None:
        """Drop collectives in flight after a failure, because they keep connections open."""
        self._buckets.clear()
        self._num_launched = self._num_finished = 0

    def remove(self) -> None:
        """Remove the hooks from the parameters. The next reduction adds them again."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._trainable.clear()
        self._buckets.clear()

    def _rebuild(self) -> None:
        """Put the trainable parameters into buckets, unless the current buckets already contain exactly these."""
        trainable = [parameter.requires_grad for parameter in self.parameters]
        if trainable == self._trainable:
            return
        self.remove()
        self._trainable = trainable
        parameters = [parameter for parameter in self.parameters if parameter.requires_grad]
        self._buckets = self._make_buckets(parameters)
        if self.overlap:
            for bucket in self._buckets:
                for index, parameter in enumerate(bucket.parameters):
                    hook = partial(self._on_gradient, bucket, index)
                    handle = parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
                    self._handles.append(handle)

    def _by_size(self, parameters: Sequence[nn.Parameter]) -> list[Bucket]:
        return [AllReduceBucket(members) for members in assign(parameters, self.bucket_bytes)]

    def _on_gradient(self, bucket: Bucket, index: int, parameter: Tensor) -> None:
        # This hook runs for every parameter in every backward, but only an armed backward counts.
        if not self._armed:
            return
        if bucket.work is not None:
            raise late_gradient_error(parameter)
        bucket.missing.discard(index)
        # A complete bucket waits for earlier buckets, because collectives of a group must start in the same order on
        # all ranks. If the graph depends on the data, buckets become complete in any order.
        while self._num_launched < len(self._buckets) and not self._buckets[self._num_launched].missing:
            self._launch(self._buckets[self._num_launched])

    def _launch(self, bucket: Bucket) -> None:
        if self._num_launched - self._num_finished == self._max_in_flight:
            oldest = self._buckets[self._num_finished]
            oldest.wait()
            oldest.finish()
            self._num_finished += 1
        bucket.launch(self._group(), self.scale, None if self._mask_group is None else self._mask_group())
        self._num_launched += 1


def assign(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[list[nn.Parameter]]:
    """Put parameters into buckets, in the order in which backward should complete them.

    Args:
        parameters: The parameters in the order of the model.
        bucket_bytes: The size in bytes at which a bucket is complete.

    Returns:
        The buckets. Each has one dtype and one device, and the reverse order of the model.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[tuple[int, nn.Parameter]]] = {}
    for position, parameter in enumerate(reversed(parameters)):
        kinds.setdefault((parameter.dtype, parameter.device), []).append((position, parameter))
    buckets: list[tuple[int, list[nn.Parameter]]] = []
    for members in kinds.values():
        limit = min(FIRST_BUCKET_BYTES, bucket_bytes)
        bucket: list[nn.Parameter] = []
        num_bytes = 0
        for position, parameter in members:
            bucket.append(parameter)
            num_bytes += to_local(parameter).numel() * parameter.element_size()
            if num_bytes >= limit or position == members[-1][0]:
                buckets.append((position, bucket))
                bucket, num_bytes, limit = [], 0, bucket_bytes
    # The bucket whose last gradient arrives first comes first.
    return [bucket for _, bucket in sorted(buckets, key=lambda positioned: positioned[0])]


class Bucket(ABC):
    """Parameters of one dtype on one device, whose gradients are reduced as one flat tensor.

    The tensor exists from :meth:`launch` to :meth:`finish`. It contains the elements of all gradients, and one number
    per parameter, which is not 0 if this rank has the gradient. A subclass defines which part of the sum a rank gets.

    Args:
        parameters: The parameters, in the order in which their gradients should arrive.

    Attributes:
        missing: The positions of the parameters without a gradient on this rank so far.
        work: The collective in flight; ``None`` if there is none.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        # Gradients have the strides that autograd would use (channels last, for example), which makes optimizers
        # faster.
        local = [to_local(parameter) for parameter in parameters]
        self._shapes = [tensor.shape for tensor in local]
        self._strides = [torch.empty_like(tensor, device="meta").stride() for tensor in local]
        self._clear()

    def _clear(self) -> None:
        """Reset the bucket to the state without gradients."""
        self.missing = set(range(len(self.parameters)))
        self.work: Pending | None = None
        self._flat: Tensor | None = None
        self._mask: tuple[Tensor, Pending] | None = None

    @torch.no_grad()
    def launch(self, group: ProcessGroup, scale: float, mask_group: ProcessGroup | None = None) -> None:
        """Pack the gradients in ``.grad``, free them, and start the sum over the group.

        All gradients of a bucket are copied at once. One copy per gradient would take more time, and would not reduce
        the peak memory, which is the size of all gradients and one bucket.

        Args:
            group: The ranks.
            scale: The factor.
            mask_group: The same ranks with a backend for the host, to exchange which gradients they have; ``None`` for
                no exchange.

        Raises:
            TypeError: If a gradient has another dtype or device than its parameter.
        """
        first = self.parameters[0]
        for parameter in self.parameters:
            if isinstance(parameter.grad, DTensor):
                redistribute_grad(parameter)
        has_gradient = torch.ones(len(self.parameters), dtype=_gradient_dtype(first), device=first.device)
        self.missing = {index for index, parameter in enumerate(self.parameters) if parameter.grad is None}
        for index in self.missing:
            has_gradient[index].zero_()  # assigning a number would copy it from the host, which would wait
        gradients = map(_flatten_gradient, self.parameters, self._shapes, self._strides)
        flat = self._pack(gradients, has_gradient, group.size())
        if scale != 1.0:
            flat.mul_(scale)
        for parameter in self.parameters:
            parameter.grad = None
        self._flat, self.work = self._reduce(flat, group)
        if mask_group is not None:
            mask = torch.tensor([index not in self.missing for index in range(len(self.parameters))]).byte()
            self._mask = mask, start_all_reduce(mask, mask_group, dist.ReduceOp.MAX)

    def wait(self) -> None:
        """Wait for the sum: the host waits on CPU, and the current stream waits on CUDA."""
        assert self.work is not None
        self.work.wait()

    def finish(self) -> None:
        """Set the gradients, after :meth:`wait`.

        Raises:
            RuntimeError: If a parameter received another gradient in the meantime.
        """
        assert self._flat is not None
        sums: list[float] = []
        if self._mask is not None:
            self._mask[1].wait()
            sums = self._mask[0].tolist()
        # Reading waits for the device; a rank with all gradients needs no information about other ranks.
        elif self.missing:
            sums = self._flat[-len(self.parameters) :].tolist()
        for parameter in self.parameters:
            if parameter.grad is not None:
                raise late_gradient_error(parameter)
        used = [index not in self.missing or bool(sums[index]) for index in range(len(self.parameters))]
        self._unpack(self._flat, used)
        self._clear()

    @abstractmethod
    def _pack(self, gradients: Iterator[Tensor], has_gradient: Tensor, num_ranks: int) -> Tensor:
        """Return one tensor with the flat gradients, and the numbers that mark the gradients of this rank."""

    @abstractmethod
    def _reduce(self, flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Pending]:
        """Start the sum, and return the tensor that will contain it, with the numbers at its end."""

    @abstractmethod
    def _unpack(self, flat: Tensor, used: Sequence[bool]) -> None:
        """Set the gradients of parameters that a rank has used."""


class AllReduceBucket(Bucket):
    """A bucket whose sum every rank receives; gradients become views of it."""

    def _pack(self, gradients: Iterator[Tensor], has_gradient: Tensor, num_ranks: int) -> Tensor:
        return torch.cat([*gradients, has_gradient])

    def _reduce(self, flat: Tensor, group: ProcessGroup) -> tuple[Tensor, Pending]:
        return flat, start_all_reduce(flat, group)

    def _unpack(self, flat: Tensor, used: Sequence[bool]) -> None:
        offset = 0
        for parameter, shape, stride, is_used in zip(self.parameters, self._shapes, self._strides, used, strict=True):
            gradient = flat.as_strided(shape, stride, offset)
            if is_used and isinstance(parameter, DTensor):
                give_gradient(parameter, gradient)
            elif is_used:
                parameter.grad = gradient
            offset += shape.numel()


def _flatten_gradient(parameter: nn.Parameter, shape: torch.Size, stride: tuple[int, ...]) -> Tensor:
    """Return the elements of a parameter's gradient in memory order, as a view if possible; zeros if there is none."""
    gradient = local_gradient(parameter) if isinstance(parameter, DTensor) else parameter.grad
    dtype = _gradient_dtype(parameter)
    if gradient is None:
        return torch.zeros((), dtype=dtype, device=parameter.device).expand(shape.numel())
    if gradient.dtype != dtype or gradient.device != parameter.device:
        raise TypeError(
            f"The gradient of a parameter of shape {tuple(parameter.shape)} is {gradient.dtype} on {gradient.device},"
            f" but the parameter is {parameter.dtype} on {parameter.device}. Replicas can average the gradient only if"
            " it has the dtype and device of the parameter. Cast the gradient in a hook on the parameter. [LH810]"
        )
    if gradient.layout is not torch.strided:
        gradient = gradient.to_dense()  # ranks use different rows of an embedding, so only the dense sizes are equal
    if gradient.stride() != stride:
        gradient = torch.empty_strided(gradient.shape, stride, dtype=gradient.dtype, device=gradient.device).copy_(
            gradient
        )
    return gradient.as_strided((gradient.numel(),), (1,))


def _gradient_dtype(parameter: nn.Parameter) -> torch.dtype:
    """Return the dtype in which a parameter's gradient is accumulated and reduced."""
    return parameter.grad_dtype or parameter.dtype


def late_gradient_error(parameter: Tensor) -> RuntimeError:
    """Return the error for a gradient that arrives after its bucket was launched."""
    return RuntimeError(
        f"A parameter of shape {tuple(parameter.shape)} received a second gradient in one step, after the reduction of"
        " its bucket had started. Reentrant checkpointing causes this for parameters that are used more than once. Pass"
        " `use_reentrant=False` to `torch.utils.checkpoint.checkpoint`. [LH811]"
    )
