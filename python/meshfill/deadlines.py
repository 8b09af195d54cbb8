"""Timeouts, and deadlines on the monotonic clock, in seconds. None is no deadline."""

import time
from typing import Optional

from .arguments import seconds


def first_timeout(*timeouts: Optional[float]) -> Optional[float]:
    """The first one that is given. ValueError: it is no number of seconds from 0 on."""
    return next((seconds("timeout", timeout) for timeout in timeouts if timeout is not None), None)


def deadline_in(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: Optional[float]) -> Optional[float]:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
