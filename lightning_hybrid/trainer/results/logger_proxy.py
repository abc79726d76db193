"""Calls of `self.logger` and `self.print` inside a step: recorded on the last stage, and made on rank 0.

`StepContext` enters a :class:`LoggerProxy` for each step, sends its calls with the results of the step, and lets global
rank 0 make them with :func:`make_calls`. Real calls during the step would be lost, because the loggers of ranks other
than rank 0 do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.loggers import Logger

from lightning_hybrid.distributed.pytree import decode, encode, map_leaves
from lightning_hybrid.distributed.tensor_bytes import to_host
from lightning_hybrid.trainer.results.logging import LogRecorder

LoggerCall = tuple[int | None, tuple[tuple[str, Any], ...], tuple[Any, ...], dict[str, Any]]
"""The index of the logger (``None`` for `self.print`), the path from it to the called method, and the arguments."""


class LoggerProxy:
    """A replacement of the Trainer's loggers and of `LightningModule.print` while a step runs.

    ::

        last stage    self.logger.experiment.add_image("x", image, 3)   --> (0, .experiment .add_image, ("x", ...))
        rank 0        loggers[0].experiment.add_image("x", image, 3)    <-- after the step

    Loggers write on rank 0, but the values are known on the last stage. Attributes of a logger, such as its class, its
    directory and its version, come from the real logger. Calls return ``None``.

    Args:
        module: The user's module.
        recorder: Knows if calls of the user's step count: code before the body also runs on the first stage, where its
            calls do not count.
        is_source: True if the calls of this rank count: on the first tensor-parallel rank of the last stage of the
            first replica.
        unfollowed: Makes a context for code that is not part of the user's step: here, the copy of arguments to the
            host.

    Attributes:
        calls: The calls of the current step, or of the step that has just run.
    """

    def __init__(
        self,
        module: LightningModule,
        recorder: LogRecorder,
        *,
        is_source: bool,
        unfollowed: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        self._module = module
        self._unfollowed = unfollowed
        self._log_recorder, self._is_source = recorder, is_source
        self.calls: list[LoggerCall] = []
        self._seen: list[Any] | None = None

    @contextmanager
    def only_seen(self) -> Iterator[None]:
        """Discard the calls inside the context, in which a step is only traced; keep their arguments alive.

        The trace sends tensors that are still alive at its end to the last stage, where the call is recorded.
        """
        self._seen = []
        try:
            yield
        finally:
            self._seen = None

    @contextmanager
    def __call__(self) -> Iterator[list[LoggerCall]]:
        """Replace the loggers and `print` inside the context, and yield the list that receives the calls."""
        trainer, attributes = self._module.trainer, vars(self._module)
        loggers = trainer.loggers
        self.calls = []
        proxies: list[Any] = [_RecordingLogger(logger, self._recorder(i)) for i, logger in enumerate(loggers)]
        trainer.loggers = proxies
        record = self._recorder(None)
        # A function instead of a method: callbacks copy modules, and a method would copy this object, too.
        attributes["print"] = lambda *args, **kwargs: record((), tuple(map(str, args)), kwargs)
        try:
            yield self.calls
        finally:
            trainer.loggers = loggers
            del attributes["print"]

    def _recorder(self, index: int | None) -> Callable[[Any, tuple[Any, ...], dict[str, Any]], None]:
        def record(path: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if self._seen is not None:
                self._seen.append((args, kwargs))
            elif self._is_source and self._log_recorder.counts:
                with self._unfollowed():
                    self.calls.append((index, path, map_leaves(to_host, args), map_leaves(to_host, kwargs)))

        return record


class _RecordingLogger:
    """A logger whose method calls are recorded. Other attributes are read from the real logger."""

    def __init__(self, logger: Logger, record: Callable[..., None]) -> None:
        self._logger, self._record = logger, record

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """Return the class of the real logger, so that `isinstance(self.logger, TensorBoardLogger)` holds."""
        return type(self._logger)

    def __getattr__(self, name: str) -> Any:
        if name == "experiment":
            return _RecordedPath((("attribute", name),), self._record)
        value = getattr(self._logger, name)
        return _RecordedPath((("attribute", name),), self._record) if callable(value) else value


class _RecordedPath:
    """An unknown object inside a logger. The call at the end of a chain of attributes and items is recorded."""

    def __init__(self, path: tuple[tuple[str, Any], ...], record: Callable[..., None]) -> None:
        self._path, self._record = path, record

    def __getattr__(self, name: str) -> _RecordedPath:
        if name.startswith("__"):
            raise AttributeError(name)
        return _RecordedPath((*self._path, ("attribute", name)), self._record)

    def __getitem__(self, key: Any) -> _RecordedPath:
        return _RecordedPath((*self._path, ("item", key)), self._record)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._record((*self._path, ("attribute", "__setitem__")), (key, value), {})

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self._record(self._path, args, kwargs)

    def _no_value(self, *_: Any) -> Any:
        path = "".join(f".{name}" if kind == "attribute" else f"[{name!r}]" for kind, name in self._path)
        raise TypeError(
            f"`self.logger{path}` has no value in a step. During the step, calls to the logger are only recorded, and"
            " rank 0 makes these calls after the step. Read the value in a hook, such as `on_train_start`, or read it"
            " from the logger itself, such as `self.logger.log_dir` or `self.logger.version`. [LH724]"
        )

    # Text and paths would be meaningless, and iteration, which falls back to `__getitem__`, would never end.
    __str__ = __fspath__ = __iter__ = __contains__ = _no_value


def pack_calls(calls: Sequence[LoggerCall]) -> bytes:
    """Return calls as bytes.

    Args:
        calls: The attribute `calls` of a :class:`LoggerProxy`.

    Raises:
        TypeError: If an argument cannot be sent to rank 0.
    """
    try:
        return encode(list(calls))
    except Exception as error:  # the pickle protocol lets classes raise any error
        raise TypeError(
            "An argument of a call to `self.logger` or `self.print` cannot be sent to rank 0, because it cannot be"
            f" pickled ({error}). If a step contains such calls, rank 0 makes all of them. Pass tensors, arrays,"
            " numbers, text or figures. [LH725]"
        ) from error


def make_calls(packed: bytes, module: LightningModule) -> None:
    """Make the recorded calls, on rank 0.

    Args:
        packed: The result of :func:`pack_calls`.
        module: The user's module.
    """
    for index, path, args, kwargs in decode(packed):
        target: Any = module.print if index is None else module.trainer.loggers[index]
        for kind, name in path:
            target = getattr(target, name) if kind == "attribute" else target[name]
        target(*args, **kwargs)
