"""The layer that several benchmarks train: large products, and little else."""

from __future__ import annotations

from torch import Tensor, nn

__all__ = ["Block"]


class Block(nn.Module):
    """A transformer block without attention: norm, two linear layers, residual."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Shape (batch, width) -> (batch, width)."""
        return x + self.layers(x)
