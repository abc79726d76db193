from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from lightning_hybrid.cli.main import COMMANDS, HybridCLI, main
from lightning_hybrid.pipeline_parallel.schedules import build
from lightning_hybrid.pipeline_parallel.timeline import simulate

ROOT = Path(__file__).parent.parent.parent


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
    with pytest.raises(SystemExit) as exit_:
        main(["--help"])
    assert exit_.value.code == 0
    out = capsys.readouterr().out
    assert all(f"\n  {command} " in out for command in (*HybridCLI.subcommands(), *COMMANDS))


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "usage: lightning-hybrid COMMAND"),
        (["fitt"], "there is no command 'fitt'; did you mean 'fit'?"),
        (["--config", "x.yaml"], "there is no command '--config'"),
        (["timeline", "--schedule", "1f2b"], "invalid choice: '1f2b'"),
        (["timeline", "--ranks", "0"], "num_ranks is 0"),
        (["timeline", "--chunks", "0"], "num_chunks is 0"),
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


def _commands(tmp_path: Path) -> dict[str, list[str]]:
    """What each command refuses when it is at work."""
    config, nothing = str(ROOT / "configs" / "gpt_hybrid.yaml"), str(tmp_path / "nothing")
    wrong = ["--config", config, "--trainer.strategy.init_args.tensor_parallel_plan", "{body.9: colwise}"]
    return {
        "timeline": ["--ranks", "0"],
        "plan": wrong,
        "memory": wrong,
        "check": ["--config", config, "--steps", "0"],
        "inspect": [nothing],
        "consolidate": [nothing, str(tmp_path / "file")],
        "export": [nothing, str(tmp_path / "folder")],
    }


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("words_only")
def test_every_command_refuses_in_one_way(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([command, *_commands(tmp_path)[command]])
    assert exit_.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"lightning-hybrid {command}: error: ")
    assert "Traceback" not in captured.err


def test_timeline_shows_picture_and_figures(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    svg = tmp_path / "picture.svg"
    words = ["--schedule=interleaved_1f1b", "--ranks=4", "--microbatches=8", "--chunks=2"]
    main(["timeline", *words, f"--svg={svg}"])
    timeline = simulate(build("interleaved_1f1b", 4, 8, 2))
    out = capsys.readouterr().out
    assert all(f"\nrank {rank} " in out for rank in range(4))
    # Megatron's formula (https://arxiv.org/abs/2104.04473): (ranks - 1) / (chunks * microbatches).
    assert "18.8% over the ideal" in out
    assert all(f"rank {rank}: {peak:g}" in out for rank, peak in enumerate(timeline.peak_in_flight))
    assert svg.read_text() == timeline.to_svg()


def test_timeline_chooses_what_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["timeline", "--schedule", "interleaved_1f1b", "--ranks", "2"])
    assert "2 ranks, 2 chunks, 8 microbatches" in capsys.readouterr().out


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
    assert yaml.safe_load(saved.read_text())["model"]["class_path"] == "examples.vit.ViT"


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
    assert config["model"]["class_path"] == "examples.vit.ViT"
    assert config["data"]["init_args"]["batch_size"] == 32


def test_plan_shows_stages_and_shared_layers_without_starting_anything(capsys: pytest.CaptureFixture[str]) -> None:
    before = list(sys.argv)
    main(["plan", "--config", str(ROOT / "configs" / "vit_hybrid.yaml"), "--trainer.devices", "8"])
    out = capsys.readouterr().out
    assert "data 2 x tensor 2 x pipeline 2 = 8 processes" in out
    assert "0-3               4 x Block" in out
    assert "body.*.attention.qkv (8)  packed_colwise_3  192x64 192  96x64 96" in out
    assert sys.argv == before


@pytest.mark.parametrize("command", ["plan", "memory", "check"])
def test_help_says_by_example_how_to_change_a_configuration(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([command, "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "change the configuration as those of `fit` do" in text
    assert f"Example: lightning-hybrid {command} --config FILE --" in text


def test_later_configurations_change_earlier_ones(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("{trainer: {devices: 8}}")
    main(["plan", "--config", str(ROOT / "configs" / "vit_hybrid.yaml"), "--config", str(more)])
    assert "= 8 processes" in capsys.readouterr().out


def test_plan_of_another_strategy_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "--config", str(ROOT / "configs" / "vit_hybrid.yaml"), "--trainer.strategy", "auto"])
    assert "is a DDPStrategy, not a HybridStrategy" in capsys.readouterr().err


def test_a_plan_that_cannot_be_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--config", str(ROOT / "configs" / "gpt_hybrid.yaml")]
    option = "--trainer.strategy.init_args.tensor_parallel_plan"
    with pytest.raises(SystemExit):
        main(["plan", *words, option, "{body.9: colwise}"])
    assert "matches no module of GPT" in capsys.readouterr().err
