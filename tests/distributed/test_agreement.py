"""What ranks agree on takes one collective where they agree."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.distributed.agreement import RankInfo, all_gather_values, check_equal
from lightning_hybrid.distributed.process_group import equally_many_groups, make_group, num_groups
from lightning_hybrid.distributed.watch.flight_recorder import read_collectives
from tests.pool import Pools


def num_collectives(since: int) -> int:
    return sum(len(kinds) for _, kinds in read_collectives(since).started.values())


def compared() -> tuple[list[bytes], int]:
    before = read_collectives().last
    told = check_equal({"size": "2"}, "Give all the same.", str(dist.get_rank()).encode())
    return told, num_collectives(before)


def test_ranks_that_have_the_same_are_compared_by_one_collective(ranks: Pools) -> None:
    assert ranks(2).run(compared) == [([b"0", b"1"], 1)] * 2


def differing() -> str:
    try:
        check_equal({"size": str(dist.get_rank())}, "Give all the same.", b"told")
    except ValueError as error:
        return str(error)
    return ""


def test_what_is_not_the_same_is_named(ranks: Pools) -> None:
    text = "`size` is not the same on every rank: 0 on rank 0; 1 on rank 1. Give all the same. [LH201]"
    assert ranks(2).run(differing) == [text] * 2


def test_what_a_rank_tells_of_itself_survives_the_way() -> None:
    torch.manual_seed(-1)
    info = RankInfo.own()
    assert RankInfo.from_bytes(info.to_bytes()) == info
    assert (info.host, info.seed) == (socket.gethostname(), (1 << 64) - 1)
    assert len(info._replace(host="a" * 99).to_bytes()) == len(info.to_bytes())


def gathered(lengths: tuple[int, int]) -> tuple[list[int], int]:
    before = read_collectives().last
    found = all_gather_values(bytes(lengths[dist.get_rank()]))
    return list(map(len, found)), num_collectives(before)


@pytest.mark.parametrize(("lengths", "taken"), [((0, 9), 1), ((400, 480), 1), ((5, 600), 2), ((9000, 600), 2)])
def test_small_values_are_gathered_by_one_collective(ranks: Pools, lengths: tuple[int, int], taken: int) -> None:
    assert ranks(2).run(gathered, lengths) == [(list(lengths), taken)] * 2


def made_evenly() -> tuple[bool, list[int], int]:
    """Rank 0 has a group that others lack, and the last rank is in none of the second groups."""
    rank = dist.get_rank()
    if rank == 0:
        dist.new_group([0], backend="gloo", use_local_synchronization=True)
    told = check_equal({}, "", bytes([num_groups()]))
    before = read_collectives().last
    with equally_many_groups(max(each[0] for each in told)):
        everyone = make_group([[0, 1, 2]], backend="gloo")
        pair = make_group([[0, 1]], backend="gloo")
        again = make_group([[1, 2], [0]], backend="gloo")
    taken = num_collectives(before)
    assert everyone is not None
    sums = []
    for group in (everyone, pair, again):
        if group is not None:
            value = torch.ones(())
            dist.all_reduce(value, group=group)
            sums.append(int(value))
    counts = check_equal({}, "", bytes([num_groups()]))
    return len(set(counts)) == 1, sums, taken


def test_groups_are_made_without_a_collective_for_each(ranks: Pools) -> None:
    assert ranks(3).run(made_evenly) == [(True, [3, 2, 1], 0), (True, [3, 2, 2], 0), (True, [3, 2], 0)]
