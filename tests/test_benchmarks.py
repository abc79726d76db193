"""Benchmarks that are run by hand still fit the package."""

from __future__ import annotations

from benchmarks.step.guards import GUARDS, without_guards


def test_the_guards_benchmark_replaces_methods_that_exist() -> None:
    originals = [vars(owner)[name] for owner, name, _ in GUARDS]
    with without_guards():
        assert all(
            vars(owner)[name] is not original for (owner, name, _), original in zip(GUARDS, originals, strict=True)
        )
    assert all(vars(owner)[name] is original for (owner, name, _), original in zip(GUARDS, originals, strict=True))
