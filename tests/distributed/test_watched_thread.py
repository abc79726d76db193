"""A thread's stack is read while the thread runs, and while garbage is collected."""

import subprocess
import sys
import textwrap

# Calls with frames of many sizes begin and end; the reader's garbage collections release the GIL in finalizers. Without
# the guard in `read_stack`, a frame is read after its call has returned, and its memory holds other objects by then.
_PROGRAM = textwrap.dedent(
    """
    import gc, random, threading, time
    from lightning_hybrid.distributed.watch.watched_thread import read_stack

    class Garbage:
        def __init__(self):
            self.cycle = self
        def __del__(self):
            time.sleep(1e-4)

    functions = []
    for count in range(40):
        names = {"functions": functions, "choice": random.choice}
        values = "".join(f"    a{index} = depth\\n" for index in range(3 * count))
        exec(f"def call(depth):\\n{values}    return choice(functions)(depth - 1) if depth else 0\\n", names)
        functions.append(names["call"])

    def read():
        while not done:
            stack = read_stack(thread)
            assert stack[-1].code.co_name == "<module>", stack
            seen.append(len(stack))
            for _ in range(3):
                Garbage()

    done, seen, thread = False, [], threading.get_ident()
    gc.set_threshold(7)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + 3
    while time.monotonic() < end and reader.is_alive():
        random.choice(functions)(random.randrange(3, 40))
    done = True
    reader.join()
    print("read", max(seen) > 1, gc.isenabled())
    """
)


def test_a_stack_is_read_while_its_calls_return():
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "read True True\n", "")
