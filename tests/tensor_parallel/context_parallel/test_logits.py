"""Logits in trainings: of the models of the examples and of transformers no rank has those of a whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import CatMetric

from lightning_hybrid.distributed.modes import TorchDispatchMode
from lightning_hybrid.distributed.pytree import flatten
from tests.pool import Pools
from tests.training_jobs import make_trainer
from tests.zoo.tensor import NanoGPT

VOCABULARY, LENGTH, SAMPLES = 254, 64, 2
CLASSES = {VOCABULARY, VOCABULARY // 2}  # of all ranks, or of one of two


class Largest(TorchDispatchMode):  # type: ignore[misc]
    """Looks for the largest tensor with an entry for each class: logits, as weights are smaller."""

    num_bytes = 0

    def forget(self) -> None:
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in flatten(result)[0]:
            if type(leaf) is Tensor and not leaf.is_meta and not CLASSES.isdisjoint(leaf.shape):
                self.num_bytes = max(self.num_bytes, leaf.nbytes)
        return result


def make_module(name: str) -> LightningModule:
    from examples.gpt import GPT
    from examples.hf import GPT2

    sizes = {"vocabulary": VOCABULARY, "length": LENGTH, "dim": 16, "depth": 2, "heads": 4}
    module = GPT(**sizes) if name == "gpt" else GPT2(**sizes)
    if name == "llama":
        from transformers import LlamaConfig, LlamaForCausalLM

        config = LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
        )
        module.model = LlamaForCausalLM(config)
    return module


def logits_of_a_fit(name: str, layout: dict[str, Any]) -> tuple[int, int]:
    """The bytes of the logits of one process, and of this rank."""
    module = make_module(name)
    length = LENGTH + (name == "gpt")  # which takes the last token off
    tokens = list(torch.randint(VOCABULARY, (2 * SAMPLES, length), generator=torch.Generator().manual_seed(1)))
    with Largest() as alone:
        module.training_step(torch.stack(tokens[:SAMPLES]), 0).backward()
    module.zero_grad()
    has_stages = "pipeline_parallel_size" in layout  # the first batch of a loader is compared with its microbatches
    trainer = make_trainer(layout, limit_val_batches=int(not has_stages), num_sanity_val_steps=0)
    loaders = [DataLoader(tokens, SAMPLES) for _ in range(2)]  # type: ignore[arg-type]
    with Largest() as largest:
        if has_stages:
            module.on_train_batch_start = lambda batch, index: largest.forget()  # type: ignore[assignment]
        trainer.fit(module, *loaders)
    return alone.num_bytes, largest.num_bytes


def _divided(name: str, kind: str, parts: int, *marks: Any, **others: int) -> Any:
    layout = {"context_parallel_size": 2, "context_parallel": kind, **others}
    return pytest.param(name, layout, parts, id="-".join([name, kind, *others]), marks=marks)


#: A model, a layout, and in how many parts logits are divided: by positions, and by classes or samples.
DIVIDED = [
    _divided("gpt", "ring", 2),
    _divided("llama", "ulysses", 2),
    _divided("gpt2", "ring", 2, pytest.mark.thorough),
    _divided("gpt", "ulysses", 4, pytest.mark.thorough, tensor_parallel_size=2),
    _divided("llama", "ring", 4, pytest.mark.thorough, pipeline_parallel_size=2, num_microbatches=2),
    _divided("llama", "ring", 2, pytest.mark.thorough, data_parallel_size=2, zero_stage=3),
]


@pytest.mark.distributed
@pytest.mark.parametrize(("name", "layout", "parts"), DIVIDED)
def test_no_rank_has_all_logits(ranks: Pools, name: str, layout: dict[str, Any], parts: int) -> None:
    size = 4 if len(layout) > 2 else 2
    found = ranks(size, lightning=True).run(logits_of_a_fit, name, layout)
    whole, most = found[0][0], max(largest for _, largest in found)
    assert whole == 4 * SAMPLES * LENGTH * VOCABULARY
    assert whole / parts <= most <= 1.1 * whole / parts


# -- logits that are kept ----------------------------------------------------------------------------------------------


class Keeping(NanoGPT):
    """A metric, and a list, that keep logits until the end of the epoch."""

    def build(self) -> None:
        super().build()
        self.metric = CatMetric()

    def loss(self, batch: Any) -> Tensor:
        logits = self(batch[0])
        self.metric.update(logits)
        self.kept = logits
        return F.cross_entropy(logits.flatten(0, 1), batch[1].flatten())

    def on_train_epoch_end(self) -> None:
        self.at_end = self.metric.compute().sum(), self.kept.softmax(1).sum()


def kept(layout: dict[str, Any] | None) -> tuple[Tensor, ...]:
    torch.manual_seed(1)
    module = Keeping().double()
    make_trainer(layout, limit_train_batches=2, limit_val_batches=0).fit(module)
    return tuple(each.detach() for each in module.at_end)


@pytest.mark.distributed
def test_logits_may_be_kept(ranks: Pools) -> None:
    (expected,) = ranks(1, lightning=True).run(kept, None)
    for found in ranks(2, lightning=True).run(kept, {"context_parallel_size": 2}, timeout=60):
        torch.testing.assert_close(found, expected)
