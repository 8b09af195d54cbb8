"""Freezes one thread of another process, with ptrace, while the others go on: a compute loop that hangs."""
import contextlib
import ctypes
import os
import pathlib

PTRACE_DETACH, PTRACE_SEIZE, PTRACE_INTERRUPT = 17, 0x4206, 0x4207
WAIT_ALL = 0x40000000  # __WALL: threads too

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long


def ptrace(request, thread):
    if libc.ptrace(request, thread, None, None) != 0:
        raise OSError(ctypes.get_errno(), f"ptrace of thread {thread}: {os.strerror(ctypes.get_errno())}")


def ticks_by_thread(process):
    ticks = {}
    for task in pathlib.Path(f"/proc/{process}/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the thread ended
            ticks[int(task.name)] = sum(map(int, (task / "stat").read_text().rsplit(") ", 1)[1].split()[11:13]))
    return ticks


@contextlib.contextmanager
def frozen(thread):
    """From the Python thread that asked for it, until the end of the block."""
    ptrace(PTRACE_SEIZE, thread)
    ptrace(PTRACE_INTERRUPT, thread)
    os.waitpid(thread, WAIT_ALL)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):  # it was killed meanwhile
            ptrace(PTRACE_DETACH, thread)
