"""How a ratio of two contenders is judged: the median over the rounds, and its 95 % interval."""

from __future__ import annotations

import random
from statistics import median

__all__ = ["interval"]


def interval(ratios: list[float], samples: int = 4000) -> tuple[float, float]:
    """The 95 % interval of the median, by bootstrap with a fixed seed.

    Args:
        ratios: One per round.
        samples: How many times the rounds are drawn again.
    """
    generator = random.Random(0)
    medians = sorted(median(generator.choices(ratios, k=len(ratios))) for _ in range(samples))
    return medians[int(0.025 * samples)], medians[int(0.975 * samples) - 1]
