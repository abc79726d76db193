"""Blocks of attention, merged, against plain softmax: each kernel, and which one is taken."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from lightning_hybrid.tensor_parallel.context_parallel.block_attention import block_attention
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.all_gather import causal_attention
from lightning_hybrid.tensor_parallel.context_parallel.block_attention.block_attention import (
    Block,
    CpuKernel,
    CudaKernel,
    Gradients,
    Kernel,
    Products,
    find_kernel,
    merge,
)

BATCH, HEADS, QUERIES, FEATURES, SCALE = 2, 4, 13, 8, 0.3
#: Where keys are cut into blocks.
CUTS = (0, 7, 13, 20)
INFINITY = float("inf")


def masks() -> dict[str, Tensor | None]:
    """Masks of all queries and keys; the first two queries see none of some blocks, the third of none."""
    keys = CUTS[-1]
    seen = torch.rand(BATCH, 1, QUERIES, keys, generator=torch.Generator().manual_seed(3)) < 0.5
    seen[:, :, 0, : CUTS[1]] = False
    seen[:, :, 1, CUTS[1] :] = False
    seen[:, :, :2, [0, -1]] = torch.tensor([[False, True], [True, False]])
    seen[:, :, 2] = False
    added = torch.randn(HEADS, QUERIES, keys, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    return {
        "none": None,
        "boolean": seen,
        "added": added,
        "added, hides": added.masked_fill(~seen[0], -INFINITY),
        "padding": torch.arange(keys) < CUTS[2],
    }


def plain(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """Attention by softmax; of a query that sees no key zeros."""
    k, v = (each.repeat_interleave(HEADS // each.shape[1], 1) for each in (k, v))
    scores = q @ k.transpose(-2, -1) * SCALE
    if mask is not None:
        scores = scores.masked_fill(~mask, -INFINITY) if mask.dtype == torch.bool else scores + mask
    sees_none = (scores == -INFINITY).all(-1, keepdim=True)
    weights = scores.masked_fill(sees_none, 0.0).softmax(-1).masked_fill(sees_none, 0.0)
    return weights @ v


def merged(kernel: type[Kernel], blocks: list[Block]) -> tuple[Tensor, Tensor]:
    q, v = blocks[0].q, blocks[0].v
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(*q.shape[:3], v.shape[3], dtype=dtype)
    logsumexp = q.new_full(q.shape[:3], -INFINITY, dtype=dtype)
    for block in blocks:
        merge(out, logsumexp, *kernel.forward(block))
    return out, logsumexp


def blocks_of(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Iterator[Block]:
    for start, end in pairwise(CUTS):
        part = None if mask is None else mask[..., start:end]
        yield Block(q, k[:, :, start:end], v[:, :, start:end], part, False, SCALE)


def drawn(dtype: torch.dtype = torch.float64, of_keys: int = HEADS, keys: int = CUTS[-1]) -> list[Tensor]:
    """Queries, keys, values, and factors of what is mixed."""
    generator = torch.Generator().manual_seed(1)
    shapes = (HEADS, QUERIES), (of_keys, keys), (of_keys, keys), (HEADS, QUERIES)
    return [torch.randn(BATCH, *each, FEATURES, dtype=torch.float64, generator=generator).to(dtype) for each in shapes]


@pytest.fixture(params=[Products, CpuKernel], ids=["products", "fused"])
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[Kernel]:
    """Each one; products in tiles of five."""
    monkeypatch.setattr(block_attention, "_ROWS", 5)
    return request.param  # type: ignore[no-any-return]


@pytest.mark.parametrize("of_keys", [HEADS, 2, 1])
@pytest.mark.parametrize("name", masks())
def test_merged_blocks_are_softmax(kernel: type[Kernel], name: str, of_keys: int) -> None:
    mask = masks()[name]
    *inputs, factors = drawn(of_keys=of_keys)
    leaves = [each.requires_grad_() for each in inputs]
    expected = plain(*leaves, mask)  # type: ignore[arg-type]
    gradients = torch.autograd.grad((expected * factors).sum(), leaves)
    with torch.no_grad():
        blocks = list(blocks_of(*leaves, mask))  # type: ignore[arg-type]
        out, logsumexp = merged(kernel, blocks)
        torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
        hidden = logsumexp == -INFINITY
        assert hidden.any() == (name in ("boolean", "added, hides"))
        logsumexp.masked_fill_(hidden, INFINITY)
        found = [kernel.backward(block, factors, out, logsumexp) for block in blocks]
    of_q = sum(each.q for each in found)
    of_k, of_v = torch.cat([each.k for each in found], 2), torch.cat([each.v for each in found], 2)
    torch.testing.assert_close([of_q, of_k, of_v], list(gradients), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("of_keys", [HEADS, 2])
def test_a_causal_block_is_softmax(kernel: type[Kernel], of_keys: int) -> None:
    *inputs, factors = drawn(of_keys=of_keys, keys=QUERIES)
    leaves = [each.requires_grad_() for each in inputs]
    expected = plain(*leaves, torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril())  # type: ignore[arg-type]
    gradients = torch.autograd.grad((expected * factors).sum(), leaves)
    with torch.no_grad():
        block = Block(*leaves, None, True, SCALE)  # type: ignore[arg-type]
        out, logsumexp = merged(kernel, [block])
        found = kernel.backward(block, factors, out, logsumexp)
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(list(found[:3]), list(gradients), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape", [(HEADS, QUERIES, CUTS[-1]), (BATCH, 1, 1, CUTS[-1]), (QUERIES, 1)])
def test_a_learnt_mask_has_its_gradient(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    monkeypatch.setattr(block_attention, "_ROWS", 5)
    q, k, v, factors = drawn()
    mask = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    expected = plain(q, k, v, mask)
    (gradient,) = torch.autograd.grad((expected * factors).sum(), mask)
    assert find_kernel(q, v, mask, 0.0, learns_mask=True) is Products
    with torch.no_grad():
        block = Block(q, k, v, mask, False, SCALE)
        found = Products.backward(block, factors, *Products.forward(block)).mask
    torch.testing.assert_close(found, gradient, rtol=1e-12, atol=1e-12)


def test_dropout_is_the_same_again_in_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_attention, "_ROWS", 5)
    q, k, v, factors = drawn()
    block = Block(q, k, v, None, False, SCALE, dropout=0.4, seed=7)
    assert find_kernel(q, v, None, 0.4) is Products
    out, logsumexp = Products.forward(block)
    assert not torch.allclose(out, Products.forward(block._replace(seed=8))[0])
    found = Products.backward(block, factors, out, logsumexp)
    for at, name in ((0, "q"), (1, "k"), (2, "v")):  # by differences
        direction = torch.randn(block[at].shape, dtype=torch.float64, generator=torch.Generator().manual_seed(at))
        ends = [Products.forward(block._replace(**{name: block[at] + step * direction}))[0] for step in (1e-6, -1e-6)]
        slope = ((ends[0] - ends[1]) * factors).sum() / 2e-6
        torch.testing.assert_close((found[at] * direction).sum(), slope, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_other_dtypes(kernel: type[Kernel], dtype: torch.dtype) -> None:
    q, k, v, factors = drawn(dtype, of_keys=2)
    mask = masks()["boolean"]
    leaves = [each.double().requires_grad_() for each in (q, k, v)]
    expected = plain(*leaves, mask)  # type: ignore[arg-type]
    gradients = torch.autograd.grad((expected * factors).sum(), leaves)
    out, logsumexp = merged(kernel, list(blocks_of(q, k, v, mask)))
    assert out.dtype == logsumexp.dtype == torch.float32
    tolerance = {"rtol": 8 * torch.finfo(dtype).eps, "atol": 8 * torch.finfo(dtype).eps}
    torch.testing.assert_close(out.double(), expected, **tolerance)
    block = Block(q, k, v, mask, False, SCALE)
    found = kernel.backward(block, factors, out.to(dtype), logsumexp.masked_fill(logsumexp == -INFINITY, INFINITY))
    torch.testing.assert_close([each.double() for each in found[:3]], list(gradients), **tolerance)


# -- which one ---------------------------------------------------------------------------------------------------------


class Lies(CpuKernel):
    """A kernel whose logsumexp is of another base."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Wrong by a factor."""
        out, logsumexp = CpuKernel.forward(block)
        return out, logsumexp * 1.4427


class Forgets(CpuKernel):
    """A kernel whose gradient is that of a block by itself."""

    @staticmethod
    def backward(block: Block, gradient: Tensor, out: Tensor, logsumexp: Tensor) -> Gradients:
        """Without what it is given of all blocks."""
        return CpuKernel.backward(block, gradient, *CpuKernel.forward(block))


class Moved(CpuKernel):
    """A kernel that this torch does not have."""

    @staticmethod
    def forward(block: Block) -> tuple[Tensor, Tensor]:
        """Its name is gone."""
        return torch.ops.aten._gone(block.q)  # type: ignore[no-any-return]


def test_the_fused_kernel_is_taken_where_it_computes_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    q, _, v, _ = drawn()
    assert find_kernel(q, v, None, 0.0) is CpuKernel
    assert find_kernel(q, v, masks()["boolean"], 0.0) is CpuKernel
    assert find_kernel(q, v[..., :4], None, 0.0) is Products, "it takes values of the keys' size"
    assert find_kernel(q.to("meta"), v.to("meta"), None, 0.0) is Products
    for other in (Lies, Forgets, Moved):
        monkeypatch.setitem(block_attention._FUSED, "cpu", other)
        assert find_kernel(q, v, None, 0.0) is Products, other


def test_the_kernel_of_cuda_takes_what_it_is_given() -> None:
    q, k, v, factors = (each.to("meta", torch.bfloat16) for each in drawn(of_keys=2))
    block = Block(q, k, v, None, False, SCALE)
    out, logsumexp = CudaKernel.forward(block)
    assert (out.shape, logsumexp.shape, logsumexp.dtype) == (q.shape, q.shape[:3], torch.float32)
    found = CudaKernel.backward(block, factors, out, logsumexp)
    assert [each.shape for each in found[:3]] == [q.shape, k.shape, v.shape]


@pytest.mark.parametrize("which", ["features apart", "one batch of keys"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_tensors_that_kernels_do_not_look_at_are_made_what_they_take_for_granted(
    which: str, dtype: torch.dtype
) -> None:
    """A kernel reads what lies there: of `Conv1d(x).view(...).transpose(-1, -2)` features do not lie side by side."""
    generator = torch.Generator().manual_seed(5)
    q, k, v = (torch.randn(2, HEADS, FEATURES, 16, generator=generator, dtype=torch.float64) for _ in range(3))
    q, k, v = (each.to(dtype).transpose(-1, -2) for each in (q, k, v))
    if which == "one batch of keys":
        q, k, v = q.contiguous(), k[:1].contiguous(), v[:1].contiguous()
    leaves = [each.detach().requires_grad_() for each in (q, k, v)]
    others = [each.detach().requires_grad_() for each in (q, k, v)]
    found = causal_attention(*leaves, [(0, 16)], SCALE)
    expected = torch.nn.functional.scaled_dot_product_attention(
        *(each.expand(2, -1, -1, -1) for each in others), is_causal=True, scale=SCALE
    )
    found.square().sum().backward()
    expected.square().sum().backward()
    tolerance = 1e-10 if dtype == torch.float64 else 0.05
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    for mine, other in zip(leaves, others, strict=True):
        torch.testing.assert_close(mine.grad, other.grad, rtol=tolerance, atol=tolerance)


def test_the_users_choice_among_torchs_kernels_holds() -> None:
    q = torch.ones(1, 2, 4, 8)
    assert find_kernel(q, q, None, 0.0) is CpuKernel
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert find_kernel(q, q, None, 0.0) is Products
