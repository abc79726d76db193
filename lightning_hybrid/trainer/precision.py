"""Precision plugins made to agree over the model group, and weights that are cast once for all microbatches."""

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

#: The values of ``Trainer(precision=...)`` that train here.
SUPPORTED = ("32-true", "64-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true")

PrecisionT = TypeVar("PrecisionT", bound=Precision)


def adapt(
    plugin: PrecisionT,
    *,
    model_group: Callable[[], ProcessGroup | None],
    clip_by_norm: Callable[[Sequence[nn.Parameter], float], Tensor],
) -> PrecisionT:
    """Makes a precision plugin agree over the model group; the object stays, and its class is a key in checkpoints.

    Args:
        plugin: Lightning's or the user's; may have been adapted before, by another strategy.
        model_group: Gives the ranks that together hold the model; ``None`` as long as there are none. Asked at every
            step, because the plugin exists before the groups. Copied and pickled with the plugin: pass a bound method.
        clip_by_norm: Scales the gradients of this rank's parameters such that the norm over the model group is at most
            a number; called by every rank of the group.

    Returns:
        The plugin.

    Raises:
        ValueError: If the plugin belongs to another strategy.
        TypeError: If the plugin's ``scaler`` is not torch's.
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
                f"`HybridStrategy` does not support the precision plugin `{type(plugin).__qualname__}`: it {reason}."
                f" Set `Trainer(precision=...)` to one of {', '.join(map(repr, SUPPORTED))}. [LH806]"
            )


def check_optimizer(plugin: Precision, optimizer: Optimizer) -> None:
    """Refuses optimizers that unscale gradients themselves, out of sight of the other ranks and of clipping.

    Args:
        plugin: The plugin.
        optimizer: The optimizer.

    Raises:
        ValueError: If the plugin scales the loss and the optimizer unscales the gradients.
    """
    scaler = getattr(plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled() and unscales_in_step(optimizer):
        raise ValueError(
            f"The optimizer `{type(optimizer).__qualname__}` unscales gradients inside its fused step. With a precision"
            " that scales the loss, such as '16-mixed', the ranks could then neither detect an overflow together nor"
            " clip gradients before the step. Create the optimizer with `fused=False` (or `foreach=True`), or use"
            " precision 'bf16-mixed', which needs no scaling. [LH807]"
        )


class MasterWeightsPrecision(HalfPrecision, MixedPrecision):
    """Half precision for optimizers that work on float32: the loss is scaled for float16, as `MixedPrecision` does it.

    Attributes:
        scaler: Scales; ``None`` for bfloat16.
    """

    @override
    def tensor_init_context(self) -> AbstractContextManager[None]:
        """Parameters are made in float32, of which the master copies are made."""
        return nullcontext()


def scale_half(plugin: Precision, device: str) -> None:
    """Let half precision scale its loss; the object stays. Another plugin is left to :func:`check_master_weights`.

    Args:
        plugin: The plugin.
        device: The type of the device.
    """
    if type(plugin) is not HalfPrecision:
        return
    adopted: Any = plugin
    adopted.__class__ = MasterWeightsPrecision
    # A loss in float16 has this as its first gradient, and twice as much would not be finite.
    adopted.scaler = GradScaler(device, init_scale=2.0**15) if plugin.precision == "16-true" else None


def check_master_weights(plugin: Precision) -> None:
    """Refuses precisions that have no use for master weights.

    Args:
        plugin: The plugin, after :func:`scale_half`.

    Raises:
        ValueError: If its parameters are not in half precision, or a class of the user decides about that.
    """
    if not isinstance(plugin, MasterWeightsPrecision):
        raise ValueError(
            "HybridStrategy(master_weights=True) keeps float32 copies of half-precision parameters, so it needs"
            f" Trainer(precision='bf16-true') or '16-true', but the Trainer uses {type(plugin).__name__} with precision"
            f" {plugin.precision!r}. Set one of these precisions, or remove master_weights: with '32-true',"
            " 'bf16-mixed' and '16-mixed', parameters are float32 anyway. [LH808]"
        )


def autocasts(plugin: Precision, device: torch.device) -> bool:
    """Whether a plugin runs steps under autocast on a device."""
    with plugin.train_step_context():
        return torch.is_autocast_enabled(device.type)


class ModelGroupGradScaler(OpenGradScaler):
    """A `GradScaler` whose ranks see an overflow together: all of the model group skip a step, or none does.

    Without that, a stage that overflowed would skip the step and halve its scale while the others go on. State dicts
    are those of `GradScaler`; so is everything else as long as the group is ``None`` or has one rank.

    Args:
        model_group: Gives the ranks that together hold the model, or ``None``.
        device: The type of the device, such as ``"cuda"``.
        settings: What `GradScaler` takes.
    """

    def __init__(self, model_group: Callable[[], ProcessGroup | None], device: str = "cuda", **settings: Any) -> None:
        super().__init__(device, **settings)
        self._join(model_group)

    def _join(self, model_group: Callable[[], ProcessGroup | None]) -> None:
        if not self.is_supported():
            raise RuntimeError(
                f"torch {torch.__version__} does not have `torch.amp.GradScaler._unscale_grads_`, which is required for"
                " ranks to detect an overflow together. Use precision 'bf16-mixed', or another version of torch for"
                " '16-mixed'. [LH135]"
            )
        self.model_group = model_group

    @classmethod
    def adopt(cls, scaler: GradScaler, model_group: Callable[[], ProcessGroup | None]) -> ModelGroupGradScaler:
        """Let a scaler agree with other ranks; the object stays, as its user may ask it for its scale.

        Args:
            scaler: torch's scaler, for any device, or one of this class; its class changes.
            model_group: Gives the ranks that together hold the model, or ``None``.

        Returns:
            The scaler.

        Raises:
            TypeError: If the scaler is of a class of the user, whose methods would be lost.
        """
        if type(scaler) not in _SCALERS:
            raise TypeError(
                f"The precision plugin's scaler is a `{type(scaler).__qualname__}`, but ranks can detect an overflow"
                " together only with torch's scaler. Pass a `torch.amp.GradScaler` with the settings that you want."
                " [LH809]"
            )
        adopted: Any = scaler
        adopted.__class__ = cls
        adopted._join(model_group)
        return cast("ModelGroupGradScaler", adopted)

    def initialize(self, device: torch.device | str | None = None) -> None:
        """Creates the scale on a device, as the first :meth:`scale` does elsewhere; afterwards does nothing.

        Ranks that never see a loss need it; :meth:`unscale_` and :meth:`step` call it.

        Args:
            device: Where the ranks of the model group communicate; by default the current one of the scaler's type.
        """
        # Only to save the multiplication: scaling again would change nothing.
        if self.is_enabled() and not self.has_scale:
            self.scale(torch.zeros((), device=self.device_type if device is None else device))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Unscales this rank's gradients and learns whether a rank of the model group found infinities or NaNs.

        Args:
            optimizer: The optimizer; may be empty, or have no gradients, on this rank.
        """
        self.initialize()
        super().unscale_(optimizer)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Steps unless a rank of the model group found infinities or NaNs.

        Args:
            optimizer: The optimizer.
            args: What its ``step`` takes.
            kwargs: What its ``step`` takes.

        Returns:
            What its ``step`` returns; ``None`` if it was skipped.
        """
        self.initialize()
        return super().step(optimizer, *args, **kwargs)

    def unscale_gradients(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any, **kwargs: Any
    ) -> dict[torch.device, Tensor]:
        """Unscale the gradients of this rank, and return whether a rank of the model group found infinities or NaNs."""
        # torch asks here, for each optimizer once per step, which devices overflowed; it records the answer, skips the
        # step on any number but 0, and lowers the scale.
        # Of divided parameters this rank unscales its shards; they are plain tensors to torch's kernel.
        views = [
            {"params": [local_view(parameter) for parameter in group["params"]]} for group in optimizer.param_groups
        ]
        local: Any = SimpleNamespace(param_groups=views)
        found: dict[torch.device, Tensor] = super().unscale_gradients(local, inv_scale, found_inf, *args, **kwargs)
        group = self.model_group()
        if group is None or group.size() == 1:
            return found
        # A stage without gradients found nothing, says so, and takes part.
        everywhere = [each.to(found_inf.device, non_blocking=True) for each in found.values()]
        overflow = torch.stack([found_inf, *everywhere]).amax(0)
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=group)
        return {overflow.device: overflow}


class SharedCasts:
    """Parameters in float32 are cast once for all microbatches of a step, where autocast casts them.

    Autocast keeps what it has cast until its outermost context is left. Lightning enters it for each microbatch, and
    has it keep nothing: then every microbatch casts all weights, and autograd keeps each copy until its backward. ::

        schedule()   |-----------------------------------------------------------|   here the copies are dropped
        plugin         |---|        |---|                  |---|
        forward()       |F0|         |F1|      B0           |F2|      B1      B2     backward: outside of autocast

    A module that changes parameters in its step may use one before and after: there every use has a copy of its own, as
    with Lightning. The first forward of each stage, which shares nothing, shows whether it does.

    Args:
        device: The type of the device, such as ``"cuda"``.
        parameters: Gives those of this rank.
    """

    def __init__(self, device: str, parameters: Callable[[], Iterable[Tensor]]) -> None:
        self._device, self._find = device, parameters
        self._parameters: list[Tensor] = []
        self._tried: set[int] = set()
        self._may_share = True

    @contextmanager
    def schedule(self) -> Iterator[None]:
        """Enter it around all forwards and backwards of a step: it changes nothing but when copies are dropped."""
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
        """Enter it around a forward of a stage, inside of the precision plugin's context."""
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
        """What is another when a parameter has been changed in a way that autograd knows of."""
        if not self._parameters:
            plain = (each for each in self._find() if not isinstance(each, DTensor))  # of those autocast sees shards
            self._parameters = [each for each in plain if each.dtype == torch.float32]
        return [version_counter(parameter) for parameter in self._parameters]


@cache
def keeps_gradients() -> bool:
    """Whether a copy that autocast has made where no gradients were wanted is not taken where they are.

    Torch 2.13 does so; if another version does not, nothing is shared.
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
    clip_by_norm(list(plugin.main_params(optimizer)), float(clip_val))
