from __future__ import annotations

import importlib
import io
import os
import pickle
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
import yaml
from torch import nn

from examples.data import CIFAR10, CIFAR10_FILES, Augment, Digits, read_cifar10
from examples.gpt import GPT, Sources
from examples.resnet import ResNet, resnet
from examples.vit import DropPath, ViT
from tests.pool import Pools
from tests.training_jobs import Losses, make_trainer

ROOT = Path(__file__).parent.parent
CONFIGS = [*sorted((ROOT / "configs").glob("*.yaml")), ROOT / "lightning_hybrid" / "cli" / "demo" / "vit.yaml"]
NUM_PER_FILE = 20


def cifar10_file(seed: int) -> tuple[bytes, np.ndarray, list[int]]:
    """The bytes of a file in the published format, and the images (number, 32, 32, 3) and labels that it holds."""
    generator = np.random.default_rng(seed)
    images = generator.integers(0, 256, (NUM_PER_FILE, 32, 32, 3), dtype=np.uint8)
    labels = generator.integers(0, 10, NUM_PER_FILE).tolist()
    planes = np.concatenate([images[..., colour].reshape(NUM_PER_FILE, 1024) for colour in range(3)], axis=1)
    content = {
        b"batch_label": b"a batch",
        b"labels": labels,
        b"data": planes,
        b"filenames": [b"a.png"] * NUM_PER_FILE,
    }
    return pickle.dumps(content, protocol=2), images, labels


@pytest.fixture
def cifar10_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "data" / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    for seed, name in enumerate(CIFAR10_FILES):
        (folder / name).write_bytes(cifar10_file(seed)[0])
    return tmp_path / "data"


@pytest.fixture
def cifar10_archive(tmp_path: Path) -> Path:
    path = tmp_path / "cifar-10-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        for seed, name in enumerate(CIFAR10_FILES):
            content = cifar10_file(seed)[0]
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


@pytest.mark.parametrize("where", ["folder above", "folder", "archive", "folder of the archive"])
def test_cifar10_is_read_wherever_it_lies(cifar10_dir: Path, cifar10_archive: Path, tmp_path: Path, where: str) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    path = {
        "folder above": cifar10_dir,
        "folder": cifar10_dir / "cifar-10-batches-py",
        "archive": cifar10_archive,
        "folder of the archive": elsewhere,
    }[where]
    if where == "folder of the archive":
        cifar10_archive.rename(elsewhere / "cifar-10-python.tar.gz")
    files = read_cifar10(path)
    for seed, name in enumerate(CIFAR10_FILES):
        _, images, labels = cifar10_file(seed)
        torch.testing.assert_close(files[name][0], torch.from_numpy(images).permute(0, 3, 1, 2))
        assert files[name][1].tolist() == labels


def test_missing_cifar10_file_is_named(cifar10_dir: Path) -> None:
    (cifar10_dir / "cifar-10-batches-py" / "data_batch_3").unlink()
    with pytest.raises(FileNotFoundError, match=r"no data_batch_3 in .*data_dir must contain"):
        read_cifar10(cifar10_dir)


def test_cifar10_file_cannot_run_programs(cifar10_dir: Path) -> None:
    (cifar10_dir / "cifar-10-batches-py" / "test_batch").write_bytes(pickle.dumps(print))
    with pytest.raises(pickle.UnpicklingError, match="print is not allowed"):
        read_cifar10(cifar10_dir)


def test_cifar10_splits(cifar10_dir: Path) -> None:
    data = CIFAR10(str(cifar10_dir), batch_size=7)
    data.setup("fit")
    assert (len(data.train), len(data.val), len(data.test)) == (90, 10, 20)
    images, labels = next(iter(data.train_dataloader()))
    assert (images.shape, images.dtype, labels.dtype) == ((7, 3, 32, 32), torch.float32, torch.int64)
    expected = torch.from_numpy(cifar10_file(5)[1]).permute(0, 3, 1, 2)[0, 1, 2, 3] / 255
    torch.testing.assert_close(data.test[0][0][1, 2, 3], (expected - 0.4822) / 0.2435)


def test_digits_split_is_the_same_everywhere() -> None:
    first, second = Digits(), Digits()
    for seed, data in enumerate((first, second)):
        torch.manual_seed(seed)
        data.setup("fit")
    assert (len(first.train), len(first.val)) == (1437, 360)
    assert torch.equal(first.val.images, second.val.images)
    everything = torch.cat([first.train.images, first.val.images])
    assert everything.shape == (1797, 1, 8, 8)
    assert everything.mean().abs() < 0.01
    assert (everything.std() - 1).abs() < 0.01


def test_augmented_image_is_a_piece_of_the_padded_one() -> None:
    image = torch.arange(1.0, 17.0).view(1, 4, 4)
    padded = nn.functional.pad(image, (1, 1, 1, 1))[0]
    crops = {tuple(padded[i : i + 4, j : j + 4].flatten().tolist()) for i in range(3) for j in range(3)}
    augment = Augment(padding=1, flip=False)
    seen = {tuple(augment(image).flatten().tolist()) for _ in range(200)}
    assert seen == crops
    mirrored = Augment(padding=0, flip=False)(image)
    assert torch.equal(mirrored, image)


def test_augmentation_flips_half_of_the_images() -> None:
    image = torch.tensor([[[1.0, 2.0], [3.0, 4.0]]])
    augment = Augment(padding=1, flip=True)
    images = [augment(image) for _ in range(400)]
    whole = [x for x in images if torch.equal(x, image) or torch.equal(x, image.flip(-1))]
    assert {x[0, 0, 0].item() for x in whole} == {1.0, 2.0}


SMALL = {
    "vit": lambda: ViT(dim=32, depth=3, heads=2),
    "resnet18": lambda: ResNet("resnet18", width=8),
    "resnet50, group norm": lambda: ResNet("resnet50", width=4, norm="group"),
}


@pytest.mark.parametrize("make", SMALL.values(), ids=SMALL)
def test_example_learns_one_batch_by_heart(make: Any) -> None:
    torch.manual_seed(0)
    model = make()
    data = Digits(batch_size=16)
    data.setup("fit")
    batch = next(iter(data.val_dataloader()))
    assert model(batch[0]).shape == (16, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(60):
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.1
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("make", list(SMALL.values())[:2], ids=list(SMALL)[:2])
def test_example_fits_validates_and_predicts(make: Any, tmp_path: Path) -> None:
    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_epochs=1, limit_train_batches=4, limit_val_batches=2, limit_predict_batches=1,
        limit_test_batches=1, default_root_dir=tmp_path, logger=False, enable_progress_bar=False, log_every_n_steps=1,
    )  # fmt: skip
    model, data = make(), Digits(batch_size=16)
    trainer.fit(model, datamodule=data)
    assert {"train_loss", "val_loss", "val_acc"} <= set(trainer.callback_metrics)
    assert "test_acc" in trainer.test(model, datamodule=data, verbose=False)[0]
    (classes,) = trainer.predict(model, datamodule=data)
    assert classes.shape == (16,)


@pytest.mark.parametrize(("name", "millions"), [("resnet18", 11.69), ("resnet34", 21.80), ("resnet50", 25.56)])
def test_resnet_has_the_published_number_of_parameters(name: str, millions: float) -> None:
    """Table 1 of torchvision's models: the same networks with 1000 classes."""
    with torch.device("meta"):
        model = resnet(name, channels=3, num_classes=1000, width=64, small_images=False, norm="batch")
    assert [type(layer).__name__ for layer in model] == ["Sequential"] * 5 + ["Classifier"]
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=0.005)


def test_unknown_resnet_lists_the_known() -> None:
    with pytest.raises(ValueError, match="'resnet19'; choose one of 'resnet18', 'resnet34', 'resnet50'"):
        ResNet("resnet19")


@pytest.mark.parametrize(
    ("options", "expected"), [({}, 25_557_032), ({"groups": 32, "width_per_group": 4}, 25_028_904)]
)
def test_bottlenecks_have_the_parameters_of_the_papers(options: dict[str, Any], expected: int) -> None:
    """ResNet-50, and ResNeXt-50 32x4d, as torchvision counts them."""
    with torch.device("meta"):
        model = resnet("resnet50", 3, 1000, 64, False, "batch", **options)
    assert sum(parameter.numel() for parameter in model.parameters()) == expected


def test_dilation_keeps_the_resolution_and_residuals_may_begin_with_nothing() -> None:
    images = torch.randn(2, 3, 64, 64)
    strided = resnet("resnet50", 3, 10, 8, False, "group")[:5]
    options: dict[str, Any] = {"replace_stride_with_dilation": (False, True, True), "zero_init_residual": True}
    dilated = resnet("resnet50", 3, 10, 8, False, "group", **options)[:5]
    assert (strided(images).shape[-1], dilated(images).shape[-1]) == (2, 8)
    block = dilated[4][2]
    assert block.conv2.dilation == (4, 4)
    features = dilated[:4](images).repeat(1, 2, 1, 1)
    torch.testing.assert_close(block(features), features.relu())  # the residual adds nothing yet
    with pytest.raises(ValueError, match="work only with bottlenecks"):
        ResNet("resnet18", groups=2)


def test_a_vit_has_the_parameters_of_the_paper_and_a_layer_before_its_head() -> None:
    with torch.device("meta"):
        base = ViT(224, 16, 3, 1000, 768, 12, 12, 4.0)
        wider = ViT(224, 16, 3, 1000, 768, 12, 12, 4.0, representation_size=512)
    assert sum(parameter.numel() for parameter in base.parameters()) == 86_567_656  # as timm counts them
    assert base.embedding.positions.shape == (1, 197, 768)
    added = 512 * 768 + 512 + 1000 * 512 - 1000 * 768
    assert sum(parameter.numel() for parameter in wider.parameters()) == 86_567_656 + added
    assert [block.drop_path.probability for block in ViT(depth=3, drop_path=0.2).body] == [0.0, 0.1, 0.2]


def test_paths_are_dropped_by_sample_and_only_in_training() -> None:
    drop, x = DropPath(0.25), torch.ones(4000, 2, 3)
    torch.manual_seed(0)
    dropped = drop(x)
    assert torch.equal(dropped, dropped[:, :1, :1].expand_as(x))
    assert sorted(dropped.unique().tolist()) == pytest.approx([0.0, 4 / 3])
    assert float(dropped.mean()) == pytest.approx(1.0, abs=0.05)
    assert torch.equal(drop.eval()(x), x)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["vit_b16", "resnet50"])
def test_large_configurations_are_planned_weighed_and_run(name: str, tmp_path: Path) -> None:
    config = ["--config", str(ROOT / "configs" / f"{name}.yaml")]
    batch = ["--data.batch_size", "16", "--data.num_images", "64"]
    run = ["--trainer.max_steps", "2", "--trainer.limit_val_batches", "0", "--trainer.logger", "false"]
    run += ["--trainer.enable_checkpointing", "false", "--trainer.accelerator", "cpu"]
    for words in (["plan", *config], ["memory", *config], ["fit", *config, *batch, *run]):
        done = subprocess.run(
            [sys.executable, "-m", "lightning_hybrid", *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_config_names_arguments_that_exist(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    for part in ("model", "data"):
        module, _, name = config[part]["class_path"].rpartition(".")
        getattr(importlib.import_module(module), name)(**config[part].get("init_args", {}))
    assert config["trainer"]["strategy"]["class_path"] == "lightning_hybrid.HybridStrategy"


def _losses_of_mixtral() -> list[float]:
    """The first and the last loss of the Mixtral, whose experts two replicas divide."""
    from examples.hf import Mixtral

    torch.manual_seed(0)
    module, data = Mixtral(length=16, dim=32, depth=2), Sources(batch_size=8, length=16, num_bytes=20_000)
    losses = Losses()
    layout = {"data_parallel_size": 2, "expert_parallel_size": 2}
    make_trainer(layout, max_steps=40, limit_val_batches=0, callbacks=[losses]).fit(module, data)
    return [losses.values[0], losses.values[-1]]


@pytest.mark.distributed
def test_a_mixtral_learns_on_two_ranks(ranks: Pools) -> None:
    pytest.importorskip("transformers")
    for first, last in ranks(2, lightning=True).run(_losses_of_mixtral):
        assert last < 0.75 * first


def test_sources_are_the_standard_library_byte_by_byte() -> None:
    data = Sources(batch_size=4, length=32, num_bytes=10_000)
    data.setup("fit")
    assert (len(data.train), len(data.val)) == ((9_000 - 1) // 32, (1_000 - 1) // 32)
    batch = next(iter(data.val_dataloader()))
    assert (batch.shape, batch.dtype) == ((4, 33), torch.int64)
    assert torch.equal(data.train[1][0], data.train[0][-1]), "the last token of a piece is the first of the next"
    text = bytes(data.train.tokens.tolist()).decode(errors="replace")
    assert "import" in text


def test_gpt_sees_no_later_token_and_learns() -> None:
    model = GPT(length=16, dim=16, depth=2, heads=2).eval()
    tokens = torch.randint(256, (2, 16))
    changed = tokens.clone()
    changed[:, 10:] = 0
    torch.testing.assert_close(model(tokens)[:, :10], model(changed)[:, :10])
    data = Sources(batch_size=8, length=16, num_bytes=20_000)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = pl.Trainer(accelerator="cpu", max_steps=120, limit_val_batches=4, **options)
    trainer.fit(model, data)
    assert float(trainer.callback_metrics["train_loss"]) < 4.5, "a uniform guess has 5.5"
