"""`extra_in_flight="auto"`: what is chosen of what ranks have measured, and that nothing but time depends on it."""

from __future__ import annotations

import logging
import math
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback

from lightning_hybrid import Tuning
from lightning_hybrid.pipeline_parallel.links import step_schedules
from lightning_hybrid.pipeline_parallel.links.delays import Delay, measure_delays
from lightning_hybrid.pipeline_parallel.links.step_schedules import (
    Measured,
    StepSchedules,
    choice_text,
    choose,
    medians,
    spare_microbatches,
    step_times,
)
from lightning_hybrid.pipeline_parallel.recorder import Range
from lightning_hybrid.pipeline_parallel.schedules import Action
from lightning_hybrid.trainer.results.hybrid_timeline import HybridTimeline
from tests.pool import Pools
from tests.training_jobs import Regression, Result, assert_same, loader, train

# -- what is chosen ----------------------------------------------------------------------------------------------------


def measured(rank: int, latency: float, **others: Any) -> Measured:
    """Two ranks, of which a microbatch takes 10 ms and 20 ms; 16 of them."""
    delays = {(0, 1): Delay(latency, 0.0)} if rank == 0 else {}
    return Measured(rank, 16, {(rank, "F"): 0.010, (rank, "B"): 0.020}, delays, **others)


@pytest.mark.parametrize(("latency", "expected"), [(0.0, 0), (0.0001, 0), (0.014, 1), (0.040, 3), (10.0, 14)])
def test_the_choice_is_the_way_there_and_back_over_the_slowest_rank(latency: float, expected: int) -> None:
    """At most 16 microbatches are in flight, and without more two are."""
    found = [measured(0, latency), measured(1, latency)]
    assert choose("1f1b", 2, found) == (expected,)
    assert expected == min(14, math.ceil((60 + 2e3 * latency) / 30 - 0.02) - 2)


def test_the_slowest_replica_and_the_fullest_device_decide() -> None:
    slower = replace(measured(0, 0.040), seconds={(0, "F"): 0.02, (0, "B"): 0.04})
    found = [measured(0, 0.001), slower, measured(1, 0.0), measured(1, 0.0)]
    times = step_times("1f1b", 2, found)
    assert (times.forwards, times.backwards) == ([0.02, 0.010], [0.04, 0.020])
    assert (times.sends, times.occupations) == ([0.040], [0.0])
    assert choose("1f1b", 2, found) == (2,)  # 80 over 60, there and back: until then the first rank only runs forwards
    assert choose("1f1b", 2, [*found, measured(0, 0.0, most=0)]) == (0,)


def test_a_device_has_memory_for_as_many_more_as_its_room_over_that_of_one() -> None:
    assert spare_microbatches(room=100.0, taken=60.0, in_flight=2) == 3
    assert spare_microbatches(room=-5.0, taken=60.0, in_flight=2) == 0
    assert spare_microbatches(room=100.0, taken=0.0, in_flight=2) == math.inf


def test_the_room_of_a_device_is_that_beside_the_peak_of_its_steps() -> None:
    """100 bytes: 10 are held, a step takes 50 more with two microbatches, and 5 stay free for fragments."""
    schedules = StepSchedules.__new__(StepSchedules)
    for device, expected in (("cuda", 1), ("cpu", math.inf)):
        schedules._device = torch.device(device)
        with (
            patch("torch.cuda.mem_get_info", return_value=(30, 100)),  # what the allocator has reserved is not free
            patch("torch.cuda.memory_reserved", return_value=70),
            patch("torch.cuda.max_memory_allocated", return_value=60),
            patch("torch.cuda.memory_allocated", return_value=10),
        ):
            assert schedules._spare(2) == expected


def test_medians_are_of_what_computes() -> None:
    done = [("forward", "0F0", 1.0), ("forward", "0F1", 2.0), ("forward", "0F2", 90.0), ("backward", "0B0", 3.0)]
    ranges = [Range(name, Action.parse(action), 5.0, 5.0 + taken) for name, action, taken in done]
    others = [Range("wait", Action.parse("0B0"), 0.0, 50.0), Range("reduce", None, 0.0, 50.0)]
    assert medians([*ranges, *others]) == pytest.approx({(0, "F"): 0.002, (0, "B"): 0.003})


def test_the_choice_is_told_with_its_reasons() -> None:
    text = choice_text((3,), [measured(0, 0.040, most=7), measured(1, 0.0)])
    assert "[3] extra microbatches" in text
    assert "40.00 ms, and a microbatch takes 30.00 ms on the slowest rank." in text
    assert "There is enough memory for 7 extra microbatches." in text


# -- in a run ----------------------------------------------------------------------------------------------------------


class ExtraInFlight(Callback):
    """The extra microbatches in flight at the end of a run, before the module is gathered."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.value = trainer.strategy.run.training_step.schedules.extra_in_flight


def trained(layout: Any, folder: str = "", delay: float | None = None) -> tuple[Result, Any, list[str]]:
    """Train two epochs of five steps; return the result, the extra microbatches in flight, and messages about them.

    Args:
        layout: The arguments of the strategy.
        folder: The folder for the timelines of two steps; without it no step is recorded.
        delay: The delay of each link in seconds. If it is given, each rank acts as a machine of its own.
    """
    told, extra = list[str](), ExtraInFlight()
    callbacks = [extra, *([HybridTimeline([1, 7], folder)] if folder else [])]
    host = f"node{os.environ['RANK']}"

    def delays(*arguments: Any) -> dict[int, Delay]:
        found = measure_delays(*arguments)
        assert all(each.latency > 0 for each in found.values())
        return {link: Delay(delay or 0.0, 0.0) for link in found}

    log = logging.getLogger("lightning.pytorch")
    with ExitStack() as patches:
        patches.enter_context(patch.object(log, "info", lambda text, *_: told.append(text)))
        patches.enter_context(patch.object(step_schedules, "measure_delays", delays))
        if delay is not None:
            patches.enter_context(patch.object(socket, "gethostname", return_value=host))
        result = train(Regression(), layout, loader(), loader(), max_epochs=2, callbacks=callbacks)
    return result, extra.value, [text for text in told if "extra_in_flight" in text]


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({}, id="1f1b"),
        pytest.param({"num_chunks": 2, "schedule": "interleaved_1f1b"}, id="chunks", marks=pytest.mark.thorough),
    ],
)
def test_what_is_chosen_trains_the_same_bit_by_bit(ranks: Pools, layout: dict[str, Any], tmp_path: Any) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 8, **layout}
    pool = ranks(2, lightning=True)
    expected, *_ = pool.run(trained, layout)[0]
    found = pool.run(trained, {**layout, "tuning": Tuning(extra_in_flight="auto")}, str(tmp_path), 10.0)
    assert [extra for _, extra, _ in found] == [found[0][1]] * 2
    assert found[0][1][0] > 3
    for result, *_ in found:
        result.metrics = {k: v for k, v in result.metrics.items() if not k.startswith("timeline")}
        assert_same(result, expected, 0.0)
    assert [len(told) for *_, told in found] == [1, 0]
    assert {path.name for path in tmp_path.iterdir()} >= {"batch-1.svg", "batch-7.svg"}


def test_inside_a_machine_nothing_is_measured_and_none_is_chosen(ranks: Pools) -> None:
    layout = {"pipeline_parallel_size": 2, "num_microbatches": 8, "tuning": Tuning(extra_in_flight="auto")}
    for _, extra, told in ranks(2, lightning=True).run(trained, layout):
        assert extra == (0,)
        assert told == []


@pytest.mark.thorough
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline_parallel_size": 4, "num_microbatches": 8},
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "num_microbatches": 4},
        {"pipeline_parallel_size": 2, "num_microbatches": 4, "zero_stage": 2},
        {"pipeline_parallel_size": 4, "num_microbatches": 4, "dynamic_shapes": True},
    ],
    ids=["pp4", "pp2-tp2", "pp2-dp2", "dynamic"],
)
def test_all_ranks_make_the_same_choice_under_any_layout(ranks: Pools, layout: dict[str, Any]) -> None:
    pool = ranks(4, lightning=True)
    expected, *_ = pool.run(trained, layout)[0]
    found = pool.run(trained, {**layout, "tuning": Tuning(extra_in_flight="auto")}, "", 10.0)
    assert len({extra for _, extra, _ in found}) == 1
    assert any(found[0][1])
    assert_same(found[0][0], expected, 0.0)
