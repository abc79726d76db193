"""Parameters outside of the layers live where they are used, once the first batch has shown where that is."""

from __future__ import annotations

import copy
import gc
import logging
import math
import random
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, WeightAveraging
from lightning.pytorch.plugins.precision import Precision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_hybrid import HybridStrategy
from lightning_hybrid.axes import Sizes
from lightning_hybrid.pipeline_parallel.placeholders import is_placeholder
from lightning_hybrid.tuning.dry_run.dry_run import dry_run
from tests.daily import daily
from tests.pool import Pools

pytestmark = pytest.mark.timeout(300)


class Residual(nn.Linear):
    """A layer and the way around it."""

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(super().forward(x))


class Language(LightningModule):
    """An embedding, a loop over layers or a chain, a head; a small scale, and a head that only validation uses."""

    def __init__(
        self, vocabulary: int = 50, width: int = 8, layers: int = 6, *, tied: bool = False, chain: bool = False
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.positions = nn.Parameter(torch.randn(6, width))
        blocks = [Residual(width, width) for _ in range(layers)]
        self.blocks = nn.Sequential(*blocks) if chain else nn.ModuleList(blocks)
        self.pipeline_body = "blocks" if chain else None
        self.scale = nn.Parameter(torch.ones(1))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.probe = nn.Linear(width, vocabulary)
        if tied:
            self.head.weight = self.embed.weight

    def features(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        if isinstance(self.blocks, nn.Sequential):
            return self.blocks(x) * self.scale
        for layer in self.blocks:
            x = layer(x)
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


def _fit(
    layout: dict[str, Any] | None, devices: int, tied: bool, averages: bool, path: str, chain: bool = False
) -> dict[str, Any]:
    """Train, validate on the way, save; then train once more with another Trainer."""
    torch.manual_seed(5)
    module = Language(tied=tied, chain=chain).double()
    stays = {"gather_module_on_teardown": False}  # what ranks hold is looked at after the run
    strategy = "auto" if layout is None else HybridStrategy(num_microbatches=2, **stays, **layout)
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
@pytest.mark.parametrize(
    ("layout", "chain"),
    daily(
        [(name, chain) for name in LAYOUTS for chain in (False, True) if not chain or name != "tp2_pp2"],
        ("tp2_pp2", False),
        ("dp2_pp2_zero3", True),
        ("pp2_chunks2", False),
        ("pp3", True),
    ),
)
def test_they_live_where_they_are_used(ranks: Pools, layout: str, chain: bool, tied: bool, tmp_path: Any) -> None:
    """Optimizers, gradient norms, averages, checkpoints and a second Trainer follow."""
    sizes = LAYOUTS[layout]
    per_stage = sizes.get("data_parallel_size", 1) * sizes.get("tensor_parallel_size", 1)
    world = sizes["pipeline_parallel_size"] * per_stage
    averages = "zero_stage" not in sizes
    expected = _fit(None, 1, tied, averages, f"{tmp_path}/one", chain)
    pool = ranks(world, lightning=True)
    found = pool.run(_fit, sizes, world, tied, averages, f"{tmp_path}/many", chain, timeout=120)
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
    if chain:
        assert ("scale" in first, "scale" in last) == (False, True)
    for each in () if chain else found:  # small
        assert "scale" in each["held"]
    assert ("probe.weight" in first, "probe.weight" in last) == (False, True)  # the sanity check has used it
    for middle in found[per_stage:-per_stage]:
        assert not {"embed.weight", "head.weight", "positions", "probe.weight"} & set(middle["held"])


class Augmenting(Language):
    """Code before a chain takes another path by chance, and draws; what it draws is used again after the chain."""

    def __init__(self) -> None:
        super().__init__(chain=True)
        self.drop = nn.Dropout(0.3)
        self.late = False

    def features(self, tokens: Tensor) -> Tensor:
        x = self.drop(self.embed(tokens))
        if random.random() < 0.5:
            x = x + self.positions[: tokens.shape[1]]
        noise = torch.rand(tokens.shape[0], 1, 1)
        x = self.blocks(x + noise)
        if self.late and self.global_step == 2:
            x = x + self.embed.weight[0]
        return x + noise


def _fit_augmenting(ranks: int, late: bool) -> Any:
    torch.manual_seed(5)
    module, norm = Augmenting().double(), Norm()
    module.late = late
    strategy = HybridStrategy(pipeline_parallel_size=ranks, num_microbatches=2, gather_module_on_teardown=False)
    try:
        _trainer(strategy, ranks, 6, [norm], num_sanity_val_steps=0, limit_val_batches=0).fit(module, _data())
    except ValueError as error:
        return str(error)
    return norm.norms, [name for name, each in module.named_parameters() if not is_placeholder(each)]


CALLS: list[int] = []


class Counting(Language):
    """Notes the calls of its steps where nothing is put back after a step that was followed."""

    def validation_step(self, tokens: Tensor) -> None:
        CALLS.append(len(tokens))
        super().validation_step(tokens)


def _validate_counting() -> list[int]:
    CALLS.clear()
    strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=2)
    _trainer(strategy, 2, 1, []).validate(Counting(chain=True), _data(), verbose=False)
    return CALLS


@pytest.mark.distributed
def test_an_evaluation_alone_traces_the_code_around_a_chain_once(ranks: Pools) -> None:
    assert ranks(2, lightning=True).run(_validate_counting, timeout=90) == [[8] * 7, [8] * 6]


@pytest.mark.distributed
def test_code_before_a_chain_may_take_any_path(ranks: Pools) -> None:
    two, three = (ranks(size, lightning=True).run(_fit_augmenting, size, False, timeout=90) for size in (2, 3))
    assert two[0][0] == pytest.approx(three[0][0], rel=1e-10)
    assert ("embed.weight" in three[0][1], "embed.weight" in three[-1][1]) == (True, False)


@pytest.mark.distributed
def test_a_use_after_a_chain_that_appears_later_is_refused_on_every_rank(ranks: Pools) -> None:
    texts = ranks(2, lightning=True).run(_fit_augmenting, 2, True, timeout=90)
    assert len(set(texts)) == 1
    assert "`add` uses a parameter outside the layers, but this parameter is on another stage" in texts[0]
    assert "dynamic_shapes=True" in texts[0]


class Switching(LightningModule):
    """Batches of tokens of length 6 use a layer at one place, those of length 5 at another, validation at a third."""

    def __init__(self, places: Sequence[str], *, tied: bool = False) -> None:
        super().__init__()
        self.places, self.tied = places, tied
        self.embed = nn.Embedding(50, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.switched = nn.Linear(8, 8)
        self.head = nn.Linear(8, 50, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.probes: list[float] = []

    def switch(self, x: Tensor) -> Tensor:
        if not self.tied:
            return x + torch.tanh(self.switched(x))
        return x + nn.functional.linear(nn.functional.linear(x, self.embed.weight).softmax(-1), self.embed.weight.T)

    def logits(self, tokens: Tensor, place: str) -> Tensor:
        x = self.embed(tokens)
        for position, layer in enumerate(self.blocks):
            if place == {0: "first", 3: "middle"}.get(position):
                x = self.switch(x)
            x = x + torch.tanh(layer(x))
        return self.head(self.switch(x) if place == "last" else x)

    def training_step(self, tokens: Tensor) -> Tensor:
        logits = self.logits(tokens, self.places[tokens.shape[1] == 5])
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, tokens: Tensor) -> None:
        self.log("probe", self.logits(tokens, self.places[2]).square().mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.probes.append(float(self.trainer.callback_metrics["probe"]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _switching_data(lengths: str, batch: int) -> DataLoader:
    """A batch of 8 over all replicas for each length."""
    tokens = torch.randint(50, (8 * len(lengths), 6), generator=torch.Generator().manual_seed(3))
    return DataLoader([row[: int(lengths[index // 8])] for index, row in enumerate(tokens)], batch)


def _strategy(layout: dict[str, Any] | None) -> tuple[Any, int]:
    """The strategy, and the number of ranks."""
    if layout is None:
        return "auto", 1
    sizes = [layout.get(f"{axis}_parallel_size", 1) for axis in ("data", "tensor", "pipeline")]
    return HybridStrategy(num_microbatches=2, **layout), math.prod(sizes)


def _travels(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    return [
        str(warning.message) for warning in caught if "are sent between stages in each step" in str(warning.message)
    ]


def _fit_switching(
    layout: dict[str, Any] | None, arguments: dict[str, Any], accumulate: int, path: str
) -> dict[str, Any]:
    """Train, validate on the way, save; then train once more with another Trainer."""
    torch.manual_seed(5)
    module, norm = Switching(**arguments).double(), Norm()
    batch = 8 // (layout or {}).get("data_parallel_size", 1)
    data = _switching_data("655656", batch), _switching_data("66", batch)
    others = {"num_sanity_val_steps": 0, "val_check_interval": 2, "accumulate_grad_batches": accumulate}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for suffix, steps in enumerate((6 // accumulate, 12 // accumulate)):  # an epoch each
            trainer = _trainer(*_strategy(layout), steps, [norm], **others)
            trainer.fit(module, *data, ckpt_path=f"{path}0" if suffix else None)
            trainer.save_checkpoint(f"{path}{suffix}")
    return {"norms": norm.norms, "probes": module.probes, "travels": _travels(caught)}


PP2, PP3 = {"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 3}
CHUNKS = {**PP2, "num_chunks": 2, "schedule": "interleaved_1f1b"}
DP2 = {**PP2, "data_parallel_size": 2}
TP2 = {**PP2, "tensor_parallel_size": 2, "tensor_parallel_plan": {"embed": "vocab", "head": "vocab"}}
#: The layout; where the two kinds of batches and validation use the layer; which steps let it travel.
SWITCHES: dict[str, tuple[dict[str, Any], str, str]] = {
    "unused": (PP3, "- middle last", ""),
    "unused, first": (PP3, "- first middle", ""),
    "unused, last": (PP3, "- last first", ""),
    "next": (PP3, "first middle last", "training validation"),
    "far": (PP3, "first last middle", "training validation"),
    "fetched": (PP3, "middle last first", "training validation"),
    "fetched from the end": (PP3, "last last middle", "validation"),
    "tied": (PP3, "last middle first tied", "training"),
    "tied, held": (PP2, "- last middle tied", ""),
    "chunks": (CHUNKS, "first middle last", "training validation"),
    "chunks, fetched": (CHUNKS, "middle last first", "training validation"),
    "dp2": (DP2, "first last middle", "training"),
    "dp2 chunks": ({**DP2, **CHUNKS}, "first last middle", "training validation"),
    "zero1": ({**DP2, "zero_stage": 1}, "first last -", "training"),
    "zero2": ({**DP2, "zero_stage": 2}, "first last -", "training"),
    "zero3": ({**DP2, "zero_stage": 3}, "first last middle", "training"),
    "zero3, fetched": ({**DP2, "zero_stage": 3}, "last last first", "validation"),
    "tp2": (TP2, "first last middle", "training"),
    "tp2, fetched": (TP2, "last last first", "validation"),
}


#: What is tried every day: each way to travel, each kind of copies.
DAILY = {("next", 1), ("fetched", 1), ("tied", 2), ("chunks", 2), ("dp2", 2), ("zero3", 1)}
DAILY |= {("tp2", 1), ("tp2, fetched", 1)}


def _switch(case: str, accumulate: int) -> Any:
    marks = () if (case, accumulate) in DAILY else pytest.mark.thorough
    return pytest.param(case, accumulate, id=f"{case}, accumulate {accumulate}", marks=marks)


@pytest.mark.distributed
@pytest.mark.parametrize(("case", "accumulate"), [_switch(case, number) for case in SWITCHES for number in (1, 2)])
def test_a_use_that_appears_later_is_right(ranks: Pools, case: str, accumulate: int, tmp_path: Any) -> None:
    """In training on later stages, in validation on any; weights, states and a second Trainer are as in one process."""
    layout, text, travelling = SWITCHES[case]
    arguments = {"places": text.split()[:3], "tied": "tied" in text}
    expected = _fit_switching(None, arguments, accumulate, f"{tmp_path}/one")
    pool = ranks(_strategy(layout)[1], lightning=True)
    found = pool.run(_fit_switching, layout, arguments, accumulate, f"{tmp_path}/many", timeout=120)
    for each in found:
        assert each["norms"] == pytest.approx(expected["norms"], rel=1e-10)
        assert each["probes"] == pytest.approx(expected["probes"], rel=1e-10)
    for suffix in range(2):
        one, many = (torch.load(f"{tmp_path}/{name}{suffix}", weights_only=False) for name in ("one", "many"))
        torch.testing.assert_close(many["state_dict"], one["state_dict"], rtol=1e-10, atol=1e-12)
        states = [each["optimizer_states"][0]["state"] for each in (many, one)]
        torch.testing.assert_close(*states, rtol=1e-10, atol=1e-12)
    warned = [f"`{step}_step` uses parameters on stages" for step in travelling.split()] * 2  # by each Trainer once
    assert [text[: len(start)] for text, start in zip(found[0]["travels"], warned, strict=True)] == warned
    assert not any(each["travels"] for each in found[1:])


def _fit_once(layout: dict[str, Any], places: Sequence[str], sanity: int) -> Any:
    torch.manual_seed(5)
    module = Switching(places).double()
    data = _switching_data("65", 8), _switching_data("6", 8)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            _trainer(
                *_strategy({**layout, "gather_module_on_teardown": False}), 2, [], num_sanity_val_steps=sanity
            ).fit(module, *data)
        except ValueError as error:
            return str(error)
    return [name for name, each in module.named_parameters() if not is_placeholder(each)], _travels(caught)


def _fit_replicas(layout: dict[str, Any] | None) -> list[float]:
    """Even samples of a batch of 8 go to the first replica, odd ones to the second; in one process they come later."""
    torch.manual_seed(5)
    module, norm = Switching(["first", "last", "-"]).double(), Norm()
    tokens = torch.randint(50, (48, 6), generator=torch.Generator().manual_seed(3))
    lengths = [(6, 6), (6, 5), (5, 6), (5, 5), (6, 5), (6, 6)]
    samples = [row[: lengths[index // 8][index % 2]] for index, row in enumerate(tokens)]
    if layout is None:
        order = [8 * batch + index for batch in range(6) for index in (0, 2, 4, 6, 1, 3, 5, 7)]
        samples = [samples[index] for index in order]
    accumulate = 2 if layout is None else 1
    trainer = _trainer(*_strategy(layout), 6, [norm], limit_val_batches=0, accumulate_grad_batches=accumulate)
    trainer.fit(module, DataLoader(samples, 4))
    return norm.norms


@pytest.mark.distributed
@pytest.mark.parametrize("zero_stage", [0, 3])
def test_replicas_need_not_see_the_same_use(ranks: Pools, zero_stage: int) -> None:
    for norms in ranks(4, lightning=True).run(_fit_replicas, {**DP2, "zero_stage": zero_stage}, timeout=90):
        assert norms == pytest.approx(_fit_replicas(None), rel=1e-10)


class Numbers(Language):
    """Validation asks for a number."""

    def validation_step(self, tokens: Tensor) -> None:
        self.log("probe", self.features(tokens).mean().item(), sync_dist=True)


class NumbersFirst(Language):
    """Validation uses a parameter behind a number, and nowhere else."""

    def validation_step(self, tokens: Tensor) -> None:
        scale = self.blocks[-1](self.blocks[0](self.positions)).mean().item()
        self.log("probe", self.embed(tokens).mean() * scale, sync_dist=True)


class OnItsDevice(Language):
    """Makes tensors where a parameter is, which some stages do not have."""

    def features(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=self.embed.weight.device)
        return super().features(tokens * (positions < 4).to(self.head.weight.device))


def _fit_again(kind: type[Language]) -> tuple[list[float], list[str]]:
    """Two Trainers; before the second one trains, validation is tried."""
    torch.manual_seed(5)
    module, norm = kind().double(), Norm()
    for sanity in (0, 1):
        strategy = HybridStrategy(pipeline_parallel_size=3, num_microbatches=2, gather_module_on_teardown=False)
        trainer = _trainer(strategy, 3, 6, [norm], num_sanity_val_steps=sanity, val_check_interval=3)
        trainer.fit(module, _data(), _data())
    return norm.norms, [name for name, each in module.named_parameters() if not is_placeholder(each)]


@pytest.mark.distributed
def test_numbers_in_a_validation_before_a_second_training_bring_nothing_back(ranks: Pools) -> None:
    """The last stage keeps what it has: what follows a number might use it."""
    first, *_, last = ranks(3, lightning=True).run(_fit_again, Numbers, timeout=90)
    assert first[0] == last[0]
    assert len(first[0]) == 12
    assert ("embed.weight" in first[1], "embed.weight" in last[1]) == (True, False)


@pytest.mark.distributed
def test_a_parameter_that_is_elsewhere_has_the_device_of_this_rank(ranks: Pools) -> None:
    norms, _ = ranks(3, lightning=True).run(_fit_again, OnItsDevice, timeout=90)[0]
    assert len(norms) == 12


def _fit_and_probe(layout: dict[str, Any] | None) -> float:
    """Train, so that parameters have a place, and validate."""
    torch.manual_seed(5)
    trainer = _trainer(*_strategy(layout), 6, [], num_sanity_val_steps=0, val_check_interval=3)
    trainer.fit(NumbersFirst().double(), _data(), _data())
    return float(trainer.callback_metrics["probe"])


@pytest.mark.distributed
def test_validation_uses_a_parameter_that_only_follows_a_number(ranks: Pools) -> None:
    """The last stage does not have `embed`, so the step runs in lockstep."""
    for probe in ranks(3, lightning=True).run(_fit_and_probe, PP3, timeout=90):
        assert probe == pytest.approx(_fit_and_probe(None), rel=1e-10)


@pytest.mark.distributed
def test_the_user_is_told_what_travels_and_what_to_do(ranks: Pools) -> None:
    (_, (text,)), *_ = ranks(3, lightning=True).run(_fit_once, PP3, ["first", "last", "-"], 0, timeout=90)
    # 8 x 8 numbers over 2 boundaries, there and back, in 2 microbatches.
    assert text == (
        "`training_step` uses parameters on stages that do not have them: 'switched.bias' is on stage 0, but is used on"
        " stage 2; 'switched.weight' is on stage 0, but is used on stage 2. A parameter outside the layers is kept only"
        " on the stages where the first training batch used it, so these parameters are sent between stages in each"
        " step (4,608 bytes in total). In the first training step, also use the parameter on the stage that needs it"
        " now, for example by adding `0 * parameter.sum()` to a tensor on that stage. Alternatively, make the parameter"
        " part of a layer."
    )


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("layout", "places", "text"),
    [
        (
            PP2,
            ["last", "first", "-"],
            "on stage 0, but the parameter cannot be sent to earlier stages. It is on stage 1, where the first "
            "training batch used",
        ),
        (
            {**TP2, "tensor_parallel_plan": {"switched": "colwise_gather_output"}},
            ["first", "last", "-"],
            "because 'switched' is sharded over tensor-parallel ranks",
        ),
    ],
    ids=["to an earlier stage", "of a shared layer"],
)
def test_what_cannot_travel_is_refused_on_every_rank(
    ranks: Pools, layout: dict[str, Any], places: list[str], text: str
) -> None:
    texts = ranks(_strategy(layout)[1], lightning=True).run(_fit_once, layout, places, 0, timeout=90)
    assert len(set(texts)) == 1
    assert text in texts[0]


@pytest.mark.distributed
def test_a_use_that_the_sanity_check_has_shown_counts(ranks: Pools) -> None:
    found = ranks(2, lightning=True).run(_fit_once, PP2, ["last", "last", "first"], 1, timeout=90)
    for held, travels in found:
        assert "switched.weight" in held
        assert not travels


def _count(kind: str, vocabulary: int, width: int) -> int:
    torch.manual_seed(5)
    module = {"loop": Language, "sequential": Wide}[kind](vocabulary, width, 8)
    if kind == "loop":
        del module.probe
    partition = [3, 2, 2, 3] if kind == "sequential" else [2, 2, 2, 2]
    strategy = HybridStrategy(
        pipeline_parallel_size=4, num_microbatches=4, partition=partition, gather_module_on_teardown=False
    )
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
    strategy = HybridStrategy(pipeline_parallel_size=3, num_microbatches=2, gather_module_on_teardown=False)
    _trainer(strategy, 3, 1, [], limit_val_batches=0).fit(module)
    return sum(parameter.nbytes for parameter in module.parameters() if not is_placeholder(parameter))


@pytest.mark.distributed
def test_the_estimate_of_memory_counts_them_where_they_will_be(ranks: Pools) -> None:
    strategy = HybridStrategy(pipeline_parallel_size=3, num_microbatches=2)
    dry = dry_run(lambda: (Loaded(), None), strategy.settings, Sizes(pipeline=3), precision=Precision())
    held = ranks(3, lightning=True).run(_held_bytes, timeout=90)
    assert [usage.parameters for usage in dry.memory] == held
