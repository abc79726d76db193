"""The search of layouts is imported only by a run that requests it."""

from __future__ import annotations

import subprocess
import sys

RUN = """
import sys
from lightning.pytorch import Trainer
from lightning_hybrid import HybridStrategy
from tests.training_jobs import Regression, loader

def fit(**arguments):
    options = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing", "logger"), False)
    strategy = HybridStrategy(**arguments)
    Trainer(accelerator="cpu", devices=1, max_steps=1, strategy=strategy, **options).fit(Regression(), loader(8, 32))
    return [name for name in sys.modules if name.startswith("lightning_hybrid.tuning")]

print(bool(fit(num_microbatches=2)), bool(fit(layout='auto')))
"""


def test_a_run_with_a_fixed_layout_does_not_import_the_search() -> None:
    ended = subprocess.run([sys.executable, "-c", RUN], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.split()[-2:] == ["False", "True"], "only the second run requests a search"
