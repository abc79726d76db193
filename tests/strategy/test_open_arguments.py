"""Arguments that are left at their defaults, or at "auto", are open; arguments that rule out a search are refused."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_hybrid import HybridStrategy, Tuning

AUTO: dict[str, Any] = {"layout": "auto"}
ALL_OPEN = (
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "tensor_parallel_mode",
    "tensor_parallel_depth",
    "context_parallel_size",
    "context_parallel",
    "num_microbatches",
    "schedule",
    "num_chunks",
    "tuning.extra_in_flight",
    "zero_stage",
    "zero_size",
    "expert_parallel_size",
    "recompute",
)


def open_without(*names: str) -> tuple[str, ...]:
    assert set(names) <= set(ALL_OPEN)
    return tuple(name for name in ALL_OPEN if name not in names)


_MODE = "tensor_parallel_mode", "tensor_parallel_depth"
_CONTEXT = "context_parallel_size", "context_parallel"


@pytest.mark.parametrize(
    ("arguments", "searched"),
    [
        ({}, ()),
        (AUTO, ALL_OPEN),
        ({"data_parallel_size": 2, **AUTO}, ALL_OPEN),
        ({"tensor_parallel_size": 2, "zero_stage": 1, **AUTO}, open_without("tensor_parallel_size", "zero_stage")),
        ({"sequence_parallel": True, **AUTO}, open_without(*_MODE, *_CONTEXT)),
        ({"tensor_parallel_mode": "2d", **AUTO}, open_without(*_MODE, *_CONTEXT)),
        ({"zero_size": 2, **AUTO}, open_without("zero_size")),
        ({"expert_parallel": "tensor", **AUTO}, open_without("expert_parallel_size")),
        ({"context_parallel": "ring", **AUTO}, open_without("context_parallel")),
        ({"context_parallel_size": 2, **AUTO}, open_without(*_MODE, "context_parallel_size")),
        ({"tensor_parallel_size": [1, 2], **AUTO}, ALL_OPEN),
        ({"pipeline_parallel_size": "auto"}, ("pipeline_parallel_size",)),
        ({"recompute": "auto", "zero_stage": "auto"}, ("zero_stage", "recompute")),
        ({"recompute": "auto", "num_microbatches": 4, **AUTO}, open_without("num_microbatches")),
    ],
)
def test_open_is_what_is_left_at_its_default_or_auto(arguments: dict[str, Any], searched: tuple[str, ...]) -> None:
    assert HybridStrategy(**arguments).settings.searched == searched


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"layout": "best"}, "layout must be 'auto' or None, got 'best'"),
        ({"tuning": {"memory_limit": "80GiB"}}, "no search is requested. Set layout='auto' or recompute='auto'"),
        ({"tuning": {"memory_limit": "much"}, **AUTO}, "tuning.memory_limit must be a quantity such as '80GiB' or"),
        ({"tuning": {"memory_limit": -1}, **AUTO}, "tuning.memory_limit must be more than 0 bytes"),
        ({"partition": [1, 2], **AUTO}, r"partition=\[1, 2\] sets a value for each stage"),
        ({"recompute": [1, 2], "pipeline_parallel_size": "auto"}, r"recompute=\[1, 2\] sets a value for each stage"),
        ({"recompute": 0.5, **AUTO}, "The search for .* does not support recompute=0.5"),
        (
            {"num_chunks": 9, "schedule": "interleaved_1f1b", **AUTO},
            "The search for .* does not support num_chunks=9",
        ),
        ({"tensor_parallel_size": 0, **AUTO}, "tensor_parallel_size must be at least 1"),
    ],
)
def test_what_does_not_go_with_a_search_is_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        HybridStrategy(**{name: Tuning(**value) if name == "tuning" else value for name, value in arguments.items()})


def test_a_limit_is_a_text_or_bytes() -> None:
    for value, size in (("80GiB", 80 * 2**30), ("24GB", 24e9), (1000, 1000.0), (None, None)):
        assert HybridStrategy(tuning=Tuning(memory_limit=value), **AUTO).settings.tuning.memory_bytes == size
    with pytest.raises(TypeError, match=r"tuning.memory_limit must be a number, a string or None, got \[1\]"):
        Tuning(memory_limit=[1])  # type: ignore[arg-type]
