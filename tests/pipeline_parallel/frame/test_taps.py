"""Hooks inside layers that let tensors out of them: code around the layers has these on every stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.memory.activation_checkpoint.checkpoint import ActivationCheckpointing
from tests.pipeline_parallel.frame.stages import check, cut_of, drawing, seed

WIDTH = 6


@pytest.fixture(autouse=True)
def _double() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(7)
    yield
    torch.set_default_dtype(before)


class Routed(nn.Module):
    """Returns rows that experts have changed, and not the scores by which these were chosen."""

    def __init__(self, *, looks: bool = False) -> None:
        super().__init__()
        self.looks = looks
        self.gate = nn.Linear(WIDTH, 2)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if not self.looks:
            return x + sum(scores.softmax(-1)[:, [i]] * expert(x) for i, expert in enumerate(self.experts))
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(scores.argmax(-1) == number)
            out.index_add_(0, rows, expert(x[rows]) * scores[rows, number, None].sigmoid())
        return x + out


class Model(nn.Module):
    """Adds a loss of what hooks on the gates have collected."""

    def __init__(self, collect: Callable[[Tensor], Tensor] = lambda scores: scores, **layers: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Routed(**layers) for _ in range(4))
        self.scores: list[Tensor] = []
        for block in self.blocks:
            block.gate.register_forward_hook(lambda module, args, output: self.scores.append(collect(output)))

    def forward(self, x: Tensor) -> Tensor:
        self.scores.clear()
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        balance = torch.stack([scores.softmax(-1).mean(0).square().sum() for scores in self.scores])
        self.scores.clear()
        return x.pow(2).mean() + balance.sum()


def inputs() -> Tensor:
    return torch.randn(4, WIDTH)


@pytest.mark.parametrize("num_stages", [2, 3, 4])
@pytest.mark.parametrize("looks", [False, True], ids=["plain", "looks at numbers"])
def test_what_hooks_inside_layers_collect_is_there_on_the_last_stage(num_stages: int, looks: bool) -> None:
    model = Model(looks=looks)
    plan = check(model, model, (inputs(),), num_stages).plan
    assert [call.taps is not None for call in plan.graph.calls if call.unit is not None] == [True] * 4


def test_what_hooks_make_of_it_is_there_too() -> None:
    model = Model(collect=lambda scores: scores * 2)
    check(model, model, (inputs(),), 2)


def test_hooks_may_take_keywords_and_read_what_modules_are_given() -> None:
    model = Model()
    seen: list[Tensor] = []

    def hook(module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        seen.append(args[0])

    def step(x: Tensor) -> Tensor:
        seen.clear()
        loss = model(x) + seen[1].mean()
        seen.clear()
        return loss

    for block in model.blocks:
        block.experts[1].register_forward_hook(hook, with_kwargs=True)
    check(model, step, (inputs(),), 2)


def test_layers_may_be_recomputed() -> None:
    model = Model()
    with ActivationCheckpointing(model.blocks, torch.device("cpu"))():
        check(model, model, (inputs(),), 2)


def test_hooks_that_change_outputs_stay_where_they_are() -> None:
    model = Model()
    for block in model.blocks:
        block.gate.register_forward_hook(lambda module, args, output: output * 3)
        block.experts[0].register_forward_hook(lambda module, args, output: output.tanh())
    check(model, model, (inputs(),), 2)


def test_hooks_that_let_nothing_out_are_called_inside_layers() -> None:
    model = Model()
    lengths: list[int] = []
    for block in model.blocks:
        block.gate._forward_hooks.clear()
        block.gate.register_forward_hook(lambda module, args, output: lengths.append(len(output)))

    def step(x: Tensor) -> Tensor:
        for block in model.blocks:
            x = block(x)
        return x.pow(2).mean()

    plan = check(model, step, (inputs(),), 2).plan
    assert all(call.taps is None for call in plan.graph.calls)
    assert lengths == [4] * 12  # of one process, of the step that is followed, and of the stages


def test_a_tensor_that_is_changed_after_a_hook_saw_it_is_refused() -> None:
    class Changing(Routed):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.gate(x).mul_(2).sum(-1, keepdim=True)

    model = Model()
    for block in model.blocks:
        block.__class__ = Changing
    with (
        (cut := cut_of(model, 2))(),
        pytest.raises(WrongUseError, match="a layer of the body computed but did not return"),
    ):
        cut.find_plan(0, model, (inputs(),), seed)


def test_a_hook_that_begins_to_change_outputs_is_refused() -> None:
    model, x = Model(), inputs()
    with (cut := cut_of(model, 2))():
        plan = cut.find_plan(0, model, (x,), seed)
        hooks = model.blocks[0].gate._forward_hooks
        hooks[next(iter(hooks))] = lambda module, args, output: output
        with pytest.raises(WrongUseError, match="changes the output of 'gate' in Routed"):
            cut.run(plan, 0, model, (x,), None, seed=seed, random=drawing)


def test_hooks_that_are_called_more_often_than_before_are_refused() -> None:
    class Twice(Routed):
        def forward(self, x: Tensor) -> Tensor:
            if is_late:
                self.gate(x)
            return super().forward(x)

    is_late = False
    model, x = Model(), inputs()
    for block in model.blocks:
        block.__class__ = Twice
    with (cut := cut_of(model, 2))():
        plan = cut.find_plan(0, model, (x,), seed)
        is_late = True
        with pytest.raises(WrongUseError, match=r"^Forward hooks inside 'blocks.0' .* received different values"):
            cut.run(plan, 0, model, (x,), None, seed=seed, random=drawing)


class Normed(nn.Module):
    """Ends with a module whose output is that of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("names", [("norm",), ("linear", "norm")], ids=str)
def test_a_tensor_that_a_hook_sees_and_the_layer_returns_is_one(names: tuple[str, ...]) -> None:
    model = nn.ModuleDict({"embed": nn.Linear(WIDTH, WIDTH), "blocks": nn.ModuleList(Normed() for _ in range(4))})
    seen: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        seen.clear()
        x = model["embed"](x)
        for block in model["blocks"]:  # type: ignore[union-attr]
            x = block(x)
        return x.pow(2).mean() + torch.stack([each.tanh().mean() for each in seen]).sum()

    for block in model["blocks"]:  # type: ignore[union-attr]
        for name in names:
            block.get_submodule(name).register_forward_hook(lambda module, args, output: seen.append(output))
    check(model, step, (inputs(),), 2)


def test_hooks_on_a_compiled_layer_are_code_around_it() -> None:
    model = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    seen: list[Tensor] = []

    def step(x: Tensor) -> Tensor:
        seen.clear()
        for layer in model:
            x = layer(x).tanh()
        return x.pow(2).mean() + torch.stack([each.mean() for each in seen]).sum()

    for layer in model:
        layer.compile(backend="eager")
        layer.register_forward_hook(lambda module, args, output: seen.append(output))
    check(model, step, (inputs(),), 2)


def test_setters_of_other_attributes_write_no_numbers() -> None:
    blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
    model = nn.ModuleDict({"blocks": blocks, "head": nn.Linear(WIDTH, WIDTH)})

    def step(x: Tensor) -> Tensor:
        model["head"].weight.requires_grad = True
        for block in model["blocks"]:  # type: ignore[union-attr]
            x = block(x).tanh()
        return model["head"](x).pow(2).mean()

    check(model, step, (inputs(),), 2)
