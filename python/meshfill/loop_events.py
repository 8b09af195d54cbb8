"""Events of a blocking prefill for an event loop, read by a thread.

grpc.aio cannot tell why a server ended a call that was still sending: a write that fails makes its status INTERNAL, whatever
the server said. The blocking library tells it.

    event loop   events_of(start)  ◄── call_soon_threadsafe ──┐
    thread       start() ─► PrefillCall: Accepted, Progress… ─┘
"""

import asyncio
import contextlib
import threading
from typing import AsyncGenerator, Callable, List, Union

from .prefill_call import PrefillCall
from .results import Accepted, PrefillResult, Progress

_END = object()


async def events_of(start: Callable[[], PrefillCall]) -> AsyncGenerator[Union[Accepted, Progress, PrefillResult], None]:
    """start() runs in the thread, too. Its errors and the call's are raised here. Whatever ends this ends the call."""
    loop = asyncio.get_running_loop()
    came: asyncio.Queue = asyncio.Queue()  # events, then an exception or _END
    stopped = threading.Event()
    begun: List[PrefillCall] = []

    def tell(what: object) -> None:
        loop.call_soon_threadsafe(came.put_nowait, what)

    def read() -> None:
        last: object = _END
        try:
            call = start()
            begun.append(call)
            if stopped.is_set():
                call.cancel()
            for event in call:
                tell(event)
        except Exception as error:
            last = error
        with contextlib.suppress(RuntimeError):  # The loop is closed: nobody waits.
            tell(last)

    threading.Thread(target=read, name="meshfill-prefill", daemon=True).start()
    try:
        while True:
            event = await came.get()
            if event is _END:
                return
            if isinstance(event, Exception):
                raise event
            yield event
    finally:
        stopped.set()
        for call in begun:
            call.cancel()
