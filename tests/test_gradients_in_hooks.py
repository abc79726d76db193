"""Norms, clipping and values of parameters in hooks: the numbers of one process, or an error in words."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, get_total_norm
from torch.utils.data import DataLoader, TensorDataset

from tests.daily import daily
from tests.pool import Pools
from tests.training_jobs import Result, assert_same, make_trainer, together, train

pytestmark = [pytest.mark.timeout(300), pytest.mark.distributed]

#: (number of ranks, number of replicas, arguments of the strategy).
LAYOUTS: dict[str, tuple[int, int, dict[str, Any]]] = {
    "pp2": (2, 1, {"pipeline_parallel_size": 2, "num_microbatches": 2}),
    "tp2": (2, 1, {"tensor_parallel_size": 2}),
    "zero1": (2, 2, {"zero_stage": 1}),
    "zero2": (2, 2, {"zero_stage": 2}),
    "zero3": (2, 2, {"zero_stage": 3}),
    "pp2 x zero2": (4, 2, {"pipeline_parallel_size": 2, "num_microbatches": 2, "zero_stage": 2}),
}
DAILY = daily(LAYOUTS, "tp2", "zero3", "pp2 x zero2")
WIDTH, SAMPLES, BATCH = 8, 24, 8


class Encoder(LightningModule):
    """Layers that tensor parallelism divides, between an embedding and a head, in float64."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(3)
            self.embed = nn.Linear(5, WIDTH)
            layer: dict[str, Any] = {
                "d_model": WIDTH,
                "nhead": 2,
                "dim_feedforward": 12,
                "dropout": 0.0,
                "batch_first": True,
            }
            self.body = nn.Sequential(*(nn.TransformerEncoderLayer(**layer) for _ in range(4)))
            self.head = nn.Linear(WIDTH, 3)
        self.embed.bias.requires_grad_(False)
        self.double()
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(self.embed(x).unsqueeze(1))[:, 0]), y)

    def configure_optimizers(self) -> Any:
        groups = [{"params": [*self.embed.parameters(), *self.body.parameters()]}, {"params": self.head.parameters()}]
        return torch.optim.AdamW(groups, lr=1e-2)


def trained(
    module: Callable[[], Encoder], layout: Mapping[str, Any] | None, replicas: int = 1
) -> tuple[Result, list[Any]]:
    """Train; return the result and the values that the hooks of the module received."""
    random = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, 5, generator=random, dtype=torch.float64)
    data = DataLoader(TensorDataset(x, torch.randint(3, (SAMPLES,), generator=random)), BATCH // replicas)
    made = module()
    return train(made, layout, data, log_every_n_steps=1), made.seen


def check(ranks: Pools, module: type[Encoder], name: str) -> None:
    """A module trains under a layout as in one process, and its hooks see on every rank what they see there."""
    size, replicas, layout = LAYOUTS[name]
    expected, expected_seen = trained(module, None)
    results = ranks(size, lightning=True).run(trained, module, layout, replicas)
    for result, seen in results:
        assert_same(seen, expected_seen)
        assert_same(result.metrics, expected.metrics)
    assert_same(together([result.weights for result, _ in results]), expected.weights)


# -- functions of torch and Lightning ----------------------------------------------------------------------------------


class Norms(Encoder):
    """Asks for norms with every function that people use, of several sets of parameters."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        optimized = [p for group in optimizer.param_groups for p in group["params"]]
        for parameters in (list(self.parameters()), list(self.head.parameters()), optimized):
            gradients = [p.grad for p in parameters if p.grad is not None]
            for norm_type in (2.0, 1.0, float("inf")):
                self.seen.append(get_total_norm(gradients, norm_type).item())
        self.seen.append(get_total_norm(self.embed.weight.grad).item())  # type: ignore[arg-type]
        self.log_dict(grad_norm(self, 2))
        self.log_dict({f"body {name}": value for name, value in grad_norm(self.body, "inf").items()})
        self.seen.append(get_total_norm([torch.ones(4)]).item())  # not of the module


class Clips(Encoder):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.seen.append(clip_grad_norm_(self.parameters(), 0.5).item())
        self.seen.append(clip_grad_norm_(self.head.parameters(), 0.1, float("inf")).item())
        clip_grad_value_(self.parameters(), 0.02)
        self.seen.append(
            torch.nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 0.1).item()
        )


@pytest.mark.parametrize("layout", DAILY)
@pytest.mark.parametrize("module", [Norms, Clips])
def test_functions_over_gradients_mean_the_whole_model(ranks: Pools, module: type[Encoder], layout: str) -> None:
    check(ranks, module, layout)


# -- whole parameters --------------------------------------------------------------------------------------------------


class Reads(Encoder):
    """Reads whole parameters and gradients with whatever code."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with whole_parameters(self, gradients=True):
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            self.seen += [float(p.grad.norm()) for p in self.parameters() if p.grad is not None]
            self.seen += [float(get_total_norm(gradients)), *map(float, grad_norm(self, 2).values())]
            assert all(type(p) is nn.Parameter for p in self.parameters())
        with whole_parameters(self, self.head, gradients=True):
            assert self.head.weight.grad is not None
            self.seen.append(float(self.head.weight.norm() / self.head.weight.grad.norm()))

    def on_train_batch_end(self, *args: Any) -> None:
        with whole_parameters(self):
            self.seen += [float(p.detach().cpu().numpy().sum()) for p in self.parameters()]
            self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())


class Writes(Encoder):
    """Writes whole parameters and gradients."""

    def on_train_start(self) -> None:
        torch.manual_seed(9)
        with whole_parameters(self, self.body, writes=True):
            for layer in self.body:
                nn.init.orthogonal_(layer.self_attn.in_proj_weight)  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with whole_parameters(self, gradients=True, writes=True):
            for p in self.parameters():
                if p.grad is not None:
                    p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 1e-6))
            self.head.bias.grad = None

    def on_train_batch_end(self, *args: Any) -> None:
        with whole_parameters(self, self.embed, writes=True):
            self.embed.weight.data = self.embed.weight.data.clamp(-0.3, 0.3)


def whole_parameters(module: Encoder, part: nn.Module | None = None, **arguments: Any) -> Any:
    """`full_parameters` of the strategy; of one process, nothing."""
    make: Callable[..., Any] = getattr(module.trainer.strategy, "full_parameters", lambda *_, **__: nullcontext())
    return make(part, **arguments)


@pytest.mark.parametrize("layout", DAILY)
@pytest.mark.parametrize("module", [Reads, Writes])
def test_parameters_are_whole_for_a_while(ranks: Pools, module: type[Encoder], layout: str) -> None:
    check(ranks, module, layout)


# -- numbers of tensors that ranks share -------------------------------------------------------------------------------


class ByHand(Encoder):
    """Computes with parameters and gradients one by one, and reads numbers in every way."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        self.seen += [float(gradient.norm()) for gradient in gradients]
        self.seen.append(torch.stack([gradient.norm() for gradient in gradients]).norm().item())
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 1e-6))

    def on_train_batch_end(self, *args: Any) -> None:
        self.seen.append(sum(float(p.detach().norm()) for p in self.parameters()))
        self.seen.append(self.body[1].linear1.weight.abs().max().item())  # type: ignore[union-attr, operator]


class Scales(Encoder):
    """Scales each gradient by its own norm, which needs no value of another stage."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.1 * p.norm() / (p.grad.norm() + 1e-6))


@pytest.mark.parametrize("layout", daily([name for name in LAYOUTS if "pp" not in name], "tp2", "zero3"))
def test_numbers_by_hand_are_of_all_ranks(ranks: Pools, layout: str) -> None:
    check(ranks, ByHand, layout)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if "pp" in name])
def test_each_gradient_may_be_scaled_on_its_stage(ranks: Pools, layout: str) -> None:
    check(ranks, Scales, layout)


# -- refusals ----------------------------------------------------------------------------------------------------------


class Refused(Encoder):
    """Does what cannot be the number of one process."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        if self.what == "sum":
            float(sum(gradient.norm() ** 2 for gradient in gradients))
        if self.what == "stack":
            torch.stack([gradient.norm() for gradient in gradients])
        if self.what == "list":
            torch.tensor([gradient.norm() for gradient in gradients])
        if self.what == "copies":
            get_total_norm([gradient.detach() for gradient in gradients])
        if self.what == "mixed":
            get_total_norm([*gradients, torch.ones(2)])
        if self.what == "set":
            for p in self.parameters():
                p.grad = torch.ones(p.shape, dtype=p.dtype)
        if self.what == "exponent":
            get_total_norm(gradients, 0.0)

    def on_train_batch_end(self, *args: Any) -> None:
        strategy: Any = self.trainer.strategy
        if self.what == "histogram":
            for p in self.parameters():
                p.detach().cpu().numpy()
        if self.what == "weights":
            self.log("norm", torch.stack([p.detach().norm() for p in self.parameters()]).norm())
        if self.what == "foreign":
            strategy.full_parameters(nn.Linear(2, 2)).__enter__()
        if self.what == "call":
            with strategy.full_parameters():
                self.head(torch.ones(1, WIDTH, dtype=torch.float64))
        if self.what == "replace":
            with strategy.full_parameters(self.head, writes=True):
                self.head.weight = nn.Parameter(torch.ones(3, WIDTH))


def refused(what: str, layout: Mapping[str, Any], replicas: int) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        trained(lambda: Refused(what), layout, replicas)
    return str(caught.value)


STAGES = "`with self.trainer.strategy.full_parameters():`"


@pytest.mark.parametrize(
    ("what", "layout", "words"),
    [
        *((what, "pp2", STAGES) for what in ("sum", "stack", "list", "histogram", "weights")),
        *(("histogram", layout, STAGES) for layout in LAYOUTS if layout != "pp2"),
        ("copies", "pp2", "Pass only the unmodified `p.grad` of the module's parameters"),
        ("mixed", "tp2", "Pass only the unmodified `p.grad` of the module's parameters"),
        ("set", "pp2", "Change gradients in place"),
        ("exponent", "zero2", "must be a positive number or inf"),
        ("foreign", "zero1", "'weight' does not belong to the LightningModule"),
        ("call", "tp2", "Call layers outside"),
        ("call", "zero3", "Call layers outside"),
        ("replace", "pp2", "Change its values in place"),
    ],
)
def test_other_numbers_are_refused_in_words(ranks: Pools, what: str, layout: str, words: str) -> None:
    size, replicas, arguments = LAYOUTS[layout]
    for text in ranks(size, lightning=True).run(refused, what, arguments, replicas):
        assert words in text


# -- master weights ----------------------------------------------------------------------------------------------------


class Masters(Encoder):
    """Halves the head's weights, in their masters in float32."""

    def on_train_start(self) -> None:
        with whole_parameters(self, self.head, writes=True):
            self.seen += [self.head.weight.dtype, self.head.weight.detach().clone()]
            self.head.weight.detach().mul_(1 / 3)
        with whole_parameters(self):
            self.seen += [self.head.weight.detach().clone(), {p.dtype for p in self.parameters()}]

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        with whole_parameters(self, gradients=True):
            assert self.embed.weight.grad is not None
            assert self.embed.weight.grad.dtype == torch.float32


def fitted_masters(layout: Mapping[str, Any]) -> list[Any]:
    module = Masters().float()
    data = DataLoader(TensorDataset(torch.randn(SAMPLES, 5).bfloat16(), torch.randint(3, (SAMPLES,))), 4)
    make_trainer({**layout, "master_weights": True}, precision="bf16-true", max_steps=1).fit(module, data)
    return module.seen


@pytest.mark.parametrize("layout", ["pp2", "zero2"])
def test_whole_parameters_are_the_masters(ranks: Pools, layout: str) -> None:
    size, _, arguments = LAYOUTS[layout]
    weight = Encoder().float().head.weight.detach()
    for seen in ranks(size, lightning=True).run(fitted_masters, arguments):
        assert_same(seen, [torch.float32, weight, weight * (1 / 3), {torch.float32}], rtol=1e-7)
