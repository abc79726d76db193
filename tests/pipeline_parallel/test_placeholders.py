from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file, save_model
from torch import Tensor, nn

from lightning_hybrid.distributed.failure import WrongUseError
from lightning_hybrid.pipeline_parallel import placeholders
from lightning_hybrid.pipeline_parallel.placeholders import (
    PlaceholderBuffer,
    PlaceholderParameter,
    is_placeholder,
    refuse_call,
    replace_with_placeholders,
)
from lightning_hybrid.pipeline_parallel.schedules import Placement
from lightning_hybrid.pipeline_parallel.stage_map import StageMap


class Model(nn.Module):
    """Layers of every kind on two stages, ties, and tensors outside the body."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        here = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        there = nn.Sequential(nn.LSTM(3, 3, num_layers=2, bidirectional=True), nn.BatchNorm1d(3), nn.Linear(3, 3))
        there[2].weight = nn.Parameter(torch.rand(3, 3), requires_grad=False)
        there[2].bias = there[1].bias  # a tie among placeholders
        there[1].register_buffer("tied_variance", there[1].running_var)
        there[1].register_buffer("passing", torch.arange(3), persistent=False)
        self.body = nn.Sequential(here, there, nn.ParameterList([torch.rand(2), torch.rand(1)]))  # type: ignore[arg-type]

    def stage_map(self) -> StageMap:
        return StageMap(
            "body", tuple(f"body.{key}" for key in self.body._modules), (range(1), range(1, 3)), Placement.in_turns(2)
        )


def make(rank: int = 0) -> Model:
    model = Model()
    replace_with_placeholders(model, model.stage_map(), rank)
    return model


def tensors(module: nn.Module) -> dict[str, Tensor]:
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def ties(module: nn.Module) -> list[list[str]]:
    names: dict[int, list[str]] = {}
    for name, tensor in tensors(module).items():
        names.setdefault(id(tensor), []).append(name)
    return sorted(group for group in names.values() if len(group) > 1)


@pytest.mark.parametrize("rank", [0, 1])
def test_names_shapes_dtypes_and_order_are_those_of_the_whole_module(rank: int) -> None:
    whole, divided = Model(), make(rank)
    expected = {
        name: (x.shape, x.dtype, x.requires_grad, isinstance(x, nn.Parameter)) for name, x in tensors(whole).items()
    }
    found = {
        name: (x.shape, x.dtype, x.requires_grad, isinstance(x, nn.Parameter)) for name, x in tensors(divided).items()
    }
    assert list(found.items()) == list(expected.items())
    assert list(divided.state_dict()) == list(whole.state_dict())
    assert ties(divided) == ties(whole)


@pytest.mark.parametrize("rank", [0, 1])
def test_only_what_lives_elsewhere_is_a_placeholder(rank: int) -> None:
    prefixes = ("body.0.",) if rank == 1 else ("body.1.", "body.2.")
    for name, tensor in tensors(make(rank)).items():
        assert is_placeholder(tensor) == tensor.is_meta == name.startswith(prefixes)


def test_what_stays_is_the_same_object() -> None:
    model = Model()
    before = tensors(model)
    replace_with_placeholders(model, model.stage_map(), 0)
    assert all(tensor is before[name] for name, tensor in tensors(model).items() if not is_placeholder(tensor))
    again = tensors(model)
    replace_with_placeholders(model, model.stage_map(), 0)  # a second time changes nothing
    assert all(tensor is again[name] for name, tensor in tensors(model).items())


def test_a_tensor_that_one_of_its_names_keeps_here_stays_under_all_its_names() -> None:
    model = Model()
    model.body[1][2].weight = model.body[0][0].weight
    model.body[1][1].running_mean = model.body[0][1].running_mean
    replace_with_placeholders(model, model.stage_map(), 0)
    assert model.body[1][2].weight is model.body[0][0].weight
    assert model.body[1][1].running_mean is model.body[0][1].running_mean
    assert not is_placeholder(model.body[1][2].weight)


def test_attributes_of_parameters_are_kept() -> None:
    # `configure_optimizers` of many models reads them, and must make the same groups on every rank.
    model = Model()
    model.body[1][2].weight.no_weight_decay = True  # type: ignore[attr-defined]
    replace_with_placeholders(model, model.stage_map(), 0)
    assert model.body[1][2].weight.no_weight_decay is True  # type: ignore[attr-defined]
    assert copy.deepcopy(model).body[1][2].weight.shape == (3, 3)


def _flat_weights(model: nn.Module) -> tuple[list[Tensor], list[Tensor]]:
    lstm = model.body[1][0]  # type: ignore[index]
    return lstm._flat_weights, [getattr(lstm, name) for name in lstm._flat_weights_names]


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype]] = {
    "double": (lambda module: module.double(), torch.float64),
    "float": (lambda module: module.double().float(), torch.float32),
    "half": (lambda module: module.half(), torch.float16),
    "bfloat16": (lambda module: module.bfloat16(), torch.bfloat16),
    "to dtype": (lambda module: module.to(torch.float64), torch.float64),
    "to device and dtype": (lambda module: module.to("cpu", torch.float64), torch.float64),
    "to dtype by name": (lambda module: module.to(dtype=torch.float16), torch.float16),
    "to another tensor": (lambda module: module.to(torch.zeros(1, dtype=torch.float64)), torch.float64),
    "to device": (lambda module: module.to("cpu"), torch.float32),
    "to torch.device": (lambda module: module.to(device=torch.device("cpu"), non_blocking=True), torch.float32),
    "cpu": (lambda module: module.cpu(), torch.float32),
    "channels last": (lambda module: module.to(memory_format=torch.channels_last), torch.float32),
}


@pytest.mark.parametrize("name", CONVERSIONS)
def test_modules_are_moved_and_converted_as_if_they_were_whole(name: str) -> None:
    convert, dtype = CONVERSIONS[name]
    model = make()
    placeholders = {name for name, tensor in tensors(model).items() if is_placeholder(tensor)}
    convert(model)
    assert {name for name, tensor in tensors(model).items() if is_placeholder(tensor)} == placeholders
    for tensor in tensors(model).values():
        assert tensor.dtype == (dtype if tensor.is_floating_point() else torch.int64)
    assert model.body[1][2].weight.requires_grad is False
    whole = Model()
    convert(whole)  # torch unties buffers that it converts
    assert ties(model) == ties(whole)
    flat, named = _flat_weights(model)
    assert all(a is b for a, b in zip(flat, named, strict=True))


def saves(model: Model, path: Path) -> dict[str, Callable[[], Any]]:
    """Every way of saving what is on another stage."""
    layer = model.body[1]
    return {
        "parameter": lambda: pickle.dumps(layer[2].weight),  # type: ignore[index]
        "buffer": lambda: pickle.dumps(layer[1].running_mean),  # type: ignore[index]
        "computed": lambda: pickle.dumps([layer[2].weight * 2]),  # type: ignore[index]
        "by copyreg": lambda: pickle.dumps(layer[2].weight, protocol=0),  # type: ignore[index]
        "state dict": lambda: torch.save(model.state_dict(), io.BytesIO()),
        "submodule": lambda: torch.save(layer.state_dict(), io.BytesIO()),  # type: ignore[union-attr]
        "module": lambda: torch.save(model, io.BytesIO()),
        "old format": lambda: torch.save(model, io.BytesIO(), _use_new_zipfile_serialization=False),
        "safetensors": lambda: save_file(dict(model.state_dict()), path),
        "safetensors of a module": lambda: save_model(model, str(path)),
    }


@pytest.mark.parametrize("how", saves(Model(), Path()))
def test_what_lives_elsewhere_is_not_saved_without_its_values(tmp_path: Path, how: str) -> None:
    with pytest.raises(ValueError, match=r"does not have its values.* `trainer\.save_checkpoint") as error:
        saves(make(), tmp_path / "file")[how]()
    assert "gather_module()" in str(error.value)
    assert list(tmp_path.iterdir()) == []


def test_what_lives_elsewhere_is_copied() -> None:
    model = make()
    model.body[1][2].weight.mark = 7  # type: ignore[index,union-attr]
    for copied in (copy.copy(model), copy.deepcopy(model)):
        assert {name for name, x in tensors(copied).items() if is_placeholder(x)} == {
            name for name, x in tensors(model).items() if is_placeholder(x)
        }
    for duplicate in (copy.copy, copy.deepcopy):
        parameter = duplicate(model.body[1][2].weight)  # type: ignore[index]
        assert type(parameter) is PlaceholderParameter
        assert (parameter.mark, parameter.requires_grad) == (7, False)  # type: ignore[attr-defined]
        assert type(duplicate(model.body[1][1].running_mean)) is PlaceholderBuffer  # type: ignore[index]


def test_a_new_process_gets_what_lives_elsewhere_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    # A worker of a loader that is spawned has the module, if a function of it makes the batches.
    monkeypatch.setattr(placeholders, "get_spawning_popen", lambda: object())
    model = pickle.loads(pickle.dumps(make()))
    assert {name for name, tensor in tensors(model).items() if tensor.is_meta} == {
        name for name, tensor in tensors(make()).items() if is_placeholder(tensor)
    }


def test_placeholders_do_not_go_to_a_gpu() -> None:
    placeholder = make().body[1][2].weight
    assert placeholder.cuda() is placeholder
    assert placeholder.to("cuda:3") is placeholder
    assert placeholder.to(device="cuda", dtype=torch.float64).is_meta
    assert placeholder.to(device="cuda", dtype=torch.float64).dtype == torch.float64


def test_copies_of_modules_have_placeholders_with_the_same_ties() -> None:
    model = make()
    copied = copy.deepcopy(model)
    assert ties(copied) == ties(model)
    assert {name: is_placeholder(x) for name, x in tensors(copied).items()} == {
        name: is_placeholder(x) for name, x in tensors(model).items()
    }
    originals = {id(x) for x in tensors(model).values()}
    assert not any(id(x) in originals for x in tensors(copied).values())
    assert copied.body[1][2].weight.requires_grad is False
    assert isinstance(copied.body[1][2].weight, PlaceholderParameter)
    assert isinstance(copied.body[1][1].running_mean, PlaceholderBuffer)
    flat, named = _flat_weights(copied)
    assert all(a is b for a, b in zip(flat, named, strict=True))


def test_operations_on_placeholders_give_tensors_without_memory() -> None:
    placeholder = make().body[1][0].weight_ih_l0
    for result in (
        placeholder + 1,
        placeholder.norm(),
        placeholder.detach(),
        placeholder.t(),
        torch.stack([placeholder, placeholder]),
    ):
        assert type(result) is PlaceholderBuffer
        assert result.is_meta
    assert placeholder.numel() == 4 * 3 * 3
    assert "size=(12, 3)" in repr(placeholder)


@pytest.mark.parametrize(
    "move",
    [
        lambda average, weight: average.data.mul_(0.5).add_(weight.data, alpha=0.5),
        lambda average, weight: average.data.lerp_(weight.detach(), 0.5),
        lambda average, weight: average.detach().copy_(weight.detach() * 0.5),
        lambda average, weight: average.detach().__iadd__(weight.detach().float().mul(0.5)),
        lambda average, weight: average.detach().__setitem__(0, weight.detach()[0]),
        lambda average, weight: torch.add(average.detach(), weight.detach(), out=average.data),
        lambda average, weight: torch._foreach_lerp_([average.detach()], [weight.detach()], 0.5),
    ],
)
def test_tensors_with_values_are_not_written_with_placeholders(move: Any) -> None:
    """Torch does nothing then, without a word: an average of weights would decay."""
    module = make()
    weight = next(each for each in module.parameters() if is_placeholder(each))
    average = nn.Parameter(torch.ones(weight.shape, dtype=weight.dtype), requires_grad=False)
    with pytest.raises(WrongUseError, match="a parameter on another stage"):
        move(average, weight)


def test_lists_of_averages_and_weights_go_together() -> None:
    module = make()
    averages = copy.deepcopy(module)
    before = [each.clone() for each in module.parameters() if not is_placeholder(each)]
    with torch.no_grad():
        torch._foreach_mul_([each for each in module.parameters() if not is_placeholder(each)], 3)
        torch._foreach_lerp_(list(averages.parameters()), list(module.parameters()), 0.5)
    after = [each for each in averages.parameters() if not is_placeholder(each)]
    for one, other in zip(after, before, strict=True):
        torch.testing.assert_close(one, other * 2)


def test_requires_grad_can_be_changed() -> None:
    model = make()
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.body[1].requires_grad_(True)
    assert model.body[1][0].weight_ih_l0.requires_grad
    assert model.double().body[1][0].weight_ih_l0.requires_grad


def test_the_state_of_a_divided_module_can_be_loaded_into_itself() -> None:
    model = make()
    state = model.state_dict()
    assert all(value.is_meta == is_placeholder(tensors(model)[name]) for name, value in state.items())
    model.load_state_dict(state)
    assert is_placeholder(model.body[1][2].weight)


@pytest.mark.filterwarnings("error")
def test_the_state_of_the_whole_module_can_be_loaded_into_it_and_its_copies() -> None:
    whole, model = Model(), make()
    state = whole.state_dict()
    for loading, names in ((model, state), (copy.deepcopy(model), state)):
        assert not any(loading.load_state_dict(names))
        assert torch.equal(loading.embed.weight, whole.embed.weight)
        assert is_placeholder(loading.body[1][2].weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**state, "body.1.2.weight": torch.zeros(4)})


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, fused=True),
    "foreach adamw": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "fused sgd": lambda parameters: torch.optim.SGD(parameters, 0.1, momentum=0.9, fused=True),
    "adagrad": lambda parameters: torch.optim.Adagrad(parameters),
    "rmsprop": lambda parameters: torch.optim.RMSprop(parameters, momentum=0.9),
    "nadam": lambda parameters: torch.optim.NAdam(parameters),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_take_placeholders_and_step_over_them(name: str) -> None:
    torch.manual_seed(0)
    whole = Model()
    divided = copy.deepcopy(whole)
    replace_with_placeholders(divided, divided.stage_map(), 0)
    for model in (whole, divided):
        optimizer = OPTIMIZERS[name](model.parameters())
        assert len(optimizer.param_groups[0]["params"]) == len(list(whole.parameters()))
        for _ in range(2):
            optimizer.zero_grad()
            model.body[0](model.embed(torch.arange(5))).square().sum().backward()
            optimizer.step()
    assert torch.equal(divided.body[0][0].weight, whole.body[0][0].weight)
    assert torch.equal(divided.embed.weight, whole.embed.weight)


def test_parametrized_layers_are_divided() -> None:
    model = Model()
    nn.utils.parametrizations.weight_norm(model.body[1][2])
    nn.utils.parametrizations.weight_norm(model.body[0][0])
    names = list(model.state_dict())
    replace_with_placeholders(model, model.stage_map(), 0)
    assert list(model.state_dict()) == names
    assert not any(tensor.is_meta for tensor in model.body[0].state_dict().values())
    assert all(tensor.is_meta for tensor in model.body[1].state_dict().values())


class CallError(ValueError):
    pass


def test_a_layer_that_lives_elsewhere_refuses_to_be_called() -> None:
    layer = nn.Linear(2, 2)
    refuse_call(layer, CallError, "not here")
    with pytest.raises(CallError, match="not here"):
        layer(torch.zeros(1, 2))
    with pytest.raises(CallError, match="not here"):
        copy.deepcopy(layer)(torch.zeros(1, 2))
