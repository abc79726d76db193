"""Fits on a pretended device: the numbers of the CPU to the last bit, no mixture of devices."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import Faults, HybridStrategy, Launch
from lightning_hybrid.checkpoint.snapshot import snapshot
from lightning_hybrid.distributed import dtensor
from lightning_hybrid.memory.offload import Offload
from lightning_hybrid.pipeline_parallel.engine import Engine
from lightning_hybrid.pipeline_parallel.schedules import Schedule, build
from tests.daily import daily
from tests.gpu import fits as gpu_fits
from tests.gpu import test_cuda as gpu_bodies
from tests.gpu import test_nccl as nccl_bodies
from tests.pool import Pools
from tests.pretended_device import PretendedDevice, Wait, pretended_device


def test_values_are_where_they_were_put() -> None:
    with pretended_device() as seen:
        x = torch.ones(3, device="cuda")
        assert x.device == (cuda := torch.device("cuda", 0))
        assert (x + 1)[1:].device == cuda
        assert torch.zeros_like(x, device="cpu").device.type == "cpu"
        assert nn.Linear(2, 2).to("cuda").weight.device == cuda
        assert x.cpu().device.type == "cpu"
        assert x.to("cuda") is x
        with pytest.raises(RuntimeError, match="same device"):
            x + torch.ones(3)
        seen.waits.clear()
        float(x.sum())
        x.tolist()
        x.copy_(torch.zeros(3), non_blocking=True)
        x.copy_(torch.zeros(3).pin_memory(), non_blocking=True)
        assert [wait.what.split(" ")[0] for wait in seen.waits] == ["_local_scalar_dense", "tolist", "copy"]
        x[1:] = 0  # as an H100 does it, with torch 2.11
        assert len(seen.waits) == 3
        x[1] = 0
        assert len(seen.waits) == 4
        assert all("test_pretended_device.py" in wait.caller for wait in seen.waits)
    assert torch.ones(1).device.type == "cpu"


def test_a_snapshot_is_copied_by_the_device_while_the_host_goes_on() -> None:
    with pretended_device() as seen:
        module = nn.Linear(2, 3).to("cuda")
        state = {"state_dict": module.state_dict()}
        seen.waits.clear()
        copy, wait = snapshot(state)
        assert seen.waits == []
        wait()
        assert [(each.what, each.is_ours) for each in seen.waits] == [("synchronize", True)]
        weight = copy["state_dict"]["weight"]
        assert (weight.device.type, weight.is_pinned()) == ("cpu", True)
        assert torch.equal(weight, module.weight.cpu())


def test_states_of_an_optimizer_move_with_one_wait() -> None:
    with pretended_device() as seen:
        module = nn.Linear(2, 3).to("cuda")
        optimizer = torch.optim.Adam(module.parameters(), foreach=True)
        module(torch.ones(1, 2, device="cuda")).sum().backward()
        optimizer.step()
        offload = Offload(["optimizer"], torch.device("cuda", 0))
        seen.waits.clear()
        offload.offload_states(optimizer)
        assert [wait.what for wait in seen.waits] == ["synchronize"]
        assert {state["exp_avg"].device.type for state in optimizer.state.values()} == {"cpu"}
        offload.load_states(optimizer)
        assert len(seen.waits) == 1
        optimizer.step()


def test_an_activation_comes_back_before_backward_needs_it() -> None:
    with pretended_device() as seen:
        offload = Offload(["activations"], torch.device("cuda", 0), min_bytes=0)
        x = torch.ones(4, device="cuda", requires_grad=True)
        with offload.activations(tuple):
            layers = [x]
            for _ in range(3):  # each saves its result
                layers.append(layers[-1].exp())
        copies: list[int] = []
        for layer in layers[:-1]:
            layer.register_hook(lambda gradient: copies.append(len(seen.moved)))
        seen.moved.clear()
        seen.waits.clear()
        layers[-1].sum().backward()
        assert copies == [2, 3, 3], (
            "two for the last layer, one for the second, which is there already, none for the first"
        )
        assert seen.waits == []


class Model(LightningModule):
    """A residual around the body, and dropout in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(16, 16)  # so that each sample is aligned, or kernels of the CPU take other ways
        self.body = nn.Sequential(
            *[nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16), nn.Dropout(0.1)) for _ in range(4)]
        )
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        return self.head(h + self.body(h))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, foreach=True)


class Looped(Model):
    """Its layers are called in a loop: what crosses a boundary is found by following the step."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.body)

    def forward(self, x: Tensor) -> Tensor:
        first = h = self.embed(x)
        for layer in self.body:
            h = layer(h)
        return self.head(first + h)


class Halving(nn.Module):
    """A layer that hands on a tensor of the host beside its output."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, values: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x, scale = values
        assert scale.device.type == "cpu"
        return self.layer(x) * scale[0], scale / 2


class Hosted(Model):
    """Between its stages a tensor of the host travels too."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[Halving() for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x)
        y, scale = self.body((h, torch.ones(2, device="cpu")))
        return self.head(h + y * scale[0])


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(44, 16, generator=generator)
    return DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8)


@dataclass(frozen=True)
class Case:
    """A fit on two ranks.

    Attributes:
        settings: Of the strategy.
        arguments: Of the Trainer.
        half: Whether it is in fp16, with a scale.
        callbacks: Of the Trainer.
        kind: Of the module.
    """

    settings: dict[str, Any]
    arguments: dict[str, Any] = field(default_factory=dict)
    half: bool = False
    callbacks: tuple[Callback, ...] = ()
    kind: type[Model] = Model


PP2: dict[str, Any] = {"pipeline_parallel_size": 2}
CASES = {
    "pp2": Case(PP2),
    "pp2, over gloo": Case({**PP2, "launch": Launch(process_group_backend="gloo")}),
    "pp2, interleaved": Case({**PP2, "schedule": "interleaved_1f1b", "num_chunks": 2}),
    "pp2, all of it": Case(
        {**PP2, "offload": ["activations", "optimizer"], "recompute": True, "dynamic_shapes": True},
        {"gradient_clip_val": 0.5},
        half=True,
    ),
    "pp2, layers in a loop": Case({**PP2, "recompute": True}, kind=Looped),
    "pp2, tensors of the host between stages": Case(PP2, kind=Hosted),
    "dp2": Case({"data_parallel_size": 2}, {"gradient_clip_val": 0.5}),
    "dp2, microbatches": Case({"data_parallel_size": 2, "num_microbatches": 2}),
    "tp2": Case({"tensor_parallel_size": 2}, {"gradient_clip_val": 0.5}),
    "tp2, fp16": Case({"tensor_parallel_size": 2}, half=True),
    "dp2, ZeRO 2": Case({"data_parallel_size": 2, "zero_stage": 2, "offload": "optimizer"}),
    "dp2, ZeRO 3": Case({"data_parallel_size": 2, "zero_stage": 3}, {"gradient_clip_val": 0.5}),
    "dp2, ZeRO 3, fp16, saved in the background": Case(
        {"data_parallel_size": 2, "zero_stage": 3, "async_save": True, "save_distributed_checkpoint": True}, half=True
    ),
    "pp2, saved in the background": Case({**PP2, "async_save": True}),
}
DAILY = ("pp2, all of it", "pp2, layers in a loop", "dp2, ZeRO 3")


def fit(case: Case, folder: str, kind: str) -> dict[str, Any]:
    """Two epochs, a checkpoint, and a second run that goes on with it."""
    with pretended_device() if kind == "cuda" else contextlib.nullcontext():
        if kind == "cuda":
            rank = os.environ["RANK"]
            os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=rank, GROUP_RANK=rank)
        path = f"{folder}/{kind}.ckpt"
        run(case, kind, 1).save_checkpoint(path)
        trainer = run(case, kind, 2, ckpt_path=path)
        module = trainer.lightning_module
        return {
            "weights": {name: full(p.detach()).cpu() for name, p in module.named_parameters() if not p.is_meta},
            "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
            "scale": getattr(getattr(trainer.precision_plugin, "scaler", None), "get_scale", lambda: 0.0)(),
        }


def full(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def run(case: Case, kind: str, epochs: int, **how: Any) -> Trainer:
    """A fit on this kind of device."""
    where: dict[str, Any] = {"accelerator": "cpu", "devices": 2}
    if kind == "cuda":
        where = {"accelerator": "gpu", "devices": 1, "num_nodes": 2}
    if case.half:
        where["plugins"] = MixedPrecision("16-mixed", kind, torch.amp.GradScaler(kind, init_scale=2.0**10))
    trainer = Trainer(
        strategy=HybridStrategy(**case.settings),
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **case.arguments,
        **where,
    )
    trainer.fit(case.kind(), loader(), loader(), **how)
    return trainer


@pytest.mark.parametrize("name", daily(CASES, *DAILY))
def test_a_fit_ends_with_the_bits_of_the_cpu(ranks: Pools, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    found = ranks(2, lightning=True).run(fit, case, str(tmp_path), "cuda")
    expected = ranks(2, lightning=True).run(fit, case, str(tmp_path), "cpu")
    for one, other in zip(found, expected, strict=True):
        assert one["metrics"] == other["metrics"]
        assert one["scale"] == other["scale"]
        assert one["weights"].keys() == other["weights"].keys()
        for key, weight in other["weights"].items():
            assert torch.equal(one["weights"][key], weight), key


class Telling(Model):
    """Logs in every way, keeps numbers, and weighs its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.total, self.ratio = 0, 0, 0.5

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("tensor", loss * 2, on_epoch=True)
        self.log("number", 0.25)
        self.log("sized", loss, batch_size=len(batch[0]), sync_dist=True)
        self.log("sum", batch_idx, reduce_fx="sum")
        self.seen += 1
        self.ratio /= 2
        return loss


class Weighing(Telling):
    def microbatch_weight(self, microbatch: tuple[Tensor, Tensor]) -> Tensor:
        return (microbatch[1] >= 0).sum()


class Steady(Callback):
    """Keeps what makes the host wait from the fourth step on, for three steps, and all that goes between them."""

    def __init__(self, seen: PretendedDevice) -> None:
        self.seen = seen
        self.waits: list[Wait] = []
        self.rounds: list[int] = []

    def on_before_zero_grad(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in (3, 4, 5, 6):
            self.waits += self.seen.waits if self.rounds else []
            self.rounds.append(trainer.global_step)
            self.seen.waits.clear()


class Onlooker(Callback):
    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        """Reads the batch."""


ROWS: dict[str, tuple[int, type[LightningModule], Case]] = {
    "pp2": (2, Model, Case(PP2)),
    "pp2: logs, attributes, clipping": (2, Telling, Case(PP2, {"gradient_clip_val": 0.5})),
    "pp2: weights of microbatches": (2, Weighing, Case(PP2, {"gradient_clip_val": 0.5})),
    "pp2: a progress bar and a logger": (2, Telling, Case(PP2, {"logger": True, "enable_progress_bar": True})),
    "pp2: a scale": (2, Model, Case(PP2, half=True)),
    "pp2: hooks that read batches": (2, Telling, Case(PP2, callbacks=(Onlooker(),))),
    "pp2: dynamic shapes": (2, Telling, Case({**PP2, "dynamic_shapes": True})),
    "pp2: tensors of the host between stages": (2, Hosted, Case(PP2)),
    "pp2: accumulated": (2, Weighing, Case(PP2, {"accumulate_grad_batches": 2})),
    "dp2": (2, Model, Case({"data_parallel_size": 2}, {"gradient_clip_val": 0.5})),
    "dp2: microbatches": (2, Weighing, Case({"num_microbatches": 2}, {"gradient_clip_val": 0.5})),
    "dp2: ZeRO 2": (2, Model, Case({"zero_stage": 2}, {"gradient_clip_val": 0.5})),
    "dp2: ZeRO 3": (2, Model, Case({"zero_stage": 3, "num_microbatches": 2}, {"gradient_clip_val": 0.5})),
    "tp2": (2, Weighing, Case({"tensor_parallel_size": 2}, {"gradient_clip_val": 0.5})),
    "dp2 x pp2": (4, Weighing, Case({**PP2, "zero_stage": 0}, {"gradient_clip_val": 0.5})),
    "dp2 x pp2: ZeRO 2": (4, Telling, Case({**PP2, "zero_stage": 2}, {"gradient_clip_val": 0.5})),
}
OF_EVERY_DAY = ("pp2: weights of microbatches", "pp2: dynamic shapes", "dp2: microbatches")
OF_LIGHTNING = {
    # A replica's batches move as its loader gives them: whether they are pinned is the loader's choice.
    "lightning/fabric/utilities/apply_func.py batch_to",
    # Lightning's own `self.log` makes tensors of plain numbers.
    "lightning/pytorch/core/module.py __to_tensor",
}
# In our `step`, torch's own asks whether there was an overflow: it has to know whether to call the optimizer.
OF_SCALER = "lightning_hybrid/trainer/precision.py step"


def steady_rows(names: list[str]) -> dict[str, list[Wait]]:
    """By row, what makes the host wait in three steps, and between them."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=rank, GROUP_RANK=rank)
    with pretended_device() as seen:
        return {name: steady(seen, *ROWS[name][1:]) for name in names}


def steady(seen: PretendedDevice, kind: type[LightningModule], case: Case) -> list[Wait]:
    steady = Steady(seen)
    silent: dict[str, Any] = dict.fromkeys(
        ["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False
    )
    if case.half:
        silent["plugins"] = MixedPrecision("16-mixed", "cuda", torch.amp.GradScaler("cuda", init_scale=2.0**10))
    trainer = Trainer(
        strategy=HybridStrategy(**case.settings),
        accelerator="gpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        max_steps=7,
        callbacks=[steady, *case.callbacks],
        **{**silent, **case.arguments},
    )
    x = torch.randn(32 * 7, 16, generator=torch.Generator().manual_seed(1))
    trainer.fit(kind(), DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 8))
    assert len(steady.rounds) == 4
    return steady.waits


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(list(OF_EVERY_DAY), id="of every day"),
        *(pytest.param([name], id=name, marks=pytest.mark.thorough) for name in ROWS if name not in OF_EVERY_DAY),
    ],
)
def test_no_line_of_ours_makes_the_host_wait_in_a_step(ranks: Pools, names: list[str]) -> None:
    for rank, rows in enumerate(ranks(ROWS[names[0]][0], lightning=True).run(steady_rows, names)):
        for name, waits in rows.items():
            callers = [re.sub(r":[0-9]+", "", wait.caller) for wait in waits]
            assert callers.count(OF_SCALER) == (3 if ROWS[name][2].half else 0), f"{name}, rank {rank}: once a step"
            others = {caller for caller in callers if caller != OF_SCALER}
            assert others <= OF_LIGHTNING, f"{name}, rank {rank}: {waits}"
            if "pp2" in name or "tp2" in name:
                assert others == set(), "batches that one rank loads for others are pinned"


def early_receives(settings: dict[str, Any], accumulated: int) -> list[bool]:
    """For each step, whether its receives are posted before their messages are needed."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=rank, GROUP_RANK=rank)
    ran: list[Schedule] = []
    run = Engine.run

    def noting(engine: Engine, schedule: Schedule, *args: Any, **kwargs: Any) -> list[Any]:
        ran.append(schedule)
        return run(engine, schedule, *args, **kwargs)

    how: dict[str, Any] = {"accumulate_grad_batches": accumulated, "limit_val_batches": 0, "num_nodes": 2}
    with pretended_device(), patch.object(Engine, "run", noting):
        gpu_fits.fit(HybridStrategy(**settings, faults=Faults(compare_microbatches=False)), **how)
    assert len(ran) == 12
    early = [build(each.name, each.num_ranks, each.num_microbatches, each.num_chunks) for each in ran]
    return [one.actions == other.actions for one, other in zip(ran, early, strict=True)]


@pytest.mark.parametrize(
    ("settings", "accumulated", "late"),
    [
        ({}, 1, 1),
        ({}, 2, 2),
        ({}, 3, 3),
        ({"dynamic_shapes": True}, 1, 12),
        ({"schedule": "interleaved_1f1b", "num_chunks": 2}, 1, 1),
    ],
    ids=str,
)
def test_a_first_step_waits_for_no_message_that_it_does_not_need_yet(
    ranks: Pools, settings: dict[str, Any], accumulated: int, late: int
) -> None:
    """Both ranks load kernels in it, and CUDA waits for posted receives before it loads one: they hung an H100."""
    for early in ranks(2, lightning=True).run(early_receives, {**PP2, **settings}, accumulated):
        assert early == [False] * late + [True] * (12 - late)


def gathered() -> tuple[set[str], set[str]]:
    """Where torch gathers the parts of parameters, and where all of them are then."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=rank, GROUP_RANK=rank)
    there: set[str] = set()
    gather = dtensor._gather_there

    def noting(tensor: DTensor) -> Tensor:
        there.add(tensor.to_local().device.type)
        return gather(tensor)

    found: set[str] = set()

    class Gathering(Callback):
        def on_train_end(self, trainer: Trainer, module: LightningModule) -> None:
            whole = [dtensor.full_tensor(p.detach()) for p in module.parameters() if isinstance(p, DTensor)]
            found.update(each.device.type for each in whole)

    backends = {"cpu": "gloo", "cuda": "gloo"}
    with (
        pretended_device(),
        patch.object(dtensor, "_gather_there", noting),
        patch.object(dtensor, "device_backends", return_value=backends),
    ):
        trainer = Trainer(
            accelerator="gpu",
            devices=1,
            num_nodes=2,
            strategy=HybridStrategy(tensor_parallel_size=2),
            callbacks=[Gathering()],
            max_steps=1,
            logger=False,
            enable_checkpointing=False,
        )
        trainer.fit(Model(), loader())
    return there, found


def test_gloo_gathers_on_the_host(ranks: Pools) -> None:
    """With tensors of a device, processes ended there."""
    assert ranks(2, lightning=True).run(gathered) == [({"cpu"}, {"cuda"})] * 2


def moved_elements(evaluates: bool) -> int:
    """The elements of the largest copy to the device, in training or in an evaluation."""
    rank = os.environ["RANK"]
    os.environ.update(LOCAL_RANK="0", LOCAL_WORLD_SIZE="1", NODE_RANK=rank, GROUP_RANK=rank)
    with pretended_device() as seen:
        silent: dict[str, Any] = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar"], False)
        strategy = HybridStrategy(pipeline_parallel_size=int(os.environ["WORLD_SIZE"]), num_microbatches=4)
        where = {"accelerator": "gpu", "devices": 1, "num_nodes": int(os.environ["WORLD_SIZE"])}
        trainer = Trainer(strategy=strategy, max_epochs=1, enable_model_summary=False, **silent, **where)
        batches = DataLoader(TensorDataset(torch.randn(64, 16), torch.zeros(64, dtype=torch.long)), 64)
        module = Model()
        trainer.validate(module, batches, verbose=False) if evaluates else trainer.fit(module, batches)
        return seen.moved.count(64 * 16)


@pytest.mark.parametrize(("evaluates", "expected"), [(False, [0, 0, 0]), (True, [1, 0, 1])], ids=["fit", "validate"])
def test_a_stage_that_does_not_read_a_batch_does_not_move_it(
    ranks: Pools, evaluates: bool, expected: list[int]
) -> None:
    """In training microbatches move when they are needed; in evaluation the ends of the pipeline read whole batches."""
    assert ranks(3, lightning=True).run(moved_elements, evaluates) == expected


def run_body(module: str, name: str, *arguments: Any) -> Any:
    """A test for GPUs, or what it runs on a rank, on the pretended device."""
    index, count = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    if name == "over_gloo":
        index, count = 0, 1
    body = getattr(importlib.import_module(module), name)
    with pretended_device(index, count):
        return body(*arguments)


ALONE: list[tuple[Any, ...]] = [
    ("test_one_process_is_like_the_single_device_strategy",),
    ("test_no_step_makes_the_host_wait",),
    ("test_states_are_on_the_host_between_steps",),
    *(("test_precisions_in_one_process", precision) for precision in ("bf16-mixed", "16-mixed", "bf16-true")),
    *(("test_master_weights_in_one_process", precision) for precision in ("bf16-true", "16-true")),
    *(("test_features_in_one_process_over_nccl", name, Path) for name in gpu_bodies.FEATURES),
]


@pytest.mark.parametrize(
    "body", [pytest.param(body, marks=pytest.mark.thorough if i > 1 else ()) for i, body in enumerate(ALONE)], ids=str
)
def test_what_tests_for_gpus_do_in_one_process(ranks: Pools, tmp_path: Path, body: tuple[Any, ...]) -> None:
    arguments = [tmp_path if argument is Path else argument for argument in body]
    ranks(1, lightning=True).run(run_body, "tests.gpu.test_cuda", *arguments)


@pytest.mark.thorough
@pytest.mark.parametrize("name", nccl_bodies.LAYOUTS)
def test_what_tests_for_gpus_do_on_two_ranks(ranks: Pools, name: str) -> None:
    settings = nccl_bodies.LAYOUTS[name]
    for module, body in (("tests.gpu.fits", "fit_on_ranks"), ("tests.gpu.test_cuda", "over_gloo")):
        one, other = ranks(2, lightning=True).run(run_body, module, body, settings, {})
        assert one["metrics"] == other["metrics"]
        assert len(one["losses"]) == len(other["losses"]) > 4


def fail(settings: dict[str, Any]) -> str:
    try:
        gpu_fits.fit(HybridStrategy(**settings), gpu_fits.Failing, devices=2)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.thorough
def test_what_tests_for_gpus_do_when_a_rank_fails(ranks: Pools) -> None:
    stories = ranks(2, lightning=True).run(run_body, __name__, "fail", PP2)
    assert all("a fault of rank 1" in story for story in stories)
