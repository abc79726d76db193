"""Which of Lightning's tests are run: those of what any strategy serves."""

from __future__ import annotations

from pathlib import Path

__all__ = ["FILES", "ROOT", "files_of"]

#: Where Lightning keeps the tests of its Trainer, in a checkout of its repository.
ROOT = Path("tests") / "tests_pytorch"

#: Folders and files below ROOT. Left out is what is about other strategies, devices, file formats or services.
FILES = (
    "loops",
    "trainer/connectors",
    "trainer/dynamic_args",
    "trainer/flags",
    "trainer/logging_",
    "trainer/optimization",
    "trainer/properties",
    "trainer/test_config_validator.py",
    "trainer/test_dataloaders.py",
    "trainer/test_states.py",
    "trainer/test_trainer.py",
    "callbacks",
    "checkpointing",
    "core",
    "loggers",
    "models/test_amp.py",
    "models/test_cpu.py",
    "models/test_hooks.py",
    "models/test_hparams.py",
    "models/test_restore.py",
    "overrides",
    "plugins",
    "profilers",
    "strategies/test_common.py",
    "strategies/test_custom_strategy.py",
    "strategies/test_single_device.py",
    "test_cli.py",
    "tuner",
    "utilities/test_auto_restart.py",
    "utilities/test_compile.py",
    "utilities/test_grads.py",
    "utilities/test_model_helpers.py",
    "utilities/test_model_summary.py",
)

#: On two stages: what has to do with running steps.
FILES_ON_TWO_STAGES = (
    "loops",
    "trainer/dynamic_args",
    "trainer/flags",
    "trainer/logging_",
    "trainer/optimization",
    "callbacks",
    "checkpointing/test_checkpoint_callback_frequency.py",
    "checkpointing/test_trainer_checkpoint.py",
    "models/test_hooks.py",
    "plugins/precision",
)

#: Files in those folders without a Trainer that has the choice, or that need what a checkout does not bring.
_LEFT_OUT = (
    "callbacks/test_spike.py",  # starts DDP in sub-processes, for minutes
    "checkpointing/test_legacy_checkpoints.py",  # downloads checkpoints
)


def files_of(checkout: Path, *, stages: int = 1) -> list[str]:
    """The files of a checkout, below ROOT."""
    root = checkout / ROOT
    names = FILES if stages == 1 else FILES_ON_TWO_STAGES
    found = [
        path for name in names for path in ([root / name] if name.endswith(".py") else root.glob(f"{name}/**/*.py"))
    ]
    paths = sorted(path.relative_to(root).as_posix() for path in found if path.name.startswith("test_"))
    return [path for path in paths if path not in _LEFT_OUT]
