"""The ready-made hook that counts tokens, against the losses of transformers."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BatchEncoding, BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel

from lightning_hybrid import count_tokens
from tests.pool import Pools, RankError
from tests.training_jobs import together, train

VOCABULARY = 32


def make_gpt() -> torch.nn.Module:
    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=16,
        n_layer=4,
        n_head=4,
        n_positions=16,
        bos_token_id=None,
        eos_token_id=None,
        initializer_range=0.5,  # losses of samples shall differ
    )
    return GPT2LMHeadModel(config)


def make_bert() -> torch.nn.Module:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=16,
        initializer_range=0.5,
    )
    return BertForMaskedLM(config)


def batches(number: int, *, samples: int = 8, length: int = 10) -> list[BatchEncoding]:
    """Sequences that are filled up to a length; of some the first label counts, of some it does not."""
    generator = torch.Generator().manual_seed(5)
    made = []
    for _ in range(number):
        ids = torch.randint(VOCABULARY, (samples, length), generator=generator)
        ends = torch.randint(1, length + 1, (samples, 1), generator=generator)
        places = torch.arange(length)
        ignored = (places >= ends) | ((places == 0) & (ends % 2 == 0))
        made.append(BatchEncoding({"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}))
    return made


@pytest.mark.parametrize(("make", "shift"), [(make_gpt, True), (make_bert, False)])
def test_losses_of_transformers_are_means_over_the_counted_tokens(make: Any, shift: bool) -> None:
    torch.manual_seed(0)
    model = make().double().eval()
    (batch,) = batches(1)
    halves = [{key: value[part] for key, value in batch.items()} for part in (slice(2), slice(2, None))]
    count = count_tokens("labels", shift=shift)
    counts = torch.stack([count(half) for half in halves]).double()
    with torch.no_grad():
        losses = torch.stack([model(**half).loss for half in halves])
        whole = model(**batch).loss
    # A causal model takes its loss in float32, whatever its parameters are.
    torch.testing.assert_close(
        (losses * counts).sum() / counts.sum(), whole.double(), rtol=1e-6, atol=0.0, check_dtype=False
    )
    assert count(batch) == counts.sum()
    other = count_tokens("labels", shift=not shift)
    wrong = torch.stack([other(half) for half in halves]).double()
    assert abs((losses * wrong).sum() / wrong.sum() - whole) > 1e-4


LABELS = torch.tensor([[1, 2, -100, -100], [-100, 3, 4, -100]])


@pytest.mark.parametrize(
    ("key", "batch"),
    [
        ("labels", {"labels": LABELS}),
        ("labels", BatchEncoding({"labels": LABELS})),
        ("labels", SimpleNamespace(labels=LABELS)),
        (1, (None, LABELS)),
        (-1, [None, LABELS]),
        (None, LABELS),
    ],
)
def test_labels_are_found_in_batches_of_any_kind(key: Any, batch: Any) -> None:
    assert count_tokens(key)(batch) == 4
    assert count_tokens(key, shift=True)(batch) == 3
    assert count_tokens(key, ignore_index=3)(batch) == 7


def test_it_is_assigned_in_the_class_or_called_from_a_method() -> None:
    class Assigned(LightningModule):
        microbatch_weight = count_tokens("labels")

    class Calling(LightningModule):
        def microbatch_weight(self, microbatch: Any) -> Tensor:
            return count_tokens("labels")(microbatch) + 1

    for module, expected in ((Assigned(), 4), (Calling(), 5)):
        assert module.microbatch_weight({"labels": LABELS}) == expected
        assert copy.deepcopy(module).microbatch_weight({"labels": LABELS}) == expected
    assert pickle.loads(pickle.dumps(Assigned.microbatch_weight)) == Assigned.microbatch_weight


@pytest.mark.parametrize(
    ("key", "batch", "message"),
    [
        ("labels", {"ids": 1, "targets": 2}, r"'labels'.*dict with the keys \['ids', 'targets'\]"),
        ("labels", (1, 2), "'labels'.*tuple.*Pass the key"),
        (2, (1, 2), "count_tokens\\(2\\).*tuple"),
        ("labels", {"labels": [1, 2]}, "tensor of labels.*found list"),
        ("labels", {"labels": torch.tensor(3)}, "without dimensions"),
    ],
)
def test_labels_that_are_not_there(key: Any, batch: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        count_tokens(key)(batch)


@pytest.mark.parametrize("key", [1.0, True, ("labels",)])
def test_keys_that_are_none(key: Any) -> None:
    with pytest.raises(TypeError, match="must be the key of a mapping"):
        count_tokens(key)


class Language(LightningModule):
    microbatch_weight: Any = count_tokens("labels", shift=True)

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.model = make_gpt().eval()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch).loss
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Misnamed(Language):
    microbatch_weight = count_tokens("targets")


def _collate(rows: list[dict[str, Tensor]]) -> BatchEncoding:
    return BatchEncoding({key: torch.stack([row[key] for row in rows]) for key in rows[0]})


def language(layout: Mapping[str, Any] | None, batch_size: int, accumulate: int, module: Any = Language) -> Any:
    rows = [{key: value[i] for key, value in batch.items()} for batch in batches(3) for i in range(8)]
    data = DataLoader(rows, batch_size, collate_fn=_collate)
    return train(module().double(), layout, data, accumulate_grad_batches=accumulate, limit_val_batches=0).weights


def test_a_language_model_learns_as_in_one_process(ranks: Pools) -> None:
    layout = {"data_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 2}
    expected = language(None, 8, 1)
    results = ranks(4, lightning=True).run(language, layout, 2, 2)
    torch.testing.assert_close(together(results), expected, rtol=1e-5, atol=1e-7)


def test_labels_that_are_not_there_are_told_on_every_rank(ranks: Pools) -> None:
    with pytest.raises(RankError) as caught:
        ranks(2, lightning=True).run(language, {"pipeline_parallel_size": 2}, 4, 1, Misnamed)
    assert len(caught.value.failures) == 2
    for story in caught.value.failures.values():
        assert story.rstrip().splitlines()[-1].startswith("ValueError: count_tokens('targets') found no such key")
