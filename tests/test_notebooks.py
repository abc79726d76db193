"""Training in worker processes, as a notebook needs it: what was trained comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer

from lightning_hybrid import HybridStrategy, Launch
from lightning_hybrid.strategy.launch import check_copying

ROOT = Path(__file__).parent.parent
INTERACTIVE = "lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE"

DEFINITIONS = """
import json
import sys

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import lightning_hybrid
from lightning_hybrid import HybridStrategy, Launch


class Model(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1)).double()

    def training_step(self, batch, batch_idx):
        return self.net(batch[0]).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net(batch[0]).pow(2).mean())

    test_step = validation_step

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.1)


data = torch.randn(32, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
data = DataLoader(TensorDataset(data), 8)


def trained(folder, devices, strategy):
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=strategy, max_epochs=2, logger=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=[ModelCheckpoint(folder, monitor="val_loss")],
    )
    model = Model()
    trainer.fit(model, data, data)
    return trainer, model


def outcome(trainer, model):
    return json.dumps({
        "weights": {name: value.tolist() for name, value in model.state_dict().items()},
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "best": list(torch.load(trainer.checkpoint_callback.best_model_path)["state_dict"]),
        "predicted": model.net(torch.ones(1, 4, dtype=torch.float64)).tolist(),
        "tested": trainer.test(model, data, verbose=False)[0]["val_loss"],
    })
"""


def of_one_process(folder: Path) -> dict[str, Any]:
    names: dict[str, Any] = {}
    exec(DEFINITIONS, names)
    return json.loads(names["outcome"](*names["trained"](folder, 1, "auto")))  # type: ignore[no-any-return]


def assert_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["best"] == expected["best"]
    for name in ("logged", "predicted", "tested"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-10, atol=1e-12)
    for name, value in expected["weights"].items():
        torch.testing.assert_close(torch.tensor(found["weights"][name]), torch.tensor(value), rtol=1e-10, atol=1e-12)


@pytest.mark.rows(70)
def test_a_notebook_trains_a_pipeline_and_gets_back_what_was_trained(tmp_path: Path) -> None:
    cells = [
        DEFINITIONS,
        f"trainer, model = trained({str(tmp_path / 'notebook')!r}, 2, 'hybrid_pp2')",
        "print('FOUND', outcome(trainer, model))",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute(cwd=str(ROOT))
    texts = "".join(output.get("text", "") for output in notebook.cells[-1].outputs)
    found = json.loads(texts.split("FOUND ")[1].splitlines()[0])
    assert_equal(found, of_one_process(tmp_path / "one"))
    assert "pipeline 2 = 2 processes" in "".join(output.get("text", "") for output in notebook.cells[1].outputs)


SCRIPT = """
if __name__ == "__main__":
    launch = Launch(start_method=sys.argv[1])
    strategy = HybridStrategy(pipeline_parallel_size=2, launch=launch, **json.loads(sys.argv[3]))
    print("FOUND", outcome(*trained(sys.argv[2], 2, strategy)))
"""


def run_script(folder: Path, start_method: str, **arguments: Any) -> subprocess.CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(DEFINITIONS + SCRIPT)
    command = [sys.executable, str(script), start_method, str(folder / "run"), json.dumps(arguments)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=150, check=True)


@pytest.mark.thorough
@pytest.mark.parametrize("start_method", ["spawn", "forkserver"])
def test_a_script_may_start_its_processes_likewise(tmp_path: Path, start_method: str) -> None:
    done = run_script(tmp_path, start_method)
    assert_equal(json.loads(done.stdout.split("FOUND ")[1].splitlines()[0]), of_one_process(tmp_path / "one"))


def test_weights_of_a_module_that_stays_divided_do_not_come_back_and_that_is_said(tmp_path: Path) -> None:
    done = run_script(tmp_path, "fork", gather_module_on_teardown=False)
    found = json.loads(done.stdout.split("FOUND ")[1].splitlines()[0])
    names: dict[str, Any] = {}
    exec(DEFINITIONS, names)
    before = names["Model"]().state_dict()
    assert all(torch.equal(torch.tensor(found["weights"][name]).double(), value) for name, value in before.items())
    assert done.stderr.count("The trained weights of Model were not returned from the training processes") == 1
    assert len(found["best"]) == len(before), "the checkpoint has them"


@pytest.mark.rows(70)
def test_in_a_notebook_a_launcher_of_scripts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(INTERACTIVE, True)
    for start_method in ("popen", "spawn"):
        strategy = HybridStrategy(pipeline_parallel_size=2, launch=Launch(start_method=start_method))  # type: ignore[arg-type]
        with pytest.raises(MisconfigurationException, match="not compatible with an interactive environment"):
            Trainer(accelerator="cpu", devices=2, strategy=strategy)


def test_a_process_that_uses_a_gpu_already_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: True)
    check_copying("spawn", torch.device("cuda"))
    check_copying("fork", torch.device("cpu"))
    with pytest.raises(RuntimeError, match=r"This process already uses CUDA.*Restart the kernel"):
        check_copying("fork", torch.device("cuda"))
