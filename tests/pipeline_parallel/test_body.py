from __future__ import annotations

import copy
from collections import OrderedDict
from functools import reduce
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.pipeline_parallel.body import BodyCallError, BodyCut, body_call_text, find_body


class Model(nn.Module):
    def __init__(self, **children: nn.Module) -> None:
        super().__init__()
        for name, child in children.items():
            self.add_module(name, child)


def stack(*widths: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(a, b) for a, b in pairwise(widths)])


class Own(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + x


class Encoder(nn.Sequential):
    """A Sequential with a constructor of its own."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__(*[nn.Linear(width, width) for _ in range(depth)])


# -- finding the body --------------------------------------------------------------------------------------------------


def chain(module: nn.Module, wanted: str | None = None, num_stages: int = 2) -> tuple[str, nn.Module]:
    body = find_body(module, wanted, num_stages)
    assert body.chain is not None
    assert list(body.layers) == list(body.chain)
    return body.name, body.chain


def units(module: nn.Module, wanted: Any = None, num_stages: int = 2) -> list[str]:
    body = find_body(module, wanted, num_stages)
    assert body.chain is None
    assert [module.get_submodule(name) for name in body.names] == list(body.layers)
    return list(body.names)


def test_the_body_is_the_outermost_sequential_with_most_parameters() -> None:
    inner = stack(8, 8, 8)
    outer = nn.Sequential(inner, nn.Linear(8, 2))
    module = Model(head=nn.Linear(2, 2), small=stack(2, 2), net=Model(trunk=outer))
    assert chain(module) == ("net.trunk", outer)


def test_more_than_half_means_more() -> None:
    assert units(Model(a=stack(8, 8), b=stack(8, 8))) == ["a.0", "b.0"]


def test_tied_parameters_count_once() -> None:
    body, head = stack(8, 8, 8), nn.Linear(8, 8)
    head.weight = body[0].weight
    assert chain(Model(head=head, body=body))[0] == "body"


def test_a_body_can_be_named() -> None:
    module = Model(big=stack(8, 8), small=stack(2, 2))
    assert chain(module, "small") == ("small", module.small)


def test_a_sequential_with_its_own_constructor_is_a_body() -> None:
    module = Model(encoder=Encoder(4, 3))
    assert chain(module) == ("encoder", module.encoder)


def test_a_module_that_is_a_sequential_itself() -> None:
    module = stack(4, 4)
    assert chain(module) == ("", module)
    assert units(Own(*stack(4, 4, 4))) == ["0", "1"]


def test_candidates_are_listed_the_largest_five() -> None:
    lists = {f"list{n}": nn.ModuleList([nn.Linear(n, n)]) for n in range(1, 8)}
    module = Model(**lists, head=nn.Linear(100, 100))
    with pytest.raises(ValueError, match=r"part of the 10,268 param.*'list7' \(1 layers, 1%.*'list3'") as error:
        find_body(module, None, 2)
    assert "'list2'" not in str(error.value)
    assert "HybridStrategy(body='...')" in str(error.value)


def test_no_candidates() -> None:
    with pytest.raises(
        ValueError, match=r"The module has no list of layers\. .* store the layers .*body=\['first', 'second'"
    ):
        find_body(Model(head=nn.Linear(2, 2)), None, 2)


def test_a_name_that_leads_nowhere() -> None:
    with pytest.raises(ValueError, match=r"body='blocks' is not a submodule of Model\. Candidates: 'body'"):
        find_body(Model(body=stack(2, 2)), "blocks", 2)


def test_a_name_of_something_else() -> None:
    with pytest.raises(TypeError, match=r"body='head' is a Linear, not a list of layers"):
        find_body(Model(body=stack(2, 2), head=nn.Linear(2, 2)), "head", 2)


def test_placeholders_count_as_parameters() -> None:
    module = Model(head=nn.Linear(2, 2), body=nn.Sequential(OrderedDict(a=nn.Linear(8, 8, device="meta"))))
    assert chain(module)[0] == "body"


# -- finding units -----------------------------------------------------------------------------------------------------


def test_a_sequential_with_a_forward_of_its_own_has_units() -> None:
    module = Model(body=Own(*stack(2, 2, 2)))
    assert units(module) == units(module, "body") == ["body.0", "body.1"]


def test_lists_and_dictionaries_have_units() -> None:
    blocks = nn.ModuleList(stack(4, 4, 4, 4))
    towers = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("left", "right")})
    module = Model(embed=nn.Linear(1, 1), net=Model(blocks=blocks), towers=towers)
    assert units(module) == ["net.blocks.0", "net.blocks.1", "net.blocks.2", "towers.left", "towers.right"]
    assert units(module, "towers") == ["towers.left", "towers.right"]


def test_lists_in_a_list_are_no_layers_as_nobody_can_call_them() -> None:
    class Called(nn.ModuleDict):
        def forward(self, x: Tensor) -> Tensor:
            return self["a"](x)

    pairs = [nn.ModuleList([nn.Linear(4, 4), stack(4, 4, 4)]) for _ in range(2)]
    module = Model(layers=nn.ModuleList([*pairs, Called({"a": nn.Linear(4, 4)})]))
    expected = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1", "layers.2"]
    assert units(module) == units(module, ["layers"]) == expected
    assert units(module, ["layers.0"]) == expected[:2]


def test_numbered_neighbours_belong_together() -> None:
    """Of `layer1`, `layer2`, ... one alone would be a fragment, however large it is."""
    module = Model(stem=nn.Linear(2, 2), layer1=stack(2, 2), layer2=stack(2, 4), layer3=stack(4, 20))
    assert units(module) == ["layer1.0", "layer2.0", "layer3.0"]


def test_units_that_are_too_large_are_opened() -> None:
    stages = [Model(blocks=nn.ModuleList(stack(8, 8, 8)), down=nn.Linear(8, 8)) for _ in range(2)]
    module = Model(stages=nn.ModuleList(stages))
    assert units(module, num_stages=2) == ["stages.0", "stages.1"]
    assert units(module, num_stages=4) == [f"stages.{i}.blocks.{j}" for i in range(2) for j in range(2)]


def test_a_layer_that_stands_twice_is_one_unit() -> None:
    layer = nn.Linear(4, 4)
    assert units(Model(blocks=nn.ModuleList([layer, nn.Linear(4, 4), layer]))) == ["blocks.0", "blocks.1"]


def test_units_can_be_named() -> None:
    module = Model(encoder=nn.ModuleList(stack(2, 2, 2)), middle=nn.Linear(2, 2), decoder=stack(2, 2, 2))
    assert units(module, ["decoder", "middle", "encoder.1"]) == ["decoder.0", "decoder.1", "middle", "encoder.1"]
    assert units(module, "*coder") == ["encoder.0", "encoder.1", "decoder.0", "decoder.1"]
    assert units(module, ["encoder.*"]) == ["encoder.0", "encoder.1"]


def test_a_frozen_copy_in_a_named_list_lies_beside_its_original() -> None:
    module = Model(online=stack(2, 2, 2))
    module.target = copy.deepcopy(module.online).requires_grad_(False)
    assert units(module, ["online", "target"]) == ["online.0", "target.0", "online.1", "target.1"]
    assert units(module, ["online.*", "target.*"]) == ["online.0", "online.1", "target.0", "target.1"]


def test_names_of_units_that_cannot_be_meant() -> None:
    module = Model(net=Model(blocks=nn.ModuleList(stack(2, 2, 2))))
    with pytest.raises(ValueError, match=r"body=\['blocks'\]: 'blocks' does not match a submodule of Model"):
        find_body(module, ["blocks"], 2)
    with pytest.raises(ValueError, match=r"both 'net' and its submodule 'net.blocks.0'"):
        find_body(module, ["net", "net.blocks.0"], 2)


# -- cutting the step --------------------------------------------------------------------------------------------------


def until_body(cut: BodyCut, step: Any, arguments: tuple[Any, ...], *layers: Any) -> Any:
    return cut.run(step, arguments, lambda x: run(layers, x), unwinds=True)


def around_body(cut: BodyCut, step: Any, arguments: tuple[Any, ...], inputs: Any = None, *layers: Any) -> Any:
    return cut.run(step, arguments, lambda x: run(layers, x), inputs, unwinds=False)


def run(layers: tuple[Any, ...], x: Any) -> Any:
    return reduce(lambda value, layer: layer(value), layers, x)


class Steps:
    """Code before the body, the body, and code after it that also uses what was before (a residual)."""

    def __init__(self) -> None:
        self.body = stack(3, 3, 3, 3)
        self.ran: list[str] = []
        self.cut = BodyCut("body", self.body)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        self.ran.append("before")
        x = batch * 2 + batch_idx
        y = self.body(x)
        self.ran.append("after")
        return {"loss": (x + y).square().sum()}

    def layers(self, start: int, stop: int, x: Tensor) -> Tensor:
        for layer in list(self.body)[start:stop]:
            x = layer(x)
        return x


def test_the_stages_of_a_cut_step_make_the_whole_step() -> None:
    steps, batch = Steps(), torch.rand(2, 3)
    expected = steps.training_step(batch, 1)["loss"]
    steps.ran.clear()
    with steps.cut():
        first = until_body(steps.cut, steps.training_step, (batch, 1), steps.body[0])
        middle = steps.layers(1, 2, first)
        value = around_body(steps.cut, steps.training_step, (batch, 1), middle, steps.body[2])
    assert torch.equal(value["loss"], expected)
    assert steps.ran == ["before", "before", "after"]


def test_the_body_is_itself_again_after_the_step() -> None:
    steps = Steps()
    x = torch.rand(2, 3)
    expected = steps.body(x)

    def broken() -> None:
        with steps.cut():
            assert "forward" in vars(steps.body)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert "forward" not in vars(steps.body)
    assert torch.equal(steps.body(x), expected)


def test_hooks_of_the_body_run() -> None:
    steps = Steps()
    seen = []
    steps.body.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape))
    with steps.cut():
        around_body(steps.cut, steps.training_step, (torch.rand(2, 3), 0), torch.rand(2, 3))
    assert seen == [(2, 3)]


def test_leaving_the_step_is_no_exception_to_the_user() -> None:
    steps, seen = Steps(), []

    def careful(batch: Tensor) -> Any:
        try:
            return steps.body(batch)
        except Exception as error:
            seen.append(error)
        finally:
            seen.append("finally")

    with steps.cut():
        assert until_body(steps.cut, careful, (torch.ones(1, 3),), lambda x: x + 1).tolist() == [[2, 2, 2]]
    assert seen == ["finally"]


def test_contexts_of_the_step_are_left_before_the_next_one() -> None:
    steps = Steps()

    def without_gradients(batch: Tensor) -> Any:
        with torch.no_grad():
            return steps.body(batch)

    with steps.cut():
        first = until_body(steps.cut, without_gradients, (torch.ones(1, 3),), steps.body[0])
    assert not first.requires_grad  # inside the user's context
    assert torch.is_grad_enabled()


def test_an_error_of_the_step_is_the_users() -> None:
    steps = Steps()

    def broken(batch: Tensor) -> Any:
        raise KeyError("mine")

    for run in (until_body, around_body):
        with pytest.raises(KeyError, match="mine"), steps.cut():
            run(steps.cut, broken, (torch.ones(1, 3),))


def never(batch: Tensor) -> Any:
    return batch.sum()


def test_a_step_that_does_not_call_the_body() -> None:
    steps = Steps()
    for run in (until_body, around_body):
        with pytest.raises(BodyCallError, match=r"`never` did not call the body 'body'\. .* exactly once"), steps.cut():
            run(steps.cut, never, (torch.ones(1, 3),))


def test_a_step_that_calls_the_body_twice() -> None:
    steps = Steps()

    def twice(batch: Tensor) -> Any:
        return steps.body(batch) + steps.body(batch)

    with pytest.raises(BodyCallError, match="`twice` called the body 'body' 2 times"), steps.cut():
        around_body(steps.cut, twice, (torch.ones(1, 3),), torch.ones(1, 3))


def test_one_error_does_not_spoil_the_next_step() -> None:
    steps = Steps()
    with steps.cut():
        with pytest.raises(BodyCallError):
            around_body(steps.cut, never, (torch.ones(1, 3),))
        value = around_body(steps.cut, steps.training_step, (torch.zeros(1, 3), 0), torch.ones(1, 3))
    assert value["loss"] == 3


@pytest.mark.parametrize(
    ("calls", "words"), [(0, "did not call the body 'net.body'"), (3, "called the body 'net.body' 3 times")]
)
def test_the_text_says_what_to_do(calls: int, words: str) -> None:
    text = body_call_text("net.body", ["net.body"], "training_step", calls)
    assert f"`training_step` {words}." in text
    assert "`x = self.net.body(x)`" in text


class Pair(nn.Module):
    """A student with a head of its own, and its teacher."""

    def __init__(self, *, frozen: bool = True) -> None:
        super().__init__()
        self.student = nn.ModuleDict(
            {"blocks": nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), "out": nn.Linear(8, 2)}
        )
        self.predictor = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.teacher = copy.deepcopy(self.student)
        self.teacher.requires_grad_(not frozen)


def test_a_frozen_copy_stands_beside_its_original() -> None:
    body = find_body(Pair(), None, 2)
    pairs = [f"{part}.blocks.{index}" for index in range(3) for part in ("student", "teacher")]
    assert [name for name in body.names if "blocks" in name] == pairs
    assert set(body.rows) == {1, 2}
    assert sum(body.rows) == len(body.names)


@pytest.mark.parametrize("frozen", ["student.blocks.0", "student"])
def test_layers_that_are_frozen_by_themselves_stay_in_order(frozen: str) -> None:
    """Finetuning freezes a part of a stack; and two stacks that both train are two stacks."""
    module = Pair(frozen=False)
    del module.teacher
    module.get_submodule(frozen).requires_grad_(False)
    body = find_body(module, None, 2)
    assert set(body.rows) == {1}
    assert [name for name in body.names if "blocks" in name] == [f"student.blocks.{index}" for index in range(3)]
    assert set(find_body(Pair(frozen=False), None, 2).rows) == {1}
