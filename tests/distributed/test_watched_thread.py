"""A thread's stack is read while the thread runs, and while garbage is collected."""

import subprocess
import sys
import textwrap

# Calls with frames of many sizes begin and end; the reader's garbage collections release the GIL in finalizers. Without
# the guard in `read_stack`, a frame is read after its call has returned, and its memory holds other objects by then.
_PROGRAM = textwrap.dedent(
    """
    import gc, random, sys, threading, time
    from lightning_hybrid.distributed.watch.collector import without_collector
    from lightning_hybrid.distributed.watch.watched_thread import read_stack

    class Garbage:
        count = 0
        def __init__(self):
            self.cycle = self
            Garbage.count += 1
        def __del__(self):
            Garbage.count -= 1
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
            last = stack[-1].code.co_name  # a generator that has yielded meanwhile has no caller
            assert last in ("<module>", "without_collector"), stack
            seen.append(len(stack))
            for _ in range(3 if Garbage.count < 10 else 0):
                Garbage()

    sys.setswitchinterval(1e-4)  # threads interrupt each other in the middle of a reading, too
    done, seen, thread = False, [], threading.get_ident()
    gc.set_threshold(7)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    end = time.monotonic() + 3
    while time.monotonic() < end and reader.is_alive():
        random.choice(functions)(random.randrange(3, 40))
        with without_collector():
            random.choice(functions)(10)
            assert not gc.isenabled()
    done = True
    reader.join()
    print("read", max(seen) > 1, gc.isenabled())
    """
)


def test_a_stack_is_read_while_its_calls_return() -> None:
    result = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout, result.stderr) == (0, "read True True\n", "")


def test_a_process_that_is_forked_in_the_middle_of_a_reading_can_read_and_collects() -> None:
    program = textwrap.dedent(
        """
        import gc, os, sys, threading
        from lightning_hybrid.distributed.watch.watched_thread import read_stack

        thread, done = threading.get_ident(), False

        def read():
            while not done:
                read_stack(thread)

        threading.Thread(target=read, daemon=True).start()
        sys.setswitchinterval(1e-5)
        for _ in range(100):
            child = os.fork()
            if child == 0:
                os._exit(0 if gc.isenabled() and read_stack(thread) else 1)
            assert os.waitpid(child, 0)[1] == 0
        done = True
        """
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")
