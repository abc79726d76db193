"""The module is divided: found out which stage holds what, and stand-ins put for the rest."""

from __future__ import annotations

from lightning.pytorch import LightningModule
from lightning_utilities.core.rank_zero import rank_zero_info
from torch import nn

from lightning_hybrid.materialize import is_stand_in, put_stand_ins, refuse_call
from lightning_hybrid.mesh import Mesh
from lightning_hybrid.partition import partition
from lightning_hybrid.placement import Placement
from lightning_hybrid.refusals import agree
from lightning_hybrid.schedule import build
from lightning_hybrid.settings import Settings
from lightning_hybrid.step import BodyCallError, find_body, layer_call_text
from lightning_hybrid.summary import layout_text, stage_rows, stage_table
from lightning_hybrid.timeline import simulate

__all__ = ["Division"]


class Division:
    """One module and its stages.

    Args:
        module: The user's module.
        settings: The settings.
        mesh: The ranks.

    Attributes:
        num_stages: Stages over all ranks; chunks on a single rank would be neighbours and are one stage.
        body: The dotted name of the body and the body; ``None`` if there is one stage, or before the division.
        placement: Which stage holds what.
        is_done: Whether the module has been divided.
    """

    def __init__(self, module: LightningModule, settings: Settings, mesh: Mesh) -> None:
        self._module = module
        self._settings = settings
        self._mesh = mesh
        num_ranks = mesh.pipeline_parallel_size
        self.num_stages = num_ranks * settings.num_chunks if num_ranks > 1 else 1
        self.body: tuple[str, nn.Sequential] | None = None
        self.placement = Placement(None, (), (range(0),), 1)
        self.is_done = False

    def __call__(self) -> None:
        """Put stand-ins for what other stages hold; once.

        Raises:
            ValueError: If there is no body, or it has fewer layers than there are stages; on every rank.
            TypeError: If the body cannot be divided; on every rank.
        """
        if self.num_stages > 1 and not self.is_done:
            agree(self._plan)
            rank_zero_info(self.text())
            self._put_stand_ins()
        self.is_done = True

    def check(self) -> None:
        """The body is still what was divided.

        Raises:
            ValueError: If it, or the number of its layers, is another.
        """
        if self.body is None:
            return
        name, body = self.body
        now = dict(self._module.named_modules(remove_duplicate=False)).get(name)
        if now is not body or len(body) != len(self.placement.layers):
            raise ValueError(
                f"The body {name!r} of {type(self._module).__name__} was replaced, or got other layers, after it had"
                " been divided into stages. Make it in `__init__`, or in `configure_model` (`if self.body is None:`):"
                " it is divided after that."
            )

    def _put_stand_ins(self) -> None:
        assert self.body is not None
        (name, body), rank = self.body, self._mesh.pipeline_rank
        put_stand_ins(self._module, self.placement, rank)
        paths = self._module.named_modules(remove_duplicate=False)
        own = {id(part) for path, part in paths if rank in self.placement.ranks_of(path)}
        for layer in {id(layer): layer for layer in body if id(layer) not in own}.values():
            refuse_call(layer, BodyCallError, layer_call_text(name))

    def _plan(self) -> None:
        """Find the body and say which stage gets which layers."""
        name, body = find_body(self._module, self._settings.body or getattr(self._module, "pipeline_body", None))
        weights = [sum(parameter.numel() for parameter in layer.parameters()) for layer in body]
        stages = partition(self._settings.partition, weights, self.num_stages)
        layers = tuple(path for path, _ in body.named_modules(remove_duplicate=False) if path and "." not in path)
        placement = Placement(name, layers, tuple(stages), self._mesh.pipeline_parallel_size)
        own = [
            tensor_name
            for tensor_name, tensor in self._module.named_parameters()
            if self._mesh.pipeline_rank in placement.ranks_of(tensor_name) and is_stand_in(tensor)
        ]
        if own:
            raise ValueError(
                f"{type(self._module).__name__} was divided for another layout before: {own[0]!r} has no values on the"
                " rank that needs it now. Make a new module, and load a checkpoint into it."
            )
        self.body, self.placement = (name, body), placement

    def text(self) -> str:
        """The layout and the table of stages."""
        given, num_ranks = self._settings, self._mesh.pipeline_parallel_size
        schedule = build(given.schedule, num_ranks, given.num_microbatches, given.num_chunks)
        layout = layout_text(self._mesh.sizes, schedule, bubble=simulate(schedule).bubble)
        if self.body is None:
            return layout
        return f"{layout}\n{stage_table(stage_rows(self.body[1], self.placement.stages, num_ranks), self.body[0])}"
