"""Recurrent models over sequences of several lengths: packed between two lists of layers, they train as one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.data import DataLoader, TensorDataset

from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, assert_same, together, train

WIDTH, CLASSES, LONGEST, ROWS = 12, 6, 14, 32

pytestmark = pytest.mark.distributed

#: (world size, data-parallel size, arguments of the strategy).
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
    "pp2 in microbatches": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "pp3 in microbatches": (3, 1, {"pipeline_parallel_size": 3, "num_microbatches": 2}),
    "pp2 x dp2": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 1}),
    "pp2 x dp2 in microbatches": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
}


class Recurrent(LightningModule):
    """Layers in lists around recurrent ones; batches have sequences, their lengths, and targets."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.make()
        self.double()

    def make(self) -> None:
        raise NotImplementedError

    def loss(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(*batch)
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(*batch), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)

    @classmethod
    def data(cls) -> TensorDataset:
        """Sequences, their lengths and targets; not every batch has a sequence of the full length."""
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(ROWS, LONGEST, WIDTH, generator=generator, dtype=torch.float64)
        lengths = torch.randint(7, LONGEST + 1, (ROWS,), generator=generator)
        return TensorDataset(cls.sequences(x, lengths), lengths, cls.targets(generator))

    @classmethod
    def sequences(cls, x: Tensor, lengths: Tensor) -> Tensor:
        return x

    @classmethod
    def targets(cls, generator: torch.Generator) -> Tensor:
        return torch.randint(CLASSES, (ROWS,), generator=generator)


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.Tanh(), nn.Linear(4 * WIDTH, WIDTH))


class Speech(Recurrent):
    """Convolutions in a list, a bidirectional LSTM over packed lengths, a head, CTC."""

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 3, padding=1) for _ in range(4))
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x.transpose(1, 2))).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        x, lengths = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, lengths, torch.full_like(lengths, targets.shape[1]))

    @classmethod
    def targets(cls, generator: torch.Generator) -> Tensor:
        return torch.randint(1, CLASSES, (ROWS, 3), generator=generator)


class SpeechInSequential(Speech):
    """The convolutions are one `nn.Sequential`; the length of the result is that of the batch."""

    def make(self) -> None:
        super().make()
        self.layers = nn.Sequential(*[each for layer in self.layers for each in (layer, nn.Tanh())])

    def loss(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        x = self.layers(x.transpose(1, 2)).transpose(1, 2)
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        x, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])
        log_probs = self.head(x).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(log_probs, targets, lengths, torch.full_like(lengths, targets.shape[1]))


class Stacked(Recurrent):
    """Two LSTMs, one after another on packed values, between two lists of layers; the state of the last one is used."""

    def make(self) -> None:
        self.before = nn.ModuleList(dense() for _ in range(3))
        self.first, self.second = nn.LSTM(WIDTH, WIDTH, num_layers=2), nn.LSTM(WIDTH, WIDTH)
        self.after = nn.ModuleList(dense() for _ in range(3))
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        for layer in self.before:
            x = x + layer(x)
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        out, state = self.first(packed)
        out, (last, _) = self.second(out, (state[0][-1:], state[1][-1:]))
        padded, known = pad_packed_sequence(out, batch_first=True)
        x = padded.sum(1) / known[:, None] + last[-1]
        for layer in self.after:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), targets)


class SortedText(Recurrent):
    """A classifier that sorts its texts, embeds them, and packs them for a GRU; its last state goes through layers."""

    def make(self) -> None:
        self.embed = nn.Embedding(20, WIDTH, padding_idx=0)
        self.gru = nn.GRU(WIDTH, WIDTH // 2, batch_first=True, bidirectional=True)
        self.layers = nn.ModuleList(dense() for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        lengths, order = lengths.sort(descending=True)
        packed = pack_padded_sequence(self.embed(x[order]), lengths, batch_first=True)
        _, state = self.gru(packed)
        x = torch.cat([state[-2], state[-1]], -1)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x), targets[order])

    @classmethod
    def sequences(cls, x: Tensor, lengths: Tensor) -> Tensor:
        ids = x[..., 0].mul(50).long().remainder(19) + 1
        return ids.masked_fill(torch.arange(LONGEST) >= lengths[:, None], 0)


class PackedLayers(Recurrent):
    """Recurrent layers in a list are handed what is packed; dropout works on the packed values between them."""

    def make(self) -> None:
        self.layers = nn.ModuleList(nn.GRU(WIDTH, WIDTH, batch_first=True) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, x: Tensor, lengths: Tensor, targets: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        for layer in self.layers:
            out, _ = layer(packed)
            packed = packed._replace(data=out.data + packed.data)
        x, lengths = pad_packed_sequence(packed, batch_first=True)
        return F.cross_entropy(self.head(x.sum(1) / lengths[:, None]), targets)


MODULES = [Speech, SpeechInSequential, Stacked, SortedText, PackedLayers]


def trained(module: type[Recurrent], layout: dict[str, Any] | None, batch_size: int = 8) -> Result:
    """Train with validation on the same samples."""
    data = [DataLoader(module.data(), batch_size) for _ in range(2)]
    return train(module(), layout, *data, max_epochs=2, log_every_n_steps=1)


@pytest.mark.parametrize(
    ("name", "module"),
    daily(
        [(name, module) for name in LAYOUTS for module in MODULES],
        *(("pp2 in microbatches", module) for module in MODULES),
        *(("pp2 x dp2 in microbatches", module) for module in MODULES[:2]),
    ),
)
def test_packed_sequences_between_layers_train_as_in_one_process(
    ranks: Pools, name: str, module: type[Recurrent]
) -> None:
    size, replicas, layout = LAYOUTS[name]
    expected = trained(module, None)
    results = ranks(size, lightning=True).run(trained, module, layout, 8 // replicas)
    assert_same(together([result.weights for result in results]), expected.weights)
    for result in results:
        assert_same(result.metrics, {**expected.metrics, "loss_step": result.metrics["loss_step"]})
        if replicas == 1:
            assert_same(result.losses, expected.losses)
