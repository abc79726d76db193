from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule

from lightning_hybrid.cli.hybrid_cli import HybridCLI
from lightning_hybrid.cli.main import COMMANDS, LIGHTNING_COMMANDS, main
from lightning_hybrid.pipeline_parallel.schedules import build
from lightning_hybrid.pipeline_parallel.timeline import simulate
from lightning_hybrid.version import __version__

ROOT = Path(__file__).parent.parent.parent
DEMO = ROOT / "lightning_hybrid" / "cli" / "demo" / "vit.yaml"


def run(*words: str, directory: Path = ROOT) -> str:
    """What a program of its own prints; this checkout's package is found wherever it runs."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, *words], cwd=directory, env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture
def words_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning warns where arguments are given in two ways."""
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid"])


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--help"])
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in (*LIGHTNING_COMMANDS, *COMMANDS))
    assert list(LIGHTNING_COMMANDS) == list(HybridCLI.subcommands())


def test_each_command_has_its_file() -> None:
    files = (ROOT / "lightning_hybrid" / "cli" / "commands").glob("*.py")
    assert {file.stem for file in files} == {"__init__", *COMMANDS}


# What each of these may do without: seconds of work for every call.
HEAVY = ("torch", "lightning", "numpy", "rich", "jsonargparse")


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["timeline"], ["timeline", "--json"], *([each, "--help"] for each in COMMANDS)]
)
def test_what_computes_nothing_imports_no_torch(words: list[str]) -> None:
    """How long it takes depends on the machine; what is imported does not."""
    script = (
        "import runpy, sys\n"
        f"sys.argv = ['lightning-hybrid', *{words!r}]\n"
        "try:\n    runpy.run_module('lightning_hybrid', run_name='__main__')\n"
        f"finally:\n    print(sorted({set(HEAVY)!r} & set(sys.modules)), file=sys.stderr)\n"
    )
    found = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    assert found.stderr == "[]\n"
    assert found.stdout


def test_the_versions_that_a_bug_report_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def versions() -> dict[str, str]:
        main(["--version"])
        return dict(line.split(" ", 1) for line in capsys.readouterr().out.splitlines())

    monkeypatch.setenv("PATH", str(tmp_path))
    found = versions()
    assert list(found) == ["lightning-hybrid", "torch", "lightning", "transformers", "Python", "platform", "devices"]
    assert found["lightning-hybrid"] == __version__
    assert found["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert found["Python"] == platform.python_version()
    assert found["devices"].startswith("none")
    driver = tmp_path / "nvidia-smi"
    driver.write_text("#!/bin/sh\necho NVIDIA H200\necho NVIDIA H200\n")
    driver.chmod(0o755)
    assert versions()["devices"] == "2 x NVIDIA H200"
    driver.write_text("#!/bin/sh\nexit 9\n")
    assert versions()["devices"].startswith("unknown")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["--help"], ["timeline"], ["timeline", "--json"]])
def test_a_closed_pipe_ends_the_program_without_a_word(words: list[str], unbuffered: str) -> None:
    """Who reads may stop at the first line, as ``head -1`` does; here it has stopped before that."""
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as closed:
        found = subprocess.run(
            [sys.executable, "-m", "lightning_hybrid", *words],
            cwd=ROOT, env=environment, stdout=closed, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert found.stderr == ""
    assert found.returncode == 141  # as of a program that SIGPIPE has ended


def test_another_closed_pipe_is_an_error(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def fail(args: object) -> None:
        raise BrokenPipeError("of a worker")

    monkeypatch.setattr("lightning_hybrid.cli.commands.timeline.run", fail)
    with pytest.raises(BrokenPipeError, match="of a worker"):
        main(["timeline"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "usage: lightning-hybrid COMMAND"),
        (["fitt"], "unknown command 'fitt'; did you mean 'fit'?"),
        (["--config", "x.yaml"], "unknown command '--config'"),
        (["--verson"], "unknown command '--verson'; did you mean '--version'?"),
        (["timeline", "--schedule", "1f2b"], "(choose from gpipe, 1f1b, interleaved_1f1b); did you mean '1f1b'?"),
        (["timeline", "--rankss", "4"], "unrecognized arguments: --rankss 4; did you mean '--ranks'?"),
        (["timeline", "--colour", "red"], "unrecognized arguments: --colour red [LH1001]\n"),
        (
            ["fit", "--trainer.devicess", "2"],
            "unrecognized arguments: --trainer.devicess 2; did you mean '--trainer.devices'?",
        ),
        (["timeline", "--ranks", "0"], "num_ranks is 0"),
        (["timeline", "--chunks", "0"], "num_chunks is 0"),
        (["timeline", "--ranks", "4", "--nodes", "3"], "--ranks 4 cannot be split evenly over --nodes 3. [LH1008]"),
        (["timeline", "--extra-in-flight", "1,x"], "'1,x' is not a number, a list such as 0,2,0, or auto"),
        (["timeline", "--network-bandwidth", "0"], "'0' is not a positive number"),
        (["timeline", "--schedule", "1f1b", "--chunks", "2"], "num_chunks is 2"),
        (["timeline", "--svg", "/nowhere/x.svg"], "cannot write --svg /nowhere/x.svg"),
        (["fit", "--config", "nowhere.yaml"], "nowhere.yaml"),
        (["fit", "--model", "examples.vit.Vit"], "examples.vit.Vit"),
    ],
)
@pytest.mark.usefixtures("words_only")
def test_wrong_usage_is_explained(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


VIT = str(ROOT / "configs" / "vit_pipeline.yaml")
CLASS = "lightning_hybrid.cli.demo.vit.ViT"


@pytest.mark.parametrize(
    ("change", "words", "complaint"),
    [
        ("", ["--model.dept", "3"], f"model: {CLASS} has no option 'dept'; did you mean 'depth'?"),
        (
            "",
            ["--model.colour", "red"],
            f"model: {CLASS} has no option 'colour'. Its options are image_size, patch_size, ",
        ),
        (f"model: {{class_path: {CLASS}, init_args: {{dept: 3}}}}", [], "has no option 'dept'; did you mean 'depth'?"),
        (
            "model: {class_path: examples.vit.VIT}",
            [],
            "model: cannot import examples.vit.VIT: module 'examples.vit' has",
        ),
        ("", ["--model", "examples.vit.VIT"], "has no attribute 'VIT'; did you mean 'ViT'?"),
        ("", ["--model", "examples.vitt.ViT"], "has no attribute 'vitt'; did you mean 'vit'?"),
        ("", ["--model", "exampels.vit.ViT"], "No module named 'exampels'; did you mean 'examples'?"),
        ("data: {class_path: examples.data.Digit}", [], "data: cannot import examples.data.Digit: "),
        (
            "trainer: {strategy: {class_path: lightning_hybrid.HybridStrateg}}",
            [],
            "trainer.strategy: cannot import lightning_hybrid.HybridStrateg: module 'lightning_hybrid' has no attribute"
            " 'HybridStrateg'; did you mean 'HybridStrategy'?",
        ),
        (
            "",
            ["--trainer.strategy.init_args.pipeline_paralel_size", "2"],
            "lightning_hybrid.HybridStrategy has no option 'pipeline_paralel_size'; did you mean"
            " 'pipeline_parallel_size'?",
        ),
        ("trainer: {devicess: 2}", [], "; did you mean 'trainer.devices'?"),
        ("modell: {class_path: examples.vit.ViT}", [], "; did you mean 'model'?"),
        ("", ["--model.depth", "x"], "error: model.init_args.depth: must be int; got x. [LH1002]"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "plan", "check"])
def test_a_misspelt_name_is_a_line(
    command: str,
    change: str,
    words: list[str],
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As the program says it that is started by ``python -m lightning_hybrid``."""
    file = tmp_path / "change.yaml"
    file.write_text(change or "{}")
    arguments = [command, "--config", VIT, "--config", str(file), *words]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["lightning_hybrid/__main__.py", *arguments])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    (error,) = capsys.readouterr().err.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(" [LH1002]")
    assert complaint in error


@pytest.mark.parametrize("command", ["fit", "plan"])
@pytest.mark.parametrize("is_file", [False, True])
@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        (
            "schedule",
            "1f2b",
            "schedule must be one of 'gpipe', '1f1b', 'interleaved_1f1b', 'auto', got '1f2b'. [LH102]",
        ),
        ("zero_stage", "4", "must be one of 0, 1, 2, 3, 'auto'; got 4. [LH1002]"),
        ("tensor_parallel_size", "two", "must be one of int, list[int], 'auto'; got two. [LH1002]"),
        (
            "timeout",
            '"0:00:00"',
            "timeout must be positive or None, got 0:00:00. [LH104]",
        ),
    ],
)
def test_a_wrong_value_is_a_line_with_its_path(
    command: str,
    is_file: bool,
    name: str,
    value: str,
    text: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """There were hundreds to thousands of characters of the parser."""
    file = tmp_path / "change.yaml"
    strategy = f"{{class_path: lightning_hybrid.HybridStrategy, init_args: {{{name}: {value}}}}}"
    file.write_text(f"trainer: {{strategy: {strategy}}}" if is_file else "{}")
    option = [] if is_file else [f"--trainer.strategy.init_args.{name}", value.strip('"')]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(
        sys, "argv", ["lightning_hybrid/__main__.py", command, "--config", VIT, "--config", str(file), *option]
    )
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: trainer.strategy.init_args.{name}: {text}"


def _commands(tmp_path: Path) -> dict[str, list[str]]:
    """What each command refuses when it is at work."""
    config, nothing = str(ROOT / "configs" / "gpt_hybrid.yaml"), str(tmp_path / "nothing")
    wrong = ["--config", config, "--trainer.strategy.init_args.tensor_parallel_plan", "{body.9: colwise}"]
    return {
        "demo": [],
        "timeline": ["--ranks", "0"],
        "plan": wrong,
        "memory": wrong,
        "suggest": ["--config", config, "--ranks", "8", "--nodes", "3"],
        "check": ["--config", config, "--steps", "0"],
        "inspect": [nothing],
        "consolidate": [nothing, str(tmp_path / "file")],
        "export": [nothing, str(tmp_path / "folder")],
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("words_only")
def test_every_command_refuses_in_one_way(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)  # as if it were not installed, which is what `demo` refuses
    with pytest.raises(SystemExit) as exit_:
        main([command, *_commands(tmp_path)[command]])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"lightning-hybrid {command}: error: ")
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(("ranks", "tensor", "pipeline"), [(1, 1, 1), (2, 1, 2), (3, 1, 1), (8, 2, 2)])
@pytest.mark.usefixtures("words_only")
def test_the_demo_is_divided_as_far_as_it_has_ranks(
    ranks: int, tensor: int, pipeline: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration that it prints is one for `fit`."""
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--ranks", str(ranks), "--trainer.max_steps", "7", "--print_config"])
    assert exit_.value.code == 0
    config = yaml.safe_load(capsys.readouterr().out)
    strategy = config["trainer"]["strategy"]["init_args"]
    assert (int(config["trainer"]["devices"]), config["trainer"]["max_steps"]) == (ranks, 7)
    assert (strategy["tensor_parallel_size"], strategy["pipeline_parallel_size"]) == (tensor, pipeline)
    assert config["model"]["class_path"] == "lightning_hybrid.cli.demo.vit.ViT"


def test_the_demo_says_how_to_get_its_digits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(SystemExit):
        main(["demo"])
    assert "scikit-learn is not installed. Run `pip install scikit-learn`" in capsys.readouterr().err


def test_timeline_shows_picture_and_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "picture.svg"
    words = ["--schedule=interleaved_1f1b", "--ranks=4", "--microbatches=8", "--chunks=2"]
    main(["timeline", *words, f"--svg={svg}"])
    timeline = simulate(build("interleaved_1f1b", 4, 8, 2))
    out = capsys.readouterr().out
    assert all(f"\nrank {rank} " in out for rank in range(4))
    # Megatron's formula (https://arxiv.org/abs/2104.04473): (ranks - 1) / (chunks * microbatches).
    assert "over the ideal  18.8%" in out
    assert (
        f"peak in flight  {', '.join(f'{peak:g}' for peak in timeline.peak_in_flight)}: highest number of microbatches"
        in out
    )
    assert out.count("15.8% of the step") == out.count("bubble") == 1
    assert max(map(len, out.splitlines())) <= 100
    assert svg.read_text() == timeline.to_svg()


def test_timeline_chooses_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["timeline", "--schedule", "interleaved_1f1b", "--ranks", "2"])
    assert "2 ranks, 2 chunks, 8 microbatches" in capsys.readouterr().out


def test_timeline_of_nodes_that_are_far_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The first rank of each node waits only where a message crosses nodes, and as many more are in flight there."""
    words = ["timeline", "--ranks=4", "--nodes=2", "--microbatches=24", "--network-latency=4", "--json"]
    found = {}
    for extra in ("0", "auto", "0,3,0"):
        main([*words, f"--extra-in-flight={extra}"])
        found[extra] = json.loads(capsys.readouterr().out)
    # Two ranks compute for 3 beyond each side of the link: 12 + 2 * 4 over 3 are 7 in flight, of which 1F1B has 4.
    assert found["auto"] == found["0,3,0"]
    assert found["auto"]["extra_in_flight"] == [0, 3, 0]
    assert found["auto"]["makespan"] == 24 * 3 + 3 * 3 + 2 * 4
    assert found["0"]["makespan"] > 1.4 * found["auto"]["makespan"]
    main([*words, "--network-bandwidth=0.25", "--extra-in-flight=auto"])  # a message keeps the link for 4
    narrow = json.loads(capsys.readouterr().out)
    assert 24 * 4 < narrow["makespan"] < 24 * 4 + 3 * 4 * 3 + 2 * 8


def test_timeline_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["timeline", "--schedule=gpipe", "--ranks=2", "--microbatches=4", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in ("schedule", "ranks", "microbatches", "chunks")} == {
        "schedule": "gpipe", "ranks": 2, "microbatches": 4, "chunks": 1,
    }  # fmt: skip
    # GPipe (https://arxiv.org/abs/1811.06965): all are kept, and (p - 1) / (m + p - 1) of the step is idle.
    assert found["peak_in_flight"] == [4, 4]
    assert found["bubble"] == pytest.approx(1 / 5)
    # A forward takes 1, a backward 2: rank 1 waits for the first forward of rank 0.
    assert found["makespan"] == (4 + 1) * (1 + 2)
    assert found["computing"][1][0] == {"action": "1F0", "start": 1.0, "end": 2.0}


FIT_SMALL = [
    "--trainer.accelerator=cpu",
    "--trainer.max_epochs=1",
    "--trainer.limit_train_batches=2",
    "--trainer.limit_val_batches=1",
    "--trainer.enable_progress_bar=false",
    "--trainer.enable_model_summary=false",
]


@pytest.mark.usefixtures("words_only")
def test_fit_in_this_process(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["fit", *FIT_SMALL, f"--trainer.default_root_dir={tmp_path}"]
    main(words, model="examples.vit.ViT", data="examples.data.Digits")
    assert "val_acc 0." in capsys.readouterr().out
    (saved,) = tmp_path.rglob("config.yaml")
    assert yaml.safe_load(saved.read_text())["model"]["class_path"] == "lightning_hybrid.cli.demo.vit.ViT"


PROJECT = """
from pathlib import Path

from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel

class Model(BoringModel):
    def on_train_end(self):
        Path(f"rank-{self.global_rank}").write_text(str(self.trainer.world_size))

class Data(BoringDataModule):
    pass
"""


@pytest.mark.usefixtures("words_only")
def test_without_a_logger_the_users_configuration_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder of logs is then the one where the program was started."""
    configuration = "trainer: {logger: false, enable_checkpointing: false, enable_progress_bar: false, max_steps: 1}\n"
    (tmp_path / "config.yaml").write_text(configuration)
    monkeypatch.chdir(tmp_path)
    demos = "lightning.pytorch.demos.boring_classes"
    main(["fit", "--config", "config.yaml", "--model", f"{demos}.BoringModel", "--data", f"{demos}.BoringDataModule"])
    assert (tmp_path / "config.yaml").read_text() == configuration


def test_fit_launches_every_rank_and_finds_the_users_project(tmp_path: Path) -> None:
    """Lightning starts the other ranks by running the same command line again."""
    (tmp_path / "project.py").write_text(PROJECT)
    config = {"model": {"class_path": "project.Model"}, "data": {"class_path": "project.Data"}}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config))
    words = ["fit", "--config=config.yaml", *FIT_SMALL, "--trainer.devices=2", "--trainer.strategy=ddp"]
    run("-m", "lightning_hybrid", *words, directory=tmp_path)
    assert {path.name: path.read_text() for path in tmp_path.glob("rank-*")} == {"rank-0": "2", "rank-1": "2"}


def test_script_of_an_example_is_the_program_with_defaults() -> None:
    config = yaml.safe_load(run("examples/vit.py", "fit", "--print_config"))
    assert config["model"]["class_path"] == "lightning_hybrid.cli.demo.vit.ViT"
    assert config["data"]["init_args"]["batch_size"] == 32


def test_plan_shows_stages_and_shared_layers_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    main(["plan", "--config", str(DEMO), "--trainer.devices", "8"])
    out = capsys.readouterr().out
    assert "data 2 x tensor 2 x pipeline 2 = 8 processes" in out
    assert "0-3               4 x Block" in out
    assert "body.*.attention.qkv (8)  packed_colwise_3  192x64 192  96x64 96" in out
    assert sys.argv == before


def test_of_several_sizes_the_plan_is_that_of_the_first_that_goes_with_the_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = str(ROOT / "configs" / "vit_elastic.yaml")
    for devices, expected in ((8, "data 2 x tensor 1 x pipeline 4"), (6, "data 3 x tensor 1 x pipeline 2")):
        main(["plan", "--config", config, "--trainer.devices", str(devices)])
        assert expected in capsys.readouterr().out
    main(["memory", "--json", "--config", config, "--ranks", "2"])
    assert json.loads(capsys.readouterr().out)["pipeline_parallel_size"] == 2
    with pytest.raises(SystemExit):
        main(["plan", "--config", config, "--trainer.devices", "3"])
    assert "3 processes cannot be divided by any combination of the allowed sizes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["memory", "--config", config, "--ranks", "6"])
    assert "global_batch_size=64 is not a multiple of" in capsys.readouterr().err


def test_plan_shows_which_stages_are_on_which_node(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", str(DEMO), "--trainer.devices", "8", "--trainer.num_nodes", "2"])
    table = capsys.readouterr().out
    assert re.search(r"^stage +ranks +node +layers of 'body'", table, re.MULTILINE)
    assert re.search(r"^ +0 +0-7 +0 +0-3 .*\n +1 +8-15 +1 +4-7", table, re.MULTILINE)
    sentence = r"With launch.rank_order='pp-dp-tp', a step sends [\d.]+ MB between nodes\. Set .* sends [\d.]+ MB"
    assert re.search(sentence, " ".join(table.split()))


@pytest.mark.parametrize(
    ("memory", "fits", "text"),
    [
        ([], True, " of the 80 GiB per device."),
        (["--memory", "1MiB"], False, "Does not fit: pipeline rank 0 needs the most memory"),
    ],
)
def test_memory_says_whether_it_fits(
    memory: list[str], fits: bool, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["memory", "--config", VIT, *memory]
    main(words)
    last = capsys.readouterr().out.splitlines()[-1]
    assert text in last
    assert last.startswith("Fits: ") is fits
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["fits"] is fits


@pytest.mark.parametrize("config", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem)
def test_no_line_of_a_plan_is_longer_than_a_terminal_is_wide(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", str(config)])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 100


@pytest.mark.parametrize("words", [["plan"], ["memory"], ["suggest", "--ranks=2"], ["check", "--dry"]], ids=" ".join)
@pytest.mark.usefixtures("words_only")
def test_where_nothing_is_started_lightning_says_nothing(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of SLURM, a seed, a logger or a precision that the CPU has not; what the user's code warns of is shown."""
    (tmp_path / "project.py").write_text(
        PROJECT.replace("class Data", "import warnings\nwarnings.warn('mine')\nclass Data")
    )
    (tmp_path / "srun").write_text("#!/bin/sh\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "project", raising=False)
    given = [
        "--model=project.Model",
        "--data=project.Data",
        "--trainer.logger=true",
    ]
    given += ["--trainer.devices=1", "--trainer.precision=16-mixed", f"--trainer.default_root_dir={tmp_path}"]
    (tmp_path / "run.yaml").write_text("trainer: {strategy: {class_path: lightning_hybrid.HybridStrategy}}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        main([*words, f"--config={tmp_path / 'run.yaml'}", *given])
    assert {str(each.message) for each in caught} == {"mine"}
    assert capsys.readouterr().err == ""


def test_plan_compares_the_bytes_between_nodes_of_all_orders_of_axes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(DEMO), "--trainer.devices", "4", "--trainer.num_nodes", "2"]
    found = {}
    for order in ("pp-dp-tp", "tp-dp-pp"):
        main(["plan", "--json", *words, f"--trainer.strategy.init_args.launch.rank_order={order}"])
        found[order] = json.loads(capsys.readouterr().out)["between_nodes"]
    assert found["tp-dp-pp"]["tensor_bytes"] == found["tp-dp-pp"]["bytes"] > 4 * found["pp-dp-tp"]["bytes"] > 0
    assert found["pp-dp-tp"]["tensor_bytes"] == 0
    best = found["tp-dp-pp"]["best_rank_order"], found["tp-dp-pp"]["best_bytes"]
    assert best == (found["pp-dp-tp"]["best_rank_order"], found["pp-dp-tp"]["best_bytes"])


def test_plan_with_context_parallelism_knows_the_bytes_between_nodes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(ROOT / "configs" / "gpt_hybrid.yaml"), "--trainer.devices=4", "--trainer.num_nodes=2"]
    words += ["--trainer.strategy.init_args.tensor_parallel_size=1"]
    main(["plan", "--json", *words, "--trainer.strategy.init_args.context_parallel_size=2"])
    assert json.loads(capsys.readouterr().out)["between_nodes"]["bytes"] > 0


def test_plan_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--json", "--config", str(DEMO), "--trainer.devices", "4", "--trainer.num_nodes", "2"])
    found = json.loads(capsys.readouterr().out)
    assert [found[f"{axis}_parallel_size"] for axis in ("data", "tensor", "pipeline")] == [2, 2, 2]
    assert [stage["layers"] for stage in found["stages"]] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert [(stage["ranks"], stage["nodes"]) for stage in found["stages"]] == [([0, 1, 2, 3], [0]), ([4, 5, 6, 7], [1])]
    for stage in found["stages"]:  # a block: two norms, the attention's two layers and the MLP's
        block = 2 * (64 + 64) + (64 * 192 + 192) + (64 * 64 + 64) + (64 * 128 + 128) + (128 * 64 + 64)
        assert stage["in_layers"] == 4 * block
        assert stage["num_parameters"] == stage["in_layers"] + stage["outside"]
    (qkv,) = (row for row in found["tensor_parallel_plan"] if row["module"] == "body.0.attention.qkv")
    assert qkv["parameters"]["body.0.attention.qkv.weight"] == {"shape": [192, 64], "local_shape": [96, 64]}


def test_memory_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    main(["memory", "--json", "--config", str(ROOT / "configs" / "vit_pipeline.yaml"), "--ranks", "4"])
    found = json.loads(capsys.readouterr().out)
    assert found["pipeline_parallel_size"] == 2
    for rank in found["bytes_of_pipeline_ranks"]:
        parts = [rank[name] for name in ("parameters", "gradients", "optimizer", "activations", "buffers")]
        assert rank["total"] == sum(parts)
        assert rank["optimizer"] >= 2 * rank["parameters"]  # AdamW has two moments


def test_a_dry_check_runs_the_step_on_shapes(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["check", "--dry", "--config", str(DEMO), "--trainer.devices", "4"]
    main(words)
    found = capsys.readouterr().out
    assert found.startswith(
        "Training can start with this layout. Its results were not compared with training in one process"
    )
    main([*words, "--json"])
    assert json.loads(capsys.readouterr().out)["trains"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--trainer.strategy.init_args.pipeline_parallel_size=4", "--trainer.devices=12"])
    assert ended.value.code == 2
    assert capsys.readouterr().err


@pytest.mark.parametrize("command", ["plan", "memory", "check"])
def test_help_says_by_example_how_to_change_a_configuration(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "This command also accepts all options of `fit`." in text
    assert f"Example: lightning-hybrid {command} --config FILE --" in text


def test_later_configurations_change_earlier_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("{trainer: {devices: 8}}")
    main(["plan", "--config", str(DEMO), "--config", str(more)])
    assert "= 8 processes" in capsys.readouterr().out


def test_plan_needs_no_device_of_the_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    main(["plan", "--config", str(DEMO), "--trainer.accelerator=gpu", "--trainer.devices=8"])
    assert "= 8 processes" in capsys.readouterr().out


def test_plan_counts_the_devices_that_there_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 16)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.simplefilter("ignore", DeprecationWarning)  # of third parties
        warnings.filterwarnings("ignore", "The `srun` command is available")  # where SLURM is installed
        main(["plan", "--config", str(DEMO), "--trainer.accelerator=gpu", "--trainer.devices=auto"])
    assert "= 16 processes" in capsys.readouterr().out


def test_who_changes_arguments_of_a_name_is_told_how(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    named = tmp_path / "named.yaml"
    named.write_text("{trainer: {strategy: hybrid_pp2}}")
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(DEMO), "--config", str(named), "--trainer.strategy.init_args.zero_stage=1"])
    assert "the strategy name 'hybrid_pp2' does not accept arguments. Write" in capsys.readouterr().err


def test_plan_of_another_strategy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(DEMO), "--trainer.strategy", "auto"])
    assert "is a DDPStrategy, not a HybridStrategy" in capsys.readouterr().err


def test_a_plan_that_cannot_be_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(ROOT / "configs" / "gpt_hybrid.yaml")]
    option = "--trainer.strategy.init_args.tensor_parallel_plan"
    with pytest.raises(SystemExit):
        main(["plan", *words, option, "{body.9: colwise}"])
    assert "matches no module of GPT" in capsys.readouterr().err


class ReadsAFile(LightningModule):
    """A module whose constructor raises an error."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.text = Path(path).read_text()


@pytest.mark.parametrize("command", ["fit", "plan", "memory"])
def test_an_error_of_a_constructor_names_its_class(
    command: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.yaml"
    name = f"{ReadsAFile.__module__}.{ReadsAFile.__name__}"
    file.write_text(
        f"model: {{class_path: {name}, init_args: {{path: missing.txt}}}}\n"
        "trainer: {accelerator: cpu, devices: 1, strategy: {class_path: lightning_hybrid.HybridStrategy}}\n"
    )
    monkeypatch.setattr(sys, "argv", ["lightning-hybrid", command, "--config", str(file)])
    with pytest.raises((SystemExit, FileNotFoundError)) as error:
        main()
    note = f"This error was raised when {name} was created from the configuration."
    if command == "fit":  # with its traceback
        assert error.type is FileNotFoundError
        assert error.value.__notes__ == [note]
    else:
        printed = capsys.readouterr().err
        assert printed.endswith(f"error: [Errno 2] No such file or directory: 'missing.txt'\n{note}\n"), printed
