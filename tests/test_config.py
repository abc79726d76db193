"""The arguments of `HybridStrategy`: groups, their defaults, and where an unknown name belongs."""

from __future__ import annotations

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch.cli import LightningCLI

from lightning_hybrid import Faults, HybridStrategy, Launch, Tuning
from lightning_hybrid.cli.hybrid_cli import HybridCLI
from lightning_hybrid.config import HybridConfig
from tests.training_jobs import Regression

INIT_ARGS = "--trainer.strategy.init_args"


def config_file(folder: Path, **arguments: Any) -> list[str]:
    """The option with a configuration that has these arguments."""
    strategy = {"class_path": "lightning_hybrid.HybridStrategy", "init_args": arguments}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"trainer": {"accelerator": "cpu", "devices": 1, "strategy": strategy}}))
    return ["--config", str(path)]


def given(words: list[str], cli: type[LightningCLI] = HybridCLI) -> HybridConfig:
    """The arguments that the strategy of a command line gets."""
    strategy = cli(model_class=Regression, args=words, run=False, save_config_callback=None).trainer.strategy
    assert isinstance(strategy, HybridStrategy)
    return strategy.settings.requested


def test_the_signature_has_every_argument_with_its_default() -> None:
    parameters = inspect.signature(HybridStrategy).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        each.name: each.default for each in fields(HybridConfig)
    }
    assert HybridStrategy(2, 2, num_microbatches=4).settings.requested == HybridConfig(2, 2, num_microbatches=4)


def test_a_group_is_frozen_and_prints_what_is_given() -> None:
    assert repr(Tuning(extra_in_flight=[0, 3])) == "Tuning(extra_in_flight=[0, 3])"
    assert repr(HybridConfig().faults) == "Faults()"
    with pytest.raises(FrozenInstanceError):
        Launch().rank_order = "dp-pp-tp"  # type: ignore[misc]
    for copied in (copy.deepcopy(Faults(stall_timeout=9)), pickle.loads(pickle.dumps(Faults(stall_timeout=9)))):
        assert copied == Faults(stall_timeout=9)


def test_a_number_is_a_time_in_seconds() -> None:
    settings = HybridStrategy(timeout=90, faults=Faults(heartbeat_timeout=4.5, stall_timeout=300)).settings
    assert settings.time_limit == timedelta(seconds=90)
    assert (settings.seconds_of_heartbeat, settings.seconds_to_stall) == (4.5, 0.8 * 90)
    off = HybridStrategy(timeout=None, faults=Faults(heartbeat_timeout=None, stall_timeout=None)).settings
    assert (off.time_limit, off.seconds_of_heartbeat, off.seconds_to_stall) == (None, None, None)


@pytest.mark.parametrize(
    ("reshard", "zero_stage", "num_microbatches", "frees_early"),
    [(True, 3, 4, True), (False, 3, 1, False), ("auto", 3, 4, False), ("auto", 3, 1, True)],
)
def test_parameters_are_resharded_as_fsdp2_does(
    reshard: Any, zero_stage: Any, num_microbatches: int, frees_early: bool
) -> None:
    tuning = Tuning(reshard_after_forward=reshard)
    strategy = HybridStrategy(zero_stage=zero_stage, num_microbatches=num_microbatches, tuning=tuning)
    assert strategy.settings.frees_early == frees_early


@pytest.mark.parametrize("cli", [HybridCLI, LightningCLI])
def test_yaml_has_groups_and_the_command_line_changes_a_part(tmp_path: Path, cli: type[LightningCLI]) -> None:
    config = config_file(tmp_path, faults={"heartbeat_timeout": 60, "stall_timeout": "0:02:00"})
    more = [f"{INIT_ARGS}.faults.heartbeat_timeout", "7", f"{INIT_ARGS}.tuning.extra_in_flight=2"]
    found = given([*config, *more, f"{INIT_ARGS}.launch.rank_order=dp-pp-tp"], cli)
    assert found.faults == Faults(heartbeat_timeout=7, stall_timeout=timedelta(minutes=2))
    assert (found.launch, found.tuning) == (Launch(rank_order="dp-pp-tp"), Tuning(extra_in_flight=2))
    assert given(config, cli).faults.heartbeat_timeout == 60


@pytest.mark.parametrize("option", [INIT_ARGS, "--trainer.strategy"])
def test_the_command_line_switches_a_part_off(tmp_path: Path, option: str) -> None:
    words = config_file(tmp_path, faults={"on_nonfinite": "skip"}, launch={"process_group_backend": "gloo"})
    words += [f"{option}.faults.heartbeat_timeout", "null", f"{option}.launch.process_group_backend=null"]
    found = given([*words, f"{INIT_ARGS}.global_batch_size=null"])
    assert found.faults == Faults(heartbeat_timeout=None, on_nonfinite="skip")
    assert (found.launch, found.global_batch_size) == (Launch(), None)


def test_a_saved_configuration_is_read_again(tmp_path: Path) -> None:
    words = [*config_file(tmp_path, faults={"stall_timeout": 90}), f"{INIT_ARGS}.tuning.memory_limit=80GiB"]
    words += [f"{INIT_ARGS}.layout=auto"]
    cli = HybridCLI(model_class=Regression, args=words, run=False, save_config_callback=None)
    saved = tmp_path / "saved.yaml"
    saved.write_text(cli.parser.dump(cli.config))
    assert given(["--config", str(saved)]) == given(words)
    assert yaml.safe_load(saved.read_text())["trainer"]["strategy"]["init_args"]["faults"]["stall_timeout"] == 90


@pytest.mark.parametrize(
    ("arguments", "option", "text"),
    [
        ({"heartbeat_timeout": 60}, "", "it belongs to `faults`: use faults.heartbeat_timeout"),
        ({}, "rank_order=dp-pp-tp", "it belongs to `launch`: use launch.rank_order"),
        ({"faults": {"hartbeat_timeout": 60}}, "", "no option 'faults.hartbeat_timeout'; did you mean 'heartbeat_time"),
        ({}, "tuning.extra_in_fligth=1", "no option 'tuning.extra_in_fligth'; did you mean 'extra_in_flight'?"),
        ({"faults": {"on_nonfinite": "stop"}}, "", "faults.on_nonfinite"),
        ({}, "faults.on_nonfinite=stop", "faults.on_nonfinite"),
        ({"faults": {"heartbeat_timeout": 1}}, "", "`faults.heartbeat_timeout` must be at least 0:00:03"),
    ],
)
def test_a_wrong_part_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: dict[str, Any], option: str, text: str
) -> None:
    words = [*config_file(tmp_path, **arguments), *([f"{INIT_ARGS}.{option}"] if option else [])]
    with pytest.raises((SystemExit, ValueError)) as error:
        given(words)
    assert text in f"{error.value} {capsys.readouterr().err}"
