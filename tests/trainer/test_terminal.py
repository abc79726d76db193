"""A `fit` on two ranks in a terminal of its own, read as a terminal shows it."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
COLUMNS = 200

FIT = """
import logging, sys, warnings
import lightning.pytorch as pl
from lightning.pytorch.callbacks import Callback, {bar}
from lightning_hybrid import HybridStrategy
from tests.zoo.basic import Around
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

class Talks(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        module.log("of_callback", 1.0 * batch_idx, on_epoch=True, on_step=False)
        if batch_idx == 1:
            rank_zero_info("a line inside of the epoch")
            rank_zero_warn("a warning inside of the epoch")
            warnings.warn("old", FutureWarning)

if __name__ == "__main__":
    strategy = HybridStrategy(pipeline_parallel_size=2, num_microbatches=2)
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, limit_train_batches=4, log_every_n_steps=1,
        logger=False, enable_checkpointing=False, callbacks=[Talks(), {bar}()],
    )
    trainer.fit(Around())
    if trainer.is_global_zero:
        print("the end")
"""


def screen(output: str) -> list[str]:
    """The lines that a terminal shows: carriage returns, line feeds, moves up, and lines erased."""
    lines, row, column = [""], 0, 0
    for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", output):
        if token == "\r":
            column = 0
        elif token == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif token.startswith("\x1b["):
            number = int(re.sub(r"\D", "", token) or 1)
            if token.endswith("A"):
                row = max(0, row - number)
            elif token.endswith("K"):
                lines[row] = "" if "2" in token else lines[row][:column]
        else:
            lines[row] = lines[row][:column].ljust(column) + token + lines[row][column + len(token) :]
            column += len(token)
    return [line.rstrip() for line in lines]


def in_terminal(script: Path) -> str:
    """What a program writes into a terminal."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "COLUMNS": str(COLUMNS),
        "TERM": "xterm",
        "OMP_NUM_THREADS": "1",
    }
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))  # without a width there is no bar
    words = [sys.executable, str(script)]
    with subprocess.Popen(words, env=environment, cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        output = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the terminal is closed
                break
            if not part:
                break
            output += part
    os.close(ours)
    text = output.decode()
    assert process.returncode == 0, text
    return text


@pytest.mark.distributed
@pytest.mark.parametrize("bar", ["TQDMProgressBar", pytest.param("RichProgressBar", marks=pytest.mark.thorough)])
def test_lines_of_ours_stand_beside_the_bar(tmp_path: Path, bar: str) -> None:
    script = tmp_path / "fit.py"
    script.write_text(FIT.format(bar=bar))
    lines = screen(in_terminal(script))
    shown = "\n".join(lines)
    for ours in ("Effective batch: ", "a line inside of the epoch", "Layout: ", "Estimated memory per rank"):
        (line,) = [line for line in lines if ours in line]
        assert line.startswith(ours), shown
    (warning,) = [line for line in lines if "UserWarning: a warning inside of the epoch" in line]
    assert "Epoch" not in warning, shown
    assert len([line for line in lines if "FutureWarning: old" in line]) == 1, shown
    assert "sync_dist" not in shown
    epochs = [line for line in lines if "Epoch 0" in line]
    assert len(epochs) == 1, shown
    assert "4/4" in epochs[0], shown
    assert lines.index("the end") > lines.index(epochs[0])
