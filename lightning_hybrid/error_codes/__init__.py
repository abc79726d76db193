"""Error codes: the cause and the fix of each error that a user meets.

The message of an error ends with its code: ``raise ValueError(f"... Use one of them. [LH137]")``. The code is part of
the text, so it is kept when a message is sent to other ranks, and a search for it finds where the error is raised.
`docs/write_reference.py` writes the page of errors from these entries and from the messages in the source.
"""

from lightning_hybrid.error_codes import (
    arguments,
    batches,
    checkpoints,
    commands,
    context_parallel,
    optimizers,
    processes,
    splitting,
    steps,
    tensor_parallel,
)

#: The errors of each area, by the name of its part of the page.
AREAS = {
    "arguments": arguments.ERRORS,
    "processes": processes.ERRORS,
    "splitting": splitting.ERRORS,
    "steps": steps.ERRORS,
    "tensor_parallel": tensor_parallel.ERRORS,
    "context_parallel": context_parallel.ERRORS,
    "batches": batches.ERRORS,
    "optimizers": optimizers.ERRORS,
    "checkpoints": checkpoints.ERRORS,
    "commands": commands.ERRORS,
}
