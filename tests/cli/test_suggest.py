"""The command prints the layouts that are the fastest that fit, and a configuration that starts the first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

from lightning_hybrid import HybridStrategy
from lightning_hybrid.cli import progress
from lightning_hybrid.cli.main import main
from lightning_hybrid.cli.suggest.configured import Configured
from lightning_hybrid.cli.suggest.report import as_text
from lightning_hybrid.memory.account import MemoryUsage
from lightning_hybrid.tuning.candidates import Layout, LoaderStep, Step
from lightning_hybrid.tuning.cost_model import Cost
from lightning_hybrid.tuning.machine import Machine
from lightning_hybrid.tuning.search import Rejected, Suggestions

CONFIG = str(Path(__file__).parent.parent.parent / "configs" / "gpt_hybrid.yaml")


def test_the_command_prints_the_best_and_why_the_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    main(["suggest", "--config", CONFIG, "--ranks", "4", "--memory", "1GiB"])
    text = capsys.readouterr().out
    assert "class_path: lightning_hybrid.HybridStrategy" in text
    assert "recompute" in text
    assert "Why other layouts were rejected:" in text
    assert "layers cannot be split into that many stages" in text


def test_the_yaml_starts_the_ranks_on_their_nodes_with_the_strategy(capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed to be pasted makes the layout at the top of the table, and says how many ranks a node has."""
    arguments = ["--model.depth", "2", "--ranks", "4", "--nodes", "2", "--memory", "1GiB"]
    plan = {"*.linear1": "colwise", "*.linear2": "rowwise"}
    arguments += [f"--trainer.strategy.init_args.tensor_parallel_plan={json.dumps(plan)}"]
    main(["suggest", "--config", CONFIG, *arguments])
    text = capsys.readouterr().out
    pasted = yaml.safe_load(text[text.index("\ntrainer:") : text.index("\n\nWhy")])["trainer"]
    assert (pasted["num_nodes"], pasted["devices"]) == (2, 2)
    assert pasted["strategy"]["init_args"]["tensor_parallel_plan"] == plan
    assert "faults" not in pasted["strategy"]["init_args"]
    strategy = HybridStrategy(**pasted["strategy"]["init_args"])
    assert strategy.settings.num_microbatches == pasted["strategy"]["init_args"]["num_microbatches"]
    first = next(line.split() for line in text.splitlines() if line.startswith("1  "))
    sizes = [pasted["strategy"]["init_args"][f"{axis}_parallel_size"] for axis in ("data", "tensor", "pipeline")]
    assert sizes == list(map(int, first[1:4]))
    main(["suggest", "--config", CONFIG, *arguments, "--json"])
    best = json.loads(capsys.readouterr().out)["best"][0]
    assert best["trainer"] == {"num_nodes": 2, "devices": 2}
    assert best["strategy"] == pasted["strategy"]["init_args"]


def test_the_position_of_the_context_axis_counts(capsys: pytest.CaptureFixture[str]) -> None:
    # Two nodes of two ranks each, and only 2 x 2 (data x context) is possible.
    words = ["--ranks", "4", "--nodes", "2", "--max-tensor", "1", "--max-context", "2", "--samples", "2"]
    words += ["--model.depth", "1", "--json"]
    seconds = {}
    for order in ("pp-dp-tp", "pp-dp-cp-tp", "cp-pp-dp-tp"):
        main(["suggest", "--config", CONFIG, *words, f"--trainer.strategy.init_args.launch.rank_order={order}"])
        best = json.loads(capsys.readouterr().out)["best"]
        assert {each["strategy"]["context_parallel_size"] for each in best} == {2}
        seconds[order] = min(each["parts_seconds"]["context-parallel messages"] for each in best)
    assert seconds["pp-dp-tp"] == seconds["pp-dp-cp-tp"] < seconds["cp-pp-dp-tp"] / 2  # inside a node, between nodes


def found_with(layout: Layout, size: float) -> Suggestions:
    sent = dict.fromkeys(("tensor", "context", "pipeline", "data"), 0.0)
    cost = Cost(layout, (MemoryUsage(int(size), 0, 0, 0, 0),), 1.0, {}, sent, 1.0, 0.0)
    return Suggestions((cost,), (), 1, 1)


CONFIGURED = Configured(
    16, {"tuning.reshard_after_forward": "auto"}, {"sequence_parallel": True, "num_chunks": 2, "tuning.memory_limit": 8}
)


def report_of(layout: Layout, share: float, size: float = 50.0) -> str:
    found = found_with(layout, size)
    return as_text(found, Machine(memory=100.0), Step(16), CONFIGURED, {2: share, 4: 0.01})


def test_what_is_not_varied_is_said_and_stays_in_the_yaml() -> None:
    text = report_of(Layout(1, 2, 1), 0.9)
    assert "the configuration that the search did not change: tuning.reshard_after_forward='auto'." in " ".join(
        text.split()
    )
    assert "      sequence_parallel: true" in text
    assert "      tuning:\n        memory_limit: 8" in text
    assert "num_chunks" not in text, "which is the layout's"


def test_shares_of_sequences_are_shown_and_written() -> None:
    text = report_of(Layout(1, 2, 1, context=4, context_kind="ring"), 0.9)
    assert "  4 ring  " in text
    pasted = yaml.safe_load(text[text.index("\ntrainer:") : text.index("\n\nWhy")])["trainer"]["strategy"]["init_args"]
    assert (pasted["context_parallel_size"], pasted["context_parallel"]) == (4, "ring")
    assert "context_parallel" not in report_of(Layout(1, 2, 1), 0.9)


@pytest.mark.parametrize(
    ("layout", "shown"),
    [
        (Layout(2, 4, 1, tensor_mode="2d"), "  2d  "),
        (Layout(1, 8, 1, tensor_mode="2.5d", tensor_depth=2), "  2.5d depth 2  "),
    ],
)
def test_blocks_over_a_grid_are_shown_and_written(layout: Layout, shown: str) -> None:
    text = report_of(layout, 0.9)
    assert shown in text
    pasted = yaml.safe_load(text[text.index("\ntrainer:") : text.index("\n\nWhy")])["trainer"]["strategy"]["init_args"]
    assert pasted["tensor_parallel_mode"] == layout.tensor_mode
    assert pasted.get("tensor_parallel_depth", 1) == layout.tensor_depth
    assert "tensor_parallel_mode" not in report_of(Layout(1, 4, 1), 0.9)


def test_what_all_layouts_have_in_common_is_a_line_instead_of_columns() -> None:
    costs = tuple(found_with(Layout(4, 2, 1, zero_stage=stage), 50.0).best[0] for stage in (0, 1))
    lines = as_text(Suggestions(costs, (), 1, 1), Machine(memory=100.0), Step(16), CONFIGURED, {}).splitlines()
    assert "The same in all layouts: tensor mode 1d, context 1, schedule -, recompute no." in lines
    sent = "tp sent 0.000, cp sent 0.000, pp sent 0.000, dp sent 0.000"
    assert f"The same in all layouts: batch 4 in 1, bubble 0.0%, {sent}." in " ".join(lines)
    titles = [line.split() for line in lines if "pipeline" in line.split() or "GiB" in line.split()[1:]]
    assert ["data", "tensor", "pipeline", "zero"] in titles
    assert ["ms/step", "GiB"] in titles
    assert "same in all layouts" not in report_of(Layout(1, 2, 1), 0.9)


@pytest.mark.parametrize("kind", [Step, LoaderStep], ids=lambda kind: kind.__name__)
def test_no_line_is_longer_than_a_terminal_is_wide(kind: type[Step]) -> None:
    """With the longest of everything."""
    layout = Layout(
        8,
        8,
        16,
        1024,
        "interleaved_1f1b",
        4,
        3,
        (10, 12) * 32,
        (2,) * 16,
        context=8,
        context_kind="all_gather",
        tensor_mode="2.5d",
        tensor_depth=2,
    )
    sent = dict.fromkeys(("tensor", "context", "pipeline", "data"), 1234.5 * 2**30)
    cost = Cost(layout, (MemoryUsage(79 * 2**30, 0, 0, 0, 0),), 1.0, {}, sent, 1234.5, 0.425, samples=4096)
    rejected = Rejected("more tensor-parallel messages", 12345, layout, "at least 12.34 x the time of the best")
    text = as_text(Suggestions((cost,), (rejected,), 12345, 678), Machine(), kind(4096), CONFIGURED, {8: 0.01})
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert max(map(len, lines)) <= 100
    assert "Fits: the fastest layout needs up to 79.00 GiB of the 80.00 GiB per rank." in lines
    assert all(word in text for word in ("4 all_gather"[2:], "2.5d depth 2", "interleaved_1f1b x 4 +", "layers 10-12"))


def test_what_does_not_fit_is_said_with_what_it_would_take() -> None:
    rejected = Rejected("does not fit", 9, Layout(2, 1, 1), "96.0 GiB, 1.20 x the memory")
    text = as_text(Suggestions((), (rejected,), 9, 0), Machine(), Step(16), CONFIGURED, {})
    text = " ".join(text.split())
    assert "Does not fit: no layout can be used with 80.00 GiB per device." in text
    assert "Even the layout with the lowest memory use needs 96.0 GiB, 1.20 x the memory." in text


def test_layouts_that_leave_most_layers_whole_are_told_apart() -> None:
    text = " ".join(report_of(Layout(1, 2, 1), 0.039).split())
    assert "leaves most parameters unsharded: tensor_parallel_size=2 shards 3.9% of them." in text
    assert "tensor_parallel_plan" in text
    for other in (report_of(Layout(1, 2, 1), 0.5), report_of(Layout(2, 1, 1), 0.039)):
        assert "leaves most parameters unsharded" not in other


def test_a_layout_that_barely_fits_is_marked() -> None:
    assert "0.00 !" in report_of(Layout(2, 1, 1), 0.0, size=96)
    assert "GiB !: less than 5% of the memory is free" in report_of(Layout(2, 1, 1), 0.0, size=96)
    assert "!" not in report_of(Layout(2, 1, 1), 0.0, size=95)


def test_who_waits_sees_how_far_it_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    with progress.count_progress("Counting") as update:
        for number in range(4):
            now = 10.0 * number
            update("Counting sheep", number, 4)
    assert capsys.readouterr().err == "Counting sheep: 2 of 4\n"


def test_the_command_gives_data_and_says_that_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    main(["suggest", "--config", CONFIG, "--ranks", "2", "--memory", "1MB", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["best"] == []
    assert any(group["why"] == "does not fit" for group in found["others"])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "8", "--nodes", "3"], "--ranks 8 cannot be split evenly over --nodes 3"),
        (["--ranks", "0"], "not a positive integer"),
        (["--ranks", "2", "--memory", "much"], "not a quantity such as 80GiB"),
        (["--ranks", "2", "--overlap", "2"], "not a number between 0 and 1"),
    ],
)
def test_wrong_arguments_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["suggest", "--config", CONFIG, *arguments])
    assert caught.value.code == 2
    assert text in capsys.readouterr().err
