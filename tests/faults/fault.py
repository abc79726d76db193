"""A fault: what goes wrong, where, when and on which rank, drawn from its number."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple


class Layout(NamedTuple):
    """Parallel sizes, and what replicas shard."""

    data: int
    tensor: int
    pipeline: int
    zero: int = 0
    zero_size: int | None = None
    experts: int = 1


LAYOUTS = [
    *(Layout(1, 1, 2), Layout(1, 1, 3), Layout(1, 1, 4), Layout(1, 2, 1), Layout(1, 2, 2), Layout(2, 1, 1)),
    *(Layout(2, 1, 1, 3), Layout(2, 1, 2), Layout(2, 1, 2, 3), Layout(2, 2, 1, 3)),
    *(Layout(2, 1, 1, experts=2), Layout(2, 1, 2, experts=2), Layout(2, 1, 2, 1, experts=2)),
    *(Layout(4, 1, 1, 3, 2), Layout(4, 1, 1, 2, 2, experts=2)),
]
HOOKS = [
    *("setup", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "before_body", "forward", "backward", "after_body", "on_before_optimizer_step"),
    *("on_train_batch_end", "on_validation_start", "on_validation_epoch_end", "on_save_checkpoint"),
    *("on_train_epoch_end", "getitem", "collate"),
]
#: Those of them in which an action of a schedule runs, if there is one.
IN_STEP = ["before_body", "forward", "backward", "after_body"]
#: What the rank itself does, or what is done to it from outside when it comes to the place.
DEADLY = ["raise", "exit", "kill", "sys_exit", "keyboard_interrupt", "sigint", "sigterm"]
#: Those of them that the rank lives to tell of.
RAISED = ["raise", "sys_exit", "keyboard_interrupt", "sigint"]
#: Found by who waits: the rank stands still, and another one is interrupted from outside.
STILL = ["sleep+sigint", "sleep+sigterm"]
#: Not to be found before a report of stalls: those of these runs come after a few seconds.
STALLS = ["sleep", "stop"]
#: One rank does what the others do not.
ALONE = [
    *("log", "log_sync", "should_stop", "skip_epoch", "save", "state_dict", "barrier", "torch_barrier"),
    *("all_reduce_in_step", "short_loader", "checkpoint_callback", "max_epochs", "resumes"),
]
OTHER = ["corrupt", "worker_raises", "worker_killed", "disk_full"]


@dataclass
class Fault:
    """One fault.

    Attributes:
        number: From which everything else is drawn.
        launcher: ``"fork"`` for plain processes, ``"lightning"`` or ``"torchrun"``.
        layout: The ranks.
        kind: What goes wrong.
        place: Where.
        rank: On which rank.
        time: At which call of that place.
    """

    number: int
    launcher: str = "fork"
    layout: Layout = LAYOUTS[0]
    kind: str = "raise"
    place: str = "on_train_batch_end"
    rank: int = 0
    time: int = 1

    @property
    def size(self) -> int:
        """The number of ranks."""
        data, tensor, pipeline = self.layout[:3]
        return data * tensor * pipeline

    @property
    def is_in_action(self) -> bool:
        """Whether the rank tells which action of a schedule it was in; replicas of a whole model have none."""
        return self.kind in RAISED and self.place in IN_STEP and self.layout[1:3] != (1, 1)

    @property
    def works(self) -> bool:
        """Whether it is none.

        Where nobody has to agree on a log, where no rank needs another one's part of the state, where one chooses a
        checkpoint of its own (all resume from rank 0's), and where replicas have unequal numbers of batches: their
        epoch ends together.
        """
        data, tensor, pipeline = self.layout[:3]
        is_whole = tensor == pipeline == 1 or (self.rank // tensor) % data > 0
        shards = self.layout.zero > 0 or self.layout.experts > 1
        is_spare = self.kind == "state_dict" and not shards and is_whole
        return (self.kind == "log" and tensor == pipeline == 1) or is_spare or self.kind in ("resumes", "short_loader")

    def __str__(self) -> str:
        data, tensor, pipeline, zero, zero_size, experts = self.layout
        layout = f"dp{data} tp{tensor} pp{pipeline}" + (f" zero{zero}" if zero else "")
        layout += (f" of {zero_size}" if zero_size else "") + (f" ep{experts}" if experts > 1 else "")
        return (
            f"#{self.number} {self.launcher}, {layout}: {self.kind} in {self.place} ({self.time}) on rank {self.rank}"
        )


def draw(number: int, kinds: list[str] | None = None, launcher: str = "fork") -> Fault:
    """The fault of a number.

    Args:
        number: The number.
        kinds: What to choose from; ``None`` for everything that ends by itself.
        launcher: As in :class:`Fault`.
    """
    chance = random.Random(number)
    layout = chance.choice(LAYOUTS)
    everything = DEADLY * 3 + ALONE * 2 + STILL * 2 + OTHER * 2
    kind = chance.choice(kinds or everything)
    fault = Fault(number, launcher, layout, kind)
    pipeline = layout[2]
    fault.rank = chance.randrange(fault.size)
    fault.place = chance.choice(HOOKS)
    fault.time = chance.choice([1, 1, 2, 3])
    last = (fault.size // pipeline) * (pipeline - 1)  # with "pp-dp-tp", the first rank of the last stage
    if fault.place in ("after_body", "validation_step") and pipeline > 1:
        fault.rank = chance.randrange(last, fault.size)
    if kind in ALONE:
        fault.place = {
            "all_reduce_in_step": "after_body",
            "skip_epoch": "on_train_batch_start",
            "short_loader": "loader",
            "checkpoint_callback": "trainer",
            "max_epochs": "trainer",
            "resumes": "trainer",
        }.get(kind, chance.choice(["on_train_batch_end", "on_train_epoch_end", "on_validation_epoch_end"]))
        if kind == "should_stop":
            fault.place = "on_train_batch_end"
        if kind == "all_reduce_in_step":
            fault.layout = chance.choice([each for each in LAYOUTS if each[2] > 1])
            fault.rank = chance.randrange(fault.size)
        if kind == "short_loader":
            fault.layout = chance.choice([each for each in LAYOUTS if each[0] > 1])
            fault.rank = 0
    # A loader may take as long as it likes, and before a run has begun nobody watches.
    if kind in STILL + STALLS and fault.place in ("setup", "getitem", "collate", "configure_optimizers"):
        fault.place = "before_body"
    if fault.place in ("getitem", "collate"):
        fault.rank = 0  # it loads
    if fault.place in ("on_train_epoch_start", "on_train_start", "setup", "configure_optimizers", "on_fit_start"):
        fault.time = 1
    if kind.startswith("worker"):
        fault.place, fault.rank = "getitem", 0
    if kind == "disk_full":
        fault.place, fault.rank = "saving", 0
    if kind == "corrupt":
        fault.layout = chance.choice([each for each in LAYOUTS if each[2] > 1])
        fault.place, fault.rank = "message", chance.randrange(fault.size)
    return fault
