"""What `check` does to a module before it compares: values for the meta device, dropout that is found, draws."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_hybrid import Faults
from lightning_hybrid.cli.check import check
from lightning_hybrid.cli.check_training.dropout import set_dropout_to_zero
from lightning_hybrid.cli.check_training.step_watch import StepWatch
from lightning_hybrid.cli.local_ranks import RankError
from lightning_hybrid.cli.main import main
from lightning_hybrid.distributed.modes import FunctionMode
from tests.strategy.test_meta_init import FromMeta
from tests.zoo import basic, frame

PP2: dict[str, Any] = {"pipeline_parallel_size": 2, "num_microbatches": 2}


# -- layers on the meta device -----------------------------------------------------------------------------------------


class Sum(FromMeta):
    """A sum over samples, so each microbatch is tried by itself."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * len(batch[0])


class BuiltOnMeta(basic.Around):
    """Made on the meta device in `__init__`, and changed in `setup`."""

    def build(self) -> None:
        with torch.device("meta"):
            super().build()

    def setup(self, stage: str) -> None:
        if not self.embed.weight.is_meta:  # as under a layout, where it has its values by now
            self.embed.weight.data.mul_(2)


class Table(nn.Module):
    """Cannot set its own parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(basic.WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


class Unsettable(basic.Example):
    def build(self) -> None:
        pass

    def configure_model(self) -> None:
        if not hasattr(self, "body"):
            with torch.device("meta"):
                self.body = nn.Sequential(*(nn.Sequential(basic.block(), Table()) for _ in range(4)))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("module", "layout"),
    [
        (FromMeta, PP2),
        (FromMeta, {"tensor_parallel_size": 2}),
        (BuiltOnMeta, {"data_parallel_size": 2, "zero_stage": 3}),
    ],
)
def test_layers_on_the_meta_device_have_the_same_values(module: type[basic.Example], layout: dict[str, Any]) -> None:
    result = check(module, **layout)
    assert result.equal, str(result)
    assert result.largest.difference < 1e-9
    norms = {each.name: each.expected for each in result.comparisons}
    assert all(norm > 0 for name, norm in norms.items() if name.endswith("weight"))


@pytest.mark.distributed
def test_microbatches_of_a_module_on_the_meta_device() -> None:
    result = check(Sum, num_microbatches=2, faults=Faults(compare_microbatches=False))
    assert "the loss is a sum over samples" in result.reason, str(result)


@pytest.mark.distributed
def test_layers_that_cannot_set_their_values_are_named() -> None:
    with pytest.raises(RankError) as error:
        check(Unsettable, **PP2)
    problem = "Table cannot initialize the parameter 'body.0.1.table', which was created on the meta device"
    assert f"Training in one process: {problem}" in str(error.value)
    assert "define a method `reset_parameters(self)` that sets 'table'" in str(error.value)
    assert "Traceback" not in str(error.value)


@pytest.mark.distributed
def test_the_command_checks_a_model_on_the_meta_device(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(
        "model: {class_path: tests.strategy.test_meta_init.FromMeta}\n"
        "trainer:\n"
        "  devices: 2\n"
        "  strategy:\n"
        "    class_path: lightning_hybrid.HybridStrategy\n"
        "    init_args: {pipeline_parallel_size: 2, num_microbatches: 2}\n"
    )
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])
    with pytest.raises(SystemExit) as exit_:
        main(["check", "--config", str(config)])
    printed = capsys.readouterr()
    assert exit_.value.code == 0, printed
    assert re.search(r"  \d\d weights and buffers ", printed.out)


# -- dropout -----------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Its probability is called as in papers."""

    def __init__(self, dropout: float = 0.3) -> None:
        super().__init__()
        self.p = dropout

    def forward(self, x: Tensor) -> Tensor:
        p = self.p if self.training else 0.0
        tokens = x.unflatten(-1, (-1, 2))
        return F.scaled_dot_product_attention(tokens, tokens, tokens, dropout_p=p).flatten(1)


class ByKeyword(nn.Module):
    def __init__(self, p: float = 0.3) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x, dropout_p=self.p if self.training else 0.0)


class ByPosition(ByKeyword):
    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.p, self.training)


class Inherits(ByPosition):
    pass


class DropPath(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = 0.3


class Power(nn.Module):
    """An exponent, in a class that has dropout, too."""

    def __init__(self, p: float = 0.5) -> None:
        super().__init__()
        self.p = p
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(x.pow(self.p)).norm(p=self.p)


class Named(nn.Module):
    def __init__(self, name: str, value: float) -> None:
        super().__init__()
        setattr(self, name, value)


@pytest.mark.parametrize(
    ("module", "found"),
    [
        (Attention(), ["p"]),
        (ByKeyword(), ["p"]),
        (ByPosition(), ["p"]),
        (Inherits(), ["p"]),
        (DropPath(), ["p"]),
        (nn.Dropout(0.2), ["p"]),
        (nn.MultiheadAttention(4, 2, dropout=0.2), ["dropout"]),
        (Named("dropout_p", 0.2), ["dropout_p"]),
        (Named("attn_drop", 1.0), ["attn_drop"]),
        (Named("drop_after", 1.5), []),  # no probability
        (Named("dropout_keep_prob", 0.9), []),
        (Named("p", 0.5), []),
        (Power(), []),
        (Power(2.0), []),
        (nn.Dropout(0.0), []),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_which_probabilities_are_found(module: nn.Module, found: list[str]) -> None:
    before = dict(vars(module))
    assert set_dropout_to_zero(module) == len(found)
    assert [name for name, value in vars(module).items() if value is not before[name]] == found
    assert all(getattr(module, name) == 0.0 for name in found)


class Attends(frame.Loop):
    """Each layer has an attention, whose probability is ``p``."""

    def build(self) -> None:
        super().build()
        self.blocks = nn.ModuleList(nn.Sequential(basic.block(), Attention()) for _ in range(4))


class Hidden(frame.Loop):
    """Dropout that is not found: nothing says what ``rate`` is."""

    rate = 0.3

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.blocks:
            x = F.dropout(layer(x), self.rate, self.training)  # here
        return self.head(x)


@pytest.mark.distributed
def test_dropout_of_an_attention_is_off() -> None:
    result = check(Attends, **PP2)
    assert result.equal, str(result)
    assert "Dropout probabilities set to 0: 4." in str(result)


@pytest.mark.distributed
def test_what_draws_is_named_and_not_blamed_on_the_layout() -> None:
    result = check(Hidden, **PP2)
    line = next(at for at, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# here"))
    assert f"the step draws random numbers (at tests/cli/test_check_training.py:{line})" in result.reason
    assert (
        "The results therefore cannot be equal, and the comparison does not show whether the layout is correct"
        in result.reason
    )
    assert "`--model.dropout 0`" in result.remedy
    assert "whose name contains `drop`" in result.remedy
    text = str(result)
    assert "with the same random numbers" not in text
    assert not re.search(r"(?i)dropout.* off", text)


@pytest.mark.parametrize(
    ("draw", "draws"),
    [
        (lambda: torch.randn(2), True),
        (lambda: nn.Dropout(0.5)(torch.ones(2)), True),
        (lambda: nn.Dropout(0.0)(torch.ones(2)), False),
        (lambda: torch.ones(2).sum(), False),
    ],
)
def test_draws_are_seen(draw: Any, *, draws: bool) -> None:
    watch = StepWatch()
    with FunctionMode(watch):
        draw()
    assert (watch.draws is not None) == draws
    assert watch.float32 is None


class NumpyNoise(basic.Around):
    """Draws nothing from torch."""

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + np.random.rand())


@pytest.mark.distributed
def test_draws_of_numpy_are_seen() -> None:
    result = check(NumpyNoise, data_parallel_size=2)
    assert "the step draws random numbers (from numpy or `random`)" in result.reason, str(result)


# -- the table ---------------------------------------------------------------------------------------------------------


@pytest.mark.distributed
def test_the_mark_in_the_table_is_explained() -> None:
    lines = str(check(basic.LogsProduct, num_microbatches=2)).splitlines()
    marked = [line for line in lines if line.endswith(" <")]
    assert [line.split()[1:3] for line in marked] == [["log", "square"]] * 2
    assert "<: differs by more than 1e-08" in lines
    assert "<: differs" not in str(check(basic.Plain, num_microbatches=2))
