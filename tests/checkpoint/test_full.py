"""Checkpoints are ordinary Lightning checkpoints: written and read with and without the strategy."""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from lightning_hybrid.checkpoint.file_io import FileIO
from lightning_hybrid.distributed.dtensor import to_local
from lightning_hybrid.memory.account import storage_bytes
from tests.pool import Pools
from tests.training_jobs import (
    LAYOUTS,
    PP2,
    Losses,
    Regression,
    WithoutOptimizer,
    assert_same,
    loader,
    make_trainer,
    plain,
    together,
    weights,
)

Layout = Mapping[str, Any] | None


class Resumable(Regression):
    """Two parameter groups, a scheduler, a tied and a frozen parameter, buffers inside and outside of the body."""

    def __init__(self, num_layers: int = 6) -> None:
        super().__init__(num_layers)
        self.body[4][0].weight = self.body[1][0].weight
        self.body[2][0].bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.body[5].register_buffer("offset", torch.full((3,), 0.5))

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps += 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self) -> Any:
        outside = [*self.embed.parameters(), *self.head.parameters()]
        groups = [{"params": list(self.body.parameters()), "lr": 2e-2, "weight_decay": 0.1}, {"params": outside}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, T_max=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class MeanLosses(Losses):
    """Keeps the loss of every batch, of the replicas together."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.values.append(float(trainer.strategy.reduce(outputs["loss"].clone(), reduce_op="mean")))


def trained(layout: Layout, batch_size: int, epochs: int, save: str | None, resume: str | None) -> dict[str, Any]:
    """Fit up to `epochs`, from a checkpoint if there is one, and save."""
    losses = MeanLosses()
    trainer = make_trainer(layout, max_epochs=epochs, callbacks=[losses])
    module = Resumable()
    trainer.fit(module, loader(batch_size), loader(batch_size, 20, seed=2), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return {
        "losses": losses.values,
        "weights": weights(module),
        "metrics": plain(trainer.callback_metrics),
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "steps": (trainer.global_step, int(module.steps) if not module.steps.is_meta else trainer.global_step),
    }


def everything(results: list[dict[str, Any]]) -> dict[str, Any]:
    """The results of all ranks, which must agree, as one."""
    first = {**results[0], "weights": together([result["weights"] for result in results])}
    for result in results:
        assert_same({**result, "weights": None}, {**first, "weights": None}, 0.0)
    return first


def assert_continues(resumed: dict[str, Any], straight: dict[str, Any]) -> None:
    """The second half of an uninterrupted run."""
    losses = straight["losses"]
    assert len(losses) == 2 * len(resumed["losses"])
    assert_same(resumed, {**straight, "losses": losses[len(losses) // 2 :]})


@pytest.mark.rows(51, 53)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_checkpoint_is_that_of_the_undivided_model_and_resumes_anywhere(
    ranks: Pools, tmp_path: Path, name: str
) -> None:
    size, replicas, layout = LAYOUTS[name]
    one, ours = str(tmp_path / "one.ckpt"), str(tmp_path / "ours.ckpt")
    pool = ranks(size, lightning=True)
    half = trained(None, 8 * replicas, 2, one, None)
    everything(pool.run(trained, layout, 8, 2, ours, None))

    # the same file as one process writes
    mine, other = (torch.load(path, weights_only=False) for path in (ours, one))
    assert set(mine) - set(other) == {"hybrid_parallel"}
    assert [key for key in mine if key in other] == list(other)
    assert list(mine["state_dict"]) == list(other["state_dict"])
    for key in ("state_dict", "optimizer_states", "lr_schedulers", "epoch", "global_step", "hyper_parameters"):
        assert_same(mine[key], other[key], where=key)
    assert list(mine["optimizer_states"][0]["state"]) == list(other["optimizer_states"][0]["state"])
    assert mine["state_dict"]["body.1.0.weight"].data_ptr() == mine["state_dict"]["body.4.0.weight"].data_ptr()
    torch.load(ours, weights_only=True)

    # for plain torch and Lightning
    assert_same(weights(Resumable.load_from_checkpoint(ours)), half["weights"])
    straight = trained(None, 8 * replicas, 4, None, None)
    assert_continues(trained(None, 8 * replicas, 4, None, ours), straight)

    # and for this strategy, from its own file and from one process's
    assert_same(everything(pool.run(trained, layout, 8, 4, None, None)), straight)
    for path in (ours, one):
        assert_continues(everything(pool.run(trained, layout, 8, 4, None, path)), straight)


def test_a_checkpoint_resumes_under_another_layout(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "three.ckpt")
    everything(ranks(3, lightning=True).run(trained, LAYOUTS["pp3"][2], 8, 2, path, None))
    resumed = everything(ranks(2, lightning=True).run(trained, LAYOUTS["chunks 2"][2], 8, 4, None, path))
    assert_continues(resumed, trained(None, 8, 4, None, None))


def found_by(rank: int, path: str) -> Any:
    """Goes on from a checkpoint that one rank alone finds, as ``ckpt_path="last"`` does where each has its own disk."""
    return trained(PP2, 8, 4, None, path if os.environ["RANK"] == str(rank) else None)


def test_the_first_ranks_checkpoint_is_taken(ranks: Pools, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    pool = ranks(2, lightning=True)
    pool.run(trained, PP2, 8, 2, path, None)
    straight = trained(None, 8, 4, None, None)
    assert_continues(everything(pool.run(found_by, 0, path)), straight)
    assert_same(everything(pool.run(found_by, 1, path)), straight)  # from the beginning


# -- callbacks that save ----------------------------------------------------------------------------------------------


def evaluate_best(layout: Layout, directory: str, weights_only: bool) -> dict[str, Any]:
    saver = ModelCheckpoint(
        directory, "{epoch}", monitor="val_loss", save_weights_only=weights_only, every_n_epochs=1, save_top_k=1
    )
    trainer = make_trainer(layout, max_epochs=4, enable_checkpointing=True, callbacks=[saver])
    module = Tested(learning_rate=0.05)
    trainer.fit(module, loader(8), loader(8, seed=2))
    last = trainer.test(module, loader(8, seed=2))[0]
    best = trainer.test(ckpt_path="best", dataloaders=loader(8, seed=2))[0]
    other = make_trainer(layout).test(Tested(), loader(8, seed=2), ckpt_path=saver.best_model_path)[0]
    return {"last": last, "best": best, "other": other, "score": float(saver.best_model_score)}


class Tested(Regression):
    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", self.loss(batch))


@pytest.mark.rows(51, 52)
@pytest.mark.parametrize("weights_only", [False, True])
def test_the_best_checkpoint_is_loaded_for_a_test(ranks: Pools, tmp_path: Path, weights_only: bool) -> None:
    expected = evaluate_best(None, str(tmp_path / "one"), weights_only)
    assert expected["last"]["loss"] != expected["best"]["loss"] == expected["score"]
    for result in ranks(2, lightning=True).run(evaluate_best, PP2, str(tmp_path / "two"), weights_only):
        assert_same(result, expected)
    (path,) = (tmp_path / "two").iterdir()
    assert ("optimizer_states" in torch.load(path, weights_only=False)) is not weights_only
    assert_same(
        torch.load(path, weights_only=False)["state_dict"],
        torch.load(tmp_path / "one" / path.name, weights_only=False)["state_dict"],
    )


class HooksOfCheckpoints(Regression):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"epoch": self.current_epoch, "names": len(checkpoint["state_dict"])}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.own = (checkpoint["own"], sorted(checkpoint["state_dict"]))


def own_state(layout: Layout, path: str) -> Any:
    trainer = make_trainer(layout)
    trainer.fit(HooksOfCheckpoints(), loader())
    trainer.save_checkpoint(path)
    module = HooksOfCheckpoints()
    make_trainer(layout, max_epochs=2).fit(module, loader(), ckpt_path=path)
    return module.own


def test_hooks_of_the_module_see_whole_checkpoints(ranks: Pools, tmp_path: Path) -> None:
    expected = own_state(None, str(tmp_path / "one.ckpt"))
    results = ranks(2, lightning=True).run(own_state, PP2, str(tmp_path / "two.ckpt"))
    assert results[0] == expected
    assert results[1] == expected


# -- what does not fit ------------------------------------------------------------------------------------------------


def load_wrong(layout: Layout, path: str) -> tuple[str, str]:
    with pytest.raises(Exception) as error:  # noqa: PT011 - torch's and Lightning's own types
        make_trainer(layout, max_epochs=4).fit(Resumable(), loader(), ckpt_path=path)
    return type(error.value).__name__, str(error.value)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "groups", "optimizers", "no file"])
def test_a_checkpoint_that_does_not_fit_is_an_error_on_every_rank(ranks: Pools, tmp_path: Path, fault: str) -> None:
    path = tmp_path / "wrong.ckpt"
    trained(None, 8, 1, str(path), None)
    checkpoint = torch.load(path, weights_only=False)
    state = checkpoint["state_dict"]
    if fault == "missing":
        del state["body.1.0.bias"]  # of the first stage
    elif fault == "unexpected":
        state["body.7.0.bias"] = torch.zeros(8)
    elif fault == "shape":
        state["body.5.0.weight"] = torch.zeros(8, 9)  # of the last stage
    elif fault == "groups":
        checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()
    elif fault == "optimizers":
        checkpoint["optimizer_states"] = []
    torch.save(checkpoint, path)
    if fault == "no file":
        path.unlink()
    texts = ranks(2, lightning=True).run(load_wrong, PP2, str(path))
    assert texts[0] == texts[1]
    if fault in ("missing", "unexpected", "shape"):
        assert texts[0][1].startswith(load_wrong(None, str(path))[1])
    expected = {"groups": "11", "optimizers": "optimizer", "no file": str(path)}
    assert expected.get(fault, "") in texts[0][1]


def saved_and_resumed(kind: type[Regression], path: str, layout: Layout) -> dict[str, Any]:
    for resume in (None, path):
        module = kind()
        trainer = make_trainer(layout, max_epochs=1 if resume is None else 2)
        trainer.fit(module, loader(), ckpt_path=resume)
        if resume is None:
            trainer.save_checkpoint(path)
            if kind is not WithoutOptimizer:
                forget_optimizers(path)
    return {"epochs": trainer.current_epoch, "weights": weights(module)}


def forget_optimizers(path: str) -> None:
    checkpoint = torch.load(path, weights_only=False)
    torch.save({**checkpoint, "optimizer_states": [], "lr_schedulers": []}, path)


@pytest.mark.parametrize("kind", [WithoutOptimizer, Regression])
def test_one_process_takes_optimizer_states_as_lightning_does(
    ranks: Pools, tmp_path: Path, kind: type[Regression]
) -> None:
    """`configure_optimizers` may return nothing, and a checkpoint may have been stripped of optimizers' states."""
    (result,) = ranks(1, lightning=True).run(saved_and_resumed, kind, str(tmp_path / "c.ckpt"), {})
    assert result["epochs"] == 2


def test_no_optimizer_is_no_state_in_a_pipeline(ranks: Pools, tmp_path: Path) -> None:
    results = ranks(2, lightning=True).run(saved_and_resumed, WithoutOptimizer, str(tmp_path / "c.ckpt"), PP2)
    assert [result["epochs"] for result in results] == [2, 2]


def stored_bytes(layout: dict[str, Any], path: str) -> tuple[int, int]:
    """What the optimizer's states of this rank take after they were resumed, and what their elements need."""
    found = []

    class AtStart(Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            states = [value for state in trainer.optimizers[0].state.values() for value in state.values()]
            found.append((storage_bytes(states), sum(to_local(value).nbytes for value in states)))

    module = Regression()
    make_trainer(layout, max_epochs=2, callbacks=[AtStart()]).fit(module, loader(), ckpt_path=path)
    return found[0]


@pytest.mark.parametrize(
    "layout",
    [{"zero_stage": 1}, {"zero_stage": 2}, {"zero_stage": 3}, {"tensor_parallel_size": 2}],
    ids=["zero 1", "zero 2", "zero 3", "tp2"],
)
def test_a_rank_keeps_of_a_file_what_it_uses(ranks: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Views of what was loaded would keep all of it."""
    trainer = make_trainer(None)
    trainer.fit(Regression(), loader())
    trainer.save_checkpoint(tmp_path / "file")
    for stored, needed in ranks(2, lightning=True).run(stored_bytes, layout, str(tmp_path / "file")):
        assert stored == needed


def resumed(layout: dict[str, Any] | None, kind: type[Regression], path: str) -> str:
    try:
        make_trainer(layout, max_epochs=2).fit(kind(), loader(), ckpt_path=path)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


class Momentum(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def write_foreign(kind: str, path: Path) -> None:
    if kind == "noise":
        path.write_bytes(b"\x80\x02" + bytes(range(256)) * 20)
    elif kind == "text":
        path.write_text("a page that says that the file was not found")
    elif kind == "object":
        torch.save({"state_dict": {}, "settings": Momentum}, path)
    elif kind == "directory":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is one process
            dcp.save({"state_dict": Regression().state_dict()}, checkpoint_id=path, no_dist=True)
    elif kind == "optimizer":
        trainer = make_trainer(None)
        trainer.fit(Regression(), loader())
        trainer.save_checkpoint(path)
    elif kind != "nothing":
        state = Regression().state_dict()
        torch.save({"weights": dict(state), "list": [1, 2], "empty": {}, "old": {"state_dict": state}}[kind], path)


FOREIGN = {
    "nothing": "FileNotFoundError: Checkpoint file not found: {path} (searched on ",
    "weights": "ValueError: {path} is not a checkpoint of a Trainer: it contains a plain state dict of 16 tensors",
    "list": "ValueError: {path} is not a checkpoint of a Trainer: it contains a list.",
    "empty": "ValueError: {path} is not a checkpoint of a Trainer: it contains a dict with the keys []",
    "old": "ValueError: {path} is not a checkpoint of a Trainer: it contains a dict with the keys ['state_dict'], but",
    "directory": "ValueError: {path} is not a checkpoint of a Trainer: it contains a dict with the keys ['state_dict'",
    "noise": (
        "ValueError: {path} (5122 bytes) cannot be loaded as a checkpoint. Either it was not written by `torch.save`"
    ),
    "text": "ValueError: The checkpoint {path} (44 bytes) cannot be read, because ",
    "object": "UnpicklingError: The checkpoint {path} cannot be loaded: Weights only load failed.",
    "optimizer": "ValueError: {path}: The checkpoint was saved with an optimizer other than Momentum's SGD",
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_what_is_no_checkpoint_is_named(ranks: Pools, tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.ckpt"
    write_foreign(kind, path)
    first, second = ranks(2, lightning=True).run(resumed, PP2, Momentum, str(path))
    expected = FOREIGN[kind].format(path=path).replace("Momentum's ", "")
    assert first.startswith(expected)
    assert expected.partition(": ")[2] in second


def test_a_full_disk_is_called_by_its_name(tmp_path: Path) -> None:
    """torch's writer says only that it did not get as far as it wanted."""
    path = tmp_path / "x.ckpt"
    FileIO().save_checkpoint({"a": 1}, path)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))  # as where there is no more room
    try:
        with pytest.raises(OSError, match=r"at this path, it is unchanged. Error on rank 0: OSError: .*File too large"):
            FileIO().save_checkpoint({"a": torch.zeros(1 << 16)}, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert FileIO().load_checkpoint(path) == {"a": 1}
