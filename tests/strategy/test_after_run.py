"""After a run the module is used and saved as with one process: on any rank, and by its parts."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from safetensors.torch import load_file
from torch import Tensor

from lightning_hybrid.strategy import gather
from tests.checkpoint.test_parts import LAYOUTS, Model, tried, ways
from tests.pool import Pools
from tests.training_jobs import assert_same, loader, users_trainer

X = torch.linspace(-1, 1, 18, dtype=torch.float64).view(3, 6)
RUNS: dict[str, Callable[[Any, Any], Any]] = {
    "fit": lambda trainer, module: trainer.fit(module, loader()),
    "test": lambda trainer, module: trainer.test(module, loader(), verbose=False),
    "fit and test": lambda trainer, module: (trainer.fit(module, loader()), trainer.test(module, loader())),
}


class Tested(Model):
    __test__ = False
    test_step = Model.validation_step


def used(layout: dict[str, Any], run: str, root: str) -> dict[str, Any]:
    """One rank after the other saves and calls the module and its parts, alone."""
    module = Tested()
    trainer = users_trainer(layout, limit_train_batches=2)
    RUNS[run](trainer, module)
    found: dict[str, Any] = {}
    path = Path(root) / f"{run} {dist.get_rank()}"
    for rank in range(dist.get_world_size()):
        if rank == dist.get_rank():
            for name, save in ways(module, path).items():
                if name == "to_onnx":
                    continue  # see below
                save()
                found[name] = torch.load(path, weights_only=False) if name.startswith("torch.save") else None
                if name.startswith("save_pretrained"):
                    found[name] = load_file(path / "model.safetensors")
                elif path.exists():
                    path.unlink()
            with torch.no_grad():
                found["call"], found["call of a part"] = module(X), module.body(torch.ones(1, 8, dtype=torch.float64))
                found["export"] = torch.export.export(module, (X,)).module()(X)
            found["copy"] = copy.deepcopy(module).state_dict()
        trainer.strategy.barrier()
    trainer.save_checkpoint(Path(root) / f"{run}.ckpt")
    trainer.strategy.barrier()
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_is_used_and_saved_as_after_a_run_of_one_process(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    for run in RUNS:
        results = ranks(size, lightning=True).run(used, layout, run, str(tmp_path))
        expected = torch.load(tmp_path / f"{run}.ckpt", weights_only=False)["state_dict"]
        module = Tested()
        is_as_made = all(torch.equal(value, expected[key]) for key, value in module.state_dict().items())
        assert is_as_made == (run == "test")
        module.load_state_dict(expected)
        body = {key: value.detach() for key, value in module.body.state_dict().items()}
        for found in results:
            assert_same(found["torch.save(self.state_dict())"], dict(expected), 0.0)
            assert_same(found["torch.save(self.body.state_dict())"], body, 0.0)
            assert_same(dict(found["torch.save(self)"].state_dict()), dict(expected), 0.0)
            assert_same(dict(found["torch.save(self.body)"]["body"].state_dict()), body, 0.0)
            assert_same(found["save_pretrained"], body, 0.0)
            assert_same(found["save_pretrained(state_dict)"], body, 0.0)
            assert_same(dict(found["copy"]), dict(expected), 0.0)
            assert_same(found["call"], module(X).detach())
            assert_same(found["export"], module(X).detach())
            assert_same(found["call of a part"], module.body(torch.ones(1, 8, dtype=torch.float64)).detach())


def exported(layout: dict[str, Any], path: str) -> str:
    module = Tested()
    users_trainer(layout, limit_train_batches=2).fit(module, loader())
    return to_onnx(module, path) if dist.get_rank() == 1 else ""


def to_onnx(module: Model, path: str) -> str:
    """The error, which torch raises where its packages for ONNX are not installed."""
    try:
        module.to_onnx(path, X)
    except ModuleNotFoundError as error:
        return str(error)
    return f"{Path(path).stat().st_size > 0}"


@pytest.mark.parametrize("name", LAYOUTS)
def test_one_rank_alone_writes_onnx_as_one_process_does(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    texts = ranks(size, lightning=True).run(exported, layout, str(tmp_path / "model.onnx"))
    assert texts[1] == to_onnx(Tested(), str(tmp_path / "alone.onnx"))


# -- where it stays divided --------------------------------------------------------------------------------------------


class Fails(Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        if dist.get_rank() == 1:
            raise KeyError("mine")


def failed(layout: dict[str, Any], root: str) -> dict[str, str]:
    module = Tested()
    with pytest.raises(Exception, match="mine"):
        users_trainer(layout, callbacks=[Fails()]).fit(module, loader())
    return refused(module, root)


def refused(module: Model, root: str) -> dict[str, str]:
    return {**tried(module, Path(root)), **called(module)}


def called(module: Model) -> dict[str, str]:
    uses: dict[str, Callable[[], Any]] = {
        "call": lambda: module(X),
        "call of a part": lambda: module.body(torch.ones(1, 8).double()),
        "step": lambda: module.training_step(next(iter(loader())), 0),
    }
    texts = {}
    for name, use in uses.items():
        with pytest.raises(ValueError, match="after a run") as error:
            use()
        texts[name] = str(error.value)
    return texts


@pytest.mark.parametrize("name", LAYOUTS)
def test_after_an_exception_every_use_is_one_error_and_no_file(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    for texts in ranks(size, lightning=True).run(failed, layout, str(tmp_path)):
        for way, text in texts.items():
            assert "no error" not in text, way
            assert "and a file" not in text, way
        assert "The run ended with an error" in texts["torch.save(self.state_dict())"]
        assert "load_from_checkpoint" in texts["call"]


def too_large(layout: dict[str, Any], root: str) -> tuple[dict[str, str], Any, Any]:
    module = Tested()
    trainer = users_trainer(layout, limit_train_batches=2)
    with mock.patch.object(gather, "available_memory", return_value=1000 + int(os.environ["RANK"])):
        with mock.patch("lightning_hybrid.strategy.run.rank_zero_info") as told:
            trainer.fit(module, loader())
        texts = refused(module, root)
        texts["log"] = told.call_args_list[-1].args[0]
        trainer.test(module, loader(), verbose=False)  # is not refused
        trainer.save_checkpoint(Path(root) / "all.ckpt", weights_only=True)
    trainer.strategy.gather_module()
    with torch.no_grad():
        return texts, dict(module.state_dict()), module(X)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_that_is_too_large_stays_divided_and_says_so(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    results = ranks(size, lightning=True).run(too_large, layout, str(tmp_path))
    state = torch.load(tmp_path / "all.ckpt", weights_only=False)["state_dict"]
    module = Tested()
    module.load_state_dict(state)
    for texts, whole, output in results:
        for way in ("log", "call", "torch.save(self.state_dict())"):
            assert "trainer.save_checkpoint(path, weights_only=True)" in texts[way], way
            assert f"Each of the {size} processes" in texts[way]
            assert "gather_module()" in texts[way]
        assert_same(whole, dict(state), 0.0)
        assert_same(output, module(X).detach())


def kept(layout: dict[str, Any], root: str) -> tuple[dict[str, str], dict[str, str]]:
    module = Tested()
    trainer = users_trainer({**layout, "gather_module_on_teardown": False}, limit_train_batches=2)
    trainer.fit(module, loader())
    saves, calls = tried(module, Path(root)), {}
    if trainer.strategy.settings.zero_stage:
        calls = called(module)
    trainer.strategy.gather_module()
    torch.save(module, io.BytesIO())
    return saves, calls


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_module_that_is_to_stay_divided_is_not_saved_in_parts(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    for saves, calls in ranks(size, lightning=True).run(kept, layout, str(tmp_path)):
        for way, text in saves.items():
            assert "gather_module()" in text, way
            assert "and a file" not in text, way
        assert bool(calls) == (name == "zero3")
        for text in calls.values():
            assert "gather_module_on_teardown=False" in text
            assert "gather_module()" in text


# -- gradients ---------------------------------------------------------------------------------------------------------


def norms(layout: dict[str, Any] | None) -> list[float]:
    """The gradient norm: in a hook, after the run, and after a test, for which Lightning drops the gradients."""
    module, found = Tested(), []

    class Norm(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            found.append(float(norm()))

    trainer = users_trainer(layout, limit_train_batches=2, callbacks=[Norm()])

    def norm() -> Tensor:
        if layout is None:
            return torch.nn.utils.get_total_norm([each.grad for each in module.parameters() if each.grad is not None])
        return trainer.strategy.grad_norm()

    trainer.fit(module, loader())
    found.append(float(norm()))
    trainer.test(module, loader(), verbose=False)
    found.append(float(norm()))
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_the_gradient_norm_is_known_after_a_run(ranks: Pools, name: str) -> None:
    size, layout = LAYOUTS[name]
    expected = norms(None) if size == 2 and name != "zero3" else None
    for gathers in ("auto", False):
        for found in ranks(size, lightning=True).run(norms, {**layout, "gather_module_on_teardown": gathers}):
            assert found == pytest.approx(expected or [found[0], found[0], 0.0], rel=1e-12)
            assert found[0] > 0


# -- runs that follow --------------------------------------------------------------------------------------------------


def followed(layout: dict[str, Any], gathers: Any) -> dict[str, Any]:
    """Fit, change a weight, test, and fit on with the same Trainer; then with another one."""
    layout = {**layout, "gather_module_on_teardown": gathers}
    module, found = Tested(), {}
    trainer = users_trainer(layout, limit_train_batches=2)
    trainer.fit(module, loader())
    parameters = [each for group in trainer.optimizers[0].param_groups for each in group["params"]]
    with trainer.strategy.full_parameters(module.head, writes=True), torch.no_grad():
        module.head.weight.mul_(2)
    (found["test"],) = trainer.test(module, loader(), verbose=False)
    seen: list[bool] = []

    class Sees(Callback):
        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            inside = {id(each) for each in pl_module.parameters()}
            seen.append(all(id(each) in inside for each in parameters))

    trainer.callbacks.append(Sees())
    trainer.test(module, loader(), verbose=False)
    found["optimizers know the parameters"] = seen
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, loader())
    found["again"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    other = users_trainer(layout, limit_train_batches=2)
    other.fit(module, loader())
    other.strategy.gather_module()
    return {**found, "state": dict(module.state_dict())}


@pytest.mark.parametrize("name", LAYOUTS)
def test_runs_that_follow_are_those_of_a_module_that_stayed_divided(ranks: Pools, name: str) -> None:
    size, layout = LAYOUTS[name]
    kept, whole = (ranks(size, lightning=True).run(followed, layout, gathers) for gathers in (False, "auto"))
    for one, other in zip(kept, whole, strict=True):
        assert one["optimizers know the parameters"] == [True]
        assert_same(other, one, 0.0)
