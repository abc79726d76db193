"""Running one rank's actions on its stages: one loop, one handler per action."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from lightning_hybrid.distributed.pytree import flatten
from lightning_hybrid.pipeline_parallel.p2p import BlankMessageError, Channel, Recv, Send
from lightning_hybrid.pipeline_parallel.schedules import Action, ChannelKey, Kind, Schedule
from lightning_hybrid.pipeline_parallel.stage import Stage

# Sends under way in a schedule without proofs (forward only). Waiting for the oldest cannot wait in a circle: the lists
# of a schedule would not even if every send blocked.
_WINDOW = 4
# Schedules remembered: few are in use at a time (training, evaluation, ragged last batches).
_MAX_PROGRAMS = 64

Compute = Callable[[int, int, Any], Any]
"""``compute(stage, microbatch, inputs) -> outputs`` runs the layers of a stage for one microbatch."""

Profile = Callable[[str], AbstractContextManager[Any]]
"""A function that returns a context manager for a named range, such as `torch.profiler.record_function`."""


class UnderWay(NamedTuple):
    """What an engine is at.

    Attributes:
        last: The actions that are done, the latest one last.
        awaited: The receive whose message the engine waits for at this moment; ``None`` if it waits for none.
        messages: Sends, and receives that are posted, whose end has not been seen yet.
    """

    last: list[str]
    awaited: tuple[Action, ChannelKey] | None
    messages: list[tuple[Action, ChannelKey]]


_Buffer = dict[int, Any]
"""The messages that are kept until an action needs them; the key is the index of the microbatch."""


#: Stands for a message that is not made.
_BLANK = object()


def _ignore(*_: Any) -> None:
    """The callback of a caller that has none."""


class Engine:
    """Runs the actions of one pipeline rank, in the order of the schedule and no other.

    Every stage has four buffers, and every action takes a message from one and puts one into another::

        RECV_F --> inputs -----------> F --> outputs -----------> SEND_F
        SEND_B <-- input gradients <-- B <-- output gradients <-- RECV_B

    Neighbouring stages on one rank share the buffers between them, so nothing is sent or copied there. ``RECV`` only
    posts a receive: it puts the :class:`Recv` into the buffer, and the action that takes it waits for the message.
    ``SEND`` does not wait either. It is over when the schedule proves it: a gradient that has arrived proves that the
    activation was received. What is left at the end of a run is waited for at the start of the next, so no step ends
    with a stall. After the last run :meth:`retire` has to be called: a message may be lost when its sender exits.

    An exception of ``compute`` or of the transport is not caught: :attr:`position` is the action that ran, and the
    engine is of no further use. The exceptions that :meth:`run` is told of are others: this rank computes nothing more,
    but sends and receives what its peers wait for, and the engine goes on with the next run.

    Args:
        rank: Pipeline rank.
        channels: The channels of which this rank is sender or receiver.
        trace: Called with ``"2F0"``, ``"1SEND_F3"``, ... where that is done.

    Attributes:
        position: The action that runs; ``None`` outside of a run.
        awaited: The receive whose message has not come yet; ``None`` if nothing is waited for.
        broke_off: The action at which the last run was broken off that was.
        runs: How many runs have begun.
        channels: The channels of this rank.
        posts_kernels: Whether a posted receive is a kernel of the device, for which a host can come to wait.
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
        # By identity: the hash of a schedule is that of all its actions. Holding the schedule keeps its id its own.
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
        """Run this rank's part of a schedule.

        Args:
            schedule: What to do.
            compute: ``compute(stage, microbatch, inputs)`` runs the layers of a stage on a tree (``None`` on the first
                stage) and returns a tree; on the last stage of a schedule with backward the loss, a scalar that is
                already scaled.
            keys: Signature of each microbatch, the same on all ranks: microbatches with equal keys have equal shapes,
                dtypes and plain values at every stage boundary.
            backward_begins: Called with a stage just before a backward, and whether it is its last one of this run.
            backward_ends: Called in the same way just after a backward.
            profile: Gives a context for ``"forward"``, ``"backward"``, ``"send"``, ``"receive"`` (posting) and
                ``"wait"`` (for a message).
            breaks_off: Exceptions after which this rank takes part in the run to its end, with blank messages, before
                it raises them: of ``compute``, and :class:`~.p2p.BlankMessageError`, as peers do likewise. Without any,
                no message is looked at.

        Returns:
            The outputs of the last stage by microbatch, if the schedule is forward only and this rank owns that stage;
            otherwise an empty list.

        Raises:
            ValueError: If there is not one key per microbatch, a channel is missing, or a message differs from the
                first one with its key.
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
        for step in steps:
            self.position = step.action
            message = None
            if step.is_compute:
                with profile("wait"):
                    message = self._take(step)
            with profile(step.action.kind.label):
                step.handler(self, step, run, message)

    def check_message(self) -> None:
        """A forward has run: look whether what it got stands for a message that is not made.

        Raises:
            BlankMessageError: If it does.
        """
        if self._is_blank:
            raise BlankMessageError

    def _finish_blank(self, steps: list[_Step], run: _Run) -> None:
        """Do what is left of a run without computing anything: send what has been made, and blank messages."""
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
        """Take the message of an action that is not done, if it has not been taken, and put a blank one into its place.

        What has been received proves the same sends to be over as ever.
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
        """What runs, or has run last."""
        return None if self._running is None else self._running[0]

    @property
    def has_dynamic_shapes(self) -> bool:
        """If True, each message states its shapes and may be empty. Change it between runs, on all ranks."""
        return any(channel.has_dynamic_shapes for channel in self.channels.values())

    @has_dynamic_shapes.setter
    def has_dynamic_shapes(self, dynamic: bool) -> None:
        for channel in self.channels.values():
            channel.has_dynamic_shapes = dynamic

    def retire(self) -> None:
        """Wait for every send that is under way."""
        for send in self._sends.values():
            if send.pending:
                send.wait()
        self._sends.clear()

    def under_way(self, last: int = 4) -> UnderWay:
        """What this engine is at; another thread may ask, also while an action does not end.

        Args:
            last: How many actions that are done to name.
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
        """Drop everything that is under way, after a failure: a pending message keeps its connection open."""
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
        """How many messages have gone into each channel, or have been posted; another thread may ask."""
        return {key: channel.num_messages for key, channel in self.channels.items()}

    def awaited_message(self) -> tuple[ChannelKey, int] | None:
        """The channel and the number of the message that is waited for; another thread may ask."""
        awaited = self.awaited
        if awaited is None:
            return None
        return next((key, awaited.number) for key, channel in self.channels.items() if awaited.is_of(channel))

    # One handler per action.

    def _forward(self, step: _Step, run: _Run, message: Any) -> None:
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        outputs = run.compute(stage.index, microbatch, stage.enter(microbatch, message))
        self.check_message()
        step.target[microbatch] = stage.leave(microbatch, outputs)

    def _forward_loss(self, step: _Step, run: _Run, message: Any) -> None:
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        loss = run.compute(stage.index, microbatch, stage.enter(microbatch, message))
        self.check_message()
        stage.leave_with_loss(microbatch, loss)

    def _evaluate(self, step: _Step, run: _Run, message: Any) -> None:
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        step.target[microbatch] = flatten(run.compute(stage.index, microbatch, stage.inputs(message)))

    def _evaluate_last(self, step: _Step, run: _Run, message: Any) -> None:
        self._trace(step.name)
        stage, microbatch = step.stage, step.microbatch
        run.results[microbatch] = run.compute(stage.index, microbatch, stage.inputs(message))

    def _backward(self, step: _Step, run: _Run, message: Any) -> None:
        index = step.stage.index
        run.backward_begins(index, step.is_last_backward)
        self._trace(step.name)
        gradients = step.stage.backward(step.microbatch, None if message is None else message[0])
        if index > 0:
            step.target[step.microbatch] = gradients, None
        run.backward_ends(index, step.is_last_backward)

    def _send(self, step: _Step, run: _Run, message: Any) -> None:
        leaves, spec = step.source.pop(step.microbatch)
        self._trace(step.name)
        self._sends[step.name] = step.channel.send((step.boundary, run.keys[step.microbatch]), leaves, spec)

    def _send_in_window(self, step: _Step, run: _Run, message: Any) -> None:
        self._send(step, run, message)
        if len(self._sends) > _WINDOW:
            self._sends.pop(next(iter(self._sends))).wait()

    def _receive(self, step: _Step, run: _Run, message: Any) -> None:
        self._trace(step.name)
        step.target[step.microbatch] = step.channel.post((step.boundary, run.keys[step.microbatch]))

    def _receive_at_once(self, step: _Step, run: _Run, message: Any) -> None:
        """Post a receive and start it, also behind a meta that is unknown.

        Where each host may have to wait for its device, what a send waits for must not depend on where its message is
        needed. The host waits for the meta: the lists would not wait in a circle even if each receive did.
        """
        self._receive(step, run, message)
        self.awaited = step.target[step.microbatch]
        step.channel.read_metas_until(self.awaited)
        self.awaited = None

    def _take(self, step: _Step) -> Any:
        """The message that an action works on; ``None`` at the ends of the model."""
        message = None if step.source is None else step.source.pop(step.microbatch)
        if type(message) is Recv:
            self.awaited = receive = message
            message = receive.wait()
            self.awaited = None
            if self._looks and receive.take_blank():
                if not step.action.kind.is_forward:
                    raise BlankMessageError
                self._is_blank = True  # the code runs all the same: it may see itself what is another one
        self._retire_proven(step)
        return message

    def _retire_proven(self, step: _Step) -> None:
        """Wait for the sends that are proven to be over where an action has its message."""
        for name in step.retired:
            send = self._sends.pop(name, None)
            if send is not None and send.pending:  # it may have left the window already
                send.wait()

    # What is looked up once.

    def _connect(self) -> None:
        if not self._connected:
            for key in sorted(self.channels):
                self.channels[key].connect(sends=key[0] == self._rank)
            self._connected = True

    def _program(self, schedule: Schedule) -> list[_Step]:
        known = self._programs.get(id(schedule))
        if known is not None:
            return known[1]
        if len(self._programs) >= _MAX_PROGRAMS:
            self._programs.clear()
        steps = self._compile(schedule)
        self._programs[id(schedule)] = schedule, steps
        return steps

    def _compile(self, schedule: Schedule) -> list[_Step]:
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
        key = schedule.channel(action)
        if key not in self.channels:
            raise ValueError(
                f"the action {action} of schedule {schedule.name!r} needs the channel {key}, "
                f"but rank {self._rank} has {f'only {sorted(self.channels)}' if self.channels else 'none'}"
            )
        return self.channels[key]


class _Run(NamedTuple):
    """The caller's arguments of one run, and its results."""

    compute: Compute
    keys: Sequence[Hashable]
    backward_begins: Callable[[int, bool], None]
    backward_ends: Callable[[int, bool], None]
    results: dict[int, Any]


_Handler = Callable[["Engine", "_Step", _Run, Any], None]


class _Step(NamedTuple):
    """One action, with everything that it needs already looked up."""

    handler: _Handler
    action: Action
    is_compute: bool
    name: str
    stage: Stage
    microbatch: int
    source: Any  # the buffer that a message is taken from, None where nothing goes in: the handlers know
    target: Any  # the buffer that a message is put into, likewise
    channel: Any  # Channel, or None for F and B
    boundary: int  # The stage before it: with several chunks, several boundaries share a channel.
    retired: tuple[str, ...]
    is_last_backward: bool


def _is_posted(step: _Step) -> bool:
    """Whether a receive has been posted, and nothing has taken its message."""
    return type(step.target.get(step.microbatch)) is Recv


def _handler(schedule: Schedule, action: Action) -> _Handler:
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
    """Return the buffer to take from and the buffer to put into, by stage and kind; ``None`` where nothing is moved."""
    placement, last = schedule.placement, schedule.num_stages - 1
    buffers: dict[tuple[int, Kind], _Buffers] = {}
    outputs: dict[int, tuple[_Buffer, _Buffer]] = {}  # and their gradients, by stage
    for stage in placement.stages_of(rank):
        # If the stage before is on this rank, its outputs are the inputs.
        before: _Buffers = (None, None) if stage == 0 else outputs.get(stage - 1, ({}, {}))
        after: _Buffers = (None, None) if stage == last else outputs.setdefault(stage, ({}, {}))
        for kind in Kind:
            takes, puts = (before[0], after[0]) if kind.flow > 0 else (after[1], before[1])
            buffers[stage, kind] = (None, takes) if kind.is_receive else (puts, None) if kind.is_send else (takes, puts)
    return buffers
