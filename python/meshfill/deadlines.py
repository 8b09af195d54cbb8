"""Deadlines on the monotonic clock, in seconds. None is no deadline."""

import time
from typing import Optional


def deadline_in(timeout: Optional[float]) -> Optional[float]:
    return None if timeout is None else time.monotonic() + timeout


def seconds_left(deadline: Optional[float]) -> Optional[float]:
    return None if deadline is None else max(0.0, deadline - time.monotonic())
