"""Process groups: how they are made, held weakly, and what their backends are."""

from __future__ import annotations

import hashlib
import inspect
import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_hybrid.torch_internals import abort_all_groups, group_tables, name_of_ranks, set_options_timeout

# The names that torch 2.13 brought. The old ones are looked up only where there are no new ones: they may go.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: Thread blocks of a device that a pipeline message may take: NCCL would take up to 32 of an H100's 132 processors for
#: as long as a posted receive waits.
MESSAGE_CTAS = 8

#: Ranks from which a gloo group connects two of them when they first talk: all at once, that is a socket to each.
MOST_CONNECTED = 256


class GroupRef:
    """A weak reference to a process group: torch owns groups, and destroying one must close its connections.

    A copy is the reference itself, so that its owners can be copied: callbacks copy modules.

    Args:
        group: The group; ``None`` is a group that this rank is not in, which is an error of the caller.

    Attributes:
        weak: The reference of the interpreter, for hot paths: it gives ``None`` for a group that has been destroyed.
    """

    __slots__ = ("__weakref__", "weak")

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        assert group is not None, "this rank is not a member of any of these groups"
        self.weak = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """The group, which must not have been destroyed."""
        group = self.weak()
        assert group is not None, "the process groups have been destroyed"
        return group

    @property
    def is_alive(self) -> bool:
        """Whether the group still exists."""
        return self.weak() is not None

    def __copy__(self) -> GroupRef:
        """Itself."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        """Itself."""
        return self


class SizedGroupRef(GroupRef):
    """Such a reference to a group that computation asks for its size, and for the rank in it, at each call.

    Args:
        group: The group.

    Attributes:
        size: The number of ranks.
        rank: This rank, inside of the group.
    """

    __slots__ = ("rank", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.size = group.size()
        self.rank = group.rank()


def device_backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Which backend carries the tensors of which device, such as ``{"cpu": "gloo", "cuda": "nccl"}``.

    However it was asked for: as ``"nccl"``, as ``"cpu:gloo,cuda:nccl"``, or not at all.

    Args:
        group: The group; ``None`` for that of all ranks.
    """
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def has_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Whether tensors on a device travel by NCCL, where waiting is done by the device, and a group can be aborted."""
    return device_backends(group).get("cuda") == "nccl"


def world_device() -> torch.device:
    """Where the group of all ranks takes tensors: the host, if it can."""
    return torch.device("cpu" if "cpu" in device_backends() else f"cuda:{torch.cuda.current_device()}")


def all_gather_bytes(own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """What each rank of a group has, by one collective: of objects, torch gathers the sizes first.

    Args:
        own: Of this rank, of equal length on all of them.
        group: A group over a backend that takes tensors of the host; ``None`` for all ranks, over whatever backend.
    """
    device = world_device() if group is None else torch.device("cpu")
    size, length = dist.get_world_size(group), len(own)
    gathered = torch.empty(size * length, dtype=torch.uint8, device=device)
    all_gather_single(gathered, torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device), group=group)
    everything = bytes(gathered.cpu().numpy())
    return [everything[begin : begin + length] for begin in range(0, size * length, length)]


def num_groups() -> int:
    """The number of groups of this process, as torch counts them for their names; 0 if this torch does not tell."""
    return _num_groups() or 0


@contextmanager
def equally_many_groups(most: int) -> Iterator[None]:
    """Inside, all ranks have equally many groups, and :func:`make_group` takes no collective to see to that.

    No other groups may be made inside. Ranks that are far apart save the way there and back for each call.

    Args:
        most: The largest :func:`num_groups` of all ranks.
    """
    if not _can_meet(None) or _can_split():
        yield
        return
    _fill_up(most)
    _EVEN.append(True)
    try:
        yield
    finally:
        _EVEN.pop()


def make_group(
    rank_groups: Sequence[Sequence[int]],
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    carries_messages: bool = False,
    connects_when_used: bool = False,
) -> dist.ProcessGroup | None:
    """Make disjoint groups, and return the one that this rank is in.

    Every rank of the world calls this with the same arguments in the same order, also a rank that is in none of them.
    It takes no call for each group::

        NCCL that is bound to devices   all groups are split off the world's communicator by one collective
        everything else                 the members of each group meet, and nobody else does anything

    What is split off does not share resources with the world (``split_share``): NCCL runs the operations of such
    communicators one after the other, so a receive that is posted early would hold up every collective behind it.

    Args:
        rank_groups: The global ranks of each group. Inside it they are sorted.
        backend: Of the groups; ``None`` for the one of the world.
        timeout: Of the groups; ``None`` for that of torch.
        carries_messages: Whether these are messages between stages: with NCCL they go before what the device computes
            at the time, and take :data:`MESSAGE_CTAS` thread blocks at most.
        connects_when_used: Whether NCCL makes the communicators, for which each takes memory of the device, only for
            the first operation.
    """
    group = _make_group(rank_groups, backend, timeout, carries_messages, connects_when_used)
    if group is not None:
        _MADE[:] = [*(made for made in _MADE if made() is not None), weakref.ref(group)]
    return group


#: What :func:`make_group` gave, in its order.
_MADE: list[weakref.ref[dist.ProcessGroup]] = []

#: Not empty inside of :func:`equally_many_groups`.
_EVEN: list[bool] = []


def abort_groups() -> None:
    """End what is under way in all groups, without any other rank.

    Torch aborts them all at once: one after the other, an abort can wait for that of another communicator on a peer
    (pytorch#119797). A torch that cannot gets the next best: the groups made here, latest first, which is one order on
    all ranks.
    """
    if abort_all_groups is not None:
        abort_all_groups()
        return
    groups = [made for made in (reference() for reference in reversed(_MADE)) if made is not None]
    for group in [*(group for group in groups if group is not _world()), _world()]:
        group.abort()


def _make_group(
    rank_groups: Sequence[Sequence[int]],
    backend: str | None,
    timeout: timedelta | None,
    carries_messages: bool,
    connects_when_used: bool,
) -> dist.ProcessGroup | None:
    rank = dist.get_rank()
    own = next((list(ranks) for ranks in rank_groups if rank in ranks), None)
    options = _message_options(timeout) if carries_messages and backend is None and has_nccl() else None
    if backend is None and _can_split() and not connects_when_used:
        return _split_world(rank_groups, timeout, options)
    if not _can_meet(backend):  # then torch needs all ranks for each group
        groups = [
            dist.new_group(list(ranks), timeout=timeout, backend=backend, pg_options=options) for ranks in rank_groups
        ]
        return next((group for group, ranks in zip(groups, rank_groups, strict=True) if rank in ranks), None)
    if any(len(ranks) > 1 for ranks in rank_groups):
        _even_out()
    if own is None:
        if _EVEN:
            _fill_up(num_groups() + 1)
        return None
    with _unbound(), _connecting_lazily(len(own)):
        group: dist.ProcessGroup | None = dist.new_group(
            own, timeout=timeout, backend=backend, pg_options=options, use_local_synchronization=True
        )
    return group


def set_timeout(group: dist.ProcessGroup, timeout: timedelta | None) -> bool:
    """Give a group that exists another timeout, and say whether this torch, and its backend, can."""
    if timeout is None:
        return True
    if not hasattr(group, "set_timeout"):
        return False
    try:
        group.set_timeout(timeout)
    except RuntimeError:
        return False
    return True


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _can_split() -> bool:
    """Whether the world's communicator is there, bound to devices, so that others can be split off it."""
    return getattr(_world(), "bound_device_id", None) is not None and hasattr(dist, "split_group") and has_nccl()


def _split_world(
    rank_groups: Sequence[Sequence[int]], timeout: timedelta | None, options: Any
) -> dist.ProcessGroup | None:
    arguments: dict[str, Any] = {"timeout": timeout, "pg_options": options}
    if len(set(device_backends().values())) > 1:  # tensors of the host travel too, by gloo: its members meet by name
        _even_out()
        if options is not None and "backend" in inspect.signature(dist.split_group).parameters:
            arguments["backend"] = "cuda:nccl"  # messages stay on the device
        else:
            arguments["pg_options"] = None
    group: dist.ProcessGroup | None = dist.split_group(split_ranks=[list(ranks) for ranks in rank_groups], **arguments)
    return group


def _message_options(timeout: timedelta | None) -> Any:
    # Each of these groups is of two ranks and one direction: that its messages wait for each other is what is wanted.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = MESSAGE_CTAS
    if timeout is not None:
        set_options_timeout(options, timeout)
    return options


def _can_meet(backend: str | None) -> bool:
    """Whether the members of a group can make it without the other ranks."""
    is_mpi = "mpi" in (backend or ",".join(device_backends().values()))
    return _num_groups() is not None and not is_mpi


def _num_groups() -> int | None:
    """The number after which torch names the next group that only its members make; ``None`` if it does not tell.

    Such a name is a hash of the group's ranks and of the number of groups that the process has, or in torch 2.15 of
    those that it has been asked for.
    """
    if name_of_ranks is None:
        return None
    world, name = group_tables(), name_of_ranks([0])
    for number in (len(getattr(world, "pg_names", ())), getattr(world, "group_count", 0)):
        if name == hashlib.sha1(f"0_{number}".encode(), usedforsecurity=False).hexdigest():
            return number
    return None


def _even_out() -> None:
    """Have every rank have equally many groups.

    Torch names a group that only its members make after its ranks and a number of groups: with other numbers, members
    wait for each other under other names.
    """
    if _EVEN:
        return
    most = torch.tensor(num_groups(), device=world_device())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    _fill_up(int(most))


def _fill_up(most: int) -> None:
    """Make groups of this rank alone until it has so many."""
    with _unbound(), _connecting_lazily(1):
        for _ in range(most - num_groups()):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


@contextmanager
def _unbound() -> Iterator[None]:
    """Inside, new groups are not split off the world's communicator, which would take all ranks."""
    world = _world()
    device = getattr(world, "bound_device_id", None)
    if device is None:
        yield
        return
    world.bound_device_id = None
    try:
        yield
    finally:
        world.bound_device_id = device


@contextmanager
def _connecting_lazily(size: int) -> Iterator[None]:
    """Inside, a large gloo group opens a connection at the first message over it; torch reads this for each group.

    So does one of a single rank, which has nobody to connect to, but else asks the store twice for its own address.
    """
    name = "TORCH_GLOO_LAZY_INIT"
    if 1 < size <= MOST_CONNECTED or name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]


_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")  # of torch
_OF_PARENT: list[Any] = []  # what a copy of a process never frees


def leave_groups_to_parent() -> None:
    """In a copy of a process: know no group any more, so that others can be made here, and free none.

    To free a group is to wait for its threads, which were not copied.

    Raises:
        RuntimeError: If this torch has other tables of its groups.
    """
    if not dist.is_initialized():
        return
    world = group_tables()
    found = [getattr(world, name, None) for name in _TABLES]
    tables = [table for table in found if isinstance(table, dict)]
    if world is None or len(tables) < len(found):
        raise RuntimeError(
            "This process has already created process groups, and torch"
            f" {torch.__version__} cannot create new ones after a fork. Run this code in a new process. [LH206]"
        )
    _OF_PARENT.append([world.default_pg, *(dict(table) for table in tables)])
    for table in tables:
        table.clear()
    world.default_pg = None
