"""Process groups: how they are made, weak references to them, and their backends.

The mesh makes its groups by :func:`make_group`, and other classes keep groups as :class:`GroupRef`. `dist.new_group`
alone would not suffice: by default it is a collective of all ranks for each group, so a mesh of many groups takes long,
and NCCL groups of several uses would wait for each other.

torch names a group that only its members make after its ranks and the number of groups of the process. So this *number
of groups* must be the same on all ranks before such a group is made. A group *carries messages* if pipeline stages send
activations or gradients over it.
"""

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

# These names are new in torch 2.13. The old names are used only in older versions, because torch may remove them.
all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

#: The maximum number of thread blocks for a pipeline message. By default, NCCL occupies up to 32 of an H100's 132
#: multiprocessors while a posted receive waits.
MESSAGE_CTAS = 8

#: The largest gloo group whose ranks all connect at once. In larger groups, two ranks connect at their first message.
MOST_CONNECTED = 256


class GroupRef:
    """A weak reference to a process group. torch owns groups, and destroying a group must close its connections.

    A copy is the same object, so that objects with such a reference can be copied: callbacks copy modules.

    Args:
        group: The group. ``None`` is an error; torch returns it on ranks that are not in the group.

    Attributes:
        weak: The weak reference itself, for hot paths. It returns ``None`` for a destroyed group.
    """

    __slots__ = ("__weakref__", "weak")

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        assert group is not None, "this rank is not a member of any of these groups"
        self.weak = weakref.ref(group)

    def __call__(self) -> dist.ProcessGroup:
        """Return the group; after it has been destroyed, this is an `AssertionError`."""
        group = self.weak()
        assert group is not None, "the process groups have been destroyed"
        return group

    @property
    def is_alive(self) -> bool:
        """True if the group has not been destroyed."""
        return self.weak() is not None

    def __copy__(self) -> GroupRef:
        """Return the same object."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> GroupRef:
        """Return the same object."""
        return self


class SizedGroupRef(GroupRef):
    """A reference to a group with its size and rank, which tensor-parallel layers read at each call.

    Args:
        group: The group.

    Attributes:
        size: The number of ranks.
        rank: This rank in the group.
    """

    __slots__ = ("rank", "size")

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__(group)
        self.size = group.size()
        self.rank = group.rank()


def device_backends(group: dist.ProcessGroup | None = None) -> dict[str, str]:
    """Return the backend for tensors of each device, such as ``{"cpu": "gloo", "cuda": "nccl"}``.

    The form does not depend on how the backend was requested: by ``"nccl"``, by ``"cpu:gloo,cuda:nccl"`` or not at all.

    Args:
        group: The group; ``None`` for the group of all ranks.
    """
    return dict(part.split(":") for part in dist.get_backend_config(group).split(","))


def has_nccl(group: dist.ProcessGroup | None = None) -> bool:
    """Return True if NCCL sends tensors on devices. Then the device waits, not the host, and groups can be aborted."""
    return device_backends(group).get("cuda") == "nccl"


def world_device() -> torch.device:
    """Return the device of the tensors that the group of all ranks sends: the CPU if the group supports it."""
    return torch.device("cpu" if "cpu" in device_backends() else f"cuda:{torch.cuda.current_device()}")


def all_gather_bytes(own: bytes, group: dist.ProcessGroup | None = None) -> list[bytes]:
    """Return the bytes of each rank of a group, by one collective. torch would gather the sizes first.

    Every rank of the group must call this.

    Args:
        own: The bytes of this rank. Their number is the same on every rank.
        group: A group over a backend for tensors on the host; ``None`` for all ranks, over any backend.
    """
    device = world_device() if group is None else torch.device("cpu")
    size, length = dist.get_world_size(group), len(own)
    gathered = torch.empty(size * length, dtype=torch.uint8, device=device)
    all_gather_single(gathered, torch.frombuffer(bytearray(own), dtype=torch.uint8).to(device), group=group)
    everything = bytes(gathered.cpu().numpy())
    return [everything[begin : begin + length] for begin in range(0, size * length, length)]


def num_groups() -> int:
    """Return the number of groups of this process, by which torch names new groups; 0 if torch does not reveal it."""
    return _num_groups() or 0


@contextmanager
def equally_many_groups(most: int) -> Iterator[None]:
    """Equalize the number of groups of all ranks. While entered, :func:`make_group` needs no collective for that.

    `strategy.run.World` enters this while it makes the mesh. No other groups may be made while entered. Distant ranks
    save a round trip for each call. If NCCL splits groups off, or torch does not reveal the number, nothing is done.

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
    """Make disjoint groups, and return the group of this rank.

    Every rank of the world must call this with the same arguments in the same order, even a rank that is in no group.
    One call makes all groups::

        NCCL bound to devices   all groups are split off the communicator of the world by one collective
        MPI, or unknown torch   all ranks make each group together
        otherwise               the members of each group rendezvous; before that, an all-reduce of all ranks equalizes
                                the number of groups, except inside :func:`equally_many_groups`

    Communicators that are split off do not share resources with the world (`split_share`). NCCL would run the
    operations of sharing communicators one after another, so a receive that is posted early would block every later
    collective.

    Args:
        rank_groups: The global ranks of each group. torch sorts the ranks of a group.
        backend: The backend of the groups; ``None`` for the backend of the world.
        timeout: The timeout of the groups; ``None`` for torch's default.
        carries_messages: If True, the groups are for messages between stages. With NCCL, these messages have priority
            over computation on the device, and use at most :data:`MESSAGE_CTAS` thread blocks.
        connects_when_used: If True, NCCL makes each communicator, which takes device memory, only for its first
            operation. The groups are then not split off.

    Returns:
        The group; ``None`` if this rank is in no group.
    """
    group = _make_group(rank_groups, backend, timeout, carries_messages, connects_when_used)
    if group is not None:
        _MADE[:] = [*(made for made in _MADE if made() is not None), weakref.ref(group)]
    return group


#: The groups that :func:`make_group` has made, in order.
_MADE: list[weakref.ref[dist.ProcessGroup]] = []

#: Not empty while :func:`equally_many_groups` is entered.
_EVEN: list[bool] = []


def abort_groups() -> None:
    """Abort pending operations in all groups, without other ranks.

    torch aborts all groups at once. If they are aborted one after another, an abort can wait for the abort of another
    communicator on a peer (pytorch#119797). If this version of torch cannot do that, the groups made here are aborted,
    the latest first, which is the same order on all ranks.
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
    if not _can_meet(backend):  # torch needs all ranks for each group
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
    """Set the timeout of an existing group.

    Args:
        group: The group.
        timeout: The timeout; ``None`` does not change it.

    Returns:
        True if this version of torch and the backend of the group support that.
    """
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
    """Return True if the communicator of the world is bound to devices, so that groups can be split off it."""
    return getattr(_world(), "bound_device_id", None) is not None and hasattr(dist, "split_group") and has_nccl()


def _split_world(
    rank_groups: Sequence[Sequence[int]], timeout: timedelta | None, options: Any
) -> dist.ProcessGroup | None:
    arguments: dict[str, Any] = {"timeout": timeout, "pg_options": options}
    if len(set(device_backends().values())) > 1:  # also over gloo, whose ranks rendezvous by name
        _even_out()
        if options is not None and "backend" in inspect.signature(dist.split_group).parameters:
            arguments["backend"] = "cuda:nccl"  # messages stay on the device
        else:
            arguments["pg_options"] = None
    group: dist.ProcessGroup | None = dist.split_group(split_ranks=[list(ranks) for ranks in rank_groups], **arguments)
    return group


def _message_options(timeout: timedelta | None) -> Any:
    # torch warns that messages of a group wait for each other. Each of these groups has two ranks and one direction.
    os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
    options: Any = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    options.config.max_ctas = MESSAGE_CTAS
    if timeout is not None:
        set_options_timeout(options, timeout)
    return options


def _can_meet(backend: str | None) -> bool:
    """Return True if the members of a group can make it without the other ranks."""
    is_mpi = "mpi" in (backend or ",".join(device_backends().values()))
    return _num_groups() is not None and not is_mpi


def _num_groups() -> int | None:
    """Return the number by which torch names the next group that only its members make.

    The name is a hash of the group's ranks and of the number of groups in this process. In torch 2.15, the latter is
    the number of groups that the process has requested. The result is ``None`` if torch does not reveal the number.
    """
    if name_of_ranks is None:
        return None
    world, name = group_tables(), name_of_ranks([0])
    for number in (len(getattr(world, "pg_names", ())), getattr(world, "group_count", 0)):
        if name == hashlib.sha1(f"0_{number}".encode(), usedforsecurity=False).hexdigest():
            return number
    return None


def _even_out() -> None:
    """Equalize the number of groups of all ranks, by a collective.

    torch names a group that only its members make after its ranks and the number of groups. If members had different
    numbers, they would wait for each other under different names.
    """
    if _EVEN:
        return
    most = torch.tensor(num_groups(), device=world_device())
    dist.all_reduce(most, dist.ReduceOp.MAX)
    _fill_up(int(most))


def _fill_up(most: int) -> None:
    """Make groups of this rank alone until it has a certain number of groups."""
    with _unbound(), _connecting_lazily(1):
        for _ in range(most - num_groups()):
            dist.new_group([dist.get_rank()], backend="gloo", use_local_synchronization=True)


@contextmanager
def _unbound() -> Iterator[None]:
    """Prevent torch from splitting new groups off the communicator of the world, which would need all ranks."""
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
    """Let ranks of a large gloo group connect at their first message, if the group is made while entered.

    torch reads this setting for each group. It is also set for a group of one rank. Such a group has no connections,
    but would otherwise request its own address from the store twice.
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


_TABLES = ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag")  # in torch
_OF_PARENT: list[Any] = []  # the parent's groups, which a forked process never frees


def leave_groups_to_parent() -> None:
    """Forget all groups in a forked process, without freeing them, so that new groups can be made here.

    `tuning.process_copy` calls this in a forked copy of the process. Freeing a group would wait for its threads, which
    do not exist in this process.

    Raises:
        RuntimeError: If this version of torch has other tables of groups.
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
