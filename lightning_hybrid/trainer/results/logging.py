"""Values that the user's code logs during a step: recorded on the last stage, merged, and replayed on every rank.

::

    LogRecorder --> merge_logs --> pack_logs --> message --> unpack_logs --> replay
    in the step     steps          `StepContext.share`                       `self.log`, on every rank

Lightning must not see the calls of a step directly: it would see them once for each microbatch, and only on the last
stage, so that values of an epoch would have wrong weights and ranks would wait for each other in reductions.
"""

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

# The names of the positional parameters of `self.log` after the name and the value.
_POSITIONAL = tuple(inspect.signature(LightningModule.log).parameters)[3:]


@dataclass
class Log:
    """A call of `self.log`.

    Attributes:
        name: The key.
        value: A number, or a tensor with one element. For a metric, the value of this batch; ``None`` if it has none.
        metric: The dotted name of the metric in the module, if a metric was logged.
        arguments: The other arguments of the call.
        of_batch: For a tensor that a metric's ``forward`` returned: returns the value for the whole batch after the
            batch has run; ``None`` without such a value.
    """

    name: str
    value: Any
    metric: str | None
    arguments: dict[str, Any]
    of_batch: Callable[[], Any] | None = None


class LogRecorder:
    """A replacement of `LightningModule.log` while a step runs.

    `StepContext` enters it for each training and evaluation step. The memory estimate of `DryRun` enters it only to
    keep values away from the Trainer.

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
        """Record calls of `self.log` inside the context, in one list for each microbatch that counts.

        Calls before the first :meth:`next_microbatch` are dropped.
        """
        self._records, self._current, self._values = [], None, {}
        attributes, record = vars(self._module), self._record_of_step()
        outside = attributes.get("log")
        attributes["log"] = record
        try:
            # Objects that stored the method earlier (`Head(log=self.log)`) bypass this attribute, and reach Lightning's
            # results.
            with intercept_results(attached_trainer(self._module), record):
                yield self._records
        finally:
            self._values = {}
            del attributes["log"]
            if outside is not None:
                attributes["log"] = outside

    @property
    def counts(self) -> bool:
        """Return True if the logs and calls of the current microbatch count."""
        return self._current is not None

    def next_microbatch(self, *, keep: bool) -> None:
        """Start a new microbatch.

        Args:
            keep: True if its logs count. Code before the body also runs on the first stage, where its logs do not
                count.
        """
        self._current = None
        if keep:
            self._current = []
            self._records.append(self._current)

    @contextmanager
    def only_seen(self) -> Iterator[None]:
        """Discard the values logged inside the context, in which a step is only traced; keep them alive.

        The trace sends tensors that are still alive at its end to the last stage, where they are logged.
        """
        outside, self._current = self._current, []
        try:
            yield
        finally:
            self._current = outside

    def remember_value(self, value: Any, of_batch: Callable[[], Any]) -> None:
        """Remember a value that a metric's `forward` returned in the current step.

        Args:
            value: The value. If it is a tensor, the user may log it.
            of_batch: Returns the value for the whole batch after the batch has run; ``None`` without such a value.
        """
        if isinstance(value, Tensor):
            self._values[id(value)] = value, of_batch  # keeps the tensor alive, so that no other tensor gets its id

    def _record_of_step(self) -> Callable[..., None]:
        # A function instead of a method: callbacks copy modules, and a method would copy this object, too.
        def record(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
            arguments = log_arguments(args, kwargs)
            metric, of_batch = None, None
            if isinstance(value, Metric):
                metric = arguments.get("metric_attribute") or self._name_of(value)
            if metric is None and not isinstance(value, (Tensor, Number)):
                type(self._module).log(self._module, name, value, **arguments)  # Lightning raises an error
            if metric is not None:
                value = None
            elif isinstance(value, Tensor):
                _, of_batch = self._values.get(id(value), (None, None))
                # The step may change the tensor in place later.
                value = (full_tensor(value) if isinstance(value, DTensor) else value).detach().clone()
            if self._current is not None:
                if isinstance(value, Tensor) and value.is_meta:  # computed from placeholders, so it has no value
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
    """Return the arguments of `self.log` after the name and the value, by name."""
    return dict(zip(_POSITIONAL, args, strict=False)) | kwargs


def logged_numbers(logs: Sequence[Log]) -> dict[str, float]:
    """Return the numbers that a microbatch logged, by name, without metrics and values that metrics returned."""
    plain = [log for log in logs if log.metric is None and log.of_batch is None]
    return {log.name: float(log.value) for log in plain if not isinstance(log.value, Tensor) or log.value.numel() == 1}


def merge_logs(
    records: Sequence[Sequence[Log]],
    counts: Sequence[int],
    num_microbatches: int | None = None,
    weights: LossWeights | None = None,
    kinds: Mapping[str, str] | None = None,
) -> list[Log]:
    """Merge the logs of the microbatches of one batch.

    A mean is weighted by the number of samples, by a ``batch_size`` that differs between microbatches, or by the
    weights of the losses. A sum is added, and a minimum or maximum is taken. So each result equals the value of a
    single process if the logged value is a mean, sum, minimum or maximum over samples (or over the weighted items).

    Args:
        records: The logs of each microbatch.
        counts: The number of samples of each microbatch.
        num_microbatches: The number of microbatches of a full batch; ``None`` if this batch is full.
        weights: The weights of the losses, if these are not the numbers of samples.
        kinds: For each name, ``"weighted"`` like losses, or ``"sum"``; all other values are means over samples.
            ``None`` if the module defines the weights itself; then they apply to all values.

    Returns:
        One log for each key, in the order of the first calls. Two calls with the same key in a step stay separate.
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
    """Return the mean weighted like the losses; with ``sync_dist``, over all replicas.

    Lightning takes the plain mean over replicas of values that are logged with ``sync_dist``, and weights the batches
    of an epoch by their ``batch_size``, which is equal on all replicas here. The value of a replica is therefore
    multiplied by its fraction of the weights.

    Args:
        logs: The logs of the microbatches.
        microbatches: The numbers of these microbatches.
        weights: The weights of the losses.
        weighs_batches: If True, the batches of an epoch are weighted by their weights; otherwise by their samples, as
            in Lightning.
    """
    tensors = [log.value for log in logs if isinstance(log.value, Tensor)]
    values = [torch.as_tensor(log.value, dtype=None if tensors else torch.float64) for log in logs]
    # Plain numbers are merged in Python's precision, and then converted to the dtype that Lightning uses for numbers.
    dtype = tensors[0].dtype if tensors and tensors[0].is_floating_point() else torch.get_default_dtype()
    each = torch.stack([weights.each[microbatch] for microbatch in microbatches])
    floating = [value if value.is_floating_point() else value.to(dtype) for value in values]
    value, batch_size = weighted_sum(floating, (each / each.sum()).nan_to_num().unbind()), weights.sum
    if logs[0].arguments.get("sync_dist"):
        value, batch_size = weighted(value, weights.replica_factor), weights.total
    if not weighs_batches:
        return Log(logs[0].name, value.to(dtype), None, logs[0].arguments)
    # Half precision may be too small for a number of tokens. Lightning adds numbers in float32 or higher precision.
    batch_size = batch_size.to(torch.promote_types(dtype, torch.get_default_dtype()))
    return Log(logs[0].name, value.to(dtype), None, {**logs[0].arguments, "batch_size": batch_size})


def _weigh(sizes: list[Any], counts: list[int], num_microbatches: int) -> tuple[list[float], float | None]:
    """Return the weights of the calls with one key, and the ``batch_size`` of the batch.

    ::

        a batch of 2 + 2 + 1 samples; a full batch has 4 microbatches

        batch_size=None                     weights 2, 2, 1    of the batch  None
        batch_size=len(x)        2, 2, 1            2, 2, 1                  5
        batch_size=mask.sum()    7, 4, 9            7, 4, 9                  20
        batch_size=32            32, 32, 32         2, 2, 1                  4 * 32

    If all calls pass the same number, it belongs to the batch: it is the same for each batch, even for a last batch
    with fewer microbatches. It is still multiplied by the number of microbatches, because a number of tokens may happen
    to be equal in all microbatches of a full batch, and then the result must be their sum. Only relative weights of
    batches matter.

    Args:
        sizes: The ``batch_size`` of each call; ``None`` if the call had none.
        counts: The number of samples of each microbatch.
        num_microbatches: The number of microbatches of a full batch.
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
    """Return ``"sum"``, ``"min"``, ``"max"``, or ``"mean"`` for all other reductions."""
    fx = log.arguments.get("reduce_fx", "mean")
    name = fx.lower() if isinstance(fx, str) else getattr(fx, "__name__", "mean")
    return name if name in ("sum", "min", "max") else "mean"


def _reduce(values: list[Any], weights: list[float], name: str) -> Any:
    if len(values) == 1:
        return values[0]
    # Plain numbers are merged in Python's precision, and stay plain numbers until they are logged.
    tensors = [torch.as_tensor(value, dtype=None if isinstance(value, Tensor) else torch.float64) for value in values]
    if name == "sum":
        merged = sum(tensors[1:], tensors[0])
    elif name in ("min", "max"):
        merged = getattr(torch.stack(tensors), name)()
    else:  # a value with weight 0 adds nothing, even if it is 0 / 0
        weighted = [(tensor, weight) for tensor, weight in zip(tensors, weights, strict=True) if weight]
        merged = weighted_mean(*zip(*weighted, strict=True)) if weighted else weighted_mean(tensors, weights)
    return merged if any(isinstance(value, Tensor) for value in values) else merged.item()


def pack_logs(logs: Sequence[Log]) -> dict[Any, tuple[Any, ...]]:
    """Return logs as a tree of numbers. The keys contain all other information, and are sent only if they are new.

    Args:
        logs: Merged logs.

    Returns:
        For each log, the key (position, name, metric, True if it has a value, True if it is a plain number, the type of
        a plain ``batch_size``, arguments), and as the value a tensor, with the ``batch_size`` if there is one, because
        it may change at each step. Plain numbers are tensors on the host.
    """
    packed: dict[Any, tuple[Any, ...]] = {}
    for position, log in enumerate(logs):
        plain = not isinstance(log.value, Tensor)
        arguments = dict(log.arguments)
        arguments.pop("sync_dist_group", None)
        size = arguments.pop("batch_size", None)
        # A function such as `torch.mean` is sent by its name.
        names = tuple((key, value.__name__ if callable(value) else value) for key, value in arguments.items())
        value = torch.tensor(0.0 if log.value is None else log.value, dtype=torch.float64) if plain else log.value
        size_type = type(size) if isinstance(size, (int, float)) else None
        size = size if size_type is None else torch.tensor(size, dtype=torch.float64)
        key = position, log.name, log.metric, log.value is not None, plain, size_type, names
        packed[key] = (value,) if size is None else (value, size)
    return packed


def unpack_logs(packed: dict[Any, tuple[Any, ...]], device: torch.device) -> list[Log]:
    """Return the logs that :func:`pack_logs` has packed.

    Args:
        packed: The packed logs.
        device: The device for plain numbers, as in Lightning. The host does not wait for the copy.
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
    """Log recorded values with `LightningModule.log`, on every rank; Lightning then reduces them as usual.

    Args:
        module: The user's module.
        logs: The logs, equal on all ranks of a model group.
        alone: True if there is one replica, so that no reduction is needed. Then ``sync_dist=True`` is set for values
            of an epoch, which Lightning would otherwise recommend in a warning.
        on_epoch: Lightning's default for `on_epoch`.
    """
    for entry in logs:
        said = entry.arguments.get("on_epoch")
        is_of_epoch = on_epoch if said is None else said
        arguments = {**entry.arguments, "sync_dist": True} if alone and is_of_epoch else entry.arguments
        value = entry.value
        if entry.metric is not None:
            metric = module.get_submodule(entry.metric)
            assert isinstance(metric, Metric)
            set_forward_value(metric, value)  # Lightning reads the value of this batch from there
            value, arguments = metric, {**arguments, "metric_attribute": entry.metric}
        type(module).log(module, entry.name, value, **arguments)


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of equal shapes, or their mean if all weights are 0.

    Args:
        values: The tensors.
        weights: The weight of each tensor.
    """
    weights = weights if any(weights) else [1.0] * len(values)
    total = float(sum(weights))
    parts = [value * (weight / total) for value, weight in zip(values, weights, strict=True)]
    return sum(parts[1:], parts[0])
