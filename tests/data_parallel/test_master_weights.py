"""Half weights with a float32 master copy: the numbers are those of the rule, written down for one process.

The rule: forward and backward in half precision; gradients upcast to float32, unscaled and clipped; the optimizer steps
on the float32 copy, which is rounded into the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, EMAWeightAveraging, ModelCheckpoint
from lightning.pytorch.plugins import HalfPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_hybrid import HybridStrategy, Tuning
from lightning_hybrid.data_parallel.master_weights import MasterWeights
from lightning_hybrid.trainer.precision import check_optimizer, scale_half
from tests.daily import daily
from tests.pool import Pools
from tests.test_tensor_features import made
from tests.training_jobs import make_trainer, together, weights
from tests.zoo.tensor import Encoders

BATCH, STEPS, LR = 16, 6, 3e-3
DTYPES = {"bf16-true": torch.bfloat16, "16-true": torch.float16}


class Net(LightningModule):
    """In float32, as users write modules; groups with and without decay."""

    def __init__(self, optimizer: str = "AdamW") -> None:
        super().__init__()
        self.optimizer = optimizer
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed = nn.Linear(6, 8)
            self.body = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)))
            self.head = nn.Linear(8, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        return F.mse_loss(self.head(self.body(self.embed(batch[0]))), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.training_step(batch)

    def configure_optimizers(self) -> Any:
        return make_optimizer(self.optimizer, dict(self.named_parameters()))


def make_optimizer(name: str, parameters: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    matrices = [each for key, each in parameters.items() if key.endswith("weight")]
    biases = [each for key, each in parameters.items() if key.endswith("bias")]
    options: dict[str, Any] = {"momentum": 0.9} if name == "SGD" else {}
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=LR, **options)
    return optimizer


def dataset() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(BATCH * STEPS, 6, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


class Watch(Callback):
    """Dtypes and scales at each step, and what a checkpoint would have at the end."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.state: dict[str, Tensor] = {}
        self.scales: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.first = {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()}

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        assert {parameter.dtype for parameter in pl_module.parameters()} == {self.dtype}

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        own = [each for group in optimizer.param_groups for each in group["params"] if not each.is_meta]
        assert {each.dtype for each in own} <= {torch.float32}
        assert {each.grad.dtype for each in own if each.grad is not None} <= {torch.float32}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.precision_plugin.scaler is not None:
            self.scales.append(trainer.precision_plugin.scaler.get_scale())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        own = trainer.optimizers[0].state.values()
        assert {v.dtype for state in own for v in state.values() if isinstance(v, Tensor)} <= {torch.float32}
        self.state = {key: value.clone() for key, value in trainer.strategy.lightning_module_state_dict().items()}


def train(
    layout: dict[str, Any], precision: str, optimizer: str = "AdamW", batch_size: int = BATCH, **arguments: Any
) -> dict[str, Any]:
    watch = Watch(DTYPES[precision])
    callbacks = [watch, *arguments.pop("callbacks", [])]
    trainer = make_trainer({"master_weights": True, **layout}, precision=precision, callbacks=callbacks, **arguments)
    module = Net(optimizer)
    trainer.fit(module, DataLoader(dataset(), batch_size))
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    return {"state": watch.state, "scales": watch.scales, "first": watch.first}


def by_hand(
    precision: str,
    optimizer: str = "AdamW",
    *,
    parts: int = 1,
    replicas: int = 1,
    accumulated: int = 1,
    clip: float | None = None,
    float32_gradients: bool = False,
    each_backward: bool = False,
    module: Net | None = None,
) -> dict[str, Tensor]:
    """The master weights after training by the rule, in one process.

    Args:
        precision: The precision.
        optimizer: The name of the optimizer.
        parts: Microbatches of a batch.
        replicas: How many there are, each of which sees every so manieth sample.
        accumulated: Batches of an optimizer step.
        clip: The largest norm.
        float32_gradients: Whether gradients are upcast before they are added up.
        each_backward: Whether replicas are averaged before microbatches are added up; not of single numbers, which are
            not sharded.
        module: What is trained.
    """
    dtype = DTYPES[precision]
    module = module or Net()
    masters = {name: nn.Parameter(each.detach().clone()) for name, each in module.named_parameters()}
    module.to(dtype)
    stepper = make_optimizer(optimizer, masters)
    scale = torch.tensor(2.0**15 if precision == "16-true" else 1.0)
    x, y = (each.to(dtype) for each in dataset().tensors)
    for begin in range(0, len(x), BATCH * accumulated):
        gradients: list[list[dict[str, Tensor]]] = [[] for _ in range(replicas)]
        for replica, of_replica in enumerate(gradients):
            for batch in range(begin, begin + BATCH * accumulated, BATCH):
                rows = slice(batch + replica, batch + BATCH, replicas)
                for part in zip(x[rows].tensor_split(parts), y[rows].tensor_split(parts), strict=True):
                    loss = module.training_step(list(part)) * (1 / parts) / accumulated
                    (loss * scale if precision == "16-true" else loss).backward()
                    to = torch.float32 if float32_gradients else dtype
                    of_replica.append({name: each.grad.to(to) for name, each in module.named_parameters()})
                    module.zero_grad()
        for name, master in masters.items():
            own = [[each[name] for each in of_replica] for of_replica in gradients]
            master.grad = total(own, each_backward=each_backward and master.numel() > 1).float() / scale
        if all(master.grad.isfinite().all() for master in masters.values()):
            if clip is not None:
                torch.nn.utils.clip_grad_norm_(masters.values(), clip)
            stepper.step()
        else:
            scale = scale / 2
        with torch.no_grad():
            for name, each in module.named_parameters():
                each.copy_(masters[name])
    return {name: master.detach() for name, master in masters.items()}


def total(gradients: list[list[Tensor]], *, each_backward: bool) -> Tensor:
    """The mean over replicas of the sums over backwards, added up one by one in the gradients' dtype."""
    if each_backward:
        return added([added([each / len(gradients) for each in of_all]) for of_all in zip(*gradients, strict=True)])
    return added([added(of_replica) / len(gradients) for of_replica in gradients])


def added(tensors: list[Tensor]) -> Tensor:
    return reduce(torch.add, tensors)


def assert_equal(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float = 0.0) -> None:
    assert list(actual) == list(expected)
    for name, value in expected.items():
        assert actual[name].dtype == torch.float32, name
        if rtol:
            torch.testing.assert_close(
                actual[name], value, rtol=rtol, atol=rtol, msg=lambda text, name=name: f"{name}: {text}"
            )
        else:
            assert torch.equal(actual[name], value), f"{name}: {(actual[name] - value).abs().max()}"


# -- the numbers -------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {  # ranks, arguments, what these are to the rule
    "alone": (1, {"num_microbatches": 1}, {}),
    "pp2": (2, {"pipeline_parallel_size": 2, "num_microbatches": 4}, {"parts": 4}),
    "chunks": (2, {"pipeline_parallel_size": 2, "num_chunks": 2, "schedule": "interleaved_1f1b"}, {"parts": 8}),
    "dp2": (2, {"data_parallel_size": 2}, {"replicas": 2}),
    "zero 1": (2, {"data_parallel_size": 2, "zero_stage": 1}, {"replicas": 2}),
    "zero 2": (
        2,
        {"data_parallel_size": 2, "zero_stage": 2, "num_microbatches": 2},
        {"parts": 2, "replicas": 2, "each_backward": True},
    ),
    "zero 3": (2, {"data_parallel_size": 2, "zero_stage": 3}, {"replicas": 2}),
    # Rows of the first layer: every number is computed by one rank alone.
    "tp2": (2, {"tensor_parallel_size": 2, "tensor_parallel_plan": {"embed": "colwise_gather_output"}}, {}),
    "pp2 x zero 1": (
        4,
        {"pipeline_parallel_size": 2, "zero_stage": 1, "num_microbatches": 2},
        {"parts": 2, "replicas": 2},
    ),
}


def trained(ranks: Pools, name: str, precision: str, optimizer: str, layout: Any = None, **trainer: Any) -> Any:
    """What the first rank has after training in a layout; all have the same scales."""
    size, arguments, rule = LAYOUTS[name]
    given = {**arguments, **(layout or {})}, precision, optimizer, BATCH // rule.get("replicas", 1)
    first, *others = ranks(size, lightning=True).run(partial(train, **trainer), *given)
    assert all(other["scales"] == first["scales"] for other in others)
    return first


#: Of each layout one precision every day, and both in the thorough suite.
DAILY = {"pp2": "16-true", "chunks": "bf16-true", "dp2": "bf16-true", "zero 1": "16-true", "zero 2": "bf16-true"}
DAILY |= {"alone": "bf16-true", "zero 3": "16-true", "tp2": "bf16-true"}


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "precision"),
    daily([(name, each) for name in LAYOUTS for each in DTYPES], *DAILY.items()),
)
def test_masters_are_those_of_the_rule(ranks: Pools, name: str, precision: str) -> None:
    expected = by_hand(precision, **LAYOUTS[name][2])
    assert_equal(trained(ranks, name, precision, "AdamW")["state"], expected)


@pytest.mark.distributed
@pytest.mark.parametrize("optimizer", daily(["Adagrad", "RMSprop"], "Adagrad"))
def test_other_optimizers_follow_the_rule(ranks: Pools, optimizer: str) -> None:
    # Adagrad makes its states at once.
    first = trained(ranks, "zero 1", "bf16-true", optimizer)
    assert_equal(first["state"], by_hand("bf16-true", optimizer, **LAYOUTS["zero 1"][2]))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "float32_gradients"),
    daily([(name, each) for name in ("pp2", "zero 2") for each in (False, True)], ("pp2", True), ("zero 2", False)),
)
def test_batches_are_accumulated(ranks: Pools, name: str, float32_gradients: bool) -> None:
    layout = {"tuning": Tuning(float32_gradients=float32_gradients)}
    first = trained(ranks, name, "16-true", "SGD", layout, accumulate_grad_batches=2)
    rule = {**LAYOUTS[name][2], "float32_gradients": float32_gradients, "accumulated": 2}
    assert_equal(first["state"], by_hand("16-true", "SGD", **rule))


@pytest.mark.distributed
@pytest.mark.parametrize("name", daily(["alone", "dp2", "pp2", "zero 3"], "pp2"))
def test_unscaled_float32_gradients_are_clipped(ranks: Pools, name: str) -> None:
    first, rule = trained(ranks, name, "16-true", "SGD", gradient_clip_val=0.1), LAYOUTS[name][2]
    # Ranks that share the model add up the norms of their parameters in float64, one process adds up in float32.
    assert_equal(first["state"], by_hand("16-true", "SGD", clip=0.1, **rule), 0.0 if name in ("alone", "dp2") else 1e-6)
    assert not torch.equal(first["state"]["head.weight"], by_hand("16-true", "SGD", **rule)["head.weight"])


class Sequences(Net):
    """Layers of positions, whose gradients are sums over the shares of a sequence.

    Args:
        shares: Of a sequence that are computed one after the other, as ranks compute them side by side.
    """

    def __init__(self, shares: int = 1) -> None:
        super().__init__("SGD")
        self.shares = shares

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        x = self.embed(batch[0][:, None] * torch.tensor([[0.25], [0.5], [1.0], [2.0]]).to(batch[0]))
        x = torch.cat([self.body(share.contiguous()) for share in x.chunk(self.shares, dim=1)], dim=1)
        return F.mse_loss(self.head(x).mean(1), batch[1])


def share_sequences(layout: dict[str, Any], precision: str) -> dict[str, Tensor]:
    watch = Watch(DTYPES[precision])
    trainer = make_trainer({"master_weights": True, **layout}, precision=precision, callbacks=[watch])
    trainer.fit(Sequences(), DataLoader(dataset(), BATCH))
    return watch.state


@pytest.mark.distributed
@pytest.mark.parametrize("precision", daily(DTYPES, "bf16-true"))
def test_ranks_that_share_sequences_follow_the_rule(ranks: Pools, precision: str) -> None:
    found, _ = ranks(2, lightning=True).run(share_sequences, {"context_parallel_size": 2}, precision)
    assert_equal(found, by_hand(precision, "SGD", module=Sequences(shares=2)))


def share_layers(layout: dict[str, Any] | None) -> dict[str, Tensor]:
    module = made(Encoders).float()
    module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.05)  # type: ignore[method-assign]
    if layout is None:
        make_trainer(None).fit(module)
        return {name: value.detach() for name, value in module.state_dict().items()}
    watch = Watch(torch.float16)
    make_trainer({"master_weights": True, **layout}, precision="16-true", callbacks=[watch]).fit(module)
    return watch.state


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("size", "layout"),
    daily(
        [
            (2, {"tensor_parallel_size": 2, "zero_stage": 1}),
            (2, {"context_parallel_size": 2, "context_parallel": "ring"}),
            (4, {"context_parallel_size": 2, "pipeline_parallel_size": 2}),
            (4, {"tensor_parallel_size": 4, "tensor_parallel_mode": "2d"}),
            (8, {"tensor_parallel_size": 8, "tensor_parallel_mode": "3d"}),
        ],
        (4, {"tensor_parallel_size": 4, "tensor_parallel_mode": "2d"}),
    ),
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else None,
)
def test_ranks_that_share_layers_train_close_to_float32(ranks: Pools, size: int, layout: dict[str, Any]) -> None:
    # Sums over ranks are rounded in another order than in one process, so no bit can be compared: what can is how far
    # each parameter has come. One process in half precision is 0.4 % from float32.
    initial, expected = made(Encoders).float().state_dict(), share_layers(None)
    found = ranks(size, lightning=True).run(share_layers, layout, timeout=120)[0]
    for name, value in expected.items():
        moved = (value - initial[name]).norm()
        assert (found[name] - value).norm() < 0.02 * moved, f"{name}: {(found[name] - value).norm() / moved:.3f}"


class Tied(Net):
    """Its first and last layer share a weight; layers are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(self.body)
        self.body[3][0].weight = self.body[0][0].weight

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> Tensor:
        x = self.embed(batch[0])
        for layer in self.body:
            x = layer(x)
        return F.mse_loss(self.head(x), batch[1])


def tied(layout: dict[str, Any] | None) -> dict[str, Tensor]:
    module = Tied()
    precision = "bf16-true" if layout else "32-true"
    trainer = make_trainer(layout and {"master_weights": True, **layout}, precision=precision)
    trainer.fit(module, DataLoader(dataset(), BATCH))
    return weights(module)


@pytest.mark.distributed
def test_holders_of_a_tied_weight_have_equal_masters(ranks: Pools) -> None:
    found = together(ranks(2, lightning=True).run(tied, LAYOUTS["pp2"][1]))
    # Close to float32: in half precision one process adds up both uses microbatch by microbatch, in another order.
    expected = tied(None)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-2, atol=1e-2)


# -- overflow ----------------------------------------------------------------------------------------------------------


class Overflow(Callback):
    """In the third step the gradient of one layer is infinite, where that layer lives."""

    def __init__(self) -> None:
        self.totals: list[float] = []

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        weight = pl_module.body[3][0].weight
        if not weight.is_meta:
            weight.register_hook(lambda gradient: gradient / 0 if trainer.global_step == 2 else gradient)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        state = trainer.strategy.lightning_module_state_dict()
        self.totals.append(sum(float(value.double().sum()) for value in state.values()))


def overflow(layout: dict[str, Any]) -> dict[str, Any]:
    callback = Overflow()
    result = train(layout, "16-true", callbacks=[callback])
    return {"scales": result["scales"], "totals": callback.totals}


@pytest.mark.distributed
def test_an_overflow_of_one_stage_skips_the_step_of_all(ranks: Pools) -> None:
    first, second = ranks(2, lightning=True).run(overflow, LAYOUTS["pp2"][1])
    assert first["scales"] == second["scales"] == [2.0**15] * 2 + [2.0**14] * 4
    totals = first["totals"]
    assert totals[1] == totals[2]
    assert len(set(totals)) == STEPS - 1


# -- initial values, checkpoints, callbacks ----------------------------------------------------------------------------


class LateNet(Net):
    """Made in `configure_model`, where Lightning's half precision makes parameters in half."""

    def __init__(self) -> None:
        LightningModule.__init__(self)
        self.optimizer = "AdamW"

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            made = Net()
            self.embed, self.body, self.head = made.embed, made.body, made.head


def start(layout: dict[str, Any], late: bool) -> dict[str, Tensor]:
    watch = Watch(torch.bfloat16)
    trainer = make_trainer(
        {"master_weights": True, **layout}, precision="bf16-true", callbacks=[watch], fast_dev_run=True
    )
    trainer.fit(LateNet() if late else Net(), DataLoader(dataset(), BATCH))
    return watch.first


@pytest.mark.distributed
def test_initial_values_are_not_rounded(ranks: Pools, tmp_path: Path) -> None:
    expected = Net().state_dict()
    layout = LAYOUTS["pp2"][1]
    assert_equal(ranks(2, lightning=True).run(start, layout, False)[0], expected)
    assert_equal(ranks(2, lightning=True).run(start, LAYOUTS["zero 3"][1], True)[0], expected)
    torch.save({name: value + 1e-5 for name, value in expected.items()}, tmp_path / "weights.pt")
    found = ranks(2, lightning=True).run(start, {**layout, "initial_weights": str(tmp_path / "weights.pt")}, False)[0]
    assert_equal(found, {name: value + 1e-5 for name, value in expected.items()})


def save(layout: dict[str, Any], folder: str, *, steps: int, ckpt_path: str | None = None) -> dict[str, Any]:
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=3, save_top_k=-1)
    watch = Watch(torch.float16)
    trainer = make_trainer(
        {"master_weights": True, **layout},
        precision="16-true",
        callbacks=[watch, saver],
        enable_checkpointing=True,
        max_steps=steps,
        max_epochs=-1,
    )
    batch_size = BATCH // trainer.strategy.sizes.data
    trainer.fit(Net(), DataLoader(dataset(), batch_size), ckpt_path=ckpt_path)
    return {"state": watch.state, "first": watch.first, "scales": watch.scales}


@pytest.mark.distributed
@pytest.mark.parametrize("distributed", daily([False, True], False))
def test_checkpoints_hold_the_masters(ranks: Pools, tmp_path: Path, distributed: bool) -> None:
    expected = by_hand("16-true", replicas=2)
    layout = {**LAYOUTS["zero 1"][1], "save_distributed_checkpoint": distributed, "async_save": True}
    ranks(2, lightning=True).run(partial(save, steps=3), layout, str(tmp_path))
    # Alone the sums over all samples are rounded in another order; dp 2 again goes on bit by bit.
    path = str(tmp_path / "step=3.ckpt")
    again = LAYOUTS["dp2"][1]
    first, _ = ranks(2, lightning=True).run(partial(save, steps=STEPS, ckpt_path=path), again, str(tmp_path / "again"))
    assert_equal(first["state"], expected)
    other, _ = ranks(2, lightning=True).run(
        partial(save, steps=4, ckpt_path=path), LAYOUTS["pp2"][1], str(tmp_path / "other")
    )
    assert_equal(other["first"], first["first"])
    assert other["scales"] == [2.0**15]


@pytest.mark.distributed
def test_plain_lightning_opens_a_checkpoint_in_float32(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, lightning=True).run(partial(save, steps=3), LAYOUTS["pp2"][1], str(tmp_path))
    file = tmp_path / "step=3.ckpt"
    saved = torch.load(file, weights_only=False)
    states = saved["optimizer_states"][0]["state"]
    assert {value.dtype for value in (*saved["state_dict"].values(), *states[0].values())} == {torch.float32}
    loaded = Net.load_from_checkpoint(file)
    assert_equal(loaded.state_dict(), saved["state_dict"])
    module = Net()
    trainer = make_trainer(None, max_steps=4, max_epochs=-1)
    trainer.fit(module, DataLoader(dataset(), BATCH), ckpt_path=file)
    assert trainer.global_step == 4


class Clamp(Callback):
    """Limits weights after each step, as a user may."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        for parameter in pl_module.parameters():
            if not parameter.is_meta:
                parameter.data.clamp_(-0.25, 0.25)


class Thaw(BaseFinetuning):
    """The body is frozen for one epoch, and then joins the optimizer as a group of its own."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.body)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.body, optimizer, lr=LR, initial_denom_lr=1.0)


class Trainable(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=LR)


def call_back(layout: dict[str, Any], callback: Callback, net: type[Net], **arguments: Any) -> dict[str, Tensor]:
    watch = Watch(torch.bfloat16)
    trainer = make_trainer(layout, precision="bf16-true", callbacks=[callback, watch], **arguments)
    module = net()
    trainer.fit(module, DataLoader(dataset(), BATCH))
    return {name: value.clone() for name, value in watch.state.items()}


@pytest.mark.distributed
def test_a_callback_that_changes_weights_changes_masters(ranks: Pools) -> None:
    layout = {"master_weights": True, **LAYOUTS["pp2"][1]}
    found, _ = ranks(2, lightning=True).run(call_back, layout, Clamp(), Net)
    assert max(value.bfloat16().abs().max() for value in found.values()) == 0.25
    assert any(not torch.equal(value, value.bfloat16().float()) for value in found.values())


@pytest.mark.distributed
def test_parameters_that_join_later_have_masters_too(ranks: Pools) -> None:
    layout = {"master_weights": True, **LAYOUTS["pp2"][1]}
    found, _ = ranks(2, lightning=True).run(partial(call_back, max_epochs=2), layout, Thaw(), Trainable)
    initial = Net().state_dict()
    for name, value in found.items():
        assert not torch.equal(value, initial[name]), name
        assert not torch.equal(value, value.bfloat16().float()), name


def average(layout: dict[str, Any], folder: str) -> None:
    callbacks = [EMAWeightAveraging(decay=0.9), ModelCheckpoint(folder, "{step}", every_n_train_steps=STEPS)]
    how: dict[str, Any] = {"precision": "bf16-true", "callbacks": callbacks, "enable_checkpointing": True}
    data = DataLoader(dataset(), BATCH)
    make_trainer({"master_weights": True, **layout}, **how, val_check_interval=2).fit(Net(), data, data)


@pytest.mark.thorough
@pytest.mark.distributed
def test_averages_that_change_places_with_weights_leave_masters_alone(ranks: Pools, tmp_path: Path) -> None:
    ranks(2, lightning=True).run(average, LAYOUTS["pp2"][1], str(tmp_path))
    saved = torch.load(tmp_path / f"step={STEPS}.ckpt", weights_only=False)
    assert_equal(saved["current_model_state"], by_hand("bf16-true", parts=4))
    assert not torch.equal(saved["state_dict"]["head.weight"], saved["current_model_state"]["head.weight"])


class ByHand(Net):
    """Optimizes by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int = 0) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch))
        optimizer.step()
        assert {parameter.dtype for parameter in self.parameters()} == {torch.float16}


@pytest.mark.distributed
@pytest.mark.parametrize("name", daily(["dp2", "zero 1", "zero 3"], "zero 1"))
def test_modules_may_optimize_by_hand(ranks: Pools, name: str) -> None:
    found = ranks(2, lightning=True).run(optimize_by_hand, {"master_weights": True, **LAYOUTS[name][1]})[0]
    assert_equal(found, by_hand("16-true", replicas=2))


def optimize_by_hand(layout: dict[str, Any]) -> dict[str, Tensor]:
    watch = Watch(torch.float16)
    make_trainer(layout, precision="16-true", callbacks=[watch]).fit(ByHand(), DataLoader(dataset(), BATCH // 2))
    return watch.state


def twice(layout: dict[str, Any]) -> dict[str, Any]:
    """Validate, train, make whole, train again: nothing is rounded in between."""
    module, watch = Net(), Watch(torch.bfloat16)
    make_trainer({"master_weights": True, **layout}, precision="bf16-true").validate(module, DataLoader(dataset(), 8))
    trainer = make_trainer({"master_weights": True, **layout}, precision="bf16-true", callbacks=[watch])
    trainer.fit(module, DataLoader(dataset(), BATCH))
    trainer.strategy.gather_module()
    whole = {name: value.clone() for name, value in module.state_dict().items()}
    return {"first": watch.first, "state": watch.state, "whole": whole, "dtype": module.dtype}


@pytest.mark.distributed
def test_the_module_is_given_back_in_float32(ranks: Pools) -> None:
    for result in ranks(2, lightning=True).run(twice, LAYOUTS["pp2"][1]):
        assert_equal(result["whole"], by_hand("bf16-true", parts=4))
        assert result["dtype"] == torch.float32
        assert not result["first"] or torch.equal(result["first"]["head.weight"], Net().head.weight)


# -- without ranks -----------------------------------------------------------------------------------------------------


def test_a_parameter_is_its_master_while_they_are_open() -> None:
    layer = nn.Linear(4, 3)
    weight, before = layer.weight, layer.weight.detach().clone()
    seen: list[torch.dtype] = []
    weight.register_hook(lambda gradient: seen.append(gradient.dtype))
    masters = MasterWeights(layer)
    layer.bfloat16()
    for _ in range(2):
        layer(torch.ones(2, 4).bfloat16()).sum().backward()
        with masters.opened(), masters.opened():
            assert torch.equal(layer.weight, before)
            assert weight.grad is not None
            assert weight.grad.dtype == torch.float32
            with torch.no_grad():
                weight.add_(2**-12)
                before += 2**-12
        assert layer.weight is weight
        assert weight.dtype == weight.grad.dtype == torch.bfloat16
        assert torch.equal(weight, before.bfloat16())
    assert seen == [torch.bfloat16] * 2
    weight.data[0, 0] = 5.0  # by somebody who sees the half one only
    masters.remove()
    before[0, 0] = 5.0
    assert torch.equal(layer.weight, before)
    assert layer.bias.dtype == torch.float32


def test_frozen_parameters_are_opened_for_checkpoints_alone() -> None:
    layer = nn.Linear(4, 3)
    bias = layer.bias.requires_grad_(False)
    masters = MasterWeights(layer)
    layer.bfloat16()
    masters.open()
    assert (layer.weight.dtype, bias.dtype) == (torch.float32, torch.bfloat16)
    with masters.opened():
        assert {each.dtype for each in layer.parameters()} == {torch.float32}
    assert (layer.weight.dtype, bias.dtype) == (torch.float32, torch.bfloat16)
    masters.close()
    assert {each.dtype for each in layer.parameters()} == {torch.bfloat16}


def test_an_optimizer_may_give_a_parameter_other_memory() -> None:
    layer = nn.Linear(4, 3)
    masters = MasterWeights(layer)
    layer.half()
    with masters.opened():
        layer.weight.data = torch.full((3, 4), 1 + 2**-20)
    assert torch.equal(layer.weight, torch.ones(3, 4).half())
    with masters.opened():
        assert torch.equal(layer.weight, torch.full((3, 4), 1 + 2**-20))


def test_who_steps_an_optimizer_of_torch_by_hand_steps_masters() -> None:
    layer = nn.Linear(4, 3)
    masters = MasterWeights(layer)
    layer.bfloat16()
    with masters.opened():
        optimizer, before = torch.optim.Adam(layer.parameters(), lr=2**-12), layer.weight.detach().clone()
    masters.follow([optimizer])
    for _ in range(2):
        optimizer.zero_grad()
        layer(torch.ones(2, 4).bfloat16()).sum().backward()
        optimizer.step()
        assert {each.dtype for each in layer.parameters()} == {torch.bfloat16}
    assert optimizer.state[layer.weight]["exp_avg"].dtype == torch.float32
    with masters.opened():
        torch.testing.assert_close(layer.weight, before - 2**-11, rtol=0, atol=1e-6)


class OwnHalf(HalfPrecision):
    """A class of the user."""


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "64-true", OwnHalf()])
def test_other_precisions_are_refused(precision: Any) -> None:
    how = {"precision": precision} if isinstance(precision, str) else {"plugins": precision}
    trainer = Trainer(accelerator="cpu", devices=1, strategy=HybridStrategy(master_weights=True), logger=False, **how)
    with pytest.raises(ValueError, match="needs Trainer\\(precision='bf16-true'\\) or '16-true', but"):
        trainer.fit(Net(), DataLoader(dataset(), BATCH))


def test_a_fused_optimizer_is_refused_where_the_loss_is_scaled() -> None:
    plugin = HalfPrecision("16-true")
    scale_half(plugin, "cpu")
    with pytest.raises(ValueError, match="fused=False"):
        check_optimizer(plugin, torch.optim.Adam(nn.Linear(2, 2).parameters(), fused=True))
