from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_hybrid.data_parallel.sync_batch_norm import synchronize_batch_norm
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer


def make() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Sequential(nn.BatchNorm2d(2, affine=False)))


def replaced_and_put_back() -> None:
    group = dist.new_group([0, 1])
    module = make()
    before = list(module.modules())
    names = list(module.state_dict())
    parameters = {name: id(parameter) for name, parameter in module.named_parameters()}
    undo = synchronize_batch_norm(module, group)
    layers = [layer for layer in module.modules() if isinstance(layer, nn.SyncBatchNorm)]
    assert len(layers) == 2
    assert all(layer.process_group is group for layer in layers)
    assert list(module.state_dict()) == names
    assert {name: id(parameter) for name, parameter in module.named_parameters()} == parameters
    assert copy.deepcopy(module)[1].process_group is group, "callbacks copy modules"
    module.double().eval()
    module[1].running_mean.fill_(0.5)
    undo()
    assert list(module.modules()) == before
    assert not module[1].training
    assert module[1].running_mean.tolist() == [0.5] * 4
    assert module[1].running_mean.dtype is torch.float64


def replaced_under_two_names() -> None:
    group = dist.new_group([0, 1])
    module = nn.ModuleDict({"one": nn.BatchNorm1d(4)})
    module["two"] = layer = module["one"]
    undo = synchronize_batch_norm(module, group)
    assert isinstance(module["one"], nn.SyncBatchNorm)
    assert module["one"] is module["two"]
    undo()
    assert module["one"] is module["two"] is layer


def test_a_layer_with_two_names_is_replaced(ranks: Pools) -> None:
    ranks(2).run(replaced_under_two_names)


@pytest.mark.rows(63)
def test_layers_are_replaced_and_put_back(ranks: Pools) -> None:
    ranks(2).run(replaced_and_put_back)


class Normed(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.body[1][1] = nn.BatchNorm1d(8).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)
        layer = self.body[1][1]
        self.trainer.seen = (type(layer).__mro__[1].__name__, getattr(layer, "process_group", None))  # type: ignore[attr-defined]


def validated(layout: dict[str, Any], sync_batchnorm: bool) -> Any:
    trainer = make_trainer(layout, sync_batchnorm=sync_batchnorm)
    module = Normed()
    metrics = trainer.validate(module, loader(), verbose=False)
    kind, group = trainer.seen if hasattr(trainer, "seen") else (None, None)  # type: ignore[attr-defined]
    return metrics, kind, None if group is None else group.size(), type(module.body[1][1]).__name__


@pytest.mark.rows(63)
@pytest.mark.parametrize("layout", [{"pipeline_parallel_size": 2, "num_microbatches": 2}, {}])
def test_sync_batchnorm_is_over_the_replicas(ranks: Pools, layout: dict[str, Any]) -> None:
    size = 2 * layout.get("pipeline_parallel_size", 1)
    with_sync = ranks(size, lightning=True).run(validated, layout, True)
    without = ranks(size, lightning=True).run(validated, layout, False)
    assert [result[0] for result in with_sync] == [result[0] for result in without]
    seen = [result[1:3] for result in with_sync if result[1] is not None]
    assert seen
    assert set(seen) == {("SyncBatchNorm", 2)}
    assert {result[3] for result in with_sync} == {"BatchNorm1d"}, "the user's layers are back"


def failed_setup() -> tuple[str, list[str]]:
    module = Normed()
    with pytest.raises(ValueError, match="recompute") as error:
        make_trainer({"recompute": ["nothing.*"]}, sync_batchnorm=True).fit(module, loader())
    return str(error.value), [type(layer).__name__ for layer in module.modules() if hasattr(layer, "running_mean")]


def test_a_run_that_cannot_begin_gives_the_layers_back(ranks: Pools) -> None:
    for text, kinds in ranks(2, lightning=True).run(failed_setup):
        assert "nothing.*" in text
        assert kinds == ["BatchNorm1d"]
