"""A directory of shards becomes the ordinary file that the same run would have written."""

from __future__ import annotations

import errno
import os
import re
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import DistributedSampler

from lightning_hybrid.checkpoint.tree_paths import replaced
from lightning_hybrid.cli.consolidate import consolidate
from lightning_hybrid.cli.main import main
from lightning_hybrid.distributed.pytree import flatten_with_path
from tests.pool import Pools
from tests.training_jobs import (
    Losses,
    Regression,
    WithoutOptimizer,
    assert_same,
    dataset,
    loader,
    make_trainer,
    weights,
)

PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 4}
TP2: dict[str, Any] = {"tensor_parallel_size": 2, "tensor_parallel_plan": {"body.*.0": "colwise_gather_output"}}


class Notes(Callback):
    """Keeps tensors of its own, one of them inside an object."""

    def state_dict(self) -> dict[str, Any]:
        return {"best": torch.tensor(3.5), "object": Box(torch.arange(5.0)), "text": "good"}


class Box:
    def __init__(self, value: Tensor) -> None:
        self.value = value


class Model(Regression):
    """Tied weights over two stages, a frozen parameter, buffers, two groups and a scheduler."""

    def __init__(self) -> None:
        super().__init__(4)
        self.body[3][0].weight = self.body[0][0].weight
        self.body[2][0].bias.requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("none", torch.zeros(0, 3))

    def on_train_batch_start(self, *args: Any) -> None:
        self.steps += 1

    def configure_optimizers(self) -> Any:
        outside = [*self.embed.parameters(), *self.head.parameters()]
        groups = [{"params": list(self.body.parameters()), "weight_decay": 0.1}, {"params": outside, "lr": 3e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        scheduler = CosineAnnealingLR(optimizer, T_max=40)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class SaveInTraining(Callback):
    """Saves after the second epoch, while averages exist."""

    def __init__(self, path: str | None) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1 and self.path is not None:
            trainer.save_checkpoint(self.path)


def trained(layout: Mapping[str, Any] | None, epochs: int, save: str | None, resume: str | None) -> dict[str, Any]:
    losses = Losses()
    callbacks = [losses, Notes(), EMAWeightAveraging(decay=0.5), SaveInTraining(save)]
    trainer = make_trainer(layout, max_epochs=epochs, callbacks=callbacks)
    module = Model()
    trainer.fit(module, loader(), ckpt_path=resume, weights_only=False)
    return {"losses": losses.values, "weights": weights(module)}


@pytest.mark.rows(55)
@pytest.mark.parametrize("layout", [PP2, TP2], ids=["pp2", "tp2"])
def test_it_is_the_file_that_the_same_run_writes(ranks: Pools, tmp_path: Path, layout: dict[str, Any]) -> None:
    pool = ranks(2, lightning=True)
    names = ("file", "shards", "ours")
    file, shards, ours = (str(tmp_path / f"{name}.ckpt") for name in names)
    pool.run(trained, layout, 2, file, None)
    pool.run(trained, {**layout, "save_distributed_checkpoint": True}, 2, shards, None)
    steps: list[tuple[int, int]] = []
    consolidate(Path(shards), Path(ours), progress=lambda *step: steps.append(step))
    assert sum(done for done, _ in steps) == steps[0][1] > 0

    mine, other = (torch.load(path, weights_only=False) for path in (ours, file))
    boxes = [checkpoint["callbacks"]["Notes"].pop("object") for checkpoint in (mine, other)]
    assert torch.equal(boxes[0].value, boxes[1].value)
    assert list(mine["state_dict"]) == list(other["state_dict"])
    assert_same(mine, other)
    assert type(mine["state_dict"]["head.weight"]) is Tensor
    assert list(mine)[:8] == list(other)[:8]
    for tied in ("state_dict", "current_model_state"):
        assert mine[tied]["body.0.0.weight"].data_ptr() == mine[tied]["body.3.0.weight"].data_ptr()
    assert Path(ours).stat().st_size < 1.1 * Path(file).stat().st_size

    # for plain Lightning
    straight = trained(None, 4, None, None)
    resumed = trained(None, 4, None, ours)
    assert_same(resumed, {**straight, "losses": straight["losses"][10:]})
    assert_same(dict(Model.load_from_checkpoint(ours, weights_only=False).state_dict()), dict(other["state_dict"]))

    # and for the strategy
    for path in (ours, shards):
        losses = [result["losses"] for result in pool.run(trained, layout, 4, None, path)]
        assert_same(losses, [straight["losses"][10:]] * 2)


def trained_with_scaler(layout: Mapping[str, Any], file: str, shards: str) -> None:
    for path, is_sharded in ((shards, True), (file, False)):
        trainer = make_trainer(
            {**layout, "save_distributed_checkpoint": is_sharded},
            plugins=MixedPrecision("16-mixed", "cpu", GradScaler("cpu")),
            callbacks=[Notes()],
        )
        trainer.fit(Model(), loader())
        trainer.save_checkpoint(path, weights_only=not is_sharded)


def test_weights_only_has_the_entries_of_lightnings_file(ranks: Pools, tmp_path: Path) -> None:
    shards, ours, file = tmp_path / "shards", tmp_path / "ours.ckpt", tmp_path / "file.ckpt"
    ranks(2, lightning=True).run(trained_with_scaler, PP2, str(file), str(shards))
    consolidate(shards, ours, weights_only=True)
    assert set(torch.load(ours, weights_only=True)) == set(torch.load(file, weights_only=True))
    Model.load_from_checkpoint(ours)


def trained_without_optimizer(layout: Mapping[str, Any] | None, path: str, resume: bool) -> int:
    trainer = make_trainer(layout, max_epochs=2 if resume else 1)
    trainer.fit(WithoutOptimizer(), loader(), ckpt_path=path if resume else None)
    if not resume:
        trainer.save_checkpoint(path)
    return int(trainer.current_epoch)


def test_a_run_without_optimizer_goes_on(ranks: Pools, tmp_path: Path) -> None:
    shards, ours = str(tmp_path / "shards"), str(tmp_path / "ours")
    pool, layout = ranks(2, lightning=True), {**PP2, "save_distributed_checkpoint": True}
    pool.run(trained_without_optimizer, layout, shards, False)
    consolidate(Path(shards), Path(ours))
    assert pool.run(trained_without_optimizer, layout, shards, True) == [2, 2]
    assert pool.run(trained_without_optimizer, layout, ours, True) == [2, 2]
    assert trained_without_optimizer(None, ours, True) == 2


# -- directories of Lightning's own strategies ------------------------------------------------------------------------


class Untied(Regression):
    def configure_optimizers(self) -> Any:
        outside = [*self.embed.parameters(), *self.head.parameters()]
        groups = [{"params": list(self.body.parameters()), "weight_decay": 0.1}, {"params": outside, "lr": 3e-3}]
        return torch.optim.AdamW(groups, lr=1e-2)


class FullySharded(Untied):
    """As users of `ModelParallelStrategy` write it."""

    def configure_model(self) -> None:
        fully_shard(self, mesh=self.device_mesh["data_parallel"])


class OnHost(FSDPStrategy):
    """`FSDPStrategy` on the CPU, which Lightning refuses and torch, told the device, does not."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return FullyShardedDataParallel(model, device_id=torch.device("cpu"), **self.kwargs)


def lightning_trained(kind: str, epochs: int, save: str | None, resume: str | None) -> Any:
    """Two replicas, each with half of every batch, or one process."""
    strategies: dict[str, Any] = {
        "fsdp": lambda: OnHost(state_dict_type="sharded", auto_wrap_policy={nn.Sequential}),
        "model_parallel": lambda: ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1),
        "one": lambda: "auto",
    }
    world_size, rank = (1, 0) if kind == "one" else (2, int(os.environ["RANK"]))
    losses = Losses()
    arguments = {"devices": world_size, "max_epochs": epochs, "callbacks": [losses], "use_distributed_sampler": False}
    trainer = make_trainer(None, strategy=strategies[kind](), **arguments)
    module = FullySharded() if kind == "model_parallel" else Untied()
    sampler: Any = DistributedSampler(dataset(32), world_size, rank, shuffle=False)
    trainer.fit(module, loader(8 // world_size, 32, sampler=sampler), ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
    return losses.values, weights(module) if kind == "one" else None


@pytest.mark.rows(55)
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["fsdp", "model_parallel"])
def test_directories_of_lightnings_strategies(ranks: Pools, tmp_path: Path, kind: str) -> None:
    shards, ours = str(tmp_path / "shards.ckpt"), str(tmp_path / "ours.ckpt")
    ranks(2, lightning=True).run(lightning_trained, kind, 2, shards, None)
    consolidate(Path(shards), Path(ours))
    one = str(tmp_path / "one.ckpt")
    lightning_trained("one", 2, one, None)
    mine, other = (torch.load(path, weights_only=True) for path in (ours, one))
    assert list(mine["state_dict"]) == list(other["state_dict"])
    rtol = 1e-10
    if kind == "fsdp":  # which trains in single precision
        rtol = 1e-5
        other = single(other)
    for key in ("state_dict", "optimizer_states", "epoch", "global_step"):
        assert_same(mine[key], other[key], rtol, where=key)
    straight, resumed = lightning_trained("one", 4, None, None), lightning_trained("one", 4, None, ours)
    assert_same(resumed, (straight[0][8:], straight[1]), rtol)


def single(tree: Any) -> Any:
    """A tree with tensors of single precision instead of double."""
    changed = {path: leaf.float() for path, leaf in flatten_with_path(tree) if isinstance(leaf, Tensor)}
    return replaced(tree, changed)


# -- a directory as torch alone writes it, without any other process --------------------------------------------------


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Two weights and the state of an optimizer."""
    return written(tmp_path / "shards.ckpt", {"a.weight": torch.randn(64, 64), "a.bias": torch.randn(64)})


def written(path: Path, state: dict[str, Tensor]) -> Path:
    group = {"lr": 0.1, "params": list(state)}
    optimizer = {"state": {name: {"exp_avg": value + 1} for name, value in state.items()}, "param_groups": [group]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is one process
        dcp.save({"state_dict": state, "optimizer_0": optimizer}, checkpoint_id=path, no_dist=True)
    torch.save({"epoch": 1, "global_step": 2, "lr_schedulers": []}, path / "meta.pt")
    return path


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """What the program says when it ends with the code for wrong usage: one line."""
    with pytest.raises(SystemExit) as exit_:
        main(["consolidate", *map(str, words)])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_the_program_writes_a_file(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shards.parent / "new" / "one.ckpt"
    (file.parent / ".one.ckpt.unfinished").mkdir(parents=True)  # of a directory whose saving was killed
    main(["consolidate", str(shards), str(file)])
    captured = capsys.readouterr()
    assert captured.out == f"{file}: {file.stat().st_size:,} bytes\n"
    assert captured.err == ""  # nobody watches
    checkpoint = torch.load(file, weights_only=True)
    (optimizer,) = checkpoint["optimizer_states"]
    assert list(optimizer["state"]) == [0, 1]
    assert torch.equal(optimizer["state"][1]["exp_avg"], checkpoint["state_dict"]["a.bias"] + 1)
    assert optimizer["param_groups"] == [{"lr": 0.1, "params": [0, 1]}]
    assert [each.name for each in file.parent.iterdir()] == ["one.ckpt"]


def test_a_file_is_replaced_only_if_that_is_said(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = shards.parent / "one.ckpt"
    file.write_text("old")
    assert f"{file} already exists. Use --overwrite to replace it" in refused(capsys, shards, file)
    assert file.read_text() == "old"
    main(["consolidate", str(shards), str(file), "--overwrite", "--weights-only"])
    assert sorted(torch.load(file)) == ["epoch", "global_step", "state_dict"]


def damage(path: Path, kind: str) -> None:
    shard = path / "__0_0.distcp"
    if kind == "unfinished":
        (path / ".metadata").unlink()
    elif kind == "metadata":
        (path / ".metadata").write_bytes(b"nothing")
    elif kind == "meta.pt":
        (path / "meta.pt").write_bytes((path / "meta.pt").read_bytes()[:100])
    elif kind == "missing":
        shard.unlink()
    elif kind == "truncated":
        os.truncate(shard, 5000)
    elif kind == "overwritten":
        shard.write_bytes(bytes(shard.stat().st_size))


@pytest.mark.parametrize(
    ("kind", "complaint"),
    [
        ("unfinished", "not a complete checkpoint. The file '.metadata', which is written last, is missing"),
        ("metadata", ".metadata cannot be read: UnpicklingError"),
        ("meta.pt", "meta.pt is damaged or incomplete"),
        ("missing", "the file '__0_0.distcp' (at least"),
        ("truncated", "the file '__0_0.distcp' has 5000 bytes, but it must have"),
        ("overwritten", "shards.ckpt is damaged or incomplete"),
    ],
)
def test_a_damaged_directory_is_one_line(
    shards: Path, capsys: pytest.CaptureFixture[str], kind: str, complaint: str
) -> None:
    damage(shards, kind)
    file = shards.parent / "one.ckpt"
    file.write_text("old")
    assert complaint in refused(capsys, shards, file, "--overwrite")
    assert file.read_text() == "old"
    assert sorted(each.name for each in file.parent.iterdir()) == ["one.ckpt", "shards.ckpt"]


def test_what_is_no_directory_of_shards_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.ckpt"
    torch.save({}, file)
    assert f"{file} is a file, not a sharded checkpoint" in refused(capsys, file, tmp_path / "new.ckpt")
    assert "Checkpoint not found" in refused(capsys, tmp_path / "nowhere", tmp_path / "new.ckpt")
    assert "is not a complete checkpoint" in refused(capsys, tmp_path, tmp_path / "new.ckpt")
    assert "is a directory. Pass the path of a file" in refused(capsys, tmp_path, tmp_path)


def test_a_class_that_is_not_there_is_named(shards: Path, capsys: pytest.CaptureFixture[str]) -> None:
    meta = shards / "meta.pt"
    torch.save({"object": Box(torch.zeros(1))}, meta)
    with zipfile.ZipFile(meta) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(meta, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(name, content.replace(b"tests.cli.test_consolidate", b"tests.left_at_home____"))
    line = refused(capsys, shards, shards.parent / "one.ckpt")
    assert (
        "No module named 'tests.left_at_home____'. Run the command in an environment in which your project can" in line
    )


@pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="the room is reserved by `posix_fallocate`")
def test_no_room_is_one_line_and_the_old_file_stays(
    shards: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, offset: int, length: int) -> None:
        assert length > 33280
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    file = shards.parent / "one.ckpt"
    file.write_text("old")
    monkeypatch.setattr(os, "posix_fallocate", full)
    line = refused(capsys, shards, file, "--overwrite")
    assert f"{file} (33280 bytes of tensors) cannot be written: [Errno 28] No space left on device" in line
    assert file.read_text() == "old"
    assert len(list(file.parent.iterdir())) == 2


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read in /proc")
def test_tensors_are_not_in_memory_together(tmp_path: Path) -> None:
    one = 8 * 2**20
    shards = written(tmp_path / "shards", {str(index): torch.zeros(one // 4) for index in range(10)})
    anonymous: list[int] = []

    def measure(*_: int) -> None:
        found = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert found
        anonymous.append(1024 * int(found[1]))

    measure()
    consolidate(shards, tmp_path / "one.ckpt", progress=measure)
    assert len(anonymous) == 21
    assert max(anonymous) - anonymous[0] < 6 * one  # of 20; what was freed need not be given back
