"""Batches that are not one row for each sample: split by what they hold, or whole, they train as in one process."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader

import lightning_hybrid
from tests.pool import Pools
from tests.training_jobs import LAYOUTS, Result, assert_same, together, train

WIDTH = 16


class Blocks(LightningModule):
    """A module with layers in a list, in float64; it logs its loss."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.layers = nn.ModuleList([self.make_layer() for _ in range(4)])
            self.make_rest()
        self.double()

    def make_layer(self) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh())

    def make_rest(self) -> None:
        self.head = nn.Linear(WIDTH, 1)

    def loss(self, batch: Any) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.003)

    @classmethod
    def batch(cls, number: int) -> Any:
        """The batch of a number."""
        raise NotImplementedError


def numbers(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


# -- packed rows -------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, cu_seqlens: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(len(x), 3, 4, WIDTH // 4).permute(1, 2, 0, 3)
        documents = torch.bucketize(torch.arange(len(x)), cu_seqlens[1:], right=True)
        mask = (documents[:, None] == documents[None]) & torch.ones(len(x), len(x), dtype=torch.bool).tril()
        y = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask)[0]
        out: Tensor = self.out(y.transpose(0, 1).reshape(len(x), WIDTH))
        return x + out


class PackedRows(Blocks):
    """Documents packed in one row of tokens; the loss is a mean over tokens."""

    split_batch: Any = lightning_hybrid.split_rows("cu_seqlens")

    def make_layer(self) -> nn.Module:
        return Attention()

    def make_rest(self) -> None:
        self.embed, self.head = nn.Embedding(20, WIDTH), nn.Linear(WIDTH, 20)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch["ids"])
        for layer in self.layers:
            x = layer(x, batch["cu_seqlens"])
        return F.cross_entropy(self.head(x), batch["labels"])

    @classmethod
    def batch(cls, number: int) -> Any:
        ends = torch.tensor([0, 3, 4, 5, 7 + number % 3, 2]).cumsum(0)
        ids = torch.randint(20, (2, int(ends[-1])), generator=numbers(number))
        return {"ids": ids[0], "labels": ids[1], "cu_seqlens": ends, "max_seqlen": 9}


class GuessedRows(PackedRows):
    """Nobody says how its batches are split."""

    split_batch = None


# -- graphs ------------------------------------------------------------------------------------------------------------


@dataclass
class Graphs:
    x: Tensor
    edge_index: Tensor
    batch: Tensor
    y: Tensor


def graph(number: int) -> Graphs:
    nodes = 3 + number % 4
    generator = numbers(number)
    return Graphs(
        torch.randn(nodes, 5, generator=generator, dtype=torch.float64),
        torch.randint(nodes, (2, 2 * nodes), generator=generator),
        torch.zeros(nodes, dtype=torch.int64),
        torch.randn(1, generator=generator, dtype=torch.float64),
    )


def joined(graphs: list[Graphs]) -> Graphs:
    starts = torch.tensor([0, *(len(each.x) for each in graphs)]).cumsum(0)
    return Graphs(
        torch.cat([each.x for each in graphs]),
        torch.cat([each.edge_index + start for each, start in zip(graphs, starts, strict=False)], 1),
        torch.cat([each.batch + i for i, each in enumerate(graphs)]),
        torch.cat([each.y for each in graphs]),
    )


class Convolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, edge_index: Tensor) -> Tensor:
        messages = self.linear(x)[edge_index[0]]
        out: Tensor = self.norm(x + torch.zeros_like(x).index_add_(0, edge_index[1], torch.tanh(messages)))
        return out


class GraphNet(Blocks):
    """Graphs in a dataclass; the loss is a mean over graphs."""

    split_batch: Any = lightning_hybrid.split_graphs()

    def make_layer(self) -> nn.Module:
        return Convolution()

    def make_rest(self) -> None:
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)

    def loss(self, batch: Any) -> Tensor:
        x = self.embed(batch.x)
        for layer in self.layers:
            x = layer(x, batch.edge_index)
        pooled = torch.zeros(batch.y.shape[0], WIDTH, dtype=x.dtype).index_add_(0, batch.batch, x)
        return F.mse_loss(self.head(pooled)[:, 0], batch.y)

    @classmethod
    def batch(cls, number: int) -> Any:
        return joined([graph(9 * number + i) for i in range(9)])


class GuessedGraphs(GraphNet):
    split_batch = None


class GraphBatch:
    """An object with the interface of PyTorch Geometric's `Batch`, which the package cannot open."""

    def __init__(self, graphs: list[Graphs]) -> None:
        self.graphs = graphs
        self.__dict__.update(vars(joined(graphs)))

    def to(self, *args: Any, **kwargs: Any) -> GraphBatch:
        return self

    @property
    def num_graphs(self) -> int:
        return len(self.graphs)

    def to_data_list(self) -> list[Graphs]:
        return self.graphs

    @classmethod
    def from_data_list(cls, graphs: list[Graphs]) -> GraphBatch:
        return cls(graphs)


class ObjectNet(GraphNet):
    """Needs no splitter, as the object has its own methods."""

    split_batch = None

    @classmethod
    def batch(cls, number: int) -> Any:
        return GraphBatch([graph(9 * number + i) for i in range(9)])


# -- packed sequences --------------------------------------------------------------------------------------------------


class Words(Blocks):
    """Sequences in a `PackedSequence`, pooled before the layers."""

    def make_rest(self) -> None:
        # Without a bias padding adds nothing, so that samples do not depend on how long the others are.
        self.embed, self.head = nn.Linear(5, WIDTH, bias=False), nn.Linear(WIDTH, 1)

    def pool(self, words: PackedSequence) -> Tensor:
        x, lengths = torch.nn.utils.rnn.pad_packed_sequence(words, batch_first=True)
        return torch.tanh(self.embed(x)).sum(1) / lengths[:, None]

    def loss(self, batch: Any) -> Tensor:
        words, y = batch
        x = self.pool(words)
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(self.head(x)[:, 0], y)

    @classmethod
    def batch(cls, number: int) -> Any:
        generator = numbers(number)
        lengths = [2, 5, 1, 4, 7, 3, 3, 6]
        words = [torch.randn(n, 5, generator=generator, dtype=torch.float64) for n in lengths]
        return pack_sequence(words, enforce_sorted=False), torch.randn(8, generator=generator, dtype=torch.float64)


# -- joined targets ----------------------------------------------------------------------------------------------------


class Speech(Blocks):
    """CTC with joined targets: its mean is one over samples."""

    split_batch: Any = lightning_hybrid.split_targets(1, 3)

    def make_rest(self) -> None:
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 6)

    def loss(self, batch: Any) -> Tensor:
        x, targets, input_lengths, target_lengths = batch
        x = self.embed(x)
        for layer in self.layers:
            x = x + layer(x)
        return F.ctc_loss(self.head(x).log_softmax(-1).transpose(0, 1), targets, input_lengths, target_lengths)

    @classmethod
    def batch(cls, number: int) -> Any:
        generator = numbers(number)
        lengths = torch.tensor([3, 1, 4, 2, 2, 5, 1])
        x = torch.randn(7, 12, 5, generator=generator, dtype=torch.float64)
        targets = torch.randint(1, 6, (int(lengths.sum()),), generator=generator)
        return x, targets, torch.tensor([12, 12, 10, 12, 9, 12, 12]), lengths


class GuessedSpeech(Speech):
    split_batch = None


# -- lists of samples, and tensors that are no samples -----------------------------------------------------------------


class Lists(Blocks):
    """Batches are lists of samples of different sizes."""

    split_batch: Any = lightning_hybrid.split_samples()

    def make_rest(self) -> None:
        self.embed, self.head = nn.Linear(5, WIDTH), nn.Linear(WIDTH, 1)

    def loss(self, batch: Any) -> Tensor:
        x = torch.stack([self.embed(sample["x"]).mean(0) for sample in batch])
        for layer in self.layers:
            x = x + layer(x)
        return F.mse_loss(self.head(x)[:, 0], torch.stack([sample["y"] for sample in batch]))

    @classmethod
    def batch(cls, number: int) -> Any:
        graphs = [graph(9 * number + i) for i in range(6)]
        return [{"x": each.x, "y": each.y[0]} for each in graphs]


class ClassWeights(Blocks):
    """Gets weights of five classes with every batch."""

    def make_rest(self) -> None:
        self.head = nn.Linear(WIDTH, 5)

    def loss(self, batch: Any) -> Tensor:
        x, y, class_weights = batch
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), y, class_weights)

    @classmethod
    def batch(cls, number: int) -> Any:
        generator = numbers(number)
        x = torch.randn(8, WIDTH, generator=generator, dtype=torch.float64)
        return x, torch.randint(5, (8,), generator=generator), torch.linspace(0.1, 1, 5, dtype=torch.float64)


# -- tests -------------------------------------------------------------------------------------------------------------


def trained(module: type[Blocks], layout: Mapping[str, Any] | None) -> tuple[Result, list[str]]:
    """Train; return the result and the warnings about splitting."""
    data: Any = [module.batch(number) for number in range(4)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = train(module(), layout, DataLoader(data, batch_size=None), max_epochs=2, log_every_n_steps=1)
    return result, [text for text in (str(each.message) for each in caught) if "microbatch" in text]


def check(ranks: Pools, module: type[Blocks], name: str = "pp2") -> list[str]:
    """A module trains under a layout as in one process; what rank 0 has said."""
    size, _, layout = LAYOUTS[name]
    expected, _ = trained(module, None)
    results = ranks(size, lightning=True).run(trained, module, layout)
    assert_same(together([result.weights for result, _ in results]), expected.weights)
    for result, _ in results:
        assert_same(result.losses, expected.losses)
        assert_same(result.metrics, expected.metrics)
    said: list[str] = results[0][1]
    return said


@pytest.mark.distributed
@pytest.mark.parametrize("module", [PackedRows, GraphNet, ObjectNet, Words, Speech, Lists])
def test_batches_are_split_by_what_they_hold(ranks: Pools, module: type[Blocks]) -> None:
    assert check(ranks, module) == []


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "remedy"),
    [
        (GuessedRows, "split_rows('cu_seqlens')"),
        (GuessedGraphs, "split_graphs()"),
        (GuessedSpeech, "define `GuessedSpeech.split_batch"),
        (ClassWeights, "batch[2] [5]"),
    ],
)
def test_batches_are_not_split_by_guessing(ranks: Pools, module: type[Blocks], remedy: str) -> None:
    (text,) = check(ranks, module)
    assert text.startswith("The batch runs as one microbatch instead of ")
    assert remedy in text


# -- errors ------------------------------------------------------------------------------------------------------------


class CutTargets(Speech):
    """Splits the joined targets as if they went by samples."""

    def split_batch(self, batch: Any, num_microbatches: int) -> Any:
        x, targets, input_lengths, target_lengths = batch
        return [(x[:3], targets, input_lengths[:3], target_lengths[:3]), (x[3:], targets, *batch[2:])]


class CutNodes(GraphNet):
    """Splits nodes, and leaves the edges as they are."""

    def split_batch(self, batch: Any, num_microbatches: int) -> Any:
        halves = batch.x.chunk(2), batch.batch.chunk(2), batch.y.chunk(2)
        return [Graphs(x, batch.edge_index, owners, y) for x, owners, y in zip(*halves, strict=True)]


class RaisesInLayer(Blocks):
    """Fails in a layer that sees three samples."""

    def make_layer(self) -> nn.Module:
        return Picky()

    def loss(self, batch: Any) -> Tensor:
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        loss: Tensor = self.head(x).mean()
        return loss

    @classmethod
    def batch(cls, number: int) -> Any:
        return (torch.randn(7, WIDTH, generator=numbers(number), dtype=torch.float64),)


class Picky(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) == 3:
            raise IndexError("index 3 is out of bounds")
        return super().forward(x)


def failed(module: type[Blocks], layout: Mapping[str, Any]) -> str:
    """What a run raises, with its notes."""
    try:
        trained(module, layout)
    except Exception as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    return "no error"


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "error", "place"),
    [
        (CutTargets, "", "1 of 2, which contains 3 of 10 samples"),
        (CutNodes, "", "1 of 2, which contains "),
        (RaisesInLayer, "index 3 is out of bounds", "2 of 2, which contains 3 of 7 samples"),
    ],
)
@pytest.mark.parametrize("size", [1, 2])
def test_an_error_tells_of_its_microbatch_on_every_rank(
    ranks: Pools, module: type[Blocks], error: str, place: str, size: int
) -> None:
    layout = {"num_microbatches": 2} | ({"pipeline_parallel_size": 2} if size == 2 else {})
    for text in ranks(size, lightning=True).run(failed, module, layout):
        assert error in text
        assert f"The error was raised in microbatch {place}" in text
        assert "num_microbatches=1" in text
        assert text.count("The error was raised in microbatch") == 1


@pytest.mark.distributed
def test_an_error_of_a_whole_batch_tells_of_no_microbatch(ranks: Pools) -> None:
    (text,) = ranks(1, lightning=True).run(failed, RaisesInLayer, {"num_microbatches": 1})
    assert text == "no error"
