"""What happens to machines in the middle of a run, drawn from a number."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

HEARTBEAT_TIMEOUT = 6.0  # seconds
#: (data, pipeline) parallel size; the last stages are on the second machine.
LAYOUTS = {"pp2": (1, 2), "dp2 pp2": (2, 2)}
#: A process of a machine ends, or all of them.
DEAD = ["rank killed", "machine killed", "store killed"]
#: Nothing more is heard of a machine, and no connection breaks.
SILENT = ["machine stopped", "cable cut"]
MENDED, FULL = "cable back", "disk full"
KINDS = [*DEAD, *SILENT, MENDED, FULL]
PLACES = ["set-up", "training", "validation", "saving"]


@dataclass
class Fault:
    """One fault.

    Attributes:
        number: From which everything else is drawn.
        kind: What happens.
        layout: One of :data:`LAYOUTS`.
        place: What the ranks do then.
        time: At which call of that place.
        delay: Seconds from there.
        rank: Who is hit; all of its machine, where one is.
        seconds: That a cable is cut.
        filled: Of the disk, in bytes, before the run.
    """

    number: int
    kind: str = "none"
    layout: str = "pp2"
    place: str = "training"
    time: int = 1
    delay: float = 0.0
    rank: int = 0
    seconds: float = 0.0
    filled: int = 0

    @property
    def size(self) -> int:
        """The number of ranks."""
        data, pipeline = LAYOUTS[self.layout]
        return data * pipeline

    def machine(self, rank: int) -> int:
        """The number of a rank's machine."""
        return 1 + rank // (self.size // 2)

    def on_machine(self, number: int) -> set[int]:
        """The ranks of a machine."""
        return {rank for rank in range(self.size) if self.machine(rank) == number}

    @property
    def hit(self) -> set[int]:
        """The ranks that it happens to."""
        return {self.rank} if self.kind in ("rank killed", FULL) else self.on_machine(self.machine(self.rank))

    def true_ranks(self, rank: int) -> set[int]:
        """Whom another rank is to name: one of these. Whose cable is cut, misses the others."""
        return set(range(self.size)) - self.hit if self.kind == "cable cut" and rank in self.hit else self.hit

    @property
    def survivors(self) -> set[int]:
        """The ranks that are to name them."""
        everyone = set(range(self.size))
        return everyone if self.kind in ("cable cut", FULL) else everyone - self.hit

    @property
    def limit(self) -> float:
        """Seconds in which they end."""
        return HEARTBEAT_TIMEOUT + 5 if self.kind in SILENT else 5.0

    def __str__(self) -> str:
        who = f"rank {self.rank}" if self.hit == {self.rank} else f"node{self.machine(self.rank)}"
        cut = f" for {self.seconds:.1f} s" if self.kind == MENDED else ""
        where = f"{self.place} ({self.time}) + {self.delay:.2f} s"
        return f"#{self.number} {self.layout}: {self.kind}{cut}, {who}, {where}"


def draw(number: int, kinds: list[str] | None = None) -> Fault:
    """The fault of a number.

    Args:
        number: The number.
        kinds: What to choose from; ``None`` for everything.
    """
    chance = Random(number)
    fault = Fault(number, chance.choice(kinds or KINDS), chance.choice(["pp2", "pp2", "dp2 pp2"]))
    fault.place = chance.choice(PLACES)
    fault.time = 1 if fault.place == "set-up" else chance.randint(1, 4)
    fault.delay = chance.uniform(0, 1.0 if fault.place == "set-up" else 0.15)
    fault.rank = chance.randrange(fault.size)
    # TCP says again what was lost after twice the time of before, so a cable that is back may be used only later.
    fault.seconds = chance.uniform(0.1, 0.45) * HEARTBEAT_TIMEOUT
    fault.filled = chance.randrange(150_000)
    if fault.kind == "store killed":
        fault.rank = 0
    if fault.kind == FULL:  # rank 0 writes
        fault.rank, fault.place = 0, "saving"
    return fault
