from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_hybrid.distributed.pytree import flatten, unflatten
from lightning_hybrid.pipeline_parallel.stage import Stage

LARGE = 5000
"""More elements than a stage would rather copy than pass through a function."""


def forward(stage: Stage, compute: Any, microbatch: int, message: Any) -> Any:
    return stage.leave(microbatch, compute(stage.index, microbatch, stage.enter(microbatch, message)))


def forward_loss(stage: Stage, compute: Any, microbatch: int, message: Any) -> None:
    stage.leave_with_loss(microbatch, compute(stage.index, microbatch, stage.enter(microbatch, message)))


def evaluate(stage: Stage, compute: Any, microbatch: int, message: Any) -> Any:
    return compute(stage.index, microbatch, stage.inputs(message))


def leaf(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("entry", ["private", "public"])
@pytest.mark.parametrize("size", [4, LARGE])
def test_gradients_of_inputs_and_parameters(size: int, entry: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if entry == "public":
        monkeypatch.setattr("lightning_hybrid.pipeline_parallel.stage._RUN_BACKWARD", None)
    layer, stage = nn.Linear(3, 2).double(), Stage(1)
    x, gradient = leaf(size, 3), torch.randn(size, 2, dtype=torch.float64)
    (output,), _ = forward(stage, lambda s, i, inputs: layer(inputs), 0, flatten(x))
    assert len(stage) == 1
    (ours,) = stage.backward(0, [gradient])
    assert len(stage) == 0
    parameters = [parameter.grad for parameter in layer.parameters()]
    expected = torch.autograd.grad(layer(x), [x, *layer.parameters()], gradient)
    for mine, theirs in zip([ours, *parameters], expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=0)
    assert x.grad is None, "the sender's tensor is not touched"
    torch.testing.assert_close(output, layer(x))


def test_layers_get_the_tree_that_was_sent() -> None:
    stage = Stage(5)
    assert stage.enter(3, None) is None
    tree = {"x": torch.ones(2), "nothing": None, "plain": (1, "text", True)}
    assert stage.enter(4, flatten(tree)) == tree
    leaves, spec = stage.leave(4, tree)
    assert unflatten(leaves, spec) == tree


@pytest.mark.parametrize("size", [4, LARGE])
def test_first_layer_may_work_in_place(size: int) -> None:
    stage, x = Stage(1), leaf(size)
    before = x.detach().clone()
    forward(stage, lambda s, i, inputs: nn.functional.relu_(inputs.mul_(2)), 0, flatten(x))
    (gradient,) = stage.backward(0, [torch.ones(size, dtype=torch.float64)])
    torch.testing.assert_close(gradient, 2 * (before > 0).double())


@pytest.mark.parametrize("size", [3, LARGE])
def test_tree_with_and_without_gradients(size: int) -> None:
    stage = Stage(1)
    mask = torch.arange(size) % 2 == 0
    tree = {"x": leaf(size), "frozen": torch.randn(size), "mask": mask, "unused": leaf(size), "n": 2}
    order = list(tree)
    weight = leaf(size)

    def compute(s: int, i: int, inputs: dict[str, Any]) -> dict[str, Any]:
        assert [name for name in order if getattr(inputs[name], "requires_grad", False)] == ["x", "unused"]
        x = inputs["x"]
        return {"y": x * weight * inputs["n"], "mask": inputs["mask"], "dropped": x + 1, "none": None}

    leaves, _ = forward(stage, compute, 0, flatten(tree))
    assert [getattr(leaf, "requires_grad", None) for leaf in leaves] == [True, False, True, None]
    gradients = stage.backward(0, [torch.ones(size, dtype=torch.float64), None, None, None])
    assert [gradient is not None for gradient in gradients] == [True, False, False, False, False]
    torch.testing.assert_close(gradients[0], 2 * weight.detach())


@pytest.mark.parametrize("size", [3, LARGE])
def test_output_twice_and_output_that_is_an_input_or_a_parameter(size: int) -> None:
    stage, x = Stage(1), leaf(size)
    weight = nn.Parameter(torch.ones(size, dtype=torch.float64))

    def compute(s: int, i: int, inputs: Tensor) -> list[Tensor]:
        y = inputs * weight
        return [y, y, inputs, weight]

    forward(stage, compute, 0, flatten(x))
    one = torch.ones(size, dtype=torch.float64)
    (gradient,) = stage.backward(0, [one, 2 * one, 3 * one, 4 * one])
    torch.testing.assert_close(gradient, 6 * one)
    torch.testing.assert_close(weight.grad, 3 * x.detach() + 4)


def test_loss_begins_backward() -> None:
    stage, x = Stage(1), leaf(3)
    forward_loss(stage, lambda s, i, inputs: inputs.pow(2).sum(), 0, flatten(x))
    torch.testing.assert_close(stage.backward(0, None)[0], 2 * x.detach())


@pytest.mark.parametrize("loss", [torch.tensor(1.0), 1.0, None])
def test_loss_without_graph_is_no_error(loss: Any) -> None:
    stage = Stage(1)
    forward_loss(stage, lambda s, i, inputs: loss, 0, flatten([torch.ones(2), leaf(2)]))
    assert stage.backward(0, None) == [None, None]


def test_outputs_without_graph_need_no_backward() -> None:
    stage = Stage(1)
    forward(stage, lambda s, i, inputs: inputs.detach(), 0, flatten(leaf(2)))
    assert stage.backward(0, [None]) == [None]


def test_backwards_in_any_order() -> None:
    stage, weight = Stage(0), leaf(2)
    for i in range(3):
        forward(stage, lambda s, i, inputs: weight * i, i, None)
    for i in (1, 0, 2):
        stage.backward(i, [torch.ones(2, dtype=torch.float64)])
    torch.testing.assert_close(weight.grad, torch.full((2,), 3.0, dtype=torch.float64))


@pytest.mark.parametrize("size", [3, LARGE])
def test_stages_are_joined_by_hand(size: int) -> None:
    first, second = Stage(0), Stage(1)
    weights = [leaf(size), leaf(size)]
    message = forward(first, lambda s, i, inputs: weights[0] * 3, 0, None)
    pointers = []

    def compute(s: int, i: int, inputs: Tensor) -> Tensor:
        pointers.append(inputs.data_ptr())
        return (inputs * weights[1]).sum()

    forward_loss(second, compute, 0, message)
    assert (pointers == [message[0][0].data_ptr()]) == (size == LARGE), "only little is copied"
    first.backward(0, second.backward(0, None))
    torch.testing.assert_close(weights[0].grad, 3 * weights[1].detach())


def test_parameter_that_crosses_gets_its_gradient_once() -> None:
    """A stage on the same rank may hand on a leaf of its own graph."""
    first, second = Stage(0), Stage(1)
    weight = leaf(2)
    forward_loss(second, lambda s, i, inputs: (inputs * 3).sum(), 0, forward(first, lambda s, i, x: weight, 0, None))
    gradients = second.backward(0, None)
    assert weight.grad is None
    first.backward(0, gradients)
    assert weight.grad.tolist() == [3.0, 3.0]


def test_nothing_large_is_kept_that_backward_does_not_need() -> None:
    """Neither the input (no layer saved it) nor the output outlives its user; after backward everything is gone."""
    stage, x = Stage(1), torch.randn(LARGE, requires_grad=True)
    storages = []

    def compute(s: int, i: int, inputs: Tensor) -> Tensor:
        storages.append(weakref.ref(inputs))
        output = inputs + 1
        storages.append(weakref.ref(output))
        return output

    message = flatten(x)
    outputs = forward(stage, compute, 0, message)
    assert storages[1]() is not None
    del outputs, message, x
    gc.collect()
    assert [storage() for storage in storages] == [None, None]
    assert torch.equal(stage.backward(0, [torch.ones(LARGE)])[0], torch.ones(LARGE))


def test_hooks_on_inputs_run_once() -> None:
    stage, calls = Stage(1), []

    def compute(s: int, i: int, inputs: Tensor) -> Tensor:
        inputs.register_hook(lambda gradient: calls.append(i))
        return inputs * 2

    x = leaf(2)
    for i in range(3):
        forward(stage, compute, i, flatten(x))
        stage.backward(i, [torch.ones(2, dtype=torch.float64)])
    assert calls == [0, 1, 2]


@pytest.mark.parametrize("size", [1, LARGE])
def test_evaluation_keeps_nothing(size: int) -> None:
    stage = Stage(1)
    with torch.no_grad():
        assert evaluate(stage, lambda s, i, inputs: inputs * 2, 0, flatten(torch.ones(size)))[0].item() == 2.0
        assert not evaluate(stage, lambda s, i, inputs: inputs * 2, 0, flatten(leaf(size))).requires_grad
    evaluate(stage, lambda s, i, inputs: inputs.mul_(2), 1, flatten(leaf(size)))
    assert len(stage) == 0


def test_loss_is_a_scalar() -> None:
    stage = Stage(0)
    forward_loss(stage, lambda s, i, inputs: leaf(3) * 2, 0, None)
    with pytest.raises(ValueError, match=r"must be a real scalar, got dtype torch.float64 and shape \[3\]"):
        stage.backward(0, None)
