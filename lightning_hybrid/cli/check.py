"""Comparison of training under a layout with training in one process, and a search for the cause of differences.

The function `lightning_hybrid.check` and the command ``lightning-hybrid check`` use it.

::

    check --> train in one process               each in new processes (`run_ranks`),
          --> train under the layout             which return a TrainingRecord of each rank
          --> compare the records
          --> if they differ, change one argument at a time and train again --> CheckResult with the cause

Every training runs in new processes, because a process can have only one default process group, and a failed rank must
not end the process of the user.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from lightning_hybrid.axes import AXES, Sizes, sizes_in
from lightning_hybrid.cli.check_training import MakeData, MakeModule, MicrobatchWeights, Training, TrainingRecord
from lightning_hybrid.cli.comparison import Comparison, compare, comparison_table, interleaved
from lightning_hybrid.cli.local_ranks import RankError, run_ranks
from lightning_hybrid.config import Faults, Launch, preferred
from lightning_hybrid.strategy.strategy import HybridStrategy

#: The largest relative difference of equal results, in float64 and in float32. Rounding errors are far smaller, but an
#: optimizer that divides by the size of a gradient can increase them.
TOLERANCE, TOLERANCE_FLOAT32 = 1e-8, 1e-4
_TRAINER_ARGUMENTS = ("accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm")
# These arguments do not change the numbers.
_IRRELEVANT: dict[str, Any] = {
    "initial_weights": None,
    "save_distributed_checkpoint": False,
    "async_save": False,
    "gather_module_on_teardown": False,
    "global_batch_size": None,
}
_WITHOUT_STAGES = {"pipeline_parallel_size": 1, "num_chunks": 1, "schedule": "1f1b", "partition": "uniform"}
_ONE_DIMENSION = {"tensor_parallel_mode": "1d", "tensor_parallel_depth": 1}
_WITHOUT_ZERO = {"zero_stage": 0, "zero_size": None}
_WITHOUT_EXPERTS = {"expert_parallel_size": 1}
_WITHOUT_TENSOR_PARALLEL = {"tensor_parallel_size": 1, "sequence_parallel": False, **_ONE_DIMENSION}
_MOST_SHOWN = 5


@dataclass(frozen=True)
class Experiment:
    """An additional training run in which one setting is changed, to find the cause of a difference.

    Attributes:
        change: Description of the change, such as ``"zero_stage=0"``.
        difference: The largest relative difference from training in one process; ``None`` if the run failed.
        equal: True if ``difference`` is so small that the results count as equal.
        failure: The error, if the run failed.
    """

    change: str
    difference: float | None
    equal: bool
    failure: str = ""

    def __str__(self) -> str:
        if self.difference is None:
            return f"{self.change}: training failed ({_first_line(self.failure)})"
        return f"{self.change}: {'equal' if self.equal else 'different'} ({self.difference:.0e})"


_ALONE = "in one process"


@dataclass(frozen=True)
class CheckResult:
    """Result of :func:`lightning_hybrid.check`.

    Attributes:
        layout: The layout as text.
        comparisons: All compared values, in the order in which they were computed.
        tolerance: The largest relative difference at which two values still count as equal.
        notes: Notes on the comparison, for example a note that dropout probabilities were set to 0.
        experiments: Additional training runs to find the cause of a difference.
        reason: The cause of the difference, if the values differ.
        remedy: How to remove the difference, if the values differ.
    """

    layout: str
    comparisons: tuple[Comparison, ...]
    tolerance: float
    notes: tuple[str, ...] = ()
    experiments: tuple[Experiment, ...] = ()
    reason: str = ""
    remedy: str = ""

    @property
    def differences(self) -> tuple[Comparison, ...]:
        """The values that differ, in the order in which they were computed."""
        return tuple(each for each in self.comparisons if each.difference > self.tolerance)

    @property
    def equal(self) -> bool:
        """True if all values under the layout equal the values in one process, within the tolerance."""
        return not self.differences

    @property
    def largest(self) -> Comparison:
        """The value with the largest relative difference."""
        return max(self.comparisons, key=lambda each: each.difference)

    def as_dict(self) -> dict[str, Any]:
        """Return the result as a dictionary that can be written as JSON. Numbers that are not finite are ``None``."""
        found = {"equal": self.equal, **asdict(self)}
        for row in (*found["comparisons"], *found["experiments"]):
            row.update(
                {name: None for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
            )
        return found

    def __str__(self) -> str:
        table = comparison_table(self.comparisons, self.tolerance, _MOST_SHOWN)
        parts = [f"One process compared with {self.layout}", table, *self.notes]
        if self.equal:
            number = len(self.comparisons)
            parts.append(
                f"Equal {_bound(self.largest.difference)}: {number} values; the largest relative difference is"
                f" {self.largest.difference:.1e} ({_named(self.largest)})."
            )
            return "\n\n".join(parts)
        first = self.differences[0]
        parts.append(
            f"Different. First difference: {_named(first)}, which is {first.expected:.12g} in one process and"
            f" {first.actual:.12g} under the layout (relative difference {first.difference:.1e})."
        )
        tried = "\n".join(f"  {experiment}" for experiment in self.experiments)
        parts.append(f"Why: {self.reason}\n{tried}".rstrip())
        parts.append(f"Remedy: {self.remedy}")
        return "\n\n".join(parts)


def check(
    make_module: MakeModule,
    make_data: MakeData | None = None,
    *,
    steps: int = 2,
    trainer: Mapping[str, Any] | None = None,
    time_limit: float = 600.0,
    progress: Callable[[str], None] = lambda text: None,
    **layout: Any,
) -> CheckResult:
    """Train a module in one process, train it again under a layout, and compare the results.

    Both runs train in float64 on the CPU and use the same batches from the loader. They run in forked copies of the
    process that calls ``check``. If a module stores its dropout probability in an attribute, ``check`` sets this
    probability to 0. Under the layout, the batches are distributed over the replicas. The single process trains on the
    batches of all replicas and averages the gradients of these batches, as Lightning's DDP does.

    Example::

        print(lightning_hybrid.check(MyModule, MyData, pipeline_parallel_size=2))

    Args:
        make_module: Class or function that returns the module.
        make_data: Class or function that returns the data for `Trainer.fit`. Use ``None`` if the module has its own
            loaders.
        steps: Number of optimizer steps.
        trainer: Arguments of the Trainer. Only ``accumulate_grad_batches``, ``gradient_clip_val`` and
            ``gradient_clip_algorithm`` are accepted.
        time_limit: Time limit for each training run, in seconds.
        progress: Function that ``check`` calls before each training run, with a description of the run as argument.
        layout: Arguments of `HybridStrategy`. ``data_parallel_size="auto"`` is replaced by 1, and a list of sizes is
            replaced by its first entry. ``global_batch_size`` is ignored. Set ``accumulate_grad_batches`` in
            ``trainer`` instead.

    Returns:
        The compared values and, if values differ, the cause of the difference.

    Raises:
        ValueError, TypeError: If an argument is invalid, or if training in one process produces a loss or gradient norm
            that is not finite.
        RankError: If training fails in one process or under the layout.
        RuntimeError: If the operating system cannot fork a process.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps must be an integer of at least 1, got {steps!r}. [LH103]")
    if not time_limit > 0:
        raise ValueError(f"time_limit must be a positive number of seconds, got {time_limit!r}. [LH103]")
    arguments = {"accumulate_grad_batches": 1, **(trainer or {})}
    if unknown := sorted(set(arguments) - set(_TRAINER_ARGUMENTS)):
        raise ValueError(
            f"trainer accepts only {', '.join(_TRAINER_ARGUMENTS)}, but got {', '.join(unknown)}. [LH1006]"
        )
    launch = replace(layout.get("launch", Launch()), process_group_backend="gloo")
    layout = {**layout, **_IRRELEVANT, "launch": launch}
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        layout[name] = preferred(layout.get(name, 1))
    settings = HybridStrategy(**layout).settings
    if settings.searched:
        raise ValueError(
            f"A check needs fixed values for {', '.join(settings.searched)}, because it does not search for a layout."
            " [LH1004]"
        )
    layout |= {"num_microbatches": settings.num_microbatches, "schedule": settings.schedule}
    if layout.get("data_parallel_size", "auto") == "auto":
        layout["data_parallel_size"] = 1
    with TemporaryDirectory(prefix="lightning-hybrid-") as directory:
        training = Training(make_module, make_data or (lambda: None), steps, arguments, settings, Path(directory))
        return _Check(training, layout, settings.auto_microbatches, time_limit, progress).result()


@dataclass(frozen=True)
class _Explanation:
    """The cause of a difference, and the remedy."""

    reason: str
    remedy: str


@dataclass
class _Check:
    """The training runs of one check, and their results. Only :func:`check` makes it, and calls :meth:`result`.

    Attributes:
        training: The training that all runs have in common.
        layout: The arguments of `HybridStrategy` that are checked, by name.
        chooses_microbatches: True if ``num_microbatches`` is ``"auto"``. A run may then use one microbatch instead.
        time_limit: The time limit of each run, in seconds.
        progress: Receives a description of each run before it starts.
        experiments: The additional runs so far, which search for the cause of a difference.
    """

    training: Training
    layout: dict[str, Any]
    chooses_microbatches: bool  # True if a run may use one microbatch instead of the layout's number
    time_limit: float
    progress: Callable[[str], None]
    experiments: list[Experiment] = field(default_factory=list)
    _ranks: list[TrainingRecord] = field(default_factory=list)  # the records of the unchanged layout
    _references: dict[tuple[Any, ...], TrainingRecord] = field(default_factory=dict)

    @property
    def replicas(self) -> int:
        return _sizes(self.layout).num_replicas

    @property
    def num_microbatches(self) -> int:
        return int(self.layout["num_microbatches"])

    @property
    def tolerance(self) -> float:
        return TOLERANCE if self.reference(self.replicas).float32 is None else TOLERANCE_FLOAT32

    def result(self) -> CheckResult:
        reference = self.reference(self.replicas)
        if not all(map(math.isfinite, (*reference.losses, *reference.grad_norms))):
            raise ValueError(
                f"In one process, the losses are {reference.losses[:_MOST_SHOWN]} and the gradient norms are"
                f" {reference.grad_norms[:_MOST_SHOWN]}, but only finite values can be compared. Use another learning"
                " rate or fewer steps. [LH1007]"
            )
        result = CheckResult(_layout_text(self.layout), self.compare({}), self.tolerance, self.notes())
        if result.equal:
            return result
        if self.is_repeatable():
            explanation = self.explain(result)
        else:
            with_same_draws = self.with_same_draws(result)
            if with_same_draws.equal:
                return with_same_draws
            explanation = self.explain_draws()
        return replace(result, experiments=tuple(self.experiments), **vars(explanation))

    def with_same_draws(self, result: CheckResult) -> CheckResult:
        """Return a new result, compared with replicas that each run the same microbatches and seeds in one process."""
        without = {**_WITHOUT_STAGES, **_WITHOUT_TENSOR_PARALLEL, **_WITHOUT_ZERO, **_WITHOUT_EXPERTS}
        layout = {**self.layout, **without, "recompute": False}
        if all(self.layout.get(name, value) == value for name, value in layout.items()):
            return result
        text = "one process with the same microbatches and seeds"
        try:
            ranks, replicas = self.train(self.layout), self.train(layout)
        except RankError as error:
            self.add_failure(text, error)
            return result
        compared = compare(interleaved(replicas), ranks, steps=self.training.steps, replicas=len(replicas))
        self.add(text, compared)
        note = "The step draws random numbers, so one process ran the same microbatches with the same random numbers."
        return replace(result, comparisons=compared, notes=(*result.notes, note))

    # -- trainings ---------------------------------------------------------------------------------------------------

    def run(self, text: str, function: Callable[[], Any], world_size: int) -> list[Any]:
        self.progress(text)
        try:
            return run_ranks(function, world_size, time_limit=self.time_limit)
        except RankError as error:
            advice = f"\n\n{_advice(text)}" if error.is_raised else ""
            raise RankError(f"Training {text}: {error}{advice}", is_raised=error.is_raised) from None

    def reference(self, replicas: int, *, seed: int = 0, fixed_statistics: bool = False) -> TrainingRecord:
        """Return the record of training in one process on the batches of several replicas. Cached.

        Args:
            replicas: The number of replicas.
            seed: The seed of random numbers during training, not of the initial weights.
            fixed_statistics: If True, batch norms use their running statistics.

        Raises:
            RankError: If training fails.
        """
        key = (replicas, seed, fixed_statistics)
        if key not in self._references:
            function = partial(self.training.in_one_process, replicas, seed=seed, fixed_statistics=fixed_statistics)
            (self._references[key],) = self.run(_ALONE, function, 1)
        return self._references[key]

    def compare(self, changes: Mapping[str, Any], *, fixed_statistics: bool = False) -> tuple[Comparison, ...]:
        """Train under the layout with changed arguments, and compare with one process."""
        layout = {**self.layout, **changes}
        replicas = _sizes(layout).num_replicas
        reference = self.reference(replicas, fixed_statistics=fixed_statistics)
        ranks = self.train(layout, fixed_statistics=fixed_statistics)
        self._ranks = self._ranks or ranks
        return compare(reference, ranks, steps=self.training.steps, replicas=replicas)

    def train(self, layout: Mapping[str, Any], *, fixed_statistics: bool = False) -> list[TrainingRecord]:
        """Train under a layout, and return the record of every rank.

        Raises:
            RankError: If training fails.
        """
        given = dict(layout)
        if self.chooses_microbatches and layout["num_microbatches"] == self.num_microbatches:
            given["num_microbatches"] = "auto"
        if _sizes(layout).num_replicas * self.training.accumulated > 1:
            faults = layout.get("faults", Faults())  # one process takes the plain mean over these batches, as DDP does
            given["faults"] = replace(faults, compare_microbatches=False)
        function = partial(self.training.under_layout, given, fixed_statistics=fixed_statistics)
        return self.run(f"under {_layout_text(layout)}", function, _sizes(layout).num_ranks)

    def notes(self) -> tuple[str, ...]:
        reference = self.reference(self.replicas)
        notes = []
        if reference.dropouts:
            notes.append(
                f"Dropout probabilities set to 0: {reference.dropouts}. Otherwise, the microbatches and the full batch"
                " would draw different random numbers."
            )
        if reference.float32 is not None:
            notes.append(
                f"The step computes in float32 at {reference.float32}, so float32 rounding errors are expected."
            )
        return tuple(notes)

    # -- why ---------------------------------------------------------------------------------------------------------

    def explain_draws(self) -> _Explanation:
        """Return the explanation for random steps: even two runs in one process differ if their seeds differ."""
        draws = self.reference(self.replicas).draws
        who = "training draws random numbers" if draws is None else f"the step draws random numbers ({draws})"
        return _Explanation(
            f"{who}, so even two runs in one process differ if their seeds differ. Under a layout, each microbatch,"
            " replica, layer and rank can draw its own random numbers. The results therefore cannot be equal, and the"
            " comparison does not show whether the layout is correct.",
            "Turn off all random numbers for the check. Set dropout in your own code to 0 (such as `--model.dropout"
            " 0`), or store its probability in an attribute whose name contains `drop` (such as `self.dropout_p`). The"
            " check sets such attributes to 0. If your method needs random numbers, such as the noise of a diffusion"
            " model or negative samples, draw them in the Dataset or in `collate_fn` (`return x, noise`), so that every"
            " layout trains on the same numbers. Seeding a generator in the step does not help, because each microbatch"
            " would draw the same numbers again.",
        )

    def explain(self, result: CheckResult) -> _Explanation:
        """Change one argument after another until the results are equal, and return the explanation."""
        one: dict[str, Any] = {}
        if self.num_microbatches > 1:
            one = {"num_microbatches": 1}
            if self.is_equal("num_microbatches=1", one):
                return self.explain_microbatches(result)
        for text, changes in self.axes():
            if self.is_equal(text, {**one, **changes}):
                return _Explanation(
                    f"with {text}, the results are equal, so this argument causes the difference.",
                    (self.about_plan() if "tensor_parallel_size" in changes else "")
                    + "`lightning-hybrid plan` shows how the layers are sharded. If the sharding is correct, please"
                    " report a bug in this package.",
                )
        return _Explanation(
            "no single change makes the results equal.", "Remove parts of the module until the results are equal."
        )

    def about_plan(self) -> str:
        """Return sentences about possible faults of the user's tensor-parallel plan; empty if the plan is automatic."""
        record = self._ranks[0]
        if not record.has_own_plan:
            return ""
        first = "You wrote the tensor_parallel_plan yourself, so first check whether an entry is missing."
        return "".join(f"{sentence} " for sentence in (first, *record.plan_faults[:_MOST_SHOWN]))

    def explain_microbatches(self, result: CheckResult) -> _Explanation:
        """Return the explanation if one microbatch gives equal results, but several do not."""
        if layers := self.reference(self.replicas).batch_norms:
            text = "batch norm with running statistics"
            if self.is_equal(text, {}, fixed_statistics=True):
                return _Explanation(
                    f"the BatchNorm layers ({layers}) use the statistics of each microbatch instead of the full batch.",
                    "Use GroupNorm or LayerNorm, or num_microbatches=1. SyncBatchNorm does not help: it combines the"
                    " statistics of replicas, not of microbatches.",
                )
        names = list(dict.fromkeys(each.name for each in result.differences))
        if all(name.startswith("log ") for name in names):
            return _Explanation(
                f"loss, gradients and weights are equal, but these logged values are not means over the samples: "
                f"{', '.join(name.removeprefix('log ') for name in names)}.",
                "Set `reduce_fx` or `batch_size` in `self.log`, or log a torchmetrics Metric.",
            )
        function = partial(
            self.training.microbatch_weights, self.num_microbatches, self.layout.get("loss_reduction", "mean")
        )
        try:
            (weights,) = self.run("on each microbatch in one process", function, 1)
        except RankError as error:
            self.add_failure("each microbatch in one process", error)
            return _Explanation("the microbatches and the batch give different results.", "Use num_microbatches=1.")
        return self.explain_weights(weights)

    def explain_weights(self, weights: MicrobatchWeights) -> _Explanation:
        """Return the explanation from the weights with which gradients of microbatches add up to the batch's."""
        found, used = map(_weights_text, (weights.found, weights.used))
        is_sum = weights.residual <= math.sqrt(self.tolerance)
        text = f"one process, sum of microbatch gradients weighted by {found}, compared with the gradient of the batch"
        self.experiments.append(Experiment(text, weights.residual, equal=is_sum))
        if not is_sum:
            return _Explanation(
                f"the loss couples the samples of a batch: no weighted sum of microbatch gradients equals the"
                f" gradient of the batch (the best sum has a relative error of {weights.residual:.0e}).",
                "Use num_microbatches=1, or define a `split_batch` hook that keeps dependent samples together.",
            )
        if max(abs(a - b) for a, b in zip(weights.found, weights.used, strict=True)) <= math.sqrt(self.tolerance):
            return _Explanation(
                "the losses and gradients of a batch and its microbatches are equal, but the step changes state each"
                " time it is called, and it is called once per microbatch.",
                "Use num_microbatches=1, or update this state in a hook (`on_train_batch_end`).",
            )
        if all(abs(weight - 1) <= math.sqrt(self.tolerance) for weight in weights.found):
            return _Explanation(
                f"the loss is a sum over samples, but the losses of the microbatches were averaged (weights {used}).",
                'Use loss_reduction="sum".',
            )
        return _Explanation(
            f"the loss is a mean over units other than samples, such as tokens: the correct weights of the microbatches"
            f" are {found}, but the weights {used} were used.",
            "For a mean over labels that are not masked, set `microbatch_weight ="
            " lightning_hybrid.count_tokens('labels')` in the module, with `shift=True` if the model shifts the labels,"
            " as causal language models in transformers do. For any other mean, define `microbatch_weight(self,"
            " microbatch)`, which must return the divisor of the loss.",
        )

    def is_repeatable(self) -> bool:
        """Return True if training in one process gives the same results with another seed, and add the experiment."""
        first, second = self.reference(self.replicas), self.reference(self.replicas, seed=1)
        compared = compare(first, [second], steps=self.training.steps, replicas=1)
        return self.add("one process with another seed", compared).equal

    def is_equal(self, text: str, changes: Mapping[str, Any], *, fixed_statistics: bool = False) -> bool:
        """Return True if the results are equal with changed arguments, and add the experiment.

        A failed run counts as different.
        """
        try:
            compared = self.compare(changes, fixed_statistics=fixed_statistics)
        except RankError as error:
            self.add_failure(text, error)
            return False
        return self.add(text, compared).equal

    def add(self, text: str, comparisons: tuple[Comparison, ...]) -> Experiment:
        largest = max(each.difference for each in comparisons)
        experiment = Experiment(text, largest, equal=largest <= self.tolerance)
        self.experiments.append(experiment)
        return experiment

    def add_failure(self, text: str, error: RankError) -> None:
        self.experiments.append(Experiment(text, None, equal=False, failure=str(error)))

    def axes(self) -> list[tuple[str, dict[str, Any]]]:
        """Return changes that each remove one kind of parallelism, recomputation or ZeRO from the layout.

        Returns:
            For each argument that the layout uses: a text for the result, and the changed arguments by name.
        """
        changes: dict[str, dict[str, Any]] = {
            "recompute": {"recompute": False},
            "tensor_parallel_size": _WITHOUT_TENSOR_PARALLEL,
            **{axis.argument: {axis.argument: 1} for axis in AXES if axis.is_optional},
            "zero_stage": _WITHOUT_ZERO,
            "pipeline_parallel_size": _WITHOUT_STAGES,
            "expert_parallel_size": _WITHOUT_EXPERTS,
            "data_parallel_size": {"data_parallel_size": 1, "zero_size": None, **_WITHOUT_EXPERTS},
        }
        used = {name: change for name, change in changes.items() if self.layout.get(name, change[name]) != change[name]}
        return [(f"{name}={change[name]}", change) for name, change in used.items()]


# -- text --------------------------------------------------------------------------------------------------------------


def _sizes(layout: Mapping[str, Any]) -> Sizes:
    return Sizes(**sizes_in(layout))


def _layout_text(layout: Mapping[str, Any]) -> str:
    sizes = _sizes(layout)
    number = sizes.num_ranks
    text = f"{sizes} = {number} process{'es' if number > 1 else ''}"
    if (number := layout["num_microbatches"]) > 1:
        text += f", {number} microbatches"
    return text + (f", ZeRO stage {layout['zero_stage']}" if layout.get("zero_stage") else "")


def _named(comparison: Comparison) -> str:
    when = "at the end" if comparison.step is None else f"of step {comparison.step}"
    return f"{comparison.name} {when}"


def _bound(difference: float) -> str:
    """Return the smallest power of ten (at least 1e-12) that is not below a difference, as text."""
    return f"within 1e{max(-12, math.ceil(math.log10(difference)))}" if difference else "to the last bit"


def _advice(text: str) -> str:
    """Return the advice for a step that raises an error in one process or under a layout."""
    if text == _ALONE:
        return "The step also fails in one process. Train with `Trainer(devices=1)`, and fix the error there first."
    return (
        "The step works in one process, so the layout causes the error. To find the argument that causes it, run the"
        " check with `--trainer.strategy.init_args.num_microbatches 1`, or set only one of the parallel sizes. See the"
        " pages 'pipeline' and 'limits' in the documentation."
    )


def _weights_text(weights: Sequence[float]) -> str:
    shown = [f"{weight:.4g}" for weight in weights[:_MOST_SHOWN]]
    return ", ".join(shown) + (", ..." if len(weights) > _MOST_SHOWN else "")


def _first_line(text: str) -> str:
    return text.strip().splitlines()[0] if text.strip() else ""
