"""Precision plugins that detect overflow on all ranks together, and parameter casts shared by all microbatches.

`HybridStrategy.precision_plugin` adapts each plugin that it receives: :func:`adapt` and, with `master_weights`,
:func:`scale_half`. `HybridStrategy.connect` and `setup_optimizers` check the plugin. `TrainingStep` uses
:class:`SharedCasts`.

The *owners* are the ranks that together own the parameters: the model group (the ranks that hold one replica), or with
ZeRO all ranks. Each owner steps its own part of the parameters, so all owners must skip a step together and clip by the
same norm.

Lightning's plugins are changed in place instead of replaced, because users pass and keep them, and checkpoints contain
their class names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    HalfPrecision,
    MixedPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.cpu.amp.grad_scaler import GradScaler as CPUGradScaler
from torch.cuda.amp.grad_scaler import GradScaler as CUDAGradScaler
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_hybrid.distributed.dtensor import local_view
from lightning_hybrid.torch_internals import OpenGradScaler, unscales_in_step, version_counter

#: The supported values of ``Trainer(precision=...)``.
SUPPORTED = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")

PrecisionT = TypeVar("PrecisionT", bound=Precision)


def adapt(
    plugin: PrecisionT,
    *,
    model_group: Callable[[], ProcessGroup | None],
    clip_by_norm: Callable[[Sequence[nn.Parameter], float], Tensor],
) -> PrecisionT:
    """Change a precision plugin so that the owners of the parameters detect overflow and clip gradients together.

    The object and its class do not change, because the class name is a key in checkpoints. The class of its scaler and
    its method `clip_grad_by_norm` change. If the plugin overrides this method, it stays, and a warning is logged.

    Args:
        plugin: A plugin of Lightning or the user; another strategy may have adapted it before.
        model_group: Returns the group of the owners, or ``None`` if the group does not exist yet. Called at every step.
            It is copied and pickled with the plugin, so pass a bound method.
        clip_by_norm: Receives parameters of this rank and a number, scales their gradients so that their norm over all
            owners is at most this number, and returns the norm before. Every owner must call it.

    Returns:
        The plugin.

    Raises:
        ValueError: If the plugin replaces layers or belongs to another strategy.
        TypeError: If the plugin's ``scaler`` is not torch's `GradScaler`.
        RuntimeError: If this version of torch does not support the scaler.
    """
    check(plugin)
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        ModelGroupGradScaler.adopt(scaler, model_group)
    if type(plugin).clip_grad_by_norm is Precision.clip_grad_by_norm:
        plugin.clip_grad_by_norm = partial(_clip_grad_by_norm, plugin, clip_by_norm)  # type: ignore[method-assign]
    else:
        rank_zero_warn(
            f"The precision plugin {type(plugin).__qualname__} overrides `clip_grad_by_norm`, and the strategy calls"
            " this method as it is. On each rank, the method receives only the gradients of the layers on that rank."
            " Make sure that it computes the norm over all ranks of the model.",
        )
    return plugin


def check(plugin: Precision) -> None:
    """Raise an error for plugins that the strategy does not support.

    Args:
        plugin: The precision plugin.

    Raises:
        ValueError: If the plugin replaces layers or belongs to another strategy.
    """
    refused = {
        TransformerEnginePrecision: "replaces layers with layers that do their own communication",
        BitsandbytesPrecision: "replaces layers with quantized layers, which cannot be trained",
        FSDPPrecision: "belongs to `FSDPStrategy`",
        DeepSpeedPrecision: "belongs to `DeepSpeedStrategy`",
        XLAPrecision: "belongs to the strategies for XLA devices",
    }
    for kind, reason in refused.items():
        if isinstance(plugin, kind):
            raise ValueError(
                f"`HybridStrategy` does not support the precision plugin `{type(plugin).__qualname__}`, because it"
                f" {reason}. Set `Trainer(precision=...)` to one of {', '.join(map(repr, SUPPORTED))}. [LH806]"
            )


def check_optimizer(plugin: Precision, optimizer: Optimizer) -> None:
    """Raise an error for optimizers that unscale gradients themselves, because other ranks and clipping cannot see it.

    Optimizers of torch with ``fused=True`` do this.

    Args:
        plugin: The precision plugin.
        optimizer: The optimizer.

    Raises:
        ValueError: If the plugin scales the loss and the optimizer unscales the gradients.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled() and unscales_in_step(optimizer):
        raise ValueError(
            f"The optimizer `{type(optimizer).__qualname__}` unscales gradients inside its fused step. With a precision"
            " that scales the loss, such as '16-mixed', the ranks could then neither detect an overflow together nor"
            " clip gradients before the step. Create the optimizer with `fused=False` or `foreach=True`, or use"
            " precision 'bf16-mixed', which does not scale the loss. [LH807]"
        )


class MasterWeightsPrecision(HalfPrecision, MixedPrecision):
    """A half precision with float32 master weights. For float16, the loss is scaled as by `MixedPrecision`.

    Its constructor is never called, see :func:`scale_half`.

    Attributes:
        scaler: Scales the loss; ``None`` for bfloat16.
    """

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Return a context in which parameters are created in float32, so that master weights have full precision."""
        return nullcontext()


def scale_half(plugin: Precision, device: str) -> None:
    """Change the class of a `HalfPrecision` plugin to :class:`MasterWeightsPrecision`; other plugins do not change.

    For float16, the plugin also gets a scaler. :func:`check_master_weights` raises an error for other plugins.

    Args:
        plugin: The precision plugin.
        device: The type of the device, such as ``"cuda"``.
    """
    if type(plugin) is not HalfPrecision:
        return
    adopted: Any = plugin
    adopted.__class__ = MasterWeightsPrecision
    # The first gradient of a float16 loss is this number; twice this number would be infinite in float16.
    adopted.scaler = GradScaler(device, init_scale=2.0**15) if plugin.precision == "16-true" else None


def check_master_weights(plugin: Precision) -> None:
    """Raise an error for precisions that do not need master weights.

    Args:
        plugin: The precision plugin, after :func:`scale_half`.

    Raises:
        ValueError: If parameters are not in half precision, or the plugin is a class of the user.
    """
    if not isinstance(plugin, MasterWeightsPrecision):
        raise ValueError(
            "HybridStrategy(master_weights=True) keeps float32 copies of half-precision parameters, so it needs"
            f" Trainer(precision='bf16-true') or '16-true', but the Trainer uses {type(plugin).__name__} with precision"
            f" {plugin.precision!r}. Set one of these precisions, or remove master_weights. With '32-true',"
            " 'bf16-mixed' and '16-mixed', parameters are float32 anyway. [LH808]"
        )


def autocasts(plugin: Precision, device: torch.device) -> bool:
    """Return True if a plugin runs training steps under autocast on a device."""
    with plugin.train_step_context():
        return torch.is_autocast_enabled(device.type)


class ModelGroupGradScaler(OpenGradScaler):
    """A `GradScaler` that detects overflow on all owners of the parameters: all of them skip a step, or none does.

    Without this class, a stage that overflowed would skip the step and halve its scale, but other stages would not.
    State dicts are equal to the state dicts of `GradScaler`. If the group is ``None`` or has one rank, the scaler works
    exactly as `GradScaler`.

    Args:
        model_group: Returns the group of the owners, or ``None``.
        device: The type of the device, such as ``"cuda"``.
        settings: The arguments of `GradScaler`.
    """

    def __init__(self, model_group: Callable[[], ProcessGroup | None], device: str = "cuda", **settings: Any) -> None:
        super().__init__(device, **settings)
        self._join(model_group)

    def _join(self, model_group: Callable[[], ProcessGroup | None]) -> None:
        """Set the group.

        Args:
            model_group: Returns the group of the owners, or ``None``.

        Raises:
            RuntimeError: If this version of torch lacks the method that unscales gradients.
        """
        if not self.is_supported():
            raise RuntimeError(
                f"torch {torch.__version__} does not have `torch.amp.GradScaler._unscale_grads_`, which is required for"
                " ranks to detect an overflow together. Use precision 'bf16-mixed', or another version of torch for"
                " '16-mixed'. [LH135]"
            )
        self.model_group = model_group

    @classmethod
    def adopt(cls, scaler: GradScaler, model_group: Callable[[], ProcessGroup | None]) -> ModelGroupGradScaler:
        """Change the class of a scaler to this class. The object does not change, because the user may read its scale.

        Args:
            scaler: A scaler of torch for any device, or an instance of this class.
            model_group: Returns the group of the owners, or ``None``.

        Returns:
            The scaler.

        Raises:
            TypeError: If the scaler has a class of the user, whose methods would be lost.
            RuntimeError: If this version of torch lacks the method that unscales gradients.
        """
        if type(scaler) not in _SCALERS:
            raise TypeError(
                f"The precision plugin's scaler is a `{type(scaler).__qualname__}`, but ranks can detect an overflow"
                " together only with torch's own scaler. Pass a `torch.amp.GradScaler` with the settings that you want."
                " [LH809]"
            )
        adopted: Any = scaler
        adopted.__class__ = cls
        adopted._join(model_group)
        return cast("ModelGroupGradScaler", adopted)

    def initialize(self, device: torch.device | str | None = None) -> None:
        """Create the scale on a device, if it does not exist; usually, the first :meth:`scale` creates it.

        A rank that never scales a loss needs this method; :meth:`unscale_` and :meth:`step` call it.

        Args:
            device: The device of the scale; by default the current device of the scaler's type.
        """
        # The condition on `has_scale` only saves a multiplication, because scaling zeros again changes nothing.
        if self.is_enabled() and not self.has_scale:
            self.scale(torch.zeros((), device=self.device_type if device is None else device))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscale this rank's gradients, and find out if any owner has infinities or NaNs; every owner calls this.

        Args:
            optimizer: The optimizer; on this rank, it may have no parameters or no gradients.
        """
        self.initialize()
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step unless an owner has infinities or NaNs; every owner calls this.

        Args:
            optimizer: The optimizer.
            args: Arguments of the optimizer's ``step``.
            kwargs: Keyword arguments of the optimizer's ``step``.

        Returns:
            The result of the optimizer's ``step``; ``None`` if the step was skipped.
        """
        self.initialize()
        return super().step(optimizer, *args, **kwargs)

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients of this rank, and detect infinities and NaNs on all owners; a collective.

        The arguments are as for :meth:`OpenGradScaler.unscale_gradients`.

        Returns:
            A tensor for each device, which is not 0 if a gradient has infinities or NaNs; with several owners, one
            tensor for all of them.
        """
        # torch calls this method once per step for each optimizer, to find out which devices overflowed. torch records
        # the result, skips the step if a value is not 0, and lowers the scale.
        # A rank unscales its shards of sharded parameters, which torch's kernel needs as plain tensors.
        views = [
            {"params": [local_view(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
        ]
        local: Any = SimpleNamespace(param_groups=views)
        found: dict[torch.device, Tensor] = super().unscale_gradients(local, inv_scale, found_inf, *args, **kwargs)
        group = self.model_group()
        if group is None or group.size() == 1:
            return found
        # A stage without gradients contributes 0, so that all ranks take part in the collective.
        everywhere = [each.to(found_inf.device, non_blocking=True) for each in found.values()]
        overflow = torch.stack([found_inf, *everywhere]).amax(0)
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
        return {overflow.device: overflow}


class SharedCasts:
    """Casts of float32 parameters under autocast that are made only once per step, for all microbatches.

    Autocast keeps its copies of parameters until its outermost context ends. `TrainingStep` enters Lightning's context
    for each microbatch, and Lightning disables this cache. Without this class, every microbatch would cast all weights,
    and autograd would keep each copy until its backward. ::

        schedule()   |-----------------------------------------------------------|   the copies are dropped here
        plugin         |---|        |---|                  |---|
        forward()       |F0|         |F1|      B0           |F2|      B1      B2     backward: outside of autocast

    If the step changes parameters, it may use a parameter before and after the change. In this case, every use has its
    own copy, as in Lightning. The first forward of each stage shares no copies, and shows if the step changes any. If a
    later forward does, no copies are shared from then on.

    Args:
        device: The type of the device, such as ``"cuda"``.
        parameters: Returns the parameters of this rank.
    """

    def __init__(self, device: str, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._device, self._find = device, parameters
        self._parameters: list[Tensor] = []
        self._tried: set[int] = set()
        self._may_share = True

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Enter this context around all forwards and backwards of a step. At its end, the copies are dropped.

        It is an autocast context with the current settings. Its only effect is that it is the outermost context.
        """
        self._parameters = []
        with torch.autocast(
            self._device,
            dtype=torch.get_autocast_dtype(self._device),
            enabled=torch.is_autocast_enabled(self._device),
            cache_enabled=torch.is_autocast_cache_enabled(),
        ):
            yield

    @contextmanager
    def forward(self, stage: int) -> Iterator[None]:
        """Enter this context around a forward of a stage, inside the precision plugin's context.

        Without autocast, and if copies cannot be shared, it does nothing.

        Args:
            stage: The stage.
        """
        if not self._may_share or not torch.is_autocast_enabled(self._device) or not keeps_gradients():
            yield
            return
        shares = stage in self._tried
        self._tried.add(stage)
        before = self._versions()
        with torch.autocast(self._device, dtype=torch.get_autocast_dtype(self._device), cache_enabled=shares):
            yield
        if self._versions() != before:
            self._may_share = False
            torch.clear_autocast_cache()

    def _versions(self) -> list[int]:
        """Return the versions of the float32 parameters: numbers that change if autograd records a change."""
        if not self._parameters:
            plain = (each for each in self._find() if not isinstance(each, DTensor))  # autocast casts local shards
            self._parameters = [each for each in plain if each.dtype == torch.float32]
        return [version_counter(parameter) for parameter in self._parameters]


@cache
def keeps_gradients() -> bool:
    """Return True if a copy that autocast has made without gradients is not reused where gradients are needed.

    This is the case in torch 2.13. If it is not, no copies are shared. The test runs once per process.
    """
    weight, x = torch.ones(1, 1, requires_grad=True), torch.ones(1, 1)
    with torch.enable_grad(), torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            x @ weight
        return (x @ weight).requires_grad


_SCALERS = (GradScaler, CUDAGradScaler, CPUGradScaler, ModelGroupGradScaler)


def _clip_grad_by_norm(
    plugin: Precision,
    clip_by_norm: Callable[[Sequence[nn.Parameter], float], Tensor],
    optimizer: Optimizer,
    clip_val: int | float = 0.0,
) -> None:
    """Clip the gradients of an optimizer by their norm over all owners; replaces `Precision.clip_grad_by_norm`."""
    clip_by_norm(list(plugin.main_params(optimizer)), float(clip_val))
