"""Losses that are sums of means over different numbers, such as those of several tasks: as one process."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid.distributed.class_losses import observed
from lightning_hybrid.trainer.losses.loss_terms import LossTerms, TargetMeans, common_count, common_terms, tells_enough
from lightning_hybrid.trainer.losses.term_weights import TermWeights
from tests.daily import daily
from tests.pool import Pools
from tests.trainer.losses.test_loss_weights import LAYOUTS, Seen, size_of
from tests.training_jobs import together, train

BATCH, SAMPLES, LENGTH, VOCABULARY = 4, 20, 6, 11


class Tasks(Dataset[dict[str, Tensor]]):
    """Sequences with the targets of several tasks, some of which do not count."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
        kept = torch.arange(LENGTH) < 2 + (index * 7) % (LENGTH - 1)
        masked = torch.rand(LENGTH, generator=generator) < 0.3
        if index % 8 < 2:  # the first microbatch of every second batch, also of two replicas
            masked[:] = False
        positions = torch.randint(0, LENGTH, (2,), generator=generator)
        is_inside = torch.rand(2, generator=generator) < 0.6
        return {
            "input_ids": tokens,
            "attention_mask": kept.long(),
            "labels": torch.where(kept, tokens, -100),
            "masked_labels": torch.where(masked, tokens, -100),
            "classes": tokens % 4,
            "sentence_label": tokens[0] % 2,
            "some_label": tokens[0] % 3 if index % 3 else torch.tensor(-100),
            "rewards": torch.randn(LENGTH, generator=generator, dtype=torch.float64),
            "starts": torch.where(is_inside[0], positions[0], LENGTH + index % 3),
            "ends": torch.where(is_inside[1], positions[1], LENGTH),
        }


Terms = dict[str, Tensor]


class Trunk(nn.Module):
    """Tokens through layers in a list; `heads` are the sizes of what each token is turned into."""

    def __init__(self, terms: Callable[..., Terms], *heads: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.heads = nn.ModuleList(nn.Linear(8, size) for size in heads)
        self.terms = terms
        self.register_buffer("class_weights", torch.linspace(0.1, 3.0, VOCABULARY, dtype=torch.float64))

    def forward(self, batch: dict[str, Tensor]) -> Terms:
        h = self.embed(batch["input_ids"])
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        return self.terms(self, batch, *(head(h) for head in self.heads))


def masked_and_square(model: Trunk, batch: dict[str, Tensor], scores: Tensor, values: Tensor) -> Terms:
    masked = F.cross_entropy(scores.flatten(0, 1), batch["masked_labels"].flatten())
    return {"masked": masked, "square": 0.5 * F.mse_loss(values.squeeze(-1), batch["rewards"])}


def causal_with_value(model: Trunk, batch: dict[str, Tensor], scores: Tensor, values: Tensor) -> Terms:
    causal = F.cross_entropy(scores[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    return {"causal": causal, "value": F.mse_loss(values.squeeze(-1), batch["rewards"])}


def tokens_and_sequence(model: Trunk, batch: dict[str, Tensor], scores: Tensor, classes: Tensor) -> Terms:
    tokens = nn.CrossEntropyLoss(label_smoothing=0.1)(scores.transpose(1, 2), batch["labels"])
    return {"tokens": tokens, "sequence": 0.3 * F.cross_entropy(classes.mean(1), batch["some_label"])}


def with_class_weights(model: Trunk, batch: dict[str, Tensor], scores: Tensor, classes: Tensor) -> Terms:
    some = F.cross_entropy(scores.transpose(1, 2), batch["masked_labels"], weight=model.class_weights)
    more = F.cross_entropy(classes.transpose(1, 2), batch["classes"], weight=model.class_weights[:4])
    return {"some": some, "more": 2 * more}


def positions(model: Trunk, batch: dict[str, Tensor], scores: Tensor) -> Terms:
    ignored = scores.shape[1]
    starts, ends = (batch[name].clamp(0, ignored) for name in ("starts", "ends"))
    start = F.cross_entropy(scores[..., 0], starts, ignore_index=ignored)
    return {"start": start / 2, "end": F.cross_entropy(scores[..., 1], ends, ignore_index=ignored) / 2}


def recomputed(
    model: Trunk, batch: dict[str, Tensor], scores: Tensor, values: Tensor, *, use_reentrant: bool = False
) -> Terms:
    """Terms that checkpoints compute again in backward."""

    def masked(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.tanh(), batch["masked_labels"])

    def causal(scores: Tensor) -> Tensor:
        return F.cross_entropy(scores.sin(), batch["labels"])

    losses = [checkpoint(loss, scores.mT, use_reentrant=use_reentrant) for loss in (masked, causal)]
    return {"masked": losses[0], "causal": losses[1], "square": values.square().mean()}


class Pretraining(nn.Module):
    """BERT with the losses of its two tasks, added up in transformers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import BertConfig, BertForPreTraining

        sizes = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
        dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        config = BertConfig(vocab_size=VOCABULARY, max_position_embeddings=8, **sizes, **dropouts)
        self.bert = BertForPreTraining(config)

    def forward(self, batch: dict[str, Tensor]) -> Terms:
        output = self.bert(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            labels=batch["masked_labels"],
            next_sentence_label=batch["sentence_label"],
        )
        return {"both": output.loss}


SUBJECTS: dict[str, Callable[[], nn.Module]] = {
    "bert": Pretraining,
    "masked_and_square": lambda: Trunk(masked_and_square, VOCABULARY, 1),
    "causal_with_value": lambda: Trunk(causal_with_value, VOCABULARY, 1),
    "tokens_and_sequence": lambda: Trunk(tokens_and_sequence, VOCABULARY, 3),
    "with_class_weights": lambda: Trunk(with_class_weights, VOCABULARY, 4),
    "positions": lambda: Trunk(positions, 2),
    "recomputed": lambda: Trunk(recomputed, VOCABULARY, 1),
    "reentrant": lambda: Trunk(partial(recomputed, use_reentrant=True), VOCABULARY, 1),
}


class Model(LightningModule):
    """A model of the list; it has no `microbatch_weight`, and logs the loss and its terms."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = SUBJECTS[name]().double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Tensor]:
        terms = self.model(batch)
        loss = sum(terms.values(), torch.zeros((), dtype=torch.float64))
        for name, value in {**terms, "loss": loss}.items():
            self.log(name, value, on_step=True, on_epoch=False, sync_dist=True)
        return {"loss": loss}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logged(Seen):
    """Norms of gradients, and what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[dict[str, Tensor]] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.logs.append(dict(trainer.callback_metrics))


def fit(name: str, layout: Mapping[str, Any] | None, batch_size: int, accumulate: int, **arguments: Any) -> Any:
    """Train two epochs; return norms, logs, weights and warnings."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = Logged()
    how: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "log_every_n_steps": 1, **arguments}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(Model(name), layout, DataLoader(Tasks(), batch_size), callbacks=[seen], **how)
    texts = [str(each.message) for each in caught if "microbatch" in str(each.message)]
    return seen.norms, seen.logs, result.weights, texts


MORE: dict[str, dict[str, Any]] = {
    **LAYOUTS,
    "auto": {"pipeline_parallel_size": 2},
    "cp2": {"context_parallel_size": 2, "num_microbatches": 2},
    "tp2": {"tensor_parallel_size": 2, "num_microbatches": 2, "tensor_parallel_plan": "auto"},
    "tp2_pp2": {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "tensor_parallel_plan": "auto"},
    "dp2_zero2": {"data_parallel_size": 2, "zero_stage": 2},
    "dp2_zero3": {"data_parallel_size": 2, "zero_stage": 3},
    "dp2_pp2_whole": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 1},
}
NAMES = [name for name in SUBJECTS if name != "reentrant"]
EACH = ("auto", "dp2", "m3", "dp2_pp2", "dp2_pp2_whole", "tp2", "cp2")
CASES = [
    *((name, layout, 1) for name in NAMES for layout in EACH if (name, layout) != ("recomputed", "cp2")),
    *((name, layout, 2) for name in NAMES for layout in ("auto", "dp2", "dp2_pp2")),
    ("reentrant", "auto", 1),
    *(("bert", layout, 1) for layout in ("pp2", "pp3", "zero2", "zero3", "tp2_pp2", "dp2_zero2", "dp2_zero3")),
]
DAILY = {
    *(("bert", "auto", 1), ("bert", "dp2", 1), ("masked_and_square", "dp2_pp2", 1), ("causal_with_value", "cp2", 1)),
    *(("positions", "dp2", 1), ("tokens_and_sequence", "tp2", 1), ("with_class_weights", "auto", 2)),
    *(("recomputed", "auto", 1), ("recomputed", "dp2", 2), ("positions", "dp2_pp2_whole", 1), ("bert", "dp2_zero3", 1)),
}


@pytest.mark.parametrize(
    ("name", "layout", "accumulate"),
    daily(CASES, *DAILY),
    ids=lambda value: str(value),
)
def test_each_term_counts_its_own_targets(ranks: Pools, name: str, layout: str, accumulate: int) -> None:
    """Batches of a window count the same, as in Lightning."""
    arguments = MORE[layout]
    size, replicas = size_of(arguments)
    size *= arguments.get("context_parallel_size", 1)
    norms, logs, expected, _ = fit(name, None, BATCH * replicas, accumulate)
    results = ranks(size, lightning=True).run(fit, name, arguments, BATCH, accumulate, timeout=120.0)
    for found, logged, _, texts in results:
        assert texts == []
        torch.testing.assert_close(logged, logs, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(found, norms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together([part for *_, part, _ in results]), expected, rtol=1e-10, atol=1e-12)


def test_terms_of_reentrant_checkpoints_are_not_weighed(ranks: Pools) -> None:
    """Their graphs are those of backward, except in a pipeline, which runs them in the other way."""
    [(*_, texts)] = ranks(1, lightning=True).run(fit, "reentrant", MORE["m3"], BATCH, 1)
    assert any(
        "With the 3 microbatches that you set, training does not give the same results" in text for text in texts
    )


def fit_half(layout: Mapping[str, Any] | None, batch_size: int, scales: bool) -> list[Tensor]:
    """Return the norms of float64 gradients, scaled as for fp16 if asked."""
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    plugins: dict[str, Any] = {"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if scales else {}
    return [norm.double() for norm in fit("masked_and_square", layout, batch_size, 1, **plugins)[0]]


def test_terms_with_scaled_losses(ranks: Pools) -> None:
    expected = fit_half(None, 2 * BATCH, False)
    for norms in ranks(4, lightning=True).run(fit_half, MORE["dp2_pp2"], BATCH, True):
        torch.testing.assert_close(norms, expected, rtol=3e-2, atol=1e-3)


def _scores(batch: Mapping[str, Tensor]) -> Tensor:
    table = torch.arange(VOCABULARY * VOCABULARY, dtype=torch.float64).sin().view(VOCABULARY, VOCABULARY)
    return table[batch["input_ids"]].mT


def _found(step: Callable[[dict[str, Tensor]], Tensor], *sizes: int) -> list[TargetMeans | None]:
    """Return what the forwards of some batches tell."""
    found = []
    for size in sizes:
        batch, terms = next(iter(DataLoader(Tasks(), size))), LossTerms()
        with observed(terms.observe):
            terms.close(step(batch) * torch.ones((), requires_grad=True))
        found.append(terms.find_means(batch, size, 1e-9))
    return found


def _masked(batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(_scores(batch).requires_grad_(), batch["masked_labels"])


def _labels(batch: Mapping[str, Tensor]) -> Tensor:
    return F.cross_entropy(_scores(batch).requires_grad_(), batch["labels"])


@pytest.mark.parametrize(
    ("step", "calls"),
    [
        (lambda b: _masked(b) + _labels(b), [0, 1]),
        (lambda b: _masked(b) + b["rewards"].square().mean(), [0]),
        (lambda b: _labels(b).detach() * 0 + b["rewards"].mean() + 2 * _masked(b), [1]),
        # All of one term count, in this batch; but this one is made in the step.
        (lambda b: _labels(b) + F.cross_entropy(_scores(b)[..., 0].requires_grad_(), b["sentence_label"]), [0, 1]),
        (lambda b: _labels(b) + F.cross_entropy(_scores(b).requires_grad_(), b["input_ids"] * 0 + 1), [0]),
        # Targets that are made in the step, a product, a function of a term.
        (lambda b: _labels(b) + F.cross_entropy(_scores(b).requires_grad_(), b["labels"].clamp(max=5)), None),
        (lambda b: _masked(b) * _labels(b), None),
        (lambda b: _masked(b) + _labels(b).exp(), None),
        (lambda b: b["rewards"].square().mean(), None),
    ],
)
def test_which_terms_are_counted(step: Any, calls: list[int] | None) -> None:
    found = _found(step, 7, 4, 5)
    terms = common_terms(found)
    assert common_count(found) is None
    assert (None if terms is None else [call for call, _ in terms.counts]) == calls


def test_forwards_without_targets_do_not_tell() -> None:
    assert not tells_enough(_found(lambda b: _masked(b) + _labels(b), 2, 1, 1))
    assert tells_enough(_found(lambda b: _masked(b) + _labels(b), 4, 2, 2))


def test_the_class_of_positions_outside_is_the_length() -> None:
    """Which is another one in batches of other lengths."""

    def step(batch: dict[str, Tensor]) -> Tensor:
        scores = batch["input_ids"].double().cos().requires_grad_()
        starts = batch["starts"].clamp(0, scores.shape[1])
        return F.cross_entropy(scores, starts, ignore_index=scores.shape[1]) + scores.square().mean()

    terms = common_terms(_found(step, 8, 4, 4))
    assert terms is not None
    [(_, count)] = terms.counts
    batch = next(iter(DataLoader(Tasks(), SAMPLES)))
    for length in (LENGTH - 2, LENGTH, LENGTH + 1):
        longer = {**batch, **{key: torch.zeros(SAMPLES, length) for key in batch if batch[key].ndim == 2}}
        assert int(count(longer)) == int((batch["starts"] < length).sum())


def test_calls_with_other_targets_stay_as_they_are() -> None:
    """A step may have other tasks for other batches."""
    terms = common_terms(_found(lambda b: _masked(b) + _labels(b), 7, 4, 5))
    assert terms is not None
    mesh: Any = SimpleNamespace(num_replicas=1)
    microbatches = [next(iter(DataLoader(Tasks(), 2))), next(iter(DataLoader(Tasks(), 5)))]
    weights = TermWeights(terms, microbatches, [2 / 7, 5 / 7], mesh, torch.device("cpu"))
    number = [int((batch["labels"] != -100).sum()) for batch in microbatches]
    for microbatch, batch in enumerate(microbatches):
        with weights.of_microbatch(microbatch):
            first, second, third = _labels(batch), _labels(batch), _labels(batch)
        share = number[microbatch] / sum(number) / [2 / 7, 5 / 7][microbatch]
        torch.testing.assert_close([first, second, third], [_labels(batch), share * _labels(batch), _labels(batch)])


def test_a_term_without_targets_is_zero() -> None:
    terms = common_terms(_found(lambda b: _masked(b) + _labels(b), 7, 4, 5))
    assert terms is not None
    mesh: Any = SimpleNamespace(num_replicas=1)
    batch = next(iter(DataLoader(Tasks(), 2)))
    scores = _scores(batch).requires_grad_()
    with TermWeights(
        terms, [batch, next(iter(DataLoader(Tasks(), 5)))], [0.3, 0.7], mesh, batch["labels"].device
    ).of_microbatch(0):
        masked = F.cross_entropy(scores, batch["masked_labels"])
    masked.backward()
    assert masked == 0
    assert scores.grad is not None
    assert not scores.grad.any()
