"""Buckets of one chunk travel while the rank computes with its other chunks, and only the end of a step waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from lightning_hybrid.data_parallel.grad_buckets import Bucket
from lightning_hybrid.data_parallel.grad_sync import GradientSync
from tests.pool import Pools
from tests.training_jobs import Regression, loader, make_trainer

LAYOUT = {
    "data_parallel_size": 2,
    "pipeline_parallel_size": 2,
    "num_chunks": 2,
    "schedule": "interleaved_1f1b",
    "num_microbatches": 4,
}


def events() -> list[str]:
    done: list[str] = []

    def noted(owner: type, name: str, text: Callable[..., str | None]) -> Any:
        original = getattr(owner, name)

        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            word = text(*args, **kwargs)
            if word is not None:
                done.append(word)
            return original(self, *args, **kwargs)

        return mock.patch.object(owner, name, call)

    trainer = make_trainer(LAYOUT, max_steps=1, num_sanity_val_steps=0, limit_val_batches=0)
    with (
        noted(GradientSync, "backward_begins", lambda stage, is_last: f"last backward of {stage}" if is_last else None),
        noted(GradientSync, "finish", lambda **_: "end"),
        noted(Bucket, "launch", lambda *_: "launch"),
        noted(Bucket, "wait", lambda: "wait"),
    ):
        trainer.fit(Regression(), loader())
    return done


def test_a_bucket_travels_while_other_chunks_compute(ranks: Pools) -> None:
    for rank, done in enumerate(ranks(4, lightning=True).run(events)):
        first, second = rank // 2, rank // 2 + 2  # pipeline outermost: the stages of this rank
        end = done.index("end")
        assert done[: end + 1] == [
            f"last backward of {second}",
            "launch",
            f"last backward of {first}",
            "launch",
            "end",
        ]
        assert "wait" in done[end:]
