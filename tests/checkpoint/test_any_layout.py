"""Checkpoints belong to the model: written under any layout, in either form, they go on under any other one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from lightning_hybrid.distributed.dtensor import full_tensor
from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import assert_same, make_trainer, together, weights
from tests.zoo import tensor as zoo
from tests.zoo.experts import Sparse

CHUNKS = {"num_chunks": 2, "schedule": "interleaved_1f1b"}
#: (world size, replicas, arguments of the strategy)
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "one": (1, 1, {}),
    "pp2": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 4}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "dp2": (2, 2, {}),
    "tp2 pp2": (4, 1, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "num_microbatches": 4}),
    "dp2 zero 3": (2, 2, {"zero_stage": 3}),
    "dp4 zero 3 in pairs": (4, 4, {"zero_stage": 3, "zero_size": 2}),
    "dp2 experts": (2, 2, {"expert_parallel_size": 2}),
    "dp4 experts in pairs zero 1": (4, 4, {"expert_parallel_size": 2, "zero_stage": 1}),
    "dp2 tp2 zero 2": (4, 2, {"tensor_parallel_size": 2, "zero_stage": 2}),
    "dp2 pp2 chunks 2": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 4, **CHUNKS}),
}
FORMS = {"file": False, "directory": True}
#: Every day these two read; each layout writes every time.
READERS = daily(LAYOUTS, "pp2", "dp2 zero 3", "dp2 experts")
STEPS = 3


class Model(zoo.Words):
    """A tied embedding and head, packed attention, a frozen parameter, experts; AdamW, two groups and a scheduler."""

    samples = 8 * STEPS

    def build(self) -> None:
        super().build()
        layers = [
            nn.TransformerEncoderLayer(zoo.DIM, zoo.HEADS, 32, 0.0, batch_first=True, bias=False) for _ in range(4)
        ]
        self.body = nn.Sequential(*layers[:3], Sparse(), layers[3])
        self.body[1].norm1.weight.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))

    def on_train_epoch_start(self) -> None:
        self.seen += 1

    def configure_optimizers(self) -> Any:
        decayed = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Watch(Callback):
    """Remembers what was loaded, in full on the first rank, and the losses."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.loaded: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        strategy = trainer.strategy
        model, optimizer = strategy.lightning_module_state_dict(), strategy.optimizer_state(trainer.optimizers[0])
        self.loaded = {"model": _copy(model), "optimizer": _copy(optimizer)}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        loss = outputs["loss"].clone()
        self.losses.append(float(trainer.strategy.reduce(loss, reduce_op="mean")))


def _copy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _copy(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_copy(value) for value in tree]
    return tree.detach().clone() if isinstance(tree, Tensor) else tree


def made(replicas: int, seed: int) -> Model:
    torch.manual_seed(seed)
    return Model(batch_size=8 // replicas).double()


def fitted(layout: Any, replicas: int, epochs: int, *, seed: int, save: str = "", resume: str | None = None) -> Any:
    watch = Watch()
    trainer = make_trainer(layout, max_epochs=epochs, callbacks=[watch], limit_val_batches=0)
    module = made(replicas, seed)
    trainer.fit(module, ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    values = {name: value.clone() for name, value in watch.loaded["model"].items()}
    return {"loaded": {**watch.loaded, "model": values}, "losses": watch.losses, "weights": _weights(module)}


def _weights(module: nn.Module) -> dict[str, Tensor]:
    return {name: full_tensor(value) for name, value in weights(module).items()}


def written(layout: Any, replicas: int, directory: str, name: str) -> None:
    for form, sharded in FORMS.items():
        strategy = {**layout, "save_distributed_checkpoint": sharded}
        fitted(strategy, replicas, 1, seed=7, save=f"{directory}/{name} {form}.ckpt")


def resumed(layout: Any, replicas: int, paths: list[str]) -> list[Any]:
    return [fitted(layout, replicas, 2, seed=11, resume=path) for path in paths]


@pytest.fixture(scope="module")
def checkpoints(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every layout's checkpoint, in both forms, and that of plain Lightning."""
    directory = tmp_path_factory.mktemp("checkpoints")
    for name, (size, replicas, layout) in LAYOUTS.items():
        pools(size, lightning=True).run(written, layout, replicas, str(directory), name)
    fitted(None, 1, 1, seed=7, save=str(directory / "plain file.ckpt"))
    return directory


@pytest.fixture(scope="module")
def straight() -> Any:
    """Six steps of plain Lightning."""
    return fitted(None, 1, 2, seed=7)


def assert_goes_on(results: list[Any], checkpoints: Path, straight: Any, where: str) -> None:
    """What was loaded is what plain Lightning saves after three steps, and the next three steps are its own."""
    saved = torch.load(checkpoints / "plain file.ckpt", weights_only=False)
    loaded = results[0]["loaded"]
    assert_same(loaded["model"], saved["state_dict"], where=f"{where}: model")
    assert_same(loaded["optimizer"], saved["optimizer_states"][0], where=f"{where}: optimizer")
    assert_same(together([result["weights"] for result in results]), straight["weights"], where=f"{where}: weights")
    for result in results:
        assert_same(result["losses"], straight["losses"][STEPS:], where=f"{where}: losses")


@pytest.mark.rows(54)
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", READERS)
def test_what_any_layout_wrote_goes_on_under_any_other(
    pools: Pools, checkpoints: Path, straight: Any, name: str, form: str
) -> None:
    size, replicas, layout = LAYOUTS[name]
    writers = [*LAYOUTS, "plain"] if form == "file" else list(LAYOUTS)
    paths = [str(checkpoints / f"{writer} {form}.ckpt") for writer in writers]
    by_rank = pools(size, lightning=True).run(resumed, layout, replicas, paths)
    for index, writer in enumerate(writers):
        assert_goes_on([outcomes[index] for outcomes in by_rank], checkpoints, straight, f"written by {writer}")


@pytest.mark.rows(54)
@pytest.mark.distributed
@pytest.mark.parametrize("name", LAYOUTS)
def test_plain_lightning_goes_on_from_any_layouts_file(checkpoints: Path, straight: Any, name: str) -> None:
    path = checkpoints / f"{name} file.ckpt"
    assert_goes_on(resumed(None, 1, [str(path)]), checkpoints, straight, name)
    opened = Model.load_from_checkpoint(path, batch_size=8, map_location="cpu")
    saved = torch.load(checkpoints / "plain file.ckpt", weights_only=False)["state_dict"]
    assert list(opened.state_dict()) == list(saved)
    assert_same({key: value.to(saved[key].dtype) for key, value in opened.state_dict().items()}, saved, rtol=1e-6)
    assert opened.head.weight is opened.embed.weight
