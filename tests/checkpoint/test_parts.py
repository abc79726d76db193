"""Saving a part of a module, in hooks and after runs, is an error, and no file is begun."""

from __future__ import annotations

import gc
import io
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from safetensors.torch import save_file, save_model
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_hybrid.checkpoint.parts import mark_parts
from lightning_hybrid.pipeline_parallel.placeholders import replace_with_placeholders
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap
from tests.pool import Pools
from tests.training_jobs import Regression, loader, users_trainer

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (2, {"pipeline_parallel_size": 2}),
    "tp2": (2, {"tensor_parallel_size": 2, "tensor_parallel_plan": {"body.*.0": "colwise_gather_output"}}),
    "zero3": (2, {"zero_stage": 3}),
    "dp2 pp2": (4, {"pipeline_parallel_size": 2}),
}


class Folder(nn.Sequential):
    """Writes a folder as models of transformers do: what describes the model first."""

    def save_pretrained(self, folder: Path, state_dict: dict[str, Tensor] | None = None) -> None:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps({"layers": len(self)}))
        save_file(dict(self.state_dict()) if state_dict is None else state_dict, folder / "model.safetensors")


class Holder:
    """An object in which nobody looks for a module before it is pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module


class Model(Regression):
    def __init__(self) -> None:
        super().__init__(4)
        self.body = Folder(*self.body)


def ways(module: Model, path: Path) -> dict[str, Callable[[], Any]]:
    """Every way of saving a module, or a part of it, to a path."""
    body: Any = module.body
    return {
        "torch.save(self.state_dict())": lambda: torch.save(module.state_dict(), path),
        "torch.save(self.body.state_dict())": lambda: torch.save(body.state_dict(), path),
        "torch.save(list)": lambda: torch.save([{"x": list(body.parameters())}], path),
        "torch.save(self)": lambda: torch.save(module, path),
        "torch.save(self.body)": lambda: torch.save({"body": body}, str(path)),
        "torch.save(object)": lambda: torch.save(Holder(body), path),
        "to memory": lambda: torch.save(module, io.BytesIO()),
        "pickle": lambda: pickle.dumps(body),
        "safetensors": lambda: save_file({name: each.data for name, each in body.named_parameters()}, path),
        "safetensors of a module": lambda: save_model(body, str(path)),
        "save_pretrained": lambda: body.save_pretrained(path),
        "save_pretrained(state_dict)": lambda: body.save_pretrained(path, state_dict=dict(body.state_dict())),
        "to_onnx": lambda: module.to_onnx(path, {"x": torch.zeros(1, 6, dtype=torch.float64)}),
    }


class Saves(Callback):
    """Tries all ways at the end of training."""

    def __init__(self, root: Path) -> None:
        self.root, self.found = root, {}

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = tried(pl_module, self.root)


def tried(module: Model, root: Path) -> dict[str, str]:
    """The text of the error of each way."""
    found = {}
    folder = root / os.environ["RANK"]
    folder.mkdir(exist_ok=True)
    for name, save in ways(module, folder / "saved").items():
        try:
            save()
        except ValueError as error:
            found[name] = str(error)
        else:
            found[name] = "no error"
        if list(folder.iterdir()):
            found[name] += ", and a file"
            shutil.rmtree(folder)
            folder.mkdir()
    return found


def saved_in_a_hook(layout: dict[str, Any], root: str) -> tuple[dict[str, str], bool, bool]:
    module, before, callback = Model(), torch.save, Saves(Path(root))
    trainer = users_trainer(layout, callbacks=[callback], limit_train_batches=2)
    trainer.fit(module, loader())
    whole = {}

    class Whole(Callback):
        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            with trainer.strategy.full_parameters():
                if trainer.is_global_zero:
                    pl_module.body.save_pretrained(Path(root) / "folder")
                    torch.save(pl_module.state_dict(), Path(root) / "state")
                whole.update(pl_module.state_dict())

    users_trainer(layout, callbacks=[Whole()], limit_train_batches=2).fit(module, loader())
    trainer.strategy.barrier()
    state = torch.load(Path(root) / "state")
    return callback.found, torch.save is before, all(torch.equal(state[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", LAYOUTS)
def test_no_way_of_saving_in_a_hook_writes_a_part(ranks: Pools, tmp_path: Path, name: str) -> None:
    size, layout = LAYOUTS[name]
    for found, is_undone, is_whole in ranks(size, lightning=True).run(saved_in_a_hook, layout, str(tmp_path)):
        assert list(found) == list(ways(Model(), tmp_path))
        for way, text in found.items():
            assert "trainer.save_checkpoint(path, weights_only=True)" in text, (way, text)
            assert "full_parameters" in text, (way, text)
            assert "and a file" not in text, (way, text)
        assert is_undone
        assert is_whole
    assert (tmp_path / "folder" / "model.safetensors").exists()


@pytest.mark.parametrize("ends", ["whole", "gone"])
def test_functions_are_checked_as_long_as_a_divided_module_is_there(ends: str) -> None:
    gc.collect()
    save, modules = torch.save, [Model(), Model()]
    stage_map = StageMap(
        "body", tuple(f"body.{number}" for number in range(4)), (range(2), range(2, 4)), Placement.in_turns(2)
    )
    for module in modules:
        replace_with_placeholders(module, stage_map, 0)
        mark_parts(module)
        assert torch.save is not save
    while modules:
        assert torch.save is not save
        module = modules.pop()
        if ends == "whole":
            module.body = Model().body
            mark_parts(module)
        del module
        gc.collect()
    assert torch.save is save
    assert "storage" not in vars(DTensor)
