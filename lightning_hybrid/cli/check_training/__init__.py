"""A few steps of training in float64, in one process or under a layout, on the same batches, and what came of it."""

from lightning_hybrid.cli.check_training.training import (
    MakeData,
    MakeModule,
    MicrobatchWeights,
    Training,
    TrainingRecord,
)

__all__ = ["MakeData", "MakeModule", "MicrobatchWeights", "Training", "TrainingRecord"]
