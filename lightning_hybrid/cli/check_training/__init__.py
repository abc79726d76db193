"""A few training steps in float64, in one process or under a layout, with a record of the results."""

from lightning_hybrid.cli.check_training.training import (
    MakeData,
    MakeModule,
    MicrobatchWeights,
    Training,
    TrainingRecord,
)

__all__ = ["MakeData", "MakeModule", "MicrobatchWeights", "Training", "TrainingRecord"]
