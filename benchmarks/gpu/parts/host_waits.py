"""The lines that make the host wait for the device during steps."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor

from benchmarks.gpu.models import CausalLM, gpt2, token_loader
from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from lightning_hybrid import HybridStrategy

#: Steps before the first one that is watched: a run learns there.
WARM_UP = 4
#: Steps that are watched, with everything between them.
STEPS = 4


class _Logging(CausalLM):
    """A module that logs a tensor, a number and a metric of the progress bar."""

    def training_step(self, batch: dict[str, Tensor]) -> Tensor:
        loss = super().training_step(batch)
        self.log("twice", 2 * loss.detach(), prog_bar=True)
        self.log("number", 0.5, batch_size=len(batch["labels"]))
        return loss


class _Hooks(Callback):
    """A callback of the user's with hooks around a step."""

    total: Any = 0.0

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Add the loss to a sum on the device."""
        self.total = self.total + outputs["loss"].detach()

    def on_before_zero_grad(self, *_: Any) -> None:
        """Do nothing."""


class _Waits(Callback):
    """The waits from the start of one step to the start of another one."""

    def __init__(self, place: Place) -> None:
        self._place, self._stack = place, ExitStack()
        self.found: list[str] = []

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Begin after the warm-up, end so many steps later."""
        if batch_idx == WARM_UP:
            self.found = self._stack.enter_context(self._place.host_waits())
        elif batch_idx == WARM_UP + STEPS:
            self._stack.close()


#: By name: the class of the module, arguments of the Trainer, further callbacks.
CASES: dict[str, tuple[type[CausalLM], dict[str, Any], list[type[Callback]]]] = {
    "plain": (CausalLM, {}, []),
    "clipping": (CausalLM, {"gradient_clip_val": 0.5}, []),
    "accumulation": (CausalLM, {"accumulate_grad_batches": 2}, []),
    "self.log": (_Logging, {}, []),
    "callbacks": (CausalLM, {}, [_Hooks]),
    "bf16-mixed": (CausalLM, {"precision": "bf16-mixed"}, []),
}


def measure(place: Place, report: Report) -> None:
    """Watch steps in 4 microbatches with each feature, and Lightning's own strategy for comparison."""
    waits: dict[str, dict[str, float]] = {}
    for name, (module, arguments, callbacks) in {**CASES, "Lightning's own": CASES["plain"]}.items():
        strategy = "auto" if name == "Lightning's own" else HybridStrategy(num_microbatches=4)
        watch = _Waits(place)
        trainer = Trainer(
            accelerator=place.accelerator,
            devices=1,
            strategy=strategy,
            callbacks=[watch, *(callback() for callback in callbacks)],
            max_steps=-1,
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **arguments,
        )
        network = gpt2(place, layers=4, width=256, length=64)
        trainer.fit(module(network), token_loader(place, WARM_UP + STEPS + 2, 8, place.pick(64, 16)))
        waits[name] = {line: count / STEPS for line, count in Counter(watch.found).most_common()}
        report(waits_per_step=waits)
    of_ours = {
        name: sum(count for line, count in found.items() if line.startswith("lightning_hybrid/"))
        for name, found in waits.items()
    }
    theirs = sum(waits["Lightning's own"].values())
    waiting = ", ".join(f"{name} {count:g}" for name, count in of_ours.items() if count)
    report(
        of_the_package_per_step=of_ours,
        summary=f"{waiting or 'none'} of the package in a step; under Lightning's own strategy {theirs:g} in all",
    )
