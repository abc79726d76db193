"""The time from the start of the processes to the end of the first step, and the part of it that is tracing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
import warnings
from typing import Any

from benchmarks.gpu.place import Place
from benchmarks.gpu.table import Report

#: By name: the number of ranks, and what makes the strategy.
CONTENDERS: dict[str, tuple[int, dict[str, Any] | str]] = {
    "single device": (1, "auto"),
    "HybridStrategy()": (1, {}),
    "DDP": (2, "ddp"),
    "two stages": (2, {"pipeline_parallel_size": 2}),
}


def measure(place: Place, report: Report) -> None:
    """Start each contender in fresh processes."""
    texts = []
    for name, (size, _) in CONTENDERS.items():
        found = _start(place, name, size)
        report(**{name: found})
        texts.append(f"{name} {found['seconds']:.1f} s")
        if found["tracing"]:
            texts[-1] += f" (tracing {found['tracing']:.2f} s)"
    report(summary=", ".join(texts))


def _start(place: Place, name: str, size: int) -> dict[str, float]:
    """Return the seconds of the slowest rank, and those that it traced."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    launched = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    launched |= {"NODE_RANK": "0", "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "first step"}
    begin = time.time()
    words = [name, place.kind, *(["tiny"] if place.tiny else [])]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu.parts.first_step", *words],
            env=os.environ | (launched | {"RANK": str(rank), "LOCAL_RANK": str(rank)} if size > 1 else {}),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    found = [json.loads(output.splitlines()[-1]) for output in outputs]
    return {
        "seconds": round(max(each["end"] for each in found) - begin, 3),
        "tracing": round(max(each["tracing"] for each in found), 3),
    }


def _train(name: str, place: Place) -> dict[str, float]:
    """Train one step on this rank.

    Returns:
        When it ended (as `time.time`), and the seconds that finding the plan of the step took.
    """
    from lightning.pytorch import Trainer

    from benchmarks.gpu.models import CausalLM, gpt2, token_loader
    from lightning_hybrid import HybridStrategy
    from lightning_hybrid.pipeline_parallel.frame.frame import FrameCut
    from tests.devices import devices_of

    size, how = CONTENDERS[name]
    seconds, find_plan = [0.0], FrameCut.find_plan

    def timed(*args: Any, **kwargs: Any) -> Any:
        begin = time.perf_counter()
        try:
            return find_plan(*args, **kwargs)
        finally:
            seconds[0] += time.perf_counter() - begin

    FrameCut.find_plan = timed  # type: ignore[method-assign]
    trainer = Trainer(
        accelerator=place.accelerator,
        **devices_of(place.accelerator, size),
        strategy=how if isinstance(how, str) else HybridStrategy(**how),
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    ends = [0.0]
    module = CausalLM(gpt2(place, layers=12, width=768))

    def note(*_: Any) -> None:
        place.synchronize()
        ends[0] = time.time()

    module.on_train_batch_end = note  # type: ignore[method-assign, assignment]
    trainer.fit(module, token_loader(place, size, 8, place.pick(256, 16)))
    return {"end": ends[0], "tracing": seconds[0]}


if __name__ == "__main__":
    warnings.filterwarnings("ignore")
    print(json.dumps(_train(sys.argv[1], Place(sys.argv[2], tiny="tiny" in sys.argv))))
