"""Operators whose results torch cannot describe without values."""

from __future__ import annotations

import pytest
import torch

from lightning_hybrid.pipeline_parallel.frame.fake_tensors import fake_mode

grouped_mm = getattr(torch, "_grouped_mm", None)


@pytest.mark.skipif(grouped_mm is None, reason="this version of torch has no matrix products in groups")
@pytest.mark.parametrize(
    ("a", "b", "has_ends"),
    [((6, 8), (3, 8, 16), True), ((3, 5, 8), (3, 8, 16), False), ((8, 24), (24, 16), True), ((3, 5, 8), (8, 24), True)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_in_groups(a: tuple[int, ...], b: tuple[int, ...], has_ends: bool, dtype: torch.dtype) -> None:
    """Compare shapes with values and without: three groups of equal size, in rows, columns or features."""
    lengths = {6: [2, 4, 6], 24: [8, 16, 24]}
    ends = torch.tensor(lengths[24 if 24 in a + b else 6], dtype=torch.int32) if has_ends else None
    one, other = torch.randn(a).to(dtype), torch.randn(b).to(dtype)
    expected = grouped_mm(one, other, offs=ends)
    mode = fake_mode()
    fakes = [mode.from_tensor(each) for each in (one, other)]
    with mode:
        result = grouped_mm(*fakes, offs=None if ends is None else mode.from_tensor(ends))
    assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
