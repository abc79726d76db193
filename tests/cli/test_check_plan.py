"""Where a plan of the user's own trains with other numbers, the check looks there first."""

from __future__ import annotations

import pytest
from torch import Tensor
from torch.nn import functional as F

from lightning_hybrid.cli.check import check
from tests.zoo import tensor as zoo


class SilentAttention(zoo.Attention):
    """Views its projections such that any number of heads fits."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Silent(zoo.Sequences):
    layers = 2

    def layer(self, index: int) -> SilentAttention:
        return SilentAttention()


PROJECTIONS = {**{f"body.*.{name}": "colwise" for name in "qkv"}, "body.*.proj": "rowwise"}


@pytest.mark.distributed
def test_a_plan_that_lacks_the_number_of_heads() -> None:
    result = check(Silent, tensor_parallel_size=2, tensor_parallel_plan=PROJECTIONS)
    assert not result.equal
    assert result.remedy.startswith(
        "You wrote the tensor_parallel_plan yourself, so first check whether an entry is missing. 'body.*' has sharded"
        " layers ('q', 'k', 'v'), but its code reads num_heads=4, which the plan does not divide. The plan may lack the"
        " entry 'body.*': 'divide:num_heads'. `lightning-hybrid plan` shows"
    )
    assert check(
        Silent, tensor_parallel_size=2, tensor_parallel_plan={**PROJECTIONS, "body.*": "divide:num_heads"}
    ).equal
