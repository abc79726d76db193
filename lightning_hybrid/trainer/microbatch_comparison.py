"""Comparison of losses with and without microbatches, which decides how the losses of microbatches are combined.

::

    batch of a new structure      some samples in one microbatch and in two, forward only, without side effects
           |                                  |
           |                      Verdict of each rank  -->  all ranks: one Verdict
           v                                  |
    mean ----> losses of microbatches are averaged, weighted by samples or by targets (LabelCount), or each term of the
               loss by its own targets (TermCounts)
    sum  ----> losses of microbatches are summed
    other ---> one microbatch ("auto"), or a warning if the user set a number
    unknown -> the numbers show nothing, for example because losses are equal: the next step is compared

The comparison also finds states that a forward writes from the batch, such as codebooks. If their values differ with
microbatches, the result is the same as for *other*. If each replica processes its batch as one microbatch, only that
batch is run, and the replicas compare their findings.

`TrainingStep` makes one :class:`MicrobatchComparison` per run. Before each batch with a backward, it calls
:meth:`MicrobatchComparison.is_due`, and if this returns True, the object itself. `Faults(compare_microbatches=False)`
turns this off. The guide `check.md` describes the results for users.

Nothing in a module states if its loss is a mean or a sum, and over what. A wrong assumption changes the training
without an error, so the loss is measured.

A *signature* has the containers, shapes and dtypes of a batch, a *structure* has numbers of dimensions instead of
shapes. A *pair* is two microbatches and their samples joined, three batches in all. A *term* is the mean of a cross
entropy in the loss, and its *targets* are the classes that the mean counts.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor

from lightning_hybrid.config import Settings
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from lightning_hybrid.distributed.agreement import all_gather_values
from lightning_hybrid.distributed.class_losses import observed
from lightning_hybrid.distributed.failure import WrongUseError, add_note
from lightning_hybrid.pipeline_parallel.splitting.microbatch import find_batch_size
from lightning_hybrid.trainer.losses.causes import (
    ROUTERS,
    Cause,
    Experiments,
    Finding,
    common_finding,
    find_cause,
    small_text,
    structure_text,
    warning_text,
)
from lightning_hybrid.trainer.losses.divisors import find_class_weights
from lightning_hybrid.trainer.losses.loss_terms import (
    PAIR,
    LabelCount,
    LossTerms,
    TargetMeans,
    TermCounts,
    as_weighed,
    common_count,
    common_names,
    common_terms,
    tells_enough,
)
from lightning_hybrid.trainer.losses.rehearsal import (
    GraphNeeded,
    Untouched,
    graph_without_values,
    takes_from_iterators,
    untouched_attributes,
)
from lightning_hybrid.trainer.losses.runs import Run
from lightning_hybrid.trainer.losses.verdict import (
    LARGE_COEFFICIENT,
    SMALL,
    Verdict,
    coarsest,
    copied,
    joined_parts,
    joined_verdict,
    judge_pairs,
    places_of_first,
    rounding_of,
    router_losses_scaled,
    structure_of,
)
from lightning_hybrid.trainer.losses.written_states import (
    Change,
    WrittenStates,
    find_differences,
    find_of_batch,
    is_used,
    state_text,
)
from lightning_hybrid.trainer.program.step_context import StepContext
from lightning_hybrid.trainer.results.logging import Log, logged_numbers

__all__ = ["Forward", "MicrobatchComparison"]

_T = TypeVar("_T")
_Compare = Callable[[], list[Verdict]]
_NOTE = (
    "This error occurred while the loss of microbatches was compared with the loss of their batch. To skip the"
    " comparison, set HybridStrategy(faults=Faults(compare_microbatches=False))."
)
_MOST = 4  # comparisons in a run: a comparison can be inconclusive, and batches can have different structures


class Forward(Protocol):
    """The forward of the user's step for several batches, as separate steps that draw the same random numbers."""

    def __call__(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        loss_of: Callable[[int, Tensor], Tensor],
        run: Callable[[int, Callable[[], Any]], Any],
    ) -> tuple[Sequence[Tensor], Sequence[Sequence[Log]]]:
        """Run the batches through the pipeline.

        Args:
            batches: The batches.
            counts: The number of samples in each batch.
            loss_of: Receives the number of a batch and its loss, and returns the loss to use.
            run: Receives the number of a batch and a function that runs a stage's forward; may call the function twice.

        Returns:
            The losses, on the last stage only; and the logs of each batch.
        """


class MicrobatchComparison:
    """A comparison of the loss of samples in one microbatch with their loss in two; all ranks share the verdict.

    The comparison runs in the first step, and again in later steps as long as the verdict is unknown. It runs again in
    the second step if there was only one pair of microbatches, whose losses may agree by chance. Without replicas, it
    also runs for batches with another structure. With replicas, it does not, because different replicas get such
    batches in different steps. A run has at most four comparisons, and none after a difference of losses was found.

    Args:
        context: The state that steps share.
        grad_sync: The gradient synchronization, which has the parameters of this rank.
        config: The arguments of the strategy.

    Attributes:
        loss_reduction: ``"mean"`` or ``"sum"``: how the losses of the current batch's microbatches are combined.
        labels: How the targets of the batch are counted if the loss is a mean over them; otherwise ``None``.
        terms: How the targets of terms of the loss are counted if these terms are means over them; otherwise ``None``.
        log_kinds: For each logged value that is not a mean over samples, ``"weighted"`` or ``"sum"``, by name.
        explains: If True, labels need no further check, because the loss is a sum or a mean over targets, or because a
            warning has explained a difference.
        takes_one: If True, batches run as one microbatch from now on; only if the user has not set a number.
        repeats: If True, only one pair of microbatches was compared, so the next step is compared, too. That step is
            traced again, because its path may differ.
    """

    def __init__(self, context: StepContext, grad_sync: GradientSync, config: Settings) -> None:
        self._context, self._grad_sync = context, grad_sync
        self._is_auto, self._given = config.auto_microbatches, config.loss_reduction
        self.loss_reduction = self._given
        self.labels: LabelCount | None = None
        self.terms: TermCounts | None = None
        self.log_kinds: Mapping[str, str] = {}
        self.explains = self.takes_one = False
        self._is_whole = config.num_microbatches == 1
        is_split = config.num_microbatches > 1 or context.mesh.num_replicas > 1
        is_needed = config.faults.compare_microbatches and is_split and config.loss_reduction == "mean"
        self._left = _MOST if is_needed else 0
        self._verdicts: dict[Hashable, Verdict] = {}  # by the structure of the batch
        # Structures that were compared or reported on this rank, and texts of structures that any rank has compared.
        self._structures, self._texts = set[Hashable](), set[str]()
        self._changes: list[dict[str, Change]] = []  # of states, in three forwards: joined microbatches, first, second
        self._rounding = self._alone = 0.0  # the relative rounding error; the loss of only the second microbatch
        self._has_stated = False  # True after a warning about a structure or a difference
        self.repeats = False
        self._needs_graph = False  # True if the step itself computes gradients, or uses transforms of `torch.func`
        self._last: tuple[Hashable, Verdict | None] = (), None  # the signature of the last batch, and its verdict

    def is_due(self, signature: Hashable) -> bool:
        """Set the attributes to the known verdict on a batch, and return True if the batch should be compared.

        Warn once if the structure of the batch was not compared on any rank, and cannot be compared any more.

        Args:
            signature: The signature of a microbatch.
        """
        if not self._left and not self._verdicts:
            return False
        if signature != self._last[0]:
            structure = structure_of(signature)
            self._last = signature, self._verdicts.get(self._key_of(structure))
            is_known = not self._verdicts or structure in self._structures or (self._last[1] is None and self._left > 0)
            if not is_known and not self._is_whole and not self.takes_one:
                self._state_structure(structure, signature)
        known = self._last[1]
        if known is None:
            self.labels, self.terms, self.loss_reduction = None, None, self._given
            return self._left > 0
        self.labels, self.terms = known.labels, known.terms
        self.loss_reduction = "sum" if known.kind == "sum" else self._given
        return self.repeats and self._left > 0

    def __call__(self, batch: Any, num_microbatches: int, signature: Hashable, forward: Forward) -> bool:
        """Compare the microbatches of a batch with the batch; every rank calls this method at the same steps.

        Only some samples of the batch are run. Log a message or a warning about the result, and set the attributes.

        Args:
            batch: The batch.
            num_microbatches: The number of its microbatches.
            signature: The signature of a microbatch.
            forward: Runs batches through the pipeline.

        Returns:
            True if the batch must be split again: batches run as one microbatch, or losses are summed, from now on.
        """
        context, module = self._context, self._context.module
        if self._is_whole:
            self._count_targets(batch, forward)
            return False
        batches, counts = list[Any](), list[int]()
        if num_microbatches > 1 and not takes_from_iterators(module):
            batches, counts = joined_parts(batch, num_microbatches, getattr(module, "split_batch", None))
        batches = self._common(batches, signature)
        number = len(batches)
        self._left -= number > 0 or context.mesh.num_replicas > 1
        if number == 0:
            return False
        weigh, sizes = getattr(module, "microbatch_weight", None), None
        if weigh is not None:
            with context.guard():
                sizes = [float(weigh(each)) for each in batches]
        compare = partial(self._rehearse, batches, counts[:number], sizes, forward)
        verdict = self._verdict(compare)
        if verdict.kind != "other" and self._compare_states(batches[1:3], counts[1:3], num_microbatches, forward):
            return True
        if verdict.kind == "unknown":
            return False
        structure = self._key_of(structure_of(signature))
        is_first, self._last = structure not in self._verdicts, ((), None)
        self._verdicts[structure] = verdict
        is_mean = verdict.kind == "mean" and (verdict.labels or verdict.terms) is None
        self.repeats = is_first and number == PAIR and is_mean
        if verdict.kind == "other":
            experiments = None
            if getattr(module, "split_batch", None) is None:
                experiments = Experiments(batch, num_microbatches, max(counts[:number]))
            return self._judge_other(verdict, num_microbatches, compare, partial(self._find, experiments, forward))
        self.log_kinds = {**self.log_kinds, **verdict.logs}
        self.labels, self.terms = verdict.labels, verdict.terms
        self.explains = self.explains or (verdict.labels or verdict.terms) is not None or verdict.kind == "sum"
        if verdict.kind == "sum":
            self.loss_reduction = "sum"
            rank_zero_info(
                "The loss of two joined microbatches is the sum of their separate losses. Losses and gradients of"
                ' microbatches are therefore summed, as with HybridStrategy(loss_reduction="sum").'
            )
        elif len(self._verdicts) == 1 and is_first:
            self._state_router_loss(verdict, compare)
        return verdict.kind == "sum"

    def _common(self, batches: list[Any], signature: Hashable) -> list[Any]:
        """Return as many batches to compare as every rank has, and record the structures of all ranks; a collective.

        Forwards may gather parameter shards of replicas, so each rank must run the same number of forwards. Therefore,
        two equal batches are run only once if this is possible on every rank.

        Args:
            batches: The batches that this rank can compare.
            signature: The signature of a microbatch.
        """
        structure = structure_of(signature)
        self._structures.add(structure)
        own = (len(batches), len(set(places_of_first(batches))), repr(structure))
        found = all_gather_values(own, self._context.mesh.decision_group)
        self._texts |= {text for _, _, text in found}
        if len({each[:2] for each in found}) > 1:
            batches = list(map(copied, batches))
        return batches[: min(each for each, _, _ in found)]

    def _key_of(self, structure: Hashable) -> Hashable:
        """Return the key of a structure among the verdicts: with replicas, one verdict holds for all structures."""
        return "any" if self._context.mesh.num_replicas > 1 else structure

    def _state_structure(self, structure: Hashable, signature: Hashable) -> None:
        """Warn once if no rank has compared the structure of a batch, because only some replicas get such batches."""
        self._structures.add(structure)
        if repr(structure) in self._texts or self._has_stated:
            return
        self._has_stated = True
        if self._context.is_source:
            warnings.warn(structure_text(signature), stacklevel=2)

    def _count_targets(self, batch: Any, forward: Forward) -> None:
        """Find out if the loss of a batch that is one microbatch consists of means over targets; a collective.

        If it does, set the attributes. If the module has `microbatch_weight` or takes values from an iterator, nothing
        is compared in this run.

        Args:
            batch: The batch.
            forward: Runs the batch through the pipeline.
        """
        module, group = self._context.module, self._context.mesh.decision_group
        self._left -= 1
        is_known = getattr(module, "microbatch_weight", None) is not None
        if any(all_gather_values(is_known or takes_from_iterators(module), group)):
            self._left = 0
            return

        def find() -> list[TargetMeans | None]:
            run = self._run([batch], [find_batch_size(batch) or 1], forward)
            return [] if run is None else run.find_means()

        found = self._gather(find)
        if not tells_enough(found):
            return
        self._left, self.labels = 0, common_count(found)
        self.terms = common_terms(found) if self.labels is None else None
        if self.labels is not None:
            self.log_kinds = dict.fromkeys(common_names(found), "weighted")
        if (self.labels or self.terms) is not None:
            self._last, nan = ((), None), math.nan
            self._verdicts["any"] = Verdict("mean", nan, (nan, nan), nan, self.labels, terms=self.terms)

    def _compare_states(self, batches: Sequence[Any], counts: Sequence[int], number: int, forward: Forward) -> bool:
        """Compare the states that the module writes in two microbatches with the states that it writes in both joined.

        This is a collective. It warns if the states differ, or if the loss of the second microbatch depends on what the
        first one has written.

        Args:
            batches: Two microbatches.
            counts: The number of samples in each of them.
            number: The number of microbatches of the batch.
            forward: Runs batches through the pipeline.

        Returns:
            True if batches run as one microbatch from now on.
        """
        group = self._context.mesh.decision_group
        found_here = bool(find_of_batch(self._changes, self._rounding))
        everywhere = all_gather_values((found_here, self._rounding), group)
        if not any(is_found for is_found, _ in everywhere):
            return False
        rounding = max(of_rank for _, of_rank in everywhere)
        own_paths = find_of_batch(self._changes, rounding)
        paths = sorted({path for of_rank in all_gather_values(own_paths, group) for path in of_rank})
        if not paths:
            return False
        alone = self._alone
        with self._without_trace() as (one_run, tensors, states):

            def run(number: int, forward_of_stage: Callable[[], Any]) -> Any:
                lean = nullcontext() if self._needs_graph else graph_without_values(bool)
                with one_run(restores=False), tensors.run(restores=False), lean:
                    return forward_of_stage()

            after, _ = forward(list(map(copied, batches)), counts, lambda number, loss: loss.detach(), run)
            own = find_differences(self._changes[0], states.read(tensors.former), rounding)
        losses = (alone, float(after[1])) if after and is_used(alone, float(after[1]), rounding) else None
        told = all_gather_values((own, losses), group)
        found = {each.path: each for differences, _ in told for each in differences}
        used = next((each for _, each in told if each is not None), None)
        if not found and used is None:
            return False
        self.takes_one = self._is_auto
        self._left = 0 if self.takes_one else self._left
        rank_zero_warn(state_text(list(found.values()), paths, used, number, switches=self._is_auto))
        return self._is_auto

    @contextmanager
    def _without_trace(self) -> Iterator[tuple[Callable[..., AbstractContextManager[None]], Untouched, WrittenStates]]:
        """Restore the module at the end; yield contexts for one run and for its operators, and the module's states.

        If this rank is alone, an error inside reaches the caller. Otherwise, it ends the run on all ranks.
        """
        context, of_attributes = self._context, list[Tensor]()
        with (
            untouched_attributes(context.module, of_attributes) as one_run,
            context.unguarded() if self._is_alone else context.guard(),
        ):
            parameters = self._grad_sync.local_parameters
            tensors = Untouched(lambda: [*parameters(), *context.module.buffers(), *of_attributes])
            try:
                yield one_run, tensors, WrittenStates(context.module)
            finally:
                tensors.restore()

    def _judge_other(
        self, verdict: Verdict, number: int, compare: _Compare, find: Callable[[Verdict], Finding]
    ) -> bool:
        """Warn of a difference and its cause, and return True if batches run as one microbatch from now on.

        This is a collective, because experiments that find the cause run more forwards. It ends the comparisons of this
        run.

        Args:
            verdict: The verdict, of kind ``"other"``.
            number: The number of microbatches.
            compare: Compares the same batches again.
            find: Runs the experiments.
        """
        self._left, self.explains, self._has_stated = 0, True, True
        cause: Cause | None = None
        with router_losses_scaled(self._context.module, 0.0) as factor:
            if factor is not None and self._verdict(compare).kind == "mean":
                cause = ROUTERS
        if cause is not None and verdict.difference < SMALL:
            rank_zero_warn(small_text(verdict, cause))
            return False
        cause = cause or find_cause(find(verdict), verdict)
        self.takes_one = self._is_auto
        num_stages = self._context.mesh.sizes.pipeline
        rank_zero_warn(warning_text(verdict, number, cause, switches=self._is_auto, num_stages=num_stages))
        return self._is_auto

    def _find(self, experiments: Experiments | None, forward: Forward, verdict: Verdict) -> Finding:
        """Run the experiments that are possible on all ranks, and return their joint finding; a collective.

        Args:
            experiments: The experiments with the batch of this rank; ``None`` if there are none.
            forward: Runs batches through the pipeline.
            verdict: The verdict of all ranks.
        """
        own = experiments.counts if experiments is not None else {}
        everywhere = all_gather_values(list(own), self._context.mesh.decision_group)
        names = [name for name in own if all(name in names for names in everywhere)]
        candidates = verdict.divisors or ()
        if experiments is None or not names:
            return Finding(tuple(each for each in candidates if each.is_usual))

        def find() -> list[Finding]:
            run = self._run([experiments.batches[name] for name in names], [own[name] for name in names], forward)
            if run is None:
                return []
            losses = dict(zip(names, run.losses, strict=True))
            class_weights = find_class_weights(self._context.module)
            return [experiments.judge(losses, candidates, class_weights, rounding_of(run.dtype))]

        return common_finding(self._gather(find))

    def _state_router_loss(self, verdict: Verdict, compare: _Compare) -> None:
        """Warn of the difference due to a router loss if it is too small to be visible in the whole loss.

        Router losses balance the experts of a mixture of experts. If the module has one, this is a collective, which
        compares again with a large coefficient.

        Args:
            verdict: The verdict with the user's coefficient.
            compare: Compares the same batches again.
        """
        with router_losses_scaled(self._context.module, LARGE_COEFFICIENT) as factor:
            if factor is None:
                return
            found = self._verdict(compare)
        if found.kind == "other" and math.isfinite(found.difference):
            expected = verdict.joined + (found.expected - found.joined) / factor
            rank_zero_warn(small_text(replace(verdict, expected=expected), ROUTERS))

    @property
    def _is_alone(self) -> bool:
        """Return True if no other rank takes part in the forwards of this rank."""
        return self._context.mesh.model_group.size() == 1 and not self._grad_sync.zero.is_active

    def _verdict(self, compare: _Compare) -> Verdict:
        """Return the joint verdict of all ranks; a collective."""
        return joined_verdict(self._gather(compare))

    def _gather(self, compare: Callable[[], list[_T]]) -> list[_T]:
        """Run a comparison, and return the findings of all ranks; a collective.

        If this rank is alone in its forwards, its errors are ignored. Otherwise, an error of the comparison is raised
        with a note.

        Args:
            compare: Returns the findings of this rank.
        """
        own, is_alone = list[_T](), self._is_alone  # before `compare`, because a failure destroys the process groups
        try:
            own = compare()
        except Exception as error:
            if not is_alone:  # otherwise continue: if the step itself cannot run, it raises an error later
                if not isinstance(error.__cause__, WrongUseError):  # a `WrongUseError` would also occur in the step
                    add_note(error, _NOTE)
                raise
        found = all_gather_values(own, self._context.mesh.decision_group)
        return [each for of_rank in found for each in of_rank]

    def _rehearse(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        sizes: Sequence[float] | None,
        forward: Forward,
    ) -> list[Verdict]:
        """Compare the loss of samples in one microbatch with their loss in two.

        Args:
            batches: Batches from :func:`~.losses.verdict.joined_parts`: three batches for each pair of microbatches,
                their joined samples first.
            counts: The number of samples in each batch.
            sizes: The results of the module's `microbatch_weight`; ``None`` if it has no such method.
            forward: Runs batches through the pipeline.

        Returns:
            The verdict of this rank on each pair, without differences that random numbers may explain; an empty list if
            the loss is on other ranks, or the losses cannot be compared.
        """
        places = places_of_first(batches)
        firsts = sorted(set(places))
        run = self._run([batches[first] for first in firsts], [counts[first] for first in firsts], forward)
        if run is None:
            return []
        run = run.at([firsts.index(place) for place in places])
        means, labels, terms = run.find_means(), None, None
        if not tells_enough(means):
            return []
        if sizes is None:
            labels = common_count(means)
            sizes = counts if labels is None else [float(labels(batch)) for batch in run.batches]
            terms = common_terms(means) if labels is None else None
        is_known, numbers = (labels or terms) is not None, run.numbers
        losses = as_weighed(means, counts, terms) if is_known else run.losses
        if terms is not None:  # in a step, these values are means over samples, because terms are weighted
            names = common_names(means)
            numbers = [{name: logged[name] for name in logged.keys() - names} for logged in numbers]
        verdicts = judge_pairs(losses, counts, sizes, labels, terms, numbers, run.dtype)
        if any(verdict.kind == "other" for verdict in verdicts):
            verdicts = run.explain(verdicts, find_class_weights(self._context.module))
        return [verdict for verdict in verdicts if not (run.has_drawn and verdict.kind == "other")]

    def _run(self, batches: Sequence[Any], counts: Sequence[int], forward: Forward) -> Run | None:
        """Run batches through the pipeline, forward only and without side effects.

        Record the changes of the module's states, the rounding error, and the loss of the second microbatch for
        :meth:`_compare_states`.

        Args:
            batches: The batches. The step runs with copies, because it may write into them.
            counts: The number of samples in each batch.
            forward: Runs batches through the pipeline.

        Returns:
            The losses, terms and logs; ``None`` if the loss is on other ranks, or a batch has no loss.
        """
        context = self._context
        dtypes = [each.dtype for each in self._grad_sync.local_parameters() if each.is_floating_point()]
        terms = [LossTerms() for _ in batches]
        self._changes = changes = [dict[str, Change](), {}, {}]

        def loss_of(number: int, value: Tensor) -> Tensor:
            terms[number].close(value)
            dtypes.append(value.dtype)
            if torch.is_autocast_enabled(value.device.type):
                dtypes.append(torch.get_autocast_dtype(value.device.type))
            return value.detach().double() * (math.nan if terms[number].is_empty else 1.0)

        with self._without_trace() as (one_run, tensors, states):

            def attempt(number: int, forward_of_stage: Callable[[], Any]) -> Any:
                found = terms[number] = LossTerms()
                # Autograd saves tensors only after the first term of the loss, because only terms need derivatives.
                lean = nullcontext() if self._needs_graph else graph_without_values(lambda: bool(found.terms))
                with one_run(), tensors.run(), observed(found.observe), lean:
                    value = forward_of_stage()
                    if number < len(changes):
                        changes[number] |= states.read(tensors.former)
                return value

            def run(number: int, forward_of_stage: Callable[[], Any]) -> Any:
                try:
                    return attempt(number, forward_of_stage)
                except GraphNeeded:
                    self._needs_graph = True
                return attempt(number, forward_of_stage)

            # In reverse order: a half comes first and not joined microbatches, so that later stages start early.
            last = len(batches) - 1
            losses, records = forward(
                list(map(copied, batches[::-1])),
                counts[::-1],
                lambda at, value: loss_of(last - at, value),
                lambda at, of: run(last - at, of),
            )
            losses, records = losses[::-1], records[::-1]
        if context.device.type == "cuda" and torch.float32 in dtypes:
            dtypes.append(torch.float16)  # TF32, in which matrix products may be computed, has the same precision
        self._rounding = rounding_of(coarsest(dtypes)) if dtypes else 0.0
        if not losses:
            return None
        values, numbers = list(map(float, losses)), list(map(logged_numbers, records))
        self._alone = values[min(2, len(values) - 1)]
        return Run(list(batches), counts, values, terms, numbers, coarsest(dtypes), tensors.has_drawn)
