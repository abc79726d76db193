"""A Sequential that is found, and that the first step does not call as a whole: its layers train as units."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from lightning_utilities.core import rank_zero
from torch import Tensor, nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel
from torchmetrics import MeanSquaredError

from tests.pool import Pools, RankError
from tests.training_jobs import make_trainer, together, train
from tests.zoo import frame, tensor_frame
from tests.zoo.basic import Example, block


class SharedViews(tensor_frame.TwoViews):
    """Two views of a Sequential, whose layers tensor-parallel ranks share."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.Sequential(*self.blocks)

    def embed(self, x: Tensor) -> Tensor:
        return self.projection(self.blocks(x)).mean(1)


class Penalized(Example):
    """Hooks keep the outputs of all layers, and the loss has a penalty on them."""

    def build(self) -> None:
        super().build()
        self.outputs: list[Tensor] = []
        for layer in self.body:
            layer.register_forward_hook(lambda layer, args, output: self.outputs.append(output))

    def loss(self, batch: Any) -> Tensor:
        self.outputs.clear()
        loss = super().loss(batch)
        return loss + sum(output.square().mean() for output in self.outputs)


class Keeping(nn.Module):
    """A layer that keeps a penalty in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.penalty = block(), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.penalty = x.square().mean()
        return x


class KeptInLayers(Example):
    """The loss has penalties that the layers keep in attributes."""

    def build(self) -> None:
        self.body = nn.Sequential(*(Keeping() for _ in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + sum(layer.penalty for layer in self.body)


class KeepingOutput(nn.Module):
    """A layer that returns a tensor and also keeps it in a container of an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = block(), {"output": torch.zeros(())}

    def forward(self, x: Tensor) -> Tensor:
        self.kept["output"] = x = self.inner(x)
        return x


class KeptOutputs(Example):
    """The loss has a penalty on outputs that the layers keep in attributes."""

    def build(self) -> None:
        self.body = nn.Sequential(*(KeepingOutput() for _ in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        return loss + self.body[2].kept["output"].square().mean()


class InList(Example):
    """A variant of a class whose layers are in a list instead of a chain."""

    def build(self) -> None:
        super().build()
        self.body = nn.ModuleList(self.body)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.body:
            x = layer(x)
        return x


class KeptOutputsOfList(InList, KeptOutputs):
    """The same with layers in a list."""


class KeptInMiddle(KeptInLayers):
    """The loss has the penalty of one layer in the middle."""

    def loss(self, batch: Any) -> Tensor:
        return Example.loss(self, batch) + self.body[2].penalty


class ReadsLossFirst(KeptInLayers):
    """The loss is read before the penalties of some layers are added, so that the trace ends before them.

    The layers have penalties before the first step, which a stage must not use for layers of other stages.
    """

    penalized = slice(None)

    def build(self) -> None:
        super().build()
        for layer in self.body:
            layer.penalty = torch.zeros(())

    def loss(self, batch: Any) -> Tensor:
        loss = Example.loss(self, batch)
        assert float(loss) >= 0
        return loss + sum(layer.penalty for layer in [*self.body][self.penalized])


class ReadsLossFirstInList(InList, ReadsLossFirst):
    """The same with layers in a list."""


class FailsInTrace(ReadsLossFirst):
    """The loss is passed to code that does not take the fake tensors of a trace, before the penalties are added."""

    def loss(self, batch: Any) -> Tensor:
        loss = Example.loss(self, batch)
        if type(loss) is not Tensor:
            raise TypeError(f"Expected a torch.Tensor, but got a {type(loss).__name__}")
        return loss + sum(layer.penalty for layer in self.body)


class KeepingOfPositive(Keeping):
    """A layer that reads how many rows are positive, as a mixture of experts does."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalty = self.penalty * len((x.sum(-1) > 0).nonzero())
        return x


class KeptWithValues(KeptInLayers):
    """The layers read values, so they cannot run on fake tensors."""

    def build(self) -> None:
        self.body = nn.Sequential(*(KeepingOfPositive() for _ in range(self.layers)))


class ReadsMissing(ReadsLossFirst):
    """The layers have no penalties before the first step, and the step would skip a missing penalty."""

    def build(self) -> None:
        super().build()
        for layer in self.body:
            del layer.penalty

    def loss(self, batch: Any) -> Tensor:
        loss = Example.loss(self, batch)
        assert float(loss) >= 0
        return loss + sum(getattr(layer, "penalty", 0.0) for layer in self.body)


class Recording(nn.Module):
    """A layer that appends a penalty to a list of others."""

    def __init__(self, penalties: list[Tensor]) -> None:
        super().__init__()
        self.inner, self.penalties = block(), penalties

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.penalties.append(x.square().mean())
        return x


class ReadsLossBeforeList(Example):
    """The loss is read before the sum of a list of the module, to which all layers append."""

    def build(self) -> None:
        self.penalties: list[Tensor] = []
        self.body = nn.Sequential(*(Recording(self.penalties) for _ in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        loss = super().loss(batch)
        assert float(loss) >= 0
        loss = loss + sum(self.penalties)
        self.penalties.clear()
        return loss


class ReadsLossBeforeListInList(InList, ReadsLossBeforeList):
    """The same with layers in a list."""


class Record:
    """An object of the module and of all layers."""

    def __init__(self) -> None:
        self.penalties: list[Tensor] = []


class RecordingInObject(nn.Module):
    """A layer that appends a penalty to the list that an object holds at that time."""

    def __init__(self, record: Record) -> None:
        super().__init__()
        self.inner, self.record = block(), record

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.record.penalties.append(x.square().mean())
        return x


class ReadsLossBeforeObject(ReadsLossBeforeList):
    """The loss is read before the sum of a list in an object of the module and of the layers."""

    def build(self) -> None:
        self.record = Record()
        self.body = nn.Sequential(*(RecordingInObject(self.record) for _ in range(self.layers)))

    def loss(self, batch: Any) -> Tensor:
        self.record.penalties = []
        loss = Example.loss(self, batch)
        assert float(loss) >= 0
        return loss + sum(self.record.penalties)


class RecordsUnused(ReadsLossBeforeObject):
    """The list in the object is not used, except by the layers."""

    def loss(self, batch: Any) -> Tensor:
        self.record.penalties = []
        loss = Example.loss(self, batch)
        assert float(loss) >= 0
        return loss


class RecordsUnusedInList(InList, RecordsUnused):
    """The same with layers in a list."""


class PenalizesLast(ReadsLossFirst):
    """The training loss has the penalty of the last layer, which the last stage has."""

    penalized = slice(-1, None)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", Example.loss(self, batch), sync_dist=True)


class PenalizesLastInList(ReadsLossFirstInList):
    """The same with layers in a list."""

    penalized = slice(-1, None)


class PenalizesLastInEvaluation(ReadsLossFirst):
    """Only the validation loss has the penalty of the last layer. The layers have then run in microbatches."""

    penalized = slice(-1, None)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Example.loss(self, batch)


class KeptInEvaluation(KeptInLayers):
    """Only the validation loss has the penalties."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return Example.loss(self, batch)


MODULES: dict[str, type[Example]] = {
    "shared views": SharedViews,
    "penalized": Penalized,
    "two views": frame.TwoViews,
    "layer by layer": frame.LayerByLayer,
    "projected": frame.Projected,
    "penalizes last": PenalizesLast,
    "penalizes last in list": PenalizesLastInList,
    "records unused": RecordsUnused,
    "records unused in list": RecordsUnusedInList,
}


def trained(name: str, layout: dict[str, Any] | None) -> dict[str, Tensor]:
    """The weights after three steps."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.manual_seed(0)
    return train(MODULES[name](batch_size=8).double(), layout, max_steps=3, max_epochs=-1).weights


class Measured(Example):
    """A metric is called in validation, which writes its states."""

    def build(self) -> None:
        super().build()
        self.error = MeanSquaredError()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("error", self.error(self(x), y))


def fit(kind: type[Example], layout: dict[str, Any]) -> None:
    torch.manual_seed(0)
    make_trainer(layout, max_steps=2, max_epochs=-1).fit(kind(batch_size=8).double())


def told(kind: type[Example]) -> list[str]:
    """The lines of the log of a run that say that the chain is opened."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = rank_zero.log
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    torch.manual_seed(0)
    module = kind(batch_size=8).double()
    make_trainer({"pipeline_parallel_size": 2, "num_microbatches": 2}, max_steps=1, max_epochs=-1).fit(module)
    logger.setLevel(level)
    logger.removeHandler(handler)
    return [line for line in lines if "can be called one by one" in line]


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "number"), [(Measured, 0), (frame.TwoViews, 1), (Penalized, 1)])
def test_a_chain_stays_one_beside_a_metric_in_validation(ranks: Pools, kind: type[Example], number: int) -> None:
    assert len(ranks(2, lightning=True).run(told, kind, timeout=90)[0]) == number


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("two views", {"num_microbatches": 1}),
        ("projected", {"num_microbatches": 1}),
        ("layer by layer", {"num_microbatches": "auto"}),
        ("layer by layer", {"dynamic_shapes": True, "num_microbatches": 4}),
        ("two views", {"recompute": True, "num_microbatches": 2}),
        ("shared views", {"tensor_parallel_size": 2, "num_microbatches": 4}),
        ("shared views", {"context_parallel_size": 2, "num_microbatches": 2}),
        ("penalized", {"num_microbatches": 2}),
        ("penalized", {"num_microbatches": 2, "body": "body"}),
        ("penalized", {"num_microbatches": 2, "num_chunks": 2}),
        ("penalizes last", {"num_microbatches": 2, "schedule": "gpipe"}),
        ("penalizes last in list", {"num_microbatches": 2, "num_chunks": 2}),
        ("records unused", {"num_microbatches": 2}),
        ("records unused in list", {"num_microbatches": 2}),
    ],
    ids=str,
)
def test_its_layers_train_as_in_one_process(ranks: Pools, name: str, layout: dict[str, Any]) -> None:
    size = 2 * layout.get("tensor_parallel_size", 1) * layout.get("context_parallel_size", 1)
    expected = trained(name, None)
    results = ranks(size, lightning=True).run(trained, name, {"pipeline_parallel_size": 2, **layout}, timeout=90)
    torch.testing.assert_close(together(results), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.distributed
@pytest.mark.parametrize("arguments", [{}, {"body": "body"}], ids=str)
@pytest.mark.parametrize(
    "kind",
    [
        *(KeptInLayers, KeptInMiddle, KeptInEvaluation, KeptOutputs, KeptOutputsOfList),
        *(ReadsLossFirst, ReadsLossFirstInList, ReadsMissing, PenalizesLastInEvaluation),
        *(FailsInTrace, KeptWithValues, ReadsLossBeforeList, ReadsLossBeforeListInList, ReadsLossBeforeObject),
    ],
)
def test_tensors_that_layers_keep_in_attributes_are_refused(
    ranks: Pools, kind: type[Example], arguments: dict[str, Any]
) -> None:
    with pytest.raises(RankError) as error:
        ranks(2, lightning=True).run(fit, kind, {"pipeline_parallel_size": 2, "num_microbatches": 2, **arguments})
    for text in error.value.failures.values():
        assert "uses a tensor that a layer of the body stores in an attribute" in text


def fit_with_torch_styles(kind: type[Example], layer: str) -> None:
    plan = {layer: ColwiseParallel(output_layouts=Replicate())}
    fit(kind, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": plan})


@pytest.mark.distributed
@pytest.mark.parametrize(("kind", "layer"), [(Penalized, "body.*.0"), (KeptInLayers, "body.*.inner.0")])
def test_a_chain_with_torch_styles_cannot_be_opened(ranks: Pools, kind: type[Example], layer: str) -> None:
    with pytest.raises(RankError) as error:
        ranks(4, lightning=True).run(fit_with_torch_styles, kind, layer)
    for text in error.value.failures.values():
        assert "uses tensors from inside 'body'. Therefore" in text
        assert "with torch's own API" in text
