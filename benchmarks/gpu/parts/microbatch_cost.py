"""The host's cost of one more microbatch: milliseconds and kernel launches, against a loop by hand."""

from __future__ import annotations

from statistics import median
from typing import Any

from lightning.pytorch import Trainer
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.models import CausalLM, gpt2, token_loader
from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report
from benchmarks.timed_trainer import Round, Stopwatch, trainer_round
from lightning_hybrid import HybridStrategy

WARM_UP = 2


class _Accumulating(CausalLM):
    """The loop by hand: a backward for each microbatch, one step; Lightning's manual optimization."""

    def __init__(self, network: Any, microbatches: int) -> None:
        super().__init__(network)
        self.automatic_optimization = False
        self._microbatches = microbatches

    def training_step(self, batch: dict[str, Any]) -> None:  # type: ignore[override]
        """Accumulate the gradients of the microbatches."""
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        parts = zip(*(value.chunk(self._microbatches) for value in batch.values()), strict=True)
        total = 0.0
        for part in parts:
            loss = self.network(**dict(zip(batch, part, strict=True))).loss / self._microbatches
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        self.log("loss", total)


def measure(place: Place, report: Report) -> None:
    """Train a GPT-2 whose kernels are short with 1, 8 and 32 microbatches of the same batch."""
    numbers = place.pick((1, 8, 32), (1, 2, 4))
    batches, rounds, length = place.pick((5, 3, 64), (2, 2, 16))
    batch_size = numbers[-1]
    loader = token_loader(place, WARM_UP + batches, batch_size, length)
    makers: dict[str, Any] = {"ours": _ours, "by_hand": _by_hand}
    made: dict[tuple[str, int], Round] = {}
    for number in numbers:
        for name, make in makers.items():
            module, strategy = make(place, number)
            made[name, number] = trainer_round(
                module,
                loader,
                batches,
                watch=Stopwatch(WARM_UP),
                strategy=strategy,
                accelerator=place.accelerator,
                devices=1,
            )
            made[name, number]()
    times: dict[tuple[str, int], list[float]] = {key: [] for key in made}
    for index in range(rounds):
        for key in list(made)[:: 1 if index % 2 else -1]:
            times[key].append(made[key]())
    for name in makers:
        ms = {number: 1e3 * median(times[name, number]) for number in numbers}
        more = (ms[numbers[-1]] - ms[numbers[0]]) / (numbers[-1] - numbers[0])
        report(
            **{f"ms_{name}": {number: round(value, 3) for number, value in ms.items()}},
            **{f"ms_per_microbatch_{name}": round(more, 4)},
        )
    launches = {
        (name, number): _launches(place, *make(place, number), batch_size, length)
        for number in (numbers[0], numbers[-1])
        for name, make in makers.items()
    }
    extra = numbers[-1] - numbers[0]
    per_microbatch = {
        name: round((launches[name, numbers[-1]] - launches[name, numbers[0]]) / extra, 1) for name in makers
    }
    counted = "kernel launches" if place.kind == "cuda" else "operations"
    report(counted=counted, per_microbatch=per_microbatch)
    costs = {
        name: (median(times[name, numbers[-1]]) - median(times[name, numbers[0]])) / extra * 1e3 for name in makers
    }
    report(
        summary=f"{costs['ours']:.3f} ms more per microbatch, by hand {costs['by_hand']:.3f};"
        f" {per_microbatch['ours']:g} {counted}, by hand {per_microbatch['by_hand']:g}"
    )


def _ours(place: Place, number: int) -> tuple[CausalLM, Any]:
    return CausalLM(gpt2(place, layers=12, width=256, length=64)), HybridStrategy(num_microbatches=number)


def _by_hand(place: Place, number: int) -> tuple[CausalLM, Any]:
    return _Accumulating(gpt2(place, layers=12, width=256, length=64), number), "auto"


def _launches(place: Place, module: CausalLM, strategy: Any, batch_size: int, length: int) -> float:
    """Return the kernel launches of a step, after the first ones; operations of torch where there are no kernels."""
    steps = 3
    counter = _Counter(place, WARM_UP, steps)
    trainer = Trainer(
        accelerator=place.accelerator,
        devices=1,
        strategy=strategy,
        callbacks=[counter],
        max_steps=WARM_UP + steps + 1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, token_loader(place, WARM_UP + steps + 1, batch_size, length))
    return counter.count / steps


class _Counter(Stopwatch):
    """A profiler around some steps."""

    count = 0

    def __init__(self, place: Place, warm_up: int, steps: int) -> None:
        super().__init__(warm_up)
        self._place, self._steps = place, steps

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Begin after the warm-up, end so many steps later."""
        super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
        if batch_idx == self._warm_up:
            activities = [ProfilerActivity.CPU]
            if self._place.kind == "cuda":
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()
        elif batch_idx == self._warm_up + self._steps:
            self._place.synchronize()
            self._profile.stop()
            named = self._profile.key_averages()
            prefix = ("cudaLaunchKernel", "cuLaunchKernel") if self._place.kind == "cuda" else ("aten::",)
            self.count = sum(event.count for event in named if event.key.startswith(prefix))
