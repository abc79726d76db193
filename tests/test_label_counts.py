"""Losses that are means over targets, without `microbatch_weight`: as one process with the joined batch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset

from lightning_hybrid import Faults
from lightning_hybrid.trainer.losses.loss_terms import LossTerms, common_count
from tests.daily import daily
from tests.pool import Pools
from tests.trainer.losses.test_loss_weights import LAYOUTS, Seen, size_of
from tests.training_jobs import together, train

BATCH, SAMPLES, LENGTH, VOCABULARY = 4, 20, 6, 11


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences whose lengths differ, with labels that do not count behind their ends, and some more."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(2, VOCABULARY, (LENGTH,), generator=generator)
        kept = torch.arange(LENGTH) < 2 + (index * 7) % (LENGTH - 1)
        labels = torch.where(kept, tokens, -100)
        masked = torch.rand(LENGTH, generator=generator) < 0.4
        masked[index % LENGTH] = True
        return {
            "input_ids": tokens,
            "attention_mask": kept.long(),
            "labels": labels,
            "masked_labels": torch.where(masked, tokens, -100),
            "classes": tokens % 4,
        }


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_layer": 4, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": VOCABULARY}
    return GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False))


def _bert(kind: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {"num_hidden_layers": 4, "hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 16}
    dropouts = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=8, **sizes, **dropouts, **more)
    model: nn.Module = getattr(transformers, kind)(config)
    return model


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"num_layers": 2, "num_decoder_layers": 2, "d_model": 8, "d_kv": 4, "d_ff": 16, "num_heads": 2}
    config = T5Config(vocab_size=VOCABULARY, **sizes, dropout_rate=0.0, decoder_start_token_id=0, use_cache=False)
    return T5ForConditionalGeneration(config)


class Shifted(nn.Module):
    """GPT-2 with a loss in the precision of the model; that of transformers is in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt2 = gpt2()

    def forward(self, labels: Tensor, **inputs: Tensor) -> Tensor:
        scores = self.gpt2(**inputs).logits[:, :-1]
        return F.cross_entropy(scores.flatten(0, 1), labels[:, 1:].flatten())


class Classifier(nn.Module):
    """Tokens one by one, through layers in a list; its loss has what the subject says."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, VOCABULARY)
        self.options = dict(options)
        self.register_buffer("class_weights", torch.linspace(0.1, 3.0, VOCABULARY, dtype=torch.float64))

    def forward(self, input_ids: Tensor, labels: Tensor, **_: Any) -> Any:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        scores, options = self.head(h).transpose(1, 2), dict(self.options)
        if options.pop("weighted", False):
            options["weight"] = self.class_weights
        return 0.5 * F.nll_loss(F.log_softmax(scores, 1), labels) + F.cross_entropy(scores, labels, **options)


class Smoothed(Classifier):
    """One loss of a module, with label smoothing and class weights."""

    def forward(self, input_ids: Tensor, labels: Tensor, **others: Any) -> Any:
        h = self.embed(input_ids)
        for layer in self.layers:
            h = h + torch.tanh(layer(h))
        loss = nn.CrossEntropyLoss(weight=self.class_weights, label_smoothing=0.2)
        return loss(self.head(h).flatten(0, 1), labels.flatten())


#: By name: the model, and the key of its labels.
SUBJECTS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "gpt2": (gpt2, "labels"),
    "gpt2_shifted": (Shifted, "labels"),
    "bert": (lambda: _bert("BertForMaskedLM"), "masked_labels"),
    "t5": (t5, "labels"),
    "tokens": (lambda: _bert("BertForTokenClassification", num_labels=VOCABULARY), "labels"),
    "two_terms": (lambda: Classifier({}), "labels"),
    "class_weights": (lambda: Smoothed({}), "classes"),
}


class Model(LightningModule):
    """A model of the list; it has no `microbatch_weight`."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        make, self.key = SUBJECTS[name]
        self.model = make().double()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        output = self.model(**inputs, labels=batch[self.key])
        loss = output if isinstance(output, Tensor) else output.loss
        self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Logged(Seen):
    """Norms of gradients, and the loss that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.losses.append(trainer.callback_metrics["loss"])


def fit(name: str, layout: Mapping[str, Any] | None, batch_size: int, accumulate: int) -> Any:
    """Train two epochs; return norms, logged losses, weights and warnings."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    seen = Logged()
    how: dict[str, Any] = {"max_epochs": 2, "accumulate_grad_batches": accumulate, "log_every_n_steps": 1}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(Model(name), layout, DataLoader(Texts(), batch_size), callbacks=[seen], **how)
    texts = [str(each.message) for each in caught if "microbatches" in str(each.message)]
    return seen.norms, seen.losses, result.weights, texts


#: Replicas that take a batch whole, without stages and with them.
WHOLE: dict[str, dict[str, Any]] = {
    "dp2": {"data_parallel_size": 2},
    "dp2_zero2": {"data_parallel_size": 2, "zero_stage": 2},
    "dp2_zero3": {"data_parallel_size": 2, "zero_stage": 3},
    "dp2_pp2_whole": {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 1},
    "dp2_tp2_whole": {"data_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 1},
}
MORE = {
    **LAYOUTS,
    **WHOLE,
    "cp2": {"context_parallel_size": 2, "num_microbatches": 2},
    "auto": {"pipeline_parallel_size": 2},
}
CASES = [
    *((name, layout, 2) for name in SUBJECTS for layout in ("dp2", "dp2_pp2_whole")),
    *((name, layout, 1) for name in ("gpt2_shifted", "bert", "class_weights") for layout in WHOLE),
    *((name, layout, 2) for name in ("bert", "two_terms") for layout in ("dp2_zero2", "dp2_zero3")),
    *((name, layout, 2) for name in SUBJECTS for layout in ("m3", "pp2")),
    *((name, "dp2_pp2", 2) for name in ("gpt2_shifted", "bert", "class_weights")),
    *((name, layout, 1) for name in ("gpt2_shifted", "bert") for layout in ("zero2", "zero3", "tp2", "auto")),
    ("gpt2_shifted", "cp2", 1),
]
DAILY = {
    *(("gpt2", "pp2"), ("class_weights", "m3"), ("two_terms", "pp2"), ("bert", "dp2_pp2"), ("gpt2_shifted", "cp2")),
    *(("bert", "dp2"), ("class_weights", "dp2_zero3"), ("two_terms", "dp2_zero2"), ("gpt2_shifted", "dp2_pp2_whole")),
}
#: The relative difference where a loss, or attention, is computed in float32.
TOLERANCES = {"gpt2": 1e-5, "t5": 1e-5}


@pytest.mark.parametrize(
    ("name", "layout", "accumulate"),
    daily(CASES, *(case for case in CASES if case[:2] in DAILY)),
    ids=lambda value: str(value),
)
def test_targets_are_counted_without_a_hook(ranks: Pools, name: str, layout: str, accumulate: int) -> None:
    """Windows of two batches, of which the last one has one."""
    arguments = dict(MORE[layout])
    if "tensor_parallel_size" in arguments:
        arguments["tensor_parallel_plan"] = "auto"
    size, replicas = size_of(arguments)
    size *= arguments.get("context_parallel_size", 1)
    close = {"rtol": TOLERANCES.get(name, 1e-10), "atol": 1e-12 if name not in TOLERANCES else 1e-6}
    norms, losses, expected, _ = fit(name, None, BATCH * replicas * accumulate, 1)
    results = ranks(size, lightning=True).run(fit, name, arguments, BATCH, accumulate, timeout=120.0)
    for found, logged, _, texts in results:
        torch.testing.assert_close(found, norms, **close)
        if accumulate == 1:
            torch.testing.assert_close(logged, losses, **close)
        assert texts == []
    torch.testing.assert_close(together([part for *_, part, _ in results]), expected, **close)


class TwoKinds(Model):
    """Batches with and without labels, in turns."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if "masked_labels" in batch:
            return super().training_step(batch, batch_idx)
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        return self.model(**inputs).logits.square().mean()


def fit_both(layout: Mapping[str, Any] | None) -> tuple[list[Tensor], dict[str, Tensor]]:
    names = ("input_ids", "attention_mask")
    batches = list(DataLoader(Texts(), BATCH))
    batches = [batch if number % 2 else {name: batch[name] for name in names} for number, batch in enumerate(batches)]
    seen, data = Seen(), DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    return seen.norms, train(TwoKinds("bert"), layout, data, callbacks=[seen], max_epochs=2).weights


def test_batches_of_two_structures_count_each_in_its_way(ranks: Pools) -> None:
    norms, expected = fit_both(None)
    results = ranks(2, lightning=True).run(fit_both, {"pipeline_parallel_size": 2, "num_microbatches": 2})
    for found, _ in results:
        torch.testing.assert_close(found, norms, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together([part for _, part in results]), expected, rtol=1e-10, atol=1e-12)


def counted(step: Callable[[dict[str, Tensor]], Tensor]) -> Any:
    """What is recognized of a step, from three batches of texts."""
    from lightning_hybrid.distributed.class_losses import observed

    batches = [next(iter(DataLoader(Texts(), size))) for size in (4, 3, 1)]
    found = []
    for batch in batches:
        terms = LossTerms()
        with observed(terms.observe), torch.no_grad():
            loss = step(batch)
            terms.close(loss)
        found.append(terms.find_means(batch, len(batch["labels"]), 1e-9))
    assert not torch.is_inference_mode_enabled()
    return common_count(found)


def _scores(batch: dict[str, Tensor]) -> Tensor:
    return F.one_hot(batch["input_ids"], VOCABULARY).double().cos().transpose(1, 2)


@pytest.mark.parametrize(
    ("step", "key"),
    [
        (lambda b: F.cross_entropy(_scores(b), b["labels"]), "labels"),
        (lambda b: 3 * nn.CrossEntropyLoss()(_scores(b), b["masked_labels"]) / 7, "masked_labels"),
        (lambda b: F.cross_entropy(_scores(b)[..., :-1], b["labels"][..., 1:]), "labels"),
        (lambda b: F.nll_loss(_scores(b).log_softmax(1), b["labels"]), "labels"),
        # One target for each sample, all of which count: a mean over samples.
        (lambda b: F.cross_entropy(_scores(b)[..., 0], b["classes"][..., 0]), None),
        # Beside another term, through a function, made in the step, a sum.
        (lambda b: F.cross_entropy(_scores(b), b["labels"]) + _scores(b).square().mean() * b["labels"].max(), None),
        (lambda b: F.cross_entropy(_scores(b), b["labels"]).exp(), None),
        (lambda b: F.cross_entropy(_scores(b), b["labels"] * 0 + 1), None),
        (lambda b: F.cross_entropy(_scores(b), b["labels"], reduction="sum"), None),
        (lambda b: F.cross_entropy(_scores(b), b["labels"]) + F.cross_entropy(_scores(b), b["masked_labels"]), None),
        (lambda b: _scores(b).square().mean(), None),
    ],
)
def test_what_is_recognized(step: Any, key: str | None) -> None:
    count = counted(step)
    assert (count is None) == (key is None)
    if key is not None:
        batch = next(iter(DataLoader(Texts(), 5)))
        labels = batch[key][..., 1:] if count.shift else batch[key]
        assert int(count(batch)) == int((labels != -100).sum())


class Variant(Model):
    """A masked language model as its name says."""

    def __init__(self, name: str) -> None:
        super().__init__("bert")
        self.name = name
        self.automatic_optimization = name != "manual"
        if name == "hook":
            self.microbatch_weight = lambda microbatch: len(microbatch["input_ids"])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:  # type: ignore[override]
        labels = batch.pop("masked_labels")  # the batch has none after the step
        inputs = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        scores = self.model(**inputs).logits.transpose(1, 2)
        if self.name in ("none", "sum_none") and batch_idx == 0:
            F.cross_entropy(scores, torch.full_like(labels, -100))
            return None
        if self.name == "made":
            labels.masked_fill_(labels % 3 == 0, -100)
        if self.name == "unmasked":
            labels = batch["input_ids"]
        if self.name == "twice":
            self.log("other", 2 * F.cross_entropy(scores, labels).detach(), sync_dist=True)
        loss = F.cross_entropy(scores, labels)
        if self.name == "other":
            loss = loss.exp()
        if self.name in ("sum", "sum_none"):
            loss = loss + scores.square().mean()
        self.log("loss", loss, on_step=True, on_epoch=False, sync_dist=True)
        if self.name == "manual":
            self.manual_backward(loss)
            self.optimizers().step()  # type: ignore[union-attr]
            self.optimizers().zero_grad()  # type: ignore[union-attr]
        return loss


class Collectives(Callback):
    """The number of collectives of each step, and what it logs."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.losses: list[Tensor] = []

    def on_train_batch_start(self, *_: Any) -> None:
        seen = self.seen = list[str]()

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                if func.namespace == "c10d":
                    seen.append(str(func))
                return func(*args, **(kwargs or {}))

        self.mode = Mode()
        self.mode.__enter__()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.mode.__exit__(None, None, None)
        self.counts.append(len(self.seen))
        self.losses += [value for name, value in trainer.callback_metrics.items() if name == "loss"]


def fit_variant(
    name: str, layout: Mapping[str, Any] | None, batch_size: int, unlabeled: int = 0
) -> tuple[dict[str, Tensor], list[Tensor], list[int]]:
    """Train an epoch; return weights, logged losses, and the numbers of collectives of the steps."""

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch: dict[str, Tensor] = torch.utils.data.default_collate(samples)
        return batch

    samples = [Texts()[index] for index in range(SAMPLES)]
    for sample in samples[: 2 * unlabeled : 2]:  # those of the first batch of the first replica
        sample["masked_labels"] = torch.full((LENGTH,), -100)
    seen = Collectives()
    loader = DataLoader(samples, batch_size, collate_fn=collate)  # type: ignore[arg-type]
    result = train(Variant(name), layout, loader, callbacks=[seen], log_every_n_steps=1)
    return result.weights, seen.losses, seen.counts


DP2 = {"data_parallel_size": 2}


@pytest.mark.parametrize("name", ["unmasked", "other", "made", "manual"])
def test_other_losses_stay_as_they_are(ranks: Pools, name: str) -> None:
    """Bit by bit, and from the second step on with as many collectives."""
    pool = ranks(2, lightning=True)
    found, losses, counts = pool.run(fit_variant, name, DP2, BATCH)[0]
    arguments = {**DP2, "faults": Faults(compare_microbatches=False)}
    expected, plain, least = pool.run(fit_variant, name, arguments, BATCH)[0]
    assert all(torch.equal(value, expected[key]) for key, value in found.items())
    assert torch.equal(torch.stack(losses), torch.stack(plain))
    assert counts[1:] == least[1:]
    assert counts[0] <= least[0] + 1


@pytest.mark.parametrize("more", [{}, {"num_microbatches": 1, "pipeline_parallel_size": 2}])
def test_the_hook_of_the_module_has_precedence(ranks: Pools, more: dict[str, Any]) -> None:
    """Which counts samples here."""
    pool = ranks(2 * more.get("pipeline_parallel_size", 1), lightning=True)
    found = pool.run(fit_variant, "hook", {**DP2, **more}, BATCH)
    expected = pool.run(fit_variant, "masked", {**DP2, **more, "faults": Faults(compare_microbatches=False)}, BATCH)
    for (values, _, _), (others, _, _) in zip(found, expected, strict=True):
        torch.testing.assert_close(values, others, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["masked", "none", "twice", "sum", "sum_none"])
def test_steps_that_change_their_batches(ranks: Pools, name: str) -> None:
    """The first step counts like the others; where no replica has a loss in it, the second one does."""
    expected, losses, _ = fit_variant(name, None, 2 * BATCH)
    for found, logged, _ in ranks(2, lightning=True).run(fit_variant, name, DP2, BATCH):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(logged[-2:], losses[-2:], rtol=1e-10, atol=1e-12)


def test_a_replica_without_targets_adds_nothing(ranks: Pools) -> None:
    expected, losses, _ = fit_variant("masked", None, 2 * BATCH, BATCH)
    for found, logged, _ in ranks(2, lightning=True).run(fit_variant, "masked", DP2, BATCH, BATCH):
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(logged, losses, rtol=1e-10, atol=1e-12)


def test_compiled_losses_are_not_looked_at() -> None:
    """What is seen while a function is compiled would stay in it."""
    from lightning_hybrid.distributed.class_losses import observed

    found = LossTerms(in_step=True)
    scores, labels = torch.randn(4, 5, requires_grad=True), torch.tensor([0, 1, -100, 2])
    with observed(found.observe):
        torch.compile(F.cross_entropy, backend="aot_eager", fullgraph=True)(scores, labels).backward()
    assert not found.terms
    assert scores.grad is not None
