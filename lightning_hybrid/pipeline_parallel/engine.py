"""Engine that runs the actions of one pipeline rank on its stages, in the order of a schedule.

`World`, which owns the process groups of a strategy, makes one :class:`Engine`, which outlives single runs of the
Trainer. The training step and the evaluation steps call :meth:`Engine.run`. The watch thread of a run calls
:meth:`Engine.under_way` and similar methods, to report where a rank waits.

The engine knows only actions, messages and buffers; `compute`, a function of the caller, runs the layers. Nothing is
negotiated during a run: every rank runs its list of the same schedule, so all ranks of a pipeline must call
:meth:`Engine.run` with equal schedules and keys. A *blank* message replaces a message whose sender has broken off the
run; the receiver then also breaks off. To *retire* a send is to wait until it is received, and to free its tensors.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.p2p import BlankMessageError, Channel, Recv, Send
from lightning_hybrid.pipeline_parallel.schedules import Action, ChannelKey, Kind, Schedule
from lightning_hybrid.pipeline_parallel.stage import Stage

# Maximum number of unfinished sends in a forward-only schedule, which has few proofs that sends were received. Waiting
# for the oldest send cannot deadlock, because a schedule could not deadlock even if every send blocked.
_WINDOW = 4
# Maximum number of compiled schedules. Few are in use at a time (training, evaluation, smaller last batches).
_MAX_PROGRAMS = 64

Compute = Callable[[int, int, Any], Any]
"""``compute(stage, microbatch, inputs) -> outputs`` runs the layers of a stage for one microbatch."""

Profile = Callable[[str], AbstractContextManager[Any]]
"""A function that returns a context manager for a named range, such as `torch.profiler.record_function`."""


class UnderWay(NamedTuple):
    """Position of an engine in its current run, for reports.

    Attributes:
        last: The names of the last completed actions, the latest one last.
        awaited: The receive whose message the engine waits for now, and its channel; ``None`` if it does not wait.
        messages: The sends and posted receives that may be unfinished, each with its channel.
    """

    last: list[str]
    awaited: tuple[Action, ChannelKey] | None
    messages: list[tuple[Action, ChannelKey]]


_Buffer = dict[int, Any]
"""Messages that wait for the action that needs them, by the index of the microbatch."""


#: Marks a message in a buffer as blank: its sender does not compute it.
_BLANK = object()


def _ignore(*_: Any) -> None:
    """Do nothing: the default callback."""


class Engine:
    """Engine that runs the actions of one pipeline rank in the order of the schedule.

    Every stage has four buffers, and every action takes a message from one buffer and puts a message into another::

        RECV_F --> inputs -----------> F --> outputs -----------> SEND_F
        SEND_B <-- input gradients <-- B <-- output gradients <-- RECV_B

    Consecutive stages on one rank share the buffers between them, so nothing is sent or copied there. ``RECV`` only
    posts a receive: it puts the :class:`Recv` into the buffer, and the action that takes it waits for the message.
    ``SEND`` does not wait either. It is finished when the schedule proves it: a gradient that has arrived proves that
    the activation was received. The next run waits for the sends that are left at the end of a run, so no step ends
    with a stall. After the last run, call :meth:`retire`, because a message may be lost when its sender exits.

    The engine does not catch exceptions of ``compute`` or of the transport, except for the exceptions passed as
    `breaks_off`. After an exception that it does not catch, :attr:`position` is the action that raised it, and the
    engine cannot be used again. After an exception in `breaks_off`, the rank computes nothing more, but it still sends
    and receives the messages that its peers wait for, and the engine can start the next run.

    Args:
        rank: The pipeline rank.
        channels: The channels on which this rank sends or receives.
        trace: Called with the name of each action when the action runs, such as ``"2F0"`` or ``"1SEND_F3"``.

    Attributes:
        position: The action that runs, or that has raised an uncaught exception; ``None`` outside of a run.
        awaited: The receive that the engine waits for; ``None`` if it does not wait.
        broke_off: The action that raised the latest exception in `breaks_off`; ``None`` if no run has raised one.
        runs: The number of runs that have begun.
        channels: The channels of this rank.
        posts_kernels: True if a posted receive is a kernel on the device, so that the host may have to wait for it.
    """

    def __init__(
        self, rank: int, channels: Mapping[ChannelKey, Channel], *, trace: Callable[[str], None] | None = None
    ) -> None:
        self.position: Action | None = None
        self.broke_off: Action | None = None
        self.awaited: Recv | None = None
        self.runs = 0
        self._running: tuple[Schedule, list[_Step]] | None = None
        self._rank = rank
        self.channels = dict(channels)
        self.posts_kernels = any(channel.is_on_device for channel in channels.values())
        self._connected = self._looks = self._is_blank = False
        self._trace = _ignore if trace is None else trace
        self._sends: dict[str, Send] = {}
        # The key is the id, because hashing a schedule hashes all its actions. The reference to the schedule keeps the
        # id unique.
        self._programs: dict[int, tuple[Schedule, list[_Step]]] = {}

    def run(
        self,
        schedule: Schedule,
        compute: Compute,
        keys: Sequence[Hashable],
        *,
        backward_begins: Callable[[int, bool], None] = _ignore,
        backward_ends: Callable[[int, bool], None] = _ignore,
        profile: Profile | None = None,
        breaks_off: tuple[type[Exception], ...] = (),
    ) -> list[Any]:
        """Run this rank's part of a schedule. All ranks of the pipeline call this with equal schedules and keys.

        Args:
            schedule: The schedule.
            compute: ``compute(stage, microbatch, inputs)`` runs the layers of a stage. `inputs` is a tree, or ``None``
                on the first stage. The result is a tree. On the last stage of a schedule with backward, it is the loss:
                a scalar that is already scaled. :data:`~.stage.NOTHING` replaces the inputs, the result or the loss of
                a microbatch without a loss.
            keys: The signature of each microbatch, the same on all ranks. Microbatches with equal keys have equal
                shapes, dtypes and plain values at every stage boundary.
            backward_begins: Called before each backward with the stage, and with True if this is the last backward of
                the stage in this run.
            backward_ends: Called in the same way after each backward.
            profile: Returns a context for ``"forward"``, ``"backward"``, ``"send"``, ``"receive"`` (posting it) and
                ``"wait"`` (for a message).
            breaks_off: Exceptions of ``compute`` after which this rank completes the run with blank messages before it
                raises them. Include :class:`~.p2p.BlankMessageError`, which the engine raises after a blank message. If
                empty, the engine does not check whether messages are blank.

        Returns:
            The outputs of the last stage for each microbatch, if the schedule is forward only and this rank has the
            last stage; otherwise an empty list.

        Raises:
            ValueError: If the number of keys is not the number of microbatches, a channel is missing, a message differs
                from the first message with its key, or the loss is not a real scalar.
            TypeError: If a value between two stages cannot be sent.
            BlankMessageError: If another rank has broken off the run.
        """
        if len(keys) != schedule.num_microbatches:
            number = schedule.num_microbatches
            raise ValueError(f"a schedule of {number} microbatches needs {number} keys, got {len(keys)}")
        steps = self._program(schedule)
        self._connect()
        self.retire()
        self.runs += 1
        self._running = schedule, steps
        run = _Run(compute, keys, backward_begins, backward_ends, {})
        self._looks = bool(breaks_off)
        try:
            if profile is not None:
                self._run_profiled(steps, run, profile)
            else:
                for step in steps:
                    self.position = step.action
                    step.handler(self, step, run, self._take(step) if step.is_compute else None)
        except breaks_off:
            self._finish_blank(steps, run)
            raise
        self.position = None
        return [run.results[microbatch] for microbatch in sorted(run.results)]

    def _run_profiled(self, steps: list[_Step], run: _Run, profile: Profile) -> None:
        """Run the actions, each in a context of the profiler."""
        for step in steps:
            self.position = step.action
            message = None
            if step.is_compute:
                with profile("wait"):
                    message = self._take(step)
            with profile(step.action.kind.label):
                step.handler(self, step, run, message)

    def check_message(self) -> None:
        """Raise an error if the message that the current forward works on is blank.

        The engine calls this after each forward of a schedule with backward. The caller's ``compute`` can call it
        earlier.

        Raises:
            BlankMessageError: If the message is blank.
        """
        if self._is_blank:
            raise BlankMessageError

    def _finish_blank(self, steps: list[_Step], run: _Run) -> None:
        """Complete a run without computing: send the results that exist, and blank messages instead of the rest."""
        at = next(number for number, step in enumerate(steps) if step.action is self.position)
        self.broke_off, self.awaited, self._is_blank = self.position, None, False
        for step in steps[at:]:
            self.position = step.action
            if step.is_compute:
                self._trace(step.name)
                self._drop(step)
            elif not step.action.kind.is_send or step.source[step.microbatch] is not _BLANK:
                step.handler(self, step, run, None)
            else:
                self._trace(step.name)
                del step.source[step.microbatch]
                self._sends[step.name] = step.channel.send_blank((step.boundary, run.keys[step.microbatch]))
        self.position = None

    def _drop(self, step: _Step) -> None:
        """Skip a computation: remove its input from the buffer, and put a blank message in place of its result.

        If the input has not arrived, wait for it. It proves that the same sends have been received as in a complete
        run.
        """
        message = None if step.source is None else step.source.pop(step.microbatch, None)
        if type(message) is Recv:
            self.awaited = message
            with contextlib.suppress(BlankMessageError):
                message.wait()
            self.awaited = None
        self._retire_proven(step)
        if step.action.kind.completes_gradients:
            step.stage.drop(step.microbatch)
        if step.target is not None:
            step.target[step.microbatch] = _BLANK

    @property
    def schedule(self) -> Schedule | None:
        """The schedule that runs now or, between runs, the schedule of the last run; ``None`` before the first run."""
        return None if self._running is None else self._running[0]

    @property
    def has_dynamic_shapes(self) -> bool:
        """True if each message contains its shapes and may be empty. Change it between runs, on all ranks."""
        return any(channel.has_dynamic_shapes for channel in self.channels.values())

    @has_dynamic_shapes.setter
    def has_dynamic_shapes(self, dynamic: bool) -> None:
        for channel in self.channels.values():
            channel.has_dynamic_shapes = dynamic

    def retire(self) -> None:
        """Wait for all unfinished sends."""
        for send in self._sends.values():
            if send.pending:
                send.wait()
        self._sends.clear()

    def under_way(self, last: int = 4) -> UnderWay:
        """Return the position in the current run. Another thread may call this, also while an action does not end.

        Args:
            last: The maximum number of completed actions to return.
        """
        running, position = self._running, self.position
        if running is None or position is None:
            return UnderWay([], None, [])
        schedule, steps = running
        done = next(index for index, step in enumerate(steps) if step.action is position)
        names = [step.name for step in steps[max(0, done - last) : done]]
        awaited = None
        if self.awaited is not None:
            awaited = schedule.receive_for(position) if position.kind.is_compute else position
        receives = [step.action for step in steps[:done] if step.action.kind.is_receive and _is_posted(step)]
        messages = [*map(Action.parse, list(self._sends)), *receives]
        return UnderWay(
            names,
            None if awaited is None else (awaited, schedule.channel(awaited)),
            [(message, schedule.channel(message)) for message in messages if message != awaited],
        )

    def abandon(self) -> None:
        """Drop all unfinished messages after a failure, because an unfinished message keeps its connection open."""
        for channel in self.channels.values():
            channel.abandon()
        for _, steps in self._programs.values():
            for step in steps:
                for buffer in (step.source, step.target):
                    if buffer is not None:
                        buffer.clear()
        self._programs.clear()
        self._sends.clear()
        self.awaited = None
        self._running = None

    def num_messages(self) -> dict[ChannelKey, int]:
        """Return the number of messages sent or posted on each channel. Another thread may call this."""
        return {key: channel.num_messages for key, channel in self.channels.items()}

    def awaited_message(self) -> tuple[ChannelKey, int] | None:
        """Return the channel and the number of the message that the engine waits for; ``None`` if it does not wait.

        Another thread may call this.
        """
        awaited = self.awaited
        if awaited is None:
            return None
        return next((key, awaited.number) for key, channel in self.channels.items() if awaited.is_of(channel))

    # Handlers of actions.

    def _forward(self, step: _Step, run: _Run, message: Any) -> None:
        """Run a forward whose backward will follow."""
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        outputs = run.compute(stage.index, microbatch, stage.enter(microbatch, message))
        self.check_message()
        step.target[microbatch] = stage.leave(microbatch, outputs)

    def _forward_loss(self, step: _Step, run: _Run, message: Any) -> None:
        """Run a forward on the last stage. Its result is the loss."""
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        loss = run.compute(stage.index, microbatch, stage.enter(microbatch, message))
        self.check_message()
        stage.leave_with_loss(microbatch, loss)

    def _evaluate(self, step: _Step, run: _Run, message: Any) -> None:
        """Run a forward without a backward."""
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        step.target[microbatch] = flatten(run.compute(stage.index, microbatch, stage.inputs(message)))

    def _evaluate_last(self, step: _Step, run: _Run, message: Any) -> None:
        """Run a forward without a backward on the last stage, and store its result for the caller."""
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        run.results[microbatch] = run.compute(stage.index, microbatch, stage.inputs(message))

    def _backward(self, step: _Step, run: _Run, message: Any) -> None:
        """Run a backward."""
        index = step.stage.index
        run.backward_begins(index, step.is_last_backward)
        self._trace(step.name)
        gradients = step.stage.backward(step.microbatch, None if message is None else message[0])
        if index > 0:
            step.target[step.microbatch] = gradients, None
        run.backward_ends(index, step.is_last_backward)

    def _send(self, step: _Step, run: _Run, message: Any) -> None:
        """Send a message."""
        leaves, spec = step.source.pop(step.microbatch)
        self._trace(step.name)
        self._sends[step.name] = step.channel.send((step.boundary, run.keys[step.microbatch]), leaves, spec)

    def _send_in_window(self, step: _Step, run: _Run, message: Any) -> None:
        """Send a message, and wait for the oldest send if too many sends are unfinished."""
        self._send(step, run, message)
        if len(self._sends) > _WINDOW:
            self._sends.pop(next(iter(self._sends))).wait()

    def _receive(self, step: _Step, run: _Run, message: Any) -> None:
        """Post a receive."""
        self._trace(step.name)
        step.target[step.microbatch] = step.channel.post((step.boundary, run.keys[step.microbatch]))

    def _receive_at_once(self, step: _Step, run: _Run, message: Any) -> None:
        """Post a receive and start it, even if its meta is unknown.

        This handler is for channels on a device, in a schedule that does not post receives early. With such a schedule,
        every host may have to wait for its device at any time, so a receive must not start as late as its message is
        needed. The host waits for the meta. This cannot deadlock, because the schedule could not deadlock even if every
        receive blocked.
        """
        self._receive(step, run, message)
        self.awaited = step.target[step.microbatch]
        step.channel.read_metas_until(self.awaited)
        self.awaited = None

    def _take(self, step: _Step) -> Any:
        """Return the message that a computation works on, when it has arrived; ``None`` at the ends of the model.

        Raises:
            BlankMessageError: If the message of a backward is blank, or if the meta of any message marks it as blank.
        """
        message = None if step.source is None else step.source.pop(step.microbatch)
        if type(message) is Recv:
            self.awaited = receive = message
            message = receive.wait()
            self.awaited = None
            if self._looks and receive.take_blank():
                if not step.action.kind.is_forward:
                    raise BlankMessageError
                self._is_blank = True  # the forward still runs, because its own error may describe the change
        self._retire_proven(step)
        return message

    def _retire_proven(self, step: _Step) -> None:
        """Wait for the sends that are proven to be received once an action has its message."""
        for name in step.retired:
            send = self._sends.pop(name, None)
            if send is not None and send.pending:  # `_send_in_window` may have removed it already
                send.wait()

    # Lookups that are made only once.

    def _connect(self) -> None:
        """Open the connections of all channels, in the same order on all ranks."""
        if not self._connected:
            for key in sorted(self.channels):
                self.channels[key].connect(sends=key[0] == self._rank)
            self._connected = True

    def _program(self, schedule: Schedule) -> list[_Step]:
        """Return the steps of a schedule, compiled at its first run."""
        known = self._programs.get(id(schedule))
        if known is not None:
            return known[1]
        if len(self._programs) >= _MAX_PROGRAMS:
            self._programs.clear()
        steps = self._compile(schedule)
        self._programs[id(schedule)] = schedule, steps
        return steps

    def _compile(self, schedule: Schedule) -> list[_Step]:
        """Return this rank's actions of a schedule as steps."""
        actions = schedule.actions[self._rank]
        retired = schedule.retired[self._rank] if schedule.retired else [()] * len(actions)
        last_backwards = {action.stage: action for action in actions if action.kind.completes_gradients}
        buffers = _buffers(schedule, self._rank)
        stages = {stage: Stage(stage) for stage in schedule.placement.stages_of(self._rank)}
        steps = []
        for action, proven in zip(actions, retired, strict=True):
            source, target = buffers[action.stage, action.kind]
            channel = None if action.kind.is_compute else self._channel(schedule, action)
            handler = _handler(schedule, action)
            if action.kind.is_receive and self.posts_kernels and not schedule.posts_early:
                handler = Engine._receive_at_once
            steps.append(
                _Step(
                    handler,
                    action,
                    action.kind.is_compute,
                    str(action),
                    stages[action.stage],
                    action.microbatch,
                    source,
                    target,
                    channel,
                    action.stage - 1 if action.kind.is_send == (action.kind.flow < 0) else action.stage,
                    tuple(map(str, proven)),
                    last_backwards.get(action.stage) is action,
                )
            )
        return steps

    def _channel(self, schedule: Schedule, action: Action) -> Channel:
        """Return the channel of a send or receive."""
        key = schedule.channel(action)
        if key not in self.channels:
            raise ValueError(
                f"the action {action} of schedule {schedule.name!r} needs the channel {key}, "
                f"but rank {self._rank} has {f'only {sorted(self.channels)}' if self.channels else 'none'}"
            )
        return self.channels[key]


class _Run(NamedTuple):
    """Arguments and results of one run."""

    compute: Compute
    keys: Sequence[Hashable]
    backward_begins: Callable[[int, bool], None]
    backward_ends: Callable[[int, bool], None]
    results: dict[int, Any]


_Handler = Callable[["Engine", "_Step", _Run, Any], None]


class _Step(NamedTuple):
    """Action of this rank, with all objects that it needs, so that a run looks nothing up."""

    handler: _Handler
    action: Action
    is_compute: bool
    name: str
    stage: Stage
    microbatch: int
    source: Any  # the buffer to take a message from; None if the action takes none
    target: Any  # the buffer to put a message into; None if the action puts none
    channel: Any  # Channel; None for computations
    boundary: int  # the stage before it; with several chunks, several boundaries share a channel
    retired: tuple[str, ...]
    is_last_backward: bool


def _is_posted(step: _Step) -> bool:
    """Return whether a receive has been posted and no action has taken its message yet."""
    return type(step.target.get(step.microbatch)) is Recv


def _handler(schedule: Schedule, action: Action) -> _Handler:
    """Return the method of the engine that runs an action."""
    is_last_stage = action.stage == schedule.num_stages - 1
    if action.kind is Kind.F and schedule.has_backward:
        return Engine._forward_loss if is_last_stage else Engine._forward
    if action.kind is Kind.F:
        return Engine._evaluate_last if is_last_stage else Engine._evaluate
    if action.kind is Kind.B:
        return Engine._backward
    if action.kind.is_send:
        return Engine._send if schedule.has_backward else Engine._send_in_window
    return Engine._receive


_Buffers = tuple[_Buffer | None, _Buffer | None]


def _buffers(schedule: Schedule, rank: int) -> dict[tuple[int, Kind], _Buffers]:
    """Return the buffers of the stages of a rank.

    Returns:
        By stage and kind of action, the buffer to take a message from and the buffer to put a message into; ``None`` if
        the action takes or puts no message.
    """
    placement, last = schedule.placement, schedule.num_stages - 1
    buffers: dict[tuple[int, Kind], _Buffers] = {}
    outputs: dict[int, tuple[_Buffer, _Buffer]] = {}  # by stage; the second buffer contains their gradients
    for stage in placement.stages_of(rank):
        # If the previous stage is on this rank, its outputs are the inputs of this stage.
        before: _Buffers = (None, None) if stage == 0 else outputs.get(stage - 1, ({}, {}))
        after: _Buffers = (None, None) if stage == last else outputs.setdefault(stage, ({}, {}))
        for kind in Kind:
            takes, puts = (before[0], after[0]) if kind.flow > 0 else (after[1], before[1])
            buffers[stage, kind] = (None, takes) if kind.is_receive else (puts, None) if kind.is_send else (takes, puts)
    return buffers
