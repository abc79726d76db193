"""The meter by which the other tests measure counts what autograd holds, and changes nothing."""

from __future__ import annotations

import torch

from tests.memory.meter import LiveTensorMeter


def test_what_autograd_saves_is_counted_until_it_is_released() -> None:
    meter, weight = LiveTensorMeter(), torch.randn(4, 4, requires_grad=True)
    meter.exclude([weight])
    x = torch.randn(8, 4)
    with meter():
        meter.label = "first"
        y = (x @ weight).sigmoid()  # saves x, and its result
        meter.label = "second"
        z = y.exp()  # saves its result, of which a view is saved once more
        loss = (z[:4] * y[4:]).sum()
    size = 8 * 4 * 4
    assert (meter.current, meter.peak) == (3 * size, 3 * size)
    assert meter.saved_bytes(["first"]) == 2 * size
    assert meter.saved_bytes(["second"]) == 2 * size
    assert meter.saved_bytes(["first", "second"]) == 3 * size
    expected = torch.autograd.grad(loss, weight, retain_graph=True)
    loss.backward()
    del y, z, loss
    assert (meter.current, meter.peak) == (0, 3 * size)
    assert torch.equal(weight.grad, expected[0])


def test_second_derivatives_pass() -> None:
    weight = torch.randn(3, requires_grad=True)
    with LiveTensorMeter()():
        (first,) = torch.autograd.grad((weight**3).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), weight)
    assert torch.equal(second, 6 * weight)
