"""Parameters outside of the layers live where they are used, once the first batch has shown where that is."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridStrategy
from lightning_hybrid.cli.dry_run import dry_run
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from tests.pool import Pools

pytestmark = pytest.mark.timeout(300)


class Language(LightningModule):
    """An embedding, a loop over layers, a head; a small scale, and a head that only validation uses."""

    def __init__(self, vocabulary: int = 50, width: int = 8, layers: int = 6, *, tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(6, width))
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.probe = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embed.weight

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        for layer in self.blocks:
            x = x + torch.tanh(layer(x))
        return x * self.scale

    def training_step(self, tokens: Tensor) -> Tensor:
        logits = self.head(self.features(tokens))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.log("probe", self.probe(self.features(tokens)).square().mean(), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Wide(Language):
    """The same as one `nn.Sequential`."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__(vocabulary, width, layers)
        self.body = nn.Sequential(self.embed, *self.blocks, self.head)
        del self.embed, self.blocks, self.head, self.probe, self.positions, self.scale

    def training_step(self, tokens: Tensor) -> Tensor:
        return self.body(tokens).square().mean()


class Average(Callback):
    """As users write it: a list of copies, moved in a hook."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.copies = [copy.deepcopy(pl_module)]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for averaged, current in zip(self.copies[0].parameters(), pl_module.parameters(), strict=True):
                averaged.lerp_(current, 0.5)


class Norm(Callback):
    """The norm of the gradient at each step."""

    def __init__(self) -> None:
        self.norms: list[float] = []
        self.probes: list[float] = []

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        if isinstance(strategy, HybridStrategy):
            self.norms.append(float(strategy.grad_norm()))
        else:
            gradients = [p.grad for p in trainer.lightning_module.parameters() if p.grad is not None]
            self.norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    def on_validation_end(self, trainer: Trainer, *_: Any) -> None:
        self.probes.append(float(trainer.callback_metrics["probe"]))


def _trainer(strategy: Any, devices: int, steps: int, callbacks: list[Callback], **others: Any) -> Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    logging.getLogger("lightning_utilities.core.rank_zero").setLevel(logging.ERROR)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    return Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_steps=steps,
        callbacks=callbacks,
        enable_model_summary=False,
        **quiet,
        **{"num_sanity_val_steps": 1, **others},
    )


def _data(vocabulary: int = 50, batch: int = 8) -> DataLoader:
    """Six batches of 8 over all replicas."""
    tokens = torch.randint(vocabulary, (48, 6), generator=torch.Generator().manual_seed(3))
    return DataLoader(tokens, batch)


def _fit(layout: dict[str, Any] | None, devices: int, tied: bool, averages: bool, path: str) -> dict[str, Any]:
    """Train, validate on the way, save; then train once more with another Trainer."""
    torch.manual_seed(5)
    module = Language(tied=tied).double()
    strategy = "auto" if layout is None else HybridStrategy(num_microbatches=2, **layout)
    batch = 8 // (layout or {}).get("data_parallel_size", 1)
    data = _data(batch=batch), _data(batch=batch)
    norm = Norm()
    callbacks = [norm, Average(), *([WeightAveraging()] if averages else [])]
    trainer = _trainer(strategy, devices, 6, callbacks, val_check_interval=2)
    trainer.fit(module, *data)
    trainer.save_checkpoint(path)
    held = sorted(name for name, parameter in module.named_parameters() if not is_placeholder(parameter))
    optimized = sum(len(group["params"]) for group in trainer.optimizers[0].param_groups)
    states = len(trainer.optimizers[0].state)
    again = _trainer("auto" if layout is None else HybridStrategy(num_microbatches=2, **layout), devices, 9, [norm])
    again.fit(module, *data, ckpt_path=path)
    again.save_checkpoint(f"{path}2")
    probes = norm.probes
    metrics = {name: float(value) for name, value in again.callback_metrics.items()}
    return {
        "held": held,
        "optimized": optimized,
        "states": states,
        "norms": norm.norms,
        "metrics": metrics,
        "probes": probes,
    }


SHARED = {"embed": "vocab", "head": "vocab", "probe": "vocab"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "pp2": {"pipeline_parallel_size": 2},
    "pp3": {"pipeline_parallel_size": 3},
    "dp2_pp2_zero3": {"pipeline_parallel_size": 2, "data_parallel_size": 2, "zero_stage": 3},
    "pp2_chunks2": {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"},
    "tp2_pp2": {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "tensor_parallel_plan": SHARED},
}


@pytest.mark.distributed
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_they_live_where_they_are_used(ranks: Pools, layout: str, tied: bool, tmp_path: Any) -> None:
    """Optimizers, gradient norms, averages, checkpoints and a second Trainer follow."""
    sizes = LAYOUTS[layout]
    per_stage = sizes.get("data_parallel_size", 1) * sizes.get("tensor_parallel_size", 1)
    world = sizes["pipeline_parallel_size"] * per_stage
    averages = "zero_stage" not in sizes
    expected = _fit(None, 1, tied, averages, f"{tmp_path}/one")
    found = ranks(world, lightning=True).run(_fit, sizes, world, tied, averages, f"{tmp_path}/many", timeout=120)
    for each in found:
        assert each["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        assert each["metrics"]["loss"] == pytest.approx(expected["metrics"]["loss"], rel=1e-10)
        assert each["probes"] == pytest.approx(expected["probes"], rel=1e-10)
        without_gradient = len({"probe.weight", "probe.bias"} & set(each["held"]))
        assert each["optimized"] == each["states"] + without_gradient == len(each["held"])
    for suffix in ("", "2"):
        one, many = (torch.load(f"{tmp_path}/{name}{suffix}", weights_only=False) for name in ("one", "many"))
        torch.testing.assert_close(many["state_dict"], one["state_dict"], rtol=1e-10, atol=1e-12)
        if suffix == "" and averages:
            averaged = [each["averaging_state"] for each in (many, one)]
            assert averaged[0] == averaged[1]
    first, last = found[0]["held"], found[-1]["held"]
    assert ("embed.weight" in first, "embed.weight" in last) == (True, tied)
    assert tied or ("head.weight" in first, "head.weight" in last) == (False, True)
    assert ("positions" in first, "positions" in last) == (True, False)
    for each in found:  # small
        assert "scale" in each["held"]
    assert ("probe.weight" in first, "probe.weight" in last) == (False, True)  # the sanity check has used it
    for middle in found[per_stage:-per_stage]:
        assert not {"embed.weight", "head.weight", "positions", "probe.weight"} & set(middle["held"])


class _Elsewhere(Language):
    """Validation puts the training's head before the layers."""

    def validation_step(self, tokens: Tensor) -> None:
        x = self.embed(tokens) @ self.head.weight.T @ self.head.weight
        for layer in self.blocks:
            x = layer(x)
        self.log("other", x.mean())


def _fit_elsewhere(sanity: int) -> str:
    torch.manual_seed(5)
    strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=2)
    trainer = _trainer(strategy, 2, 4, [], val_check_interval=2, num_sanity_val_steps=sanity)
    if sanity:
        module = _Elsewhere().double()
        trainer.fit(module, _data(), _data())
        return " ".join(name for name, parameter in module.named_parameters() if not is_placeholder(parameter))
    with pytest.raises(ValueError, match=r"head\.weight") as error:
        trainer.fit(_Elsewhere().double(), _data(), _data())
    return str(error.value)


@pytest.mark.distributed
def test_a_use_elsewhere_is_refused_on_every_rank(ranks: Pools) -> None:
    texts = ranks(2, lightning=True).run(_fit_elsewhere, 0, timeout=90)
    assert len(set(texts)) == 1
    assert "only stage 1 used it" in texts[0]


@pytest.mark.distributed
def test_a_use_that_the_sanity_check_has_shown_counts(ranks: Pools) -> None:
    held = ranks(2, lightning=True).run(_fit_elsewhere, 1, timeout=90)
    assert all("head.weight" in names for names in held)


def _count(kind: str, vocabulary: int, width: int) -> int:
    torch.manual_seed(5)
    module = {"loop": Language, "sequential": Wide}[kind](vocabulary, width, 8)
    if kind == "loop":
        del module.probe
    strategy = HybridStrategy(pipeline_parallel_size=4, num_microbatches=4, partition=[2, 2, 2, 2])
    if kind == "sequential":
        strategy = HybridStrategy(pipeline_parallel_size=4, num_microbatches=4, partition=[3, 2, 2, 3])
    trainer = _trainer(strategy, 4, 1, [], limit_val_batches=0)
    before = {name: weakref.ref(parameter) for name, parameter in module.named_parameters()}
    trainer.fit(module, _data(vocabulary))
    gc.collect()
    gone = [name for name, parameter in module.named_parameters() if is_placeholder(parameter)]
    assert not [name for name in gone if before[name]() is not None]
    return sum(parameter.numel() for parameter in module.parameters() if not is_placeholder(parameter))


@pytest.mark.distributed
def test_no_rank_holds_more_than_with_a_sequential(ranks: Pools) -> None:
    """A vocabulary of 32,000 on 512, 8 blocks on 4 stages: within 2 % of the same layers in one `nn.Sequential`."""
    pool = ranks(4, lightning=True)
    loop, sequential = (pool.run(_count, kind, 32_000, 512, timeout=200) for kind in ("loop", "sequential"))
    assert sequential[0] > 10 * sequential[1]
    for one, other in zip(loop, sequential, strict=True):
        assert one == pytest.approx(other, rel=0.02)


class Loaded(Language):
    """With a loader of its own, and nothing that training does not use."""

    def __init__(self) -> None:
        super().__init__()
        del self.probe

    def train_dataloader(self) -> DataLoader:
        return _data()


def _held_bytes() -> int:
    module = Loaded()
    strategy = HybridStrategy(pipeline_parallel_size=3, num_microbatches=2)
    _trainer(strategy, 3, 1, [], limit_val_batches=0).fit(module)
    return sum(parameter.nbytes for parameter in module.parameters() if not is_placeholder(parameter))


@pytest.mark.distributed
def test_the_estimate_of_memory_counts_them_where_they_will_be(ranks: Pools) -> None:
    strategy = HybridStrategy(pipeline_parallel_size=3, num_microbatches=2)
    dry = dry_run(lambda: (Loaded(), None), strategy.settings, (1, 1, 3), precision=Precision())
    held = ranks(3, lightning=True).run(_held_bytes, timeout=90)
    assert [usage.parameters for usage in dry.memory] == held
