"""What the user's code logged during a step: recorded on the last stage, merged, and replayed on every rank."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.tensor import DTensor
from torchmetrics import Metric

from lightning_hybrid.distributed.dtensor import full_tensor
from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.distributed.tensor_bytes import move
from lightning_hybrid.pipeline_parallel.placeholders import without_value_text
from lightning_hybrid.trainer.lightning_internals import attached_trainer, intercept_results, set_forward_value
from lightning_hybrid.trainer.losses.loss_weights import LossWeights, weighted, weighted_sum

# What can follow name and value in a call of `self.log`.
_POSITIONAL = tuple(inspect.signature(LightningModule.log).parameters)[3:]


@dataclass
class Log:
    """One call of `self.log`.

    Attributes:
        name: The key.
        value: A number, or a tensor with one element; for a metric the value of this batch, ``None`` if it has none.
        metric: The dotted name of the metric in the module, if a metric was logged.
        arguments: The other arguments of the call.
        of_batch: For a tensor that a metric's ``forward`` returned: gives the one of the whole batch, once the batch
            has run; ``None`` if there is no such value.
    """

    name: str
    value: Any
    metric: str | None
    arguments: dict[str, Any]
    of_batch: Callable[[], Any] | None = None


class LogRecorder:
    """Replaces `LightningModule.log` while a step runs in microbatches.

    Args:
        module: The user's module.
    """

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._records: list[list[Log]] = []
        self._current: list[Log] | None = None
        self._metric_names: dict[int, tuple[str, Metric]] = {}
        self._values: dict[int, tuple[Tensor, Callable[[], Any]]] = {}

    @contextmanager
    def __call__(self) -> Iterator[list[list[Log]]]:
        """While this is entered, calls of `self.log` are recorded: a list for each microbatch."""
        self._records, self._current, self._values = [], None, {}
        attributes, record = vars(self._module), self._record_of_step()
        outside = attributes.get("log")
        attributes["log"] = record
        try:
            # What got hold of the method before (`Head(log=self.log)`) does not look there, and arrives at the results.
            with intercept_results(attached_trainer(self._module), record):
                yield self._records
        finally:
            self._values = {}
            del attributes["log"]
            if outside is not None:
                attributes["log"] = outside

    @property
    def counts(self) -> bool:
        """Whether what the microbatch that runs does counts."""
        return self._current is not None

    def next_microbatch(self, *, keep: bool) -> None:
        """A microbatch begins.

        Args:
            keep: Whether its logs count. Code before the body also runs on the first stage, where they do not.
        """
        self._current = None
        if keep:
            self._current = []
            self._records.append(self._current)

    @contextmanager
    def only_seen(self) -> Iterator[None]:
        """Inside, what is logged does not count; it stays alive."""
        outside, self._current = self._current, []
        try:
            yield
        finally:
            self._current = outside

    def remember_value(self, value: Any, of_batch: Callable[[], Any]) -> None:
        """A metric's `forward` returned this in the step that runs.

        Args:
            value: If it is a tensor, it may be logged.
            of_batch: Gives the same of the whole batch, once that has run; ``None`` if there is no such value.
        """
        if isinstance(value, Tensor):
            self._values[id(value)] = value, of_batch  # the tensor too, so that no other one gets its id

    def _record_of_step(self) -> Callable[..., None]:
        # A function, not a method: callbacks copy modules, and a method would take this object along.
        def record(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            arguments = log_arguments(args, kwargs)
            metric, of_batch = None, None
            if isinstance(value, Metric):
                metric = arguments.get("metric_attribute") or self._name_of(value)
            if metric is None and not isinstance(value, (Tensor, Number)):
                type(self._module).log(self._module, name, value, **arguments)  # Lightning says what is wrong
            if metric is not None:
                value = None
            elif isinstance(value, Tensor):
                _, of_batch = self._values.get(id(value), (None, None))
                # It may be changed in place later in the step.
                value = (full_tensor(value) if isinstance(value, DTensor) else value).detach().clone()
            if self._current is not None:
                if isinstance(value, Tensor) and value.is_meta:  # computed from placeholders, and so no number
                    raise WrongUseError(without_value_text(f"the value logged as {name!r}"))
                self._current.append(Log(name, value, metric, arguments, of_batch))

        return record

    def _name_of(self, metric: Metric) -> str | None:
        found = self._metric_names.get(id(metric))
        if found is None or found[1] is not metric:
            named = self._module.named_modules()
            self._metric_names = {id(m): (name, m) for name, m in named if isinstance(m, Metric)}
        return self._metric_names.get(id(metric), (None, None))[0]


def log_arguments(args: Sequence[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `self.log` after name and value, by their names."""
    return dict(zip(_POSITIONAL, args, strict=False)) | kwargs


def logged_numbers(logs: Sequence[Log]) -> dict[str, float]:
    """Return the numbers that a microbatch logged, by name, without metrics."""
    plain = [log for log in logs if log.metric is None and log.of_batch is None]
    return {log.name: float(log.value) for log in plain if not isinstance(log.value, Tensor) or log.value.numel() == 1}


def merge_logs(
    records: Sequence[Sequence[Log]],
    counts: Sequence[int],
    num_microbatches: int | None = None,
    weights: LossWeights | None = None,
    kinds: Mapping[str, str] | None = None,
) -> list[Log]:
    """Merge what the microbatches of one batch logged.

    A mean is weighted by the number of samples, or by a ``batch_size`` that microbatches have of their own, or by what
    the module says that their losses weigh; a sum is added, the least or greatest value is taken; so each is what one
    process would have logged if the value is a mean, sum, minimum or maximum over samples (or over what is weighed).

    Args:
        records: The logs of each microbatch.
        counts: The number of samples of each microbatch.
        num_microbatches: How many a full batch has; ``None`` for as many as this one.
        weights: The weights of the losses, if they are not the numbers of samples.
        kinds: Names of values that are ``"weighted"`` like losses, or a ``"sum"``; all others are means over samples.
            ``None`` if the module says its weights itself: then they are for all values.

    Returns:
        One log for each key, in the order of the first calls. Two calls with one key in a step stay two.
    """
    merged: dict[tuple[str, int], list[tuple[Log, int]]] = {}
    for microbatch, (logs, _) in enumerate(zip(records, counts, strict=True)):
        calls: Counter[str] = Counter()
        for log in logs:
            merged.setdefault((log.name, calls[log.name]), []).append((log, microbatch))
            calls[log.name] += 1
    number = num_microbatches or len(counts)
    return [
        _merge(entries, counts, number, weights, "of the module" if kinds is None else kinds.get(name, "mean"))
        for (name, _), entries in merged.items()
    ]


def _merge(
    entries: list[tuple[Log, int]],
    counts: Sequence[int],
    num_microbatches: int,
    weights: LossWeights | None,
    kind: str,
) -> Log:
    logs, microbatches = [log for log, _ in entries], [microbatch for _, microbatch in entries]
    first, sizes = logs[0], [log.arguments.get("batch_size") for log in logs]
    value = None if first.of_batch is None else first.of_batch()
    is_plain = value is None and first.metric is None
    is_mean = is_plain and _reduction(first) == "mean" and all(size is None for size in sizes)
    if is_mean and weights is not None and kind != "mean":
        return _mean_by_weights(logs, microbatches, weights, weighs_batches=kind == "of the module")
    of_samples, batch_size = _weigh(sizes, [counts[microbatch] for microbatch in microbatches], num_microbatches)
    arguments = {**first.arguments, "batch_size": batch_size}
    if batch_size is None:
        del arguments["batch_size"]
    if is_plain:
        reduction = "sum" if is_mean and kind == "sum" else _reduction(first)
        value = _reduce([log.value for log in logs], of_samples, reduction)
    return Log(first.name, value, first.metric, arguments)


def _mean_by_weights(logs: list[Log], microbatches: list[int], weights: LossWeights, *, weighs_batches: bool) -> Log:
    """Return the mean by the weights of the losses, as the loss itself: with ``sync_dist``, over all replicas.

    Lightning takes the plain mean over replicas of what is logged with ``sync_dist``, and weighs batches of an epoch by
    their ``batch_size``, which here is the same on all replicas. So the value of a replica is multiplied by its share.

    Args:
        logs: Of the microbatches.
        microbatches: Their numbers.
        weights: Of the losses.
        weighs_batches: If True, batches of an epoch count by their weights; otherwise by their samples, as Lightning
            has it.
    """
    tensors = [log.value for log in logs if isinstance(log.value, Tensor)]
    values = [torch.as_tensor(log.value, dtype=None if tensors else torch.float64) for log in logs]
    # Plain numbers are merged in Python's precision, and then are what Lightning makes of numbers.
    dtype = tensors[0].dtype if tensors and tensors[0].is_floating_point() else torch.get_default_dtype()
    each = torch.stack([weights.each[microbatch] for microbatch in microbatches])
    floating = [value if value.is_floating_point() else value.to(dtype) for value in values]
    value, batch_size = weighted_sum(floating, (each / each.sum()).nan_to_num().unbind()), weights.sum
    if logs[0].arguments.get("sync_dist"):
        value, batch_size = weighted(value, weights.replica_factor), weights.total
    if not weighs_batches:
        return Log(logs[0].name, value.to(dtype), None, logs[0].arguments)
    # A number of tokens may be more than half precision can hold; Lightning adds up in float32 at least.
    batch_size = batch_size.to(torch.promote_types(dtype, torch.get_default_dtype()))
    return Log(logs[0].name, value.to(dtype), None, {**logs[0].arguments, "batch_size": batch_size})


def _weigh(sizes: list[Any], counts: list[int], num_microbatches: int) -> tuple[list[float], float | None]:
    """The weights of the calls with one key, by the ``batch_size`` that each gave.

    ::

        a batch of 2 + 2 + 1 samples; a full one has 4 microbatches

        batch_size=None                     weights 2, 2, 1    of the batch  None
        batch_size=len(x)        2, 2, 1            2, 2, 1                  5
        batch_size=mask.sum()    7, 4, 9            7, 4, 9                  20
        batch_size=32            32, 32, 32         2, 2, 1                  4 * 32

    One number for all belongs to the batch: the same for each batch, also for a last one with fewer microbatches.
    It is not given once, as one process would, because a number of tokens may happen to be the same in all of a full
    batch's microbatches, and then it must be their sum; the weights of batches are relative.

    Args:
        sizes: As they were given, ``None`` where they were not.
        counts: The number of samples of each microbatch.
        num_microbatches: How many a full batch has.
    """
    if all(size is None for size in sizes):
        return list(counts), None
    numbers = [count if size is None else _number(size) for size, count in zip(sizes, counts, strict=True)]
    if len(set(numbers)) == 1 and numbers != counts:
        return list(counts), numbers[0] * num_microbatches
    return numbers, sum(numbers)


def _number(size: Any) -> float:
    number: float = size.item() if hasattr(size, "item") else size
    return number


def _reduction(log: Log) -> str:
    """``"sum"``, ``"min"``, ``"max"``, or ``"mean"`` for everything else."""
    fx = log.arguments.get("reduce_fx", "mean")
    name = fx.lower() if isinstance(fx, str) else getattr(fx, "__name__", "mean")
    return name if name in ("sum", "min", "max") else "mean"


def _reduce(values: list[Any], weights: list[float], name: str) -> Any:
    if len(values) == 1:
        return values[0]
    # Plain numbers are merged in Python's precision and stay plain numbers until they are logged.
    tensors = [torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64) for value in values]
    if name == "sum":
        merged = sum(tensors[1:], tensors[0])
    elif name in ("min", "max"):
        merged = getattr(torch.stack(tensors), name)()
    else:  # what weighs nothing adds nothing, also where its own mean is 0 / 0
        weighted = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if weight]
        merged = weighted_mean(*zip(*weighted, strict=True))
    return merged if any(isinstance(value, Tensor) for value in values) else merged.item()


def pack_logs(logs: Sequence[Log]) -> dict[Any, tuple[Any, ...]]:
    """Logs as a tree of numbers: what was logged is in the keys, which are sent only when they are new.

    Args:
        logs: Merged logs.

    Returns:
        For each log (position, name, metric, whether it has a value, whether it is a plain number, the type of a plain
        ``batch_size``, arguments) and a tensor, with the ``batch_size`` if there is one: it may be another at each
        step. Plain numbers are tensors on the host.
    """
    packed: dict[Any, tuple[Any, ...]] = {}
    for position, log in enumerate(logs):
        plain = not isinstance(log.value, Tensor)
        arguments = dict(log.arguments)
        arguments.pop("sync_dist_group", None)
        size = arguments.pop("batch_size", None)
        # A function (`torch.mean` and the like) is sent by its name.
        names = tuple((key, value.__name__ if callable(value) else value) for key, value in arguments.items())
        value = torch.tensor(0.0 if log.value is None else log.value, dtype=torch.float64) if plain else log.value
        size_type = type(size) if isinstance(size, (int, float)) else None
        size = size if size_type is None else torch.tensor(size, dtype=torch.float64)
        key = position, log.name, log.metric, log.value is not None, plain, size_type, names
        packed[key] = (value,) if size is None else (value, size)
    return packed


def unpack_logs(packed: dict[Any, tuple[Any, ...]], device: torch.device) -> list[Log]:
    """The inverse of :func:`pack_logs`.

    Args:
        packed: The logs.
        device: Where plain numbers shall be, as Lightning puts them there; the host does not wait for it.
    """
    numbers = [value for (*_, plain, _, _), (value, *_) in packed.items() if plain]
    if numbers:
        stacked = torch.stack(numbers).to(torch.get_default_dtype())  # as Lightning does with numbers
        moved = iter(move(stacked, device).unbind())
    logs = []
    for (_, name, metric, has_value, plain, size_type, names), (value, *size) in packed.items():
        value = next(moved) if plain else value
        arguments = dict(names)
        if size:
            arguments["batch_size"] = size[0] if size_type is None else size_type(size[0])
        logs.append(Log(name, value if has_value else None, metric, arguments))
    return logs


def replay(module: LightningModule, logs: Sequence[Log], *, alone: bool, on_epoch: bool) -> None:
    """Log what was recorded, on every rank.

    Args:
        module: The user's module.
        logs: Equal on all ranks of a model group.
        alone: Whether there is one replica, so that nothing needs to be reduced. Lightning's advice to reduce what is
            logged for an epoch is then followed in advance.
        on_epoch: What Lightning takes for `on_epoch` where nobody has said it.
    """
    for entry in logs:
        said = entry.arguments.get("on_epoch")
        is_of_epoch = on_epoch if said is None else said
        arguments = {**entry.arguments, "sync_dist": True} if alone and is_of_epoch else entry.arguments
        value = entry.value
        if entry.metric is not None:
            metric = module.get_submodule(entry.metric)
            assert isinstance(metric, Metric)
            set_forward_value(metric, value)  # Lightning reads the value of this batch there
            value, arguments = metric, {**arguments, "metric_attribute": entry.metric}
        type(module).log(module, entry.name, value, **arguments)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """The mean of tensors of one shape.

    Args:
        values: The tensors.
        weights: What each counts.
    """
    total = float(sum(weights))
    parts = [value * (weight / total) for value, weight in zip(values, weights, strict=True)]
    return sum(parts[1:], parts[0])
