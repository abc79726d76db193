"""Jobs that run beside training, one after the other."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """A thread that does jobs in the order in which they were given; a failure is kept until somebody waits."""

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._jobs: list[Future[None]] = []

    @property
    def is_busy(self) -> bool:
        """Whether there is a job of which nobody has heard how it ended."""
        return bool(self._jobs)

    def submit(self, job: Callable[[], None], *, if_all_went_well: bool = False) -> None:
        """Do a job after those before it.

        Args:
            job: The job.
            if_all_went_well: Whether it is left out if one of those before it, of which nobody has heard, has failed.
        """
        before = list(self._jobs)

        def run() -> None:
            if not (if_all_went_well and any(each.exception() for each in before)):
                job()

        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._jobs.append(self._executor.submit(run))

    def wait(self) -> Exception | None:
        """Wait until all jobs are done.

        Returns:
            The first failure among them, if any.
        """
        jobs, self._jobs = self._jobs, []
        errors = [error for error in (job.exception() for job in jobs) if error is not None]
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if not errors:
            return None
        error = errors[0]
        if not isinstance(error, Exception):
            raise error
        return error
