"""Background jobs during training, which run one after the other.

`Checkpointer` has one :class:`BackgroundWriter` per rank, with a job for each checkpoint that it writes (`async_save`)
or removes. A `ThreadPoolExecutor` alone does not report the failure of an earlier job, and does not make a removal
depend on the writes before it.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """Thread that runs jobs in the order of their submission. The caller of :meth:`wait` receives a failure.

    The thread exists from the first job until :meth:`wait`.

    Attributes:
        jobs: The jobs whose outcomes have not been waited for.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self.jobs: list[Future[None]] = []

    def submit(self, job: Callable[[], None], *, if_all_succeeded: bool = False) -> None:
        """Run a job after all earlier jobs.

        Args:
            job: The job.
            if_all_succeeded: If True, the job is skipped if an earlier job in :attr:`jobs` has failed.
        """
        before = list(self.jobs)

        def run() -> None:
            if not (if_all_succeeded and any(other.exception() for other in before)):
                job()

        if self._executor is None:
            self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self.jobs.append(self._executor.submit(run))

    def wait(self) -> Exception | None:
        """Wait until all jobs are done, and end the thread.

        Returns:
            The first failure; ``None`` if there is none.

        Raises:
            BaseException: The first failure, if it is not an `Exception`.
        """
        jobs, self.jobs = self.jobs, []
        error = next((error for error in [job.exception() for job in jobs] if error is not None), None)
        if self._executor is not None:
            self._executor.shutdown()
            self._executor = None
        if error is not None and not isinstance(error, Exception):
            raise error
        return error
