"""The comparison of the loss of samples in one microbatch and in two: when it is made, and what follows from it.

::

    batch of a new structure      some samples in one microbatch and in two, forward only and without a trace
           |                                  |
           |                      Verdict of each rank  -->  all ranks: one Verdict
           v                                  |
    mean ----> microbatches are averaged, by their samples or by their targets (LabelCount), perhaps each term by its
               own (TermCounts)
    sum  ----> microbatches are summed
    other ---> one microbatch ("auto"), or a warning (a number that was set)

Where replicas take a batch in one microbatch each, that batch alone is run so, and the replicas compare what they find.
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
    with_copied_classes,
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
_MOST = 4  # comparisons: where a first one does not tell, or batches have other structures


class Forward(Protocol):
    """The forward of the user's step over several batches, each as a step by itself that draws the same numbers."""

    def __call__(
        self,
        batches: Sequence[Any],
        counts: Sequence[int],
        loss_of: Callable[[int, Tensor], Tensor],
        run: Callable[[int, Callable[[], Any]], Any],
    ) -> tuple[Sequence[Tensor], Sequence[Sequence[Log]]]:
        """Run it through the pipeline.

        Args:
            batches: The batches.
            counts: Their numbers of samples.
            loss_of: Takes the number of a batch and its loss; returns the one to return.
            run: Calls each forward of each stage, perhaps twice; takes the number of the batch.

        Returns:
            The losses, on the last stage; and what each batch logged.
        """


class MicrobatchComparison:
    """The comparison of the loss of samples in one microbatch with that in two; all ranks come to one verdict.

    It is made at the first step; at the second one too if there was a single pair of microbatches, which may be equal
    by chance; and without replicas for batches of another structure, which several replicas meet at different steps.

    Args:
        context: What steps need.
        grad_sync: Sums and averages the gradients.
        config: The arguments of the strategy.

    Attributes:
        loss_reduction: ``"mean"`` or ``"sum"``: how the losses of the present batch's microbatches are merged.
        labels: How its targets are counted, if its loss is a mean over them.
        terms: How the targets of parts of its loss are counted, if these are means over them.
        log_kinds: Logged values that are not means over samples, by name.
        explains: If True, the normalizer of the loss is known, and labels need no further check.
        takes_one: If True, batches run as one microbatch from now on.
        repeats: If True, a single pair of microbatches was compared, which may have been equal by chance. The next step
            is compared too; it is traced anew, because its path may differ.
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
        self._structures, self._texts = set[Hashable](), set[str]()  # that were compared here, and on any rank
        self._changes: list[dict[str, Change]] = []  # of states, with samples in one microbatch, and in each of two
        self._rounding = self._alone = 0.0  # of a loss; and the loss of the second microbatch alone
        self._has_stated = False  # that a structure is not compared, or that microbatches differ
        self.repeats = False
        self._needs_graph = False  # as the step computes gradients itself
        self._last: tuple[Hashable, Verdict | None] = (), None  # of the last batch: its signature, and what is known

    def is_due(self, signature: Hashable) -> bool:
        """Look up what is known of a batch, and return whether a comparison would tell more.

        Args:
            signature: Of a microbatch.
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
        """Compare the microbatches of a batch with the batch.

        Args:
            batch: The batch.
            num_microbatches: The number of its microbatches.
            signature: Of a microbatch.
            forward: Runs batches through the pipeline.

        Returns:
            Whether batches are split in another way from now on.
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
        """Return as many batches to compare as all ranks have, and note the structures of all ranks.

        Forwards may gather shards of replicas, so each rank runs as many of them: a batch that is among them twice runs
        once only if that holds on all ranks.

        Args:
            batches: The batches that this rank could compare.
            signature: Of a microbatch.
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
        return "any" if self._context.mesh.num_replicas > 1 else structure

    def _state_structure(self, structure: Hashable, signature: Hashable) -> None:
        """Warn of a batch whose structure no rank has compared; a replica may be the only one that meets it."""
        self._structures.add(structure)
        if repr(structure) in self._texts or self._has_stated:
            return
        self._has_stated = True
        if self._context.is_source:
            warnings.warn(structure_text(signature), stacklevel=2)

    def _count_targets(self, batch: Any, forward: Forward) -> None:
        """Find out whether the loss of a batch, which is one microbatch, is made of means over targets.

        Args:
            batch: The batch.
            forward: Runs it through the pipeline.
        """
        module, group = self._context.module, self._context.mesh.decision_group
        self._left -= 1
        is_known = getattr(module, "microbatch_weight", None) is not None
        if any(all_gather_values(is_known or takes_from_iterators(module), group)):
            self._left = 0
            return

        def find() -> list[TargetMeans | None]:
            run = self._run([copied(batch)], [find_batch_size(batch) or 1], forward)
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
        """Compare what forwards write with microbatches and with both joined, and state a difference.

        Args:
            batches: Two microbatches.
            counts: Their numbers of samples.
            number: The number of microbatches of the batch.
            forward: Runs them.

        Returns:
            Whether batches run as one microbatch from now on.
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

            after, _ = forward(batches, counts, lambda number, loss: loss.detach(), run)
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
        """Let forwards run inside that leave the module as it was; yield contexts for each of them, and its states."""
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
        """Find the cause of a difference and state it; return whether batches run as one microbatch from now on."""
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
        """Make the experiments that all ranks can make, and return what they tell.

        Args:
            experiments: Of the batch of this rank.
            forward: Runs batches.
            verdict: Of all ranks.
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
        """State the difference that a router loss makes, where rounding of the whole loss hides it."""
        with router_losses_scaled(self._context.module, LARGE_COEFFICIENT) as factor:
            if factor is None:
                return
            found = self._verdict(compare)
        if found.kind == "other" and math.isfinite(found.difference):
            expected = verdict.joined + (found.expected - found.joined) / factor
            rank_zero_warn(small_text(replace(verdict, expected=expected), ROUTERS))

    @property
    def _is_alone(self) -> bool:
        """Return whether no other rank takes part in the forwards of this one."""
        return self._context.mesh.model_group.size() == 1 and not self._grad_sync.zero.is_active

    def _verdict(self, compare: _Compare) -> Verdict:
        """Return the verdict of all ranks: the largest difference that one of them has found."""
        return joined_verdict(self._gather(compare))

    def _gather(self, compare: Callable[[], list[_T]]) -> list[_T]:
        """Return the findings of all ranks."""
        own, is_alone = list[_T](), self._is_alone  # a failure destroys the groups that tell
        try:
            own = compare()
        except Exception as error:
            if not is_alone:  # otherwise the step itself says what is wrong, if it cannot run either
                if not isinstance(error.__cause__, WrongUseError):  # which the step would meet too
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
        """Compare the loss of samples in one microbatch with that in two.

        Args:
            batches: From :func:`~.losses.verdict.joined_parts`: three for each pair of microbatches.
            counts: Their numbers of samples.
            sizes: By the module's `microbatch_weight`, if it has one.
            forward: Runs them.

        Returns:
            What this rank finds of each pair; nothing where the loss is on other ranks, or nothing can be compared.
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
        if terms is not None:  # these values are means over samples in a step
            names = common_names(means)
            numbers = [{name: logged[name] for name in logged.keys() - names} for logged in numbers]
        verdicts = judge_pairs(losses, counts, sizes, labels, terms, numbers, run.dtype)
        if any(verdict.kind == "other" for verdict in verdicts):
            verdicts = run.explain(verdicts, find_class_weights(self._context.module))
        return [verdict for verdict in verdicts if not (run.has_drawn and verdict.kind == "other")]

    def _run(self, batches: Sequence[Any], counts: Sequence[int], forward: Forward) -> Run | None:
        """Run batches forward only and without a trace, through the pipeline.

        Args:
            batches: Copies, into which the step may write.
            counts: Their numbers of samples.
            forward: Runs them.

        Returns:
            What this rank finds; ``None`` where the loss is on other ranks, or a batch has none.
        """
        context = self._context
        dtypes = [each.dtype for each in self._grad_sync.local_parameters() if each.is_floating_point()]
        kept, terms = list(map(with_copied_classes, batches)), [LossTerms() for _ in batches]
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
                # The step after a term of the loss is recorded.
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

            # In reverse: the smallest batch comes first, so that later stages begin early.
            last = len(batches) - 1
            losses, records = forward(
                batches[::-1],
                counts[::-1],
                lambda at, value: loss_of(last - at, value),
                lambda at, of: run(last - at, of),
            )
            losses, records = losses[::-1], records[::-1]
        if context.device.type == "cuda" and torch.float32 in dtypes:
            dtypes.append(torch.float16)  # products may be computed in TF32, which has as many digits
        self._rounding = rounding_of(coarsest(dtypes)) if dtypes else 0.0
        if not losses:
            return None
        values, numbers = list(map(float, losses)), list(map(logged_numbers, records))
        self._alone = values[min(2, len(values) - 1)]
        return Run(kept, counts, values, terms, numbers, coarsest(dtypes), tensors.has_drawn)
