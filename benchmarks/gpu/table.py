"""The parts in their order, most uncertain first, with their time limits and where they rehearse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any

from benchmarks.gpu.place import Place

__all__ = ["PARTS", "Part", "Report"]


@dataclass(frozen=True)
class Report:
    """The way of measured values to the result file: each call is written there at once.

    Attributes:
        show: Takes the values by name.
        earlier: The values of earlier runs, by name of the part.
    """

    show: Callable[..., None]
    earlier: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def __call__(self, **values: Any) -> None:
        """Write values by name; ``summary`` is the text of the table."""
        self.show(**values)


@dataclass(frozen=True)
class Part:
    """One question, answered in a process of its own.

    Attributes:
        name: As in ``--parts``, the table and the result file.
        question: In one line.
        module: The module of `benchmarks.gpu.parts`; its function ``measure(place, report, **arguments)`` answers.
        seconds: The time limit on a GPU.
        rehearsal: The kind of `Place` that ``--tiny`` takes.
        arguments: Of the function.
    """

    name: str
    question: str
    module: str
    seconds: float
    rehearsal: str = "pretended"
    arguments: dict[str, Any] = field(default_factory=dict)

    def measure(self, place: Place, report: Report) -> None:
        """Run the part in this process."""
        module = import_module(f"benchmarks.gpu.parts.{self.module}")
        with place.entered():
            module.measure(place, report, **self.arguments)


def _tests(name: str, question: str, seconds: float, *tests: str) -> Part:
    return Part(name, question, "gpu_tests", seconds, rehearsal="cpu", arguments={"tests": tests})


_of_models = partial("tests/gpu/test_transparency.py::test_double_precision[ranks{}]".format)

PARTS: tuple[Part, ...] = (
    _tests(
        "tensor_over_gloo",
        "tensor parallelism over gloo, two ranks on one device (ended with SIGSEGV once)",
        40,
        "tests/gpu/test_cuda.py::test_two_ranks_over_gloo[{'tensor_parallel_size': 2}]",
    ),
    _tests(
        "failure_of_a_rank",
        "a failure in one of two pipeline stages over NCCL ends both",
        60,
        "tests/gpu/test_nccl.py::test_a_failure_of_one_rank_ends_all_soon[pp2]",
    ),
    _tests(
        "pipeline_and_tensor",
        "pipeline x tensor on four ranks over NCCL",
        50,
        "tests/gpu/test_nccl.py::test_two_axes[{'pipeline_parallel_size': 2, 'tensor_parallel_size': 2}]",
    ),
    _tests(
        "pipeline_and_zero_3",
        "pipeline x ZeRO 3 on four ranks over NCCL",
        50,
        "tests/gpu/test_nccl.py::test_two_axes[{'pipeline_parallel_size': 2, 'zero_stage': 3}]",
    ),
    Part("overhead", "HybridStrategy() against the single-device strategy, GPT-2 of 355 M", "overhead", 75),
    Part("microbatch_cost", "host time and kernel launches of one more microbatch", "microbatch_cost", 60),
    Part(
        "pipeline_1f1b",
        "two stages on one device, 1F1B, against torch.distributed.pipelining",
        "pipeline",
        40,
        rehearsal="cpu",
        arguments={"schedule": "1f1b"},
    ),
    Part(
        "pipeline_interleaved",
        "the same, interleaved 1F1B with two chunks",
        "pipeline",
        40,
        rehearsal="cpu",
        arguments={"schedule": "interleaved_1f1b"},
    ),
    Part("lora", "LoRA on a Llama of 8 B, sequence 4,096, against plain Lightning", "lora", 110),
    Part("memory_gpt", "the estimate of memory against the allocator, GPT-2 of 355 M", "memory", 40, rehearsal="cpu"),
    Part(
        "memory_lora",
        "the estimate of memory against the allocator, LoRA on a Llama of 8 B",
        "memory",
        60,
        rehearsal="cpu",
        arguments={"lora": True},
    ),
    Part("host_waits", "lines that make the host wait for the device in a step", "host_waits", 30),
    Part("first_step", "time to the first step of a GPT-2 of 12 layers, two stages", "first_step", 60, rehearsal="cpu"),
    _tests(
        "equal_numbers",
        "four models that differed from one process in float64",
        150,
        _of_models("2-context_encoder-cp2_ulysses-1f1b"),
        _of_models("4-encoders-tp2_pp2-1f1b"),
        _of_models("4-own_attention-tp2_pp2_sequence-1f1b"),
        _of_models("4-tied_words-grid2d-1f1b"),
    ),
    _tests("all_gpu_tests", "every other test of tests/gpu", 600, "tests/gpu"),
)
