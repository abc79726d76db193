"""Each entry of `torch_internals.py` alone, against the torch that is installed: a new version fails here first."""

from __future__ import annotations

import ast
import inspect
import io
import json
import logging
import math
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from lightning_hybrid import torch_internals as internals
from tests.pool import Pools

FILE = Path(internals.__file__)


def entries() -> list[str]:
    """Return the names that the register defines, and those that it passes on as they are."""
    found = list(internals.__all__)
    for node in ast.parse(FILE.read_text()).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.append(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [each.id for target in targets for each in ast.walk(target) if isinstance(each, ast.Name)]
    return [name for name in found if not name.startswith("_")]


class Functions(TorchFunctionMode):
    """Notes the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class Operators(internals.TorchDispatchMode):  # type: ignore[misc, name-defined]
    """Notes the operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append(func)
        return func(*args, **(kwargs or {}))


def functions_of(call: Callable[[], object]) -> list[str]:
    """Return the names of the functions that `__torch_function__` receives."""
    with Functions() as functions:
        call()
    return functions.names


def operators_of(call: Callable[[], object]) -> list[str]:
    """Return the names of the operators that a call consists of."""
    with Operators() as operators:
        call()
    return [internals.operator_name(each) for each in operators.calls]


class Marked(Tensor):
    """A tensor that notes which functions it is given to."""

    seen: list[Any]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        Marked.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


# -- the register itself -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", entries())
def test_this_version_of_torch_has_it(name: str) -> None:
    assert getattr(internals, name) is not None, f"torch {torch.__version__} lacks it"


def test_each_entry_is_tried_here() -> None:
    tried = {
        node.attr
        for node in ast.walk(ast.parse(Path(__file__).read_text()))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "internals"
    }
    assert [name for name in entries() if name not in tried] == []
    assert len(entries()) > 60


def test_each_entry_is_used_by_the_package() -> None:
    used = {
        alias.name
        for path in FILE.parent.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module == "lightning_hybrid.torch_internals"
        for alias in node.names
    }
    assert [name for name in entries() if name not in used] == []


def test_each_entry_has_a_comment() -> None:
    lines = FILE.read_text().splitlines()
    bare = []
    for number, line in enumerate(lines):
        name = re.match(r"([A-Za-z]\w*)(?:, \w+)*(?:: .*?)? = ", line)
        above = lines[number - 1]
        if name and not above.startswith("#:") and not re.match(r"[A-Za-z]\w*(?:: .*?)? = ", above):
            bare.append(name[1])
    functions = [
        value for name in entries() if callable(value := getattr(internals, name)) and hasattr(value, "__code__")
    ]
    bare += [each.__name__ for each in functions if each.__module__ == internals.__name__ and not inspect.getdoc(each)]
    assert bare == []


def test_the_register_needs_nothing_of_dtensors_or_the_compiler() -> None:
    imported = {
        name
        for node in ast.parse(FILE.read_text()).body
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in [getattr(node, "module", None) or node.names[0].name]
    }
    assert {name for name in imported if name.startswith(("torch.distributed", "torch._dynamo"))} == set()


# -- calls of functions and operators ----------------------------------------------------------------------------------


def test_disabling_functions() -> None:
    """One leaves modes and subclasses alone, the other only subclasses."""
    x = torch.ones(2).as_subclass(Marked)

    def called(context: Any) -> tuple[int, int]:
        Marked.seen = []
        with Functions() as mode, context():
            torch.add(x, 1)
        return len(mode.names), len(Marked.seen)

    assert called(internals.DisableTorchFunction) == (0, 0)
    assert called(internals.DisableTorchFunctionSubclass) == (1, 0)


def test_dispatch_modes() -> None:
    assert internals.current_dispatch_mode() is None
    with Operators() as outer, Operators() as inner:
        assert internals.current_dispatch_mode() is inner
        torch.ones(2)
        with internals.without_dispatch_modes():
            assert internals.current_dispatch_mode() is None
            torch.ones(2)
        with internals.DisableTorchDispatch():
            torch.empty(2, device="meta")
        assert internals.current_dispatch_mode() is inner
    assert len(outer.calls) == len(inner.calls) == 1
    assert issubclass(Operators, internals.TorchDispatchMode)


def test_operators_know_their_signatures() -> None:
    add = internals.operator_schema(torch.ops.aten.add_.Tensor)
    assert add.name == internals.operator_name(torch.ops.aten.add_.Tensor) == "aten::add_"
    assert add.is_mutable
    assert [argument.name for argument in add.arguments] == ["self", "other", "alpha"]
    assert add.arguments[0].alias_info.is_write
    assert add.arguments[1].alias_info is None
    assert len(internals.operator_schema(torch.ops.aten.native_batch_norm.default).returns) == 3
    assert not internals.operator_schema(torch.ops.aten.mm.default).is_mutable


def test_functions_by_their_names() -> None:
    pairs = [torch.ones(1)], [torch.ones(1)]
    assert functions_of(lambda: torch._foreach_add_(*pairs)) == [f"{internals.FOREACH}add_"]
    gamma, dirichlet = internals.DRAWS_BY_VALUE
    assert gamma in functions_of(torch.distributions.Gamma(torch.ones(1), torch.ones(1)).rsample)
    packed = functions_of(lambda: pad_packed_sequence(pack_padded_sequence(torch.ones(2, 1, 1), torch.tensor([2]))))
    assert {internals.PACK_SEQUENCE, internals.PAD_SEQUENCE} <= {*packed}
    assert internals.STACK_LEVEL in inspect.signature(F.log_softmax).parameters
    assert hasattr(torch, dirichlet)
    assert hasattr(torch, gamma)


def test_contexts_are_known_by_their_prefixes() -> None:
    def contexts() -> None:
        with torch.autocast("cpu"):
            torch.set_grad_enabled(True)

    names = functions_of(contexts)
    assert [name for name in names if not name.startswith((*internals.CONTEXT_PREFIXES, "set_"))] == []


def test_losses_are_called_where_they_can_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for name in ("cross_entropy_loss", "nll_loss_nd"):
        function = getattr(internals.loss_functions, name)

        def counted(*args: Any, function: Any = function, name: str = name) -> Any:
            calls.append((name, len(args)))
            return function(*args)

        monkeypatch.setattr(internals.loss_functions, name, counted)
    scores, targets = torch.zeros(2, 3), torch.tensor([0, 1])
    F.cross_entropy(scores, targets)
    F.nll_loss(scores, targets)
    assert [name for name, _ in calls] == ["cross_entropy_loss", "nll_loss_nd"]
    assert all(count >= 5 for _, count in calls), "scores, targets, weights, reduction, ignored index"


# -- operators ---------------------------------------------------------------------------------------------------------


def test_operators_are_there() -> None:
    names = *internals.SCALED_PRODUCTS, *internals.FUSED_ATTENTIONS, internals.UNSAFE_VIEW, internals.TO_COPY
    assert [name for name in names if not hasattr(torch.ops.aten, name)] == []
    collectives = internals.ALL_GATHER, internals.REDUCE_SCATTER
    assert [name for name in collectives if not hasattr(torch.ops.c10d, name)] == []
    assert internals.FLASH_ATTENTION in internals.FUSED_ATTENTIONS
    assert internals.GROUPED_PRODUCT in internals.SCALED_PRODUCTS


def test_operators_are_called_by_public_functions() -> None:
    q = torch.ones(1, 1, 2, 4)
    (attention,) = operators_of(lambda: F.scaled_dot_product_attention(q, q, q))
    assert attention.startswith(f"aten::{internals.SCALED_DOT_PRODUCT}")
    assert attention.removeprefix("aten::") in internals.FUSED_ATTENTIONS
    assert operators_of(lambda: torch.ones(1).to(torch.float64))[-1] == f"aten::{internals.TO_COPY}"
    assert operators_of(lambda: float(torch.ones(1)))[-1] == internals.operator_name(internals.read_number)
    assert internals.read_number(torch.tensor(3.0)) == 3


def collectives() -> list[str]:
    x = torch.ones(dist.get_world_size())
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return operators_of(lambda: (gather(x, x[:1].clone()), scatter(x[:1].clone(), x)))


def test_operators_of_collectives(ranks: Pools) -> None:
    expected = {f"c10d::{internals.ALL_GATHER}", f"c10d::{internals.REDUCE_SCATTER}"}
    for found in ranks(2).run(collectives):
        assert expected <= {*found}


def test_attention_with_its_logsumexp() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 3, 8, generator=generator, requires_grad=True) for _ in range(3))
    mask = torch.zeros(1, 1, 3, 3)
    out, logsumexp = internals.flash_attention_for_cpu(q, k, v, 0.0, False, attn_mask=mask, scale=0.5)
    scores = 0.5 * q @ k.transpose(-2, -1)
    torch.testing.assert_close(logsumexp, scores.logsumexp(-1))
    torch.testing.assert_close(out, scores.softmax(-1) @ v)
    gradients = torch.autograd.grad((scores.softmax(-1) @ v).sum(), (q, k, v))
    found = internals.flash_attention_for_cpu_backward(
        torch.ones_like(out), q, k, v, out, logsumexp, 0.0, False, attn_mask=mask, scale=0.5
    )
    torch.testing.assert_close(tuple(found), gradients)


def test_attention_of_devices_has_the_arguments_that_are_given() -> None:
    """Its kernel needs a GPU; `block_attention.py` compares its numbers there."""
    forward = internals.operator_schema(internals.flash_attention.default).arguments
    assert [each.name for each in forward][:5] == ["query", "key", "value", "dropout_p", "is_causal"]
    backward = internals.operator_schema(internals.flash_attention_backward.default).arguments
    assert [each.name for each in backward] == [
        *("grad_out", "query", "key", "value", "out", "logsumexp", "cum_seq_q", "cum_seq_k", "max_q", "max_k"),
        *("dropout_p", "is_causal", "philox_seed", "philox_offset", "scale"),
    ]


# -- tensors -----------------------------------------------------------------------------------------------------------


def test_changes_and_views_of_tensors() -> None:
    x = torch.zeros(4)
    before = internals.version_counter(x)
    y = x.view(2, 2)
    y.add_(1)
    assert internals.version_counter(x) == internals.version_counter(y) == before + 1
    assert internals.view_base(y) is x
    assert internals.view_base(x) is None
    assert internals.is_view(y)
    assert not internals.is_view(x)


def test_getters_are_the_functions_that_subclasses_receive() -> None:
    x, Marked.seen = torch.ones(2).as_subclass(Marked), []
    assert internals.version_counter(x) == 0
    assert isinstance(internals.view_base(x), Tensor)
    assert internals.gradient_hooks(x) is None
    assert Marked.seen == [internals.version_counter, internals.view_base, internals.gradient_hooks]
    _ = x._version, x._base, x._backward_hooks
    assert Marked.seen[3:] == Marked.seen[:3]
    assert {internals.version_counter} & {Marked.seen[0]}, "it can be an element of a set"


def test_hooks_of_tensors() -> None:
    x = nn.Parameter(torch.ones(1))
    assert not internals.gradient_hooks(x)
    handle = x.register_hook(lambda gradient: gradient)
    assert internals.gradient_hooks(x)
    handle.remove()
    assert not internals.gradient_hooks(x)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_have_identities(device: str) -> None:
    x, other = torch.ones(4, device=device), torch.ones(4, device=device)
    identities = [internals.storage_identity(each.untyped_storage()) for each in (x, x[1:], other)]
    assert identities[0] == identities[1] != identities[2]
    assert isinstance(identities[0], int)


def test_parts_of_sparse_tensors() -> None:
    x = torch.sparse_coo_tensor(torch.tensor([[1, 1]]), torch.tensor([2.0, 3.0]), (3,))
    assert internals.sparse_indices(x).tolist() == [[1, 1]]
    assert internals.sparse_values(x).tolist() == [2, 3]
    with pytest.raises(RuntimeError, match="uncoalesced"):
        x.values()


def test_a_mark_makes_a_tensor_a_parameter() -> None:
    x = torch.ones(1).as_subclass(Marked)
    Marked.seen = []
    assert not isinstance(x, nn.Parameter)
    setattr(x, internals.PARAMETER_MARK, True)
    assert isinstance(x, nn.Parameter)
    assert vars(nn.Parameter(torch.ones(1).as_subclass(Marked)))[internals.PARAMETER_MARK]


class Wrapper(Marked):
    """A tensor without values."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(internals.operator_name(func))


def test_a_wrapper_has_a_shape_and_no_values() -> None:
    Marked.seen = []
    x = internals.make_wrapper(Wrapper, (2, 3), strides=(1, 2), dtype=torch.float64, device=torch.device("cpu"))
    assert isinstance(x, Wrapper)
    with internals.DisableTorchFunctionSubclass():
        assert (x.shape, x.stride(), x.dtype, x.device.type) == ((2, 3), (1, 2), torch.float64, "cpu")
        with pytest.raises(NotImplementedError, match="aten::add"):
            x + 1


def test_norms_in_one_kernel() -> None:
    gradients = [torch.full((4,), 3.0, dtype=torch.float16), torch.zeros(1, dtype=torch.float16)]
    norms = internals.foreach_norm(gradients, 2.0, dtype=torch.float32)
    assert [(norm.item(), norm.dtype) for norm in norms] == [(6, torch.float32), (0, torch.float32)]
    assert internals.foreach_norm(gradients, math.inf, dtype=torch.float32)[0].item() == 3


def test_fake_tensors() -> None:
    mode = internals.FakeTensorMode(allow_non_fake_inputs=True)
    fake = internals.FakeTensor(mode, torch.empty_strided((2,), (1,), device="meta"), torch.device("cpu"))
    assert fake.device == torch.device("cpu")
    assert (fake + torch.ones(2)).shape == (2,)
    assert isinstance(fake + 1, internals.FakeTensor)
    assert list(inspect.signature(internals.FakeTensorMode.dispatch).parameters)[:5] == [
        *("self", "func", "types", "args", "kwargs")
    ]


def test_fake_tensors_log_what_an_operator_refuses() -> None:
    assert import_module(internals.FAKE_TENSOR_LOGGER).log is logging.getLogger(internals.FAKE_TENSOR_LOGGER)


# -- autograd and compiled code ----------------------------------------------------------------------------------------


def test_a_backward_without_checks() -> None:
    x = torch.ones((), requires_grad=True)
    roots, gradients = (x * 2, x * 3), (torch.ones(()), torch.ones(()))
    run: Any = internals.run_backward
    run(roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)
    assert x.grad is not None
    assert x.grad.item() == 5


def test_the_profiler_is_noticed() -> None:
    assert not internals.is_profiling()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert internals.is_profiling()


def test_compiled_modules_and_the_compiler() -> None:
    layer = nn.Linear(1, 1)
    assert vars(layer).get(internals.COMPILED_CALL) is None
    layer.compile(backend="eager")
    assert vars(layer)[internals.COMPILED_CALL] is not None
    vars(layer)[internals.COMPILED_CALL] = lambda x: "compiled"
    assert layer(torch.ones(1)) == "compiled"
    vars(layer)[internals.COMPILED_CALL] = None
    assert isinstance(layer(torch.ones(1)), Tensor)
    assert internals.may_have_compiled() == ("torch._dynamo.eval_frame" in sys.modules)
    import_module("torch._dynamo.eval_frame")
    assert internals.may_have_compiled()
    folder = Path(torch.__file__).parent
    assert [name for name in internals.COMPILER_FOLDERS if not (folder / name).is_dir()] == []


# -- modules -----------------------------------------------------------------------------------------------------------


def test_hooks_of_modules() -> None:
    layer = nn.Linear(1, 1)

    def hook(*_: Any) -> None:
        """Do nothing."""

    tables = {
        internals.forward_hooks: layer.register_forward_hook,
        internals.forward_pre_hooks: layer.register_forward_pre_hook,
        internals.backward_hooks: layer.register_full_backward_hook,
    }
    for table, register in tables.items():
        assert not table(layer)
        handle = register(hook)
        assert table(layer) == {handle.id: hook}
        del table(layer)[handle.id]
    handle = layer.register_load_state_dict_pre_hook(hook)
    assert internals.load_state_dict_pre_hooks(layer)[handle.id].hook is hook
    assert [name for name in internals.STATE_DICT_HOOKS if name not in vars(layer)] == []
    assert sorted(name for name in vars(layer) if "state_dict" in name) == sorted(internals.STATE_DICT_HOOKS)


def test_non_persistent_buffers() -> None:
    layer = nn.Linear(1, 1)
    layer.register_buffer("saved", torch.zeros(1))
    layer.register_buffer("unsaved", torch.zeros(1), persistent=False)
    assert internals.non_persistent_buffers(layer) == {"unsaved"}
    assert "unsaved" not in layer.state_dict()


def test_methods_of_modules_by_their_names() -> None:
    assert callable(getattr(nn.Module, internals.CALL_METHOD))
    assert callable(getattr(nn.MultiheadAttention, internals.RESET_METHOD))
    recurrent = nn.LSTM(2, 2)
    recurrent.weight_ih_l0 = nn.Parameter(torch.zeros(8, 2))
    assert getattr(recurrent, internals.FLAT_WEIGHTS)[0] is recurrent.weight_ih_l0
    kinds = nn.TransformerEncoderLayer, nn.TransformerDecoderLayer
    used = [
        {name for name in internals.TRANSFORMER_METHODS if name in inspect.getsource(kind.forward)} for kind in kinds
    ]
    assert used == [{"_sa_block", "_ff_block"}, {*internals.TRANSFORMER_METHODS}]


def test_classes_that_load_in_their_own_way() -> None:
    assert not internals.has_own_loading(nn.Linear(1, 1))
    assert internals.has_own_loading(nn.BatchNorm1d(1))


def test_metadata_of_layers() -> None:
    state = nn.Sequential(nn.BatchNorm1d(1)).state_dict()
    metadata = internals.layer_metadata(state)
    assert metadata is not None
    assert metadata["0"]["version"] == 2
    assert internals.layer_metadata({}) is None
    internals.set_layer_metadata(state, {"0": {"version": 1}})
    del state["0.num_batches_tracked"]  # which the first version did not have
    nn.Sequential(nn.BatchNorm1d(1)).load_state_dict(state)
    internals.set_layer_metadata(state, metadata)
    with pytest.raises(RuntimeError, match="num_batches_tracked"):
        nn.Sequential(nn.BatchNorm1d(1)).load_state_dict(state)


def test_recurrent_layers_have_one_class() -> None:
    """`nn.RNNBase`, which is public, is asked for in the place of the attribute that holds their weights."""
    assert all(isinstance(kind(1, 1), nn.RNNBase) for kind in (nn.RNN, nn.LSTM, nn.GRU))
    assert hasattr(nn.RNNBase("GRU", 1, 1), "_flat_weights")


# -- optimizers and gradient scaling -----------------------------------------------------------------------------------


def test_hooks_of_steps() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))])
    before, after = internals.OPTIMIZER_STEP_HOOKS
    optimizer.register_step_pre_hook(lambda *_: None)
    assert (len(vars(optimizer)[before]), len(vars(optimizer)[after])) == (1, 0)
    optimizer.register_step_post_hook(lambda *_: None)
    assert len(vars(optimizer)[after]) == 1


def test_optimizers_that_unscale_in_their_step() -> None:
    parameters = [nn.Parameter(torch.ones(1))]
    assert not internals.unscales_in_step(torch.optim.AdamW(parameters))
    assert internals.unscales_in_step(torch.optim.AdamW(parameters, fused=True))


def test_unscaling_can_be_changed() -> None:
    calls = []

    class Scaler(internals.OpenGradScaler):
        def unscale_gradients(self, optimizer: Any, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kw: Any) -> Any:
            calls.append((inv_scale.item(), found_inf.item()))
            groups = SimpleNamespace(param_groups=optimizer.param_groups)
            found = super().unscale_gradients(groups, inv_scale, found_inf, *args, **kw)
            return {device: value + 1 for device, value in found.items()} if len(calls) == 2 else found

    scaler = Scaler("cpu", init_scale=4.0)
    assert scaler.is_supported()
    assert scaler.device_type == "cpu"
    assert internals.OpenGradScaler("cuda", enabled=False).device_type == "cuda"
    assert not scaler.has_scale
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for expected in (0.0, 0.0):  # the second step is skipped, as something is said to have overflowed
        scaler.scale(parameter.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        assert parameter.item() == expected
    assert scaler.has_scale
    assert calls == [(0.25, 0), (0.25, 0)]
    assert scaler.get_scale() == 2
    assert isinstance(scaler, GradScaler)


# -- data loaders ------------------------------------------------------------------------------------------------------


def test_persistent_workers() -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert internals.persistent_iterator(loader) is None
    assert len(list(loader)) == 2
    iterator = internals.persistent_iterator(loader)
    assert iterator is iter(loader)
    internals.set_persistent_iterator(loader, None)
    assert iter(loader) is not iterator
    internals.set_persistent_iterator(loader, None)


# -- tensors that are sharded over ranks -------------------------------------------------------------------------------


@contextmanager
def world() -> Iterator[DeviceMesh]:
    """A process group of this process, and a mesh of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    finally:
        internals.clear_dtensor_cache()
        dist.destroy_process_group()


def test_dtensors_are_made_and_changed_in_parts() -> None:
    with world() as mesh:
        x = distribute_tensor(torch.arange(4.0), mesh, [Shard(0)])
        assert internals.dtensor_shard(x).tolist() == x.to_local().tolist()
        spec, make = internals.dtensor_spec(x), DTensor
        made: Any = make(torch.ones(4), spec, requires_grad=False)  # type: ignore[call-arg]
        assert (made.shape, made.placements, made.to_local().tolist()) == (x.shape, x.placements, [1] * 4)
        assert spec.tensor_meta.dtype == torch.float32
        internals.set_dtensor_shard(made, torch.zeros(4))
        assert made.full_tensor().tolist() == [0] * 4
        assert internals.dtensor_spec(made) is spec
        other = internals.dtensor_spec(distribute_tensor(torch.ones(4), mesh, [Replicate()]))
        internals.set_dtensor_shard(made, torch.ones(4), other)
        assert made.placements == (Replicate(),)


def test_specs_are_dataclasses_that_say_what_blocks_are() -> None:
    with world() as mesh:
        blocks = internals.strided_shard()(0, split_factor=2)
        assert (blocks.dim, blocks.split_factor) == (0, 2)
        x = DTensor.from_local(torch.arange(4.0), mesh, [blocks], run_check=False)
        spec = internals.dtensor_spec(x)
        names = {each.name for each in fields(spec)}
        assert {"mesh", "placements", "tensor_meta"} <= names
        if internals.BLOCKS_ARE_ORDER in names:
            spec = replace(spec, **{internals.BLOCKS_ARE_ORDER: False})
            assert getattr(spec, internals.BLOCKS_ARE_ORDER) is False
        assert (
            replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=torch.float64)).tensor_meta.dtype == torch.float64
        )


def test_dtensors_call_handlers() -> None:
    with world() as mesh:
        x, handlers = distribute_tensor(torch.tensor(3.0), mesh, [Replicate()]), internals.dtensor_handlers()
        assert handlers is not None
        assert internals.read_number not in handlers
        handlers[internals.read_number] = lambda operation, args, kwargs: 7.0
        try:
            assert float(x) == 7
        finally:
            del handlers[internals.read_number]
        assert float(x) == 3


def test_costs_of_layouts_can_be_replaced() -> None:
    module: Any = internals.dtensor_costs()
    assert list(inspect.signature(module.redistribute_cost).parameters)[:2] == ["current_spec", "target_spec"]
    assert re.search(r"\bredistribute_cost\(", inspect.getsource(module)), "it is called where a replacement is found"


def test_placements_of_results_are_forgotten() -> None:
    with world() as mesh:
        x = distribute_tensor(torch.ones(2), mesh, [Replicate()])
        _ = x + x
        internals.clear_dtensor_cache()
        assert (x + x).full_tensor().tolist() == [2, 2]


# -- process groups ----------------------------------------------------------------------------------------------------


def test_groups_are_known_by_tables_and_names() -> None:
    with world():
        tables = internals.group_tables()
        assert len(tables.pg_names) == 1
        assert tables.default_pg is dist.group.WORLD
        names = "pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"
        assert [name for name in names if not isinstance(getattr(tables, name), dict)] == []
        name_of, find = internals.name_of_ranks, internals.group_of_name
        assert name_of is not None
        assert find is not None
        first = name_of([0])
        assert re.fullmatch(r"[0-9a-f]{40}", first)
        group = dist.new_group([0], use_local_synchronization=True)
        assert name_of([0]) != first
        assert dist.get_process_group_ranks(find(group.group_name)) == [0]


def test_all_groups_are_aborted_at_once() -> None:
    abort: Any = internals.abort_all_groups
    required = [each for each in inspect.signature(abort).parameters.values() if each.default is each.empty]
    assert required == []


def test_the_flight_recorder_is_read() -> None:
    dump = internals.dump_flight_recorder
    assert dump is not None
    with world():
        dist.all_reduce(torch.ones(3))
        entry = json.loads(dump())["entries"][-1]
        assert entry["profiling_name"] == "gloo:all_reduce"
        assert {"record_id", "process_group", "collective_seq_id", "retired", "thread_id"} <= entry.keys()
        assert entry["input_sizes"] == [[3]]
        assert entry["input_dtypes"] == ["Float"]
        assert "pg_status" in json.loads(dump(includeCollectives=False))


def test_meshes_drop_their_groups() -> None:
    with world() as mesh:
        internals.forget_mesh_groups(mesh)
        assert not getattr(mesh, "_pg_registry", {})


def test_timeouts_in_options() -> None:
    options: Any = dist.ProcessGroupNCCL.Options() if dist.is_nccl_available() else SimpleNamespace()
    internals.set_options_timeout(options, timedelta(seconds=5))
    assert options._timeout == timedelta(seconds=5)


# -- pickled names -----------------------------------------------------------------------------------------------------


def test_pickled_names_are_there() -> None:
    pairs = [(module, name) for module, names in internals.PICKLED.items() for name in names]
    pairs += [internals.REBUILD_WITH_CLASS, internals.REBUILD_WITH_STATE]
    assert [pair for pair in pairs if not hasattr(import_module(pair[0]), pair[1])] == []


class Found(pickle.Unpickler):
    """Notes the names in a pickle of `torch.save`, and makes nothing of them."""

    names: list[tuple[str, str]]

    def find_class(self, module: str, name: str) -> Any:
        self.names.append((module, name))
        return super().find_class(module, name) if module in ("collections", "builtins") else SimpleNamespace

    def persistent_load(self, identity: Any) -> Any:
        return None


def pickled_names(value: Any) -> set[tuple[str, str]]:
    """Return the names in what `torch.save` writes."""
    found = Found(io.BytesIO(pickle.dumps(value)))
    found.names = []
    with suppress(TypeError, AttributeError):  # nothing is called as torch would
        found.load()
    return {*found.names}


def test_tensors_are_pickled_by_these_names() -> None:
    parameter = nn.Parameter(torch.ones(1))
    plain = pickled_names(parameter)
    assert ("torch._utils", f"{internals.REBUILD}parameter") in plain
    assert {name for _, name in plain if name.startswith(internals.REBUILD)} <= {*internals.PICKLED["torch._utils"]}
    parameter.mark = 1  # type: ignore[attr-defined]
    assert internals.REBUILD_WITH_STATE in pickled_names(parameter)
    assert internals.REBUILD_WITH_CLASS in pickled_names(torch.ones(1).as_subclass(Marked))
