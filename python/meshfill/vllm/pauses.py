"""When no prompt is sent to a server that refused one, or was away. No I/O.

A refused prompt pauses those that are at least as long: a shorter one may find the room that it did not.
"""

from typing import List, Tuple

LONGEST_SECONDS = 600.0  # a server that says more is asked again then


class Pauses:
    """Times are of time.monotonic()."""

    def __init__(self):
        self._until: List[Tuple[float, int]] = []  # (end, tokens from which on prompts are not sent)

    def add(self, seconds: float, least_tokens: int, now: float) -> None:
        """From now on. No seconds: no pause."""
        if seconds <= 0:
            return
        new = (now + min(seconds, LONGEST_SECONDS), least_tokens)
        # Those that this one contains say nothing more.
        self._until = [old for old in self._until if old[0] > now and (old[0] > new[0] or old[1] < new[1])] + [new]

    def holds(self, tokens: int, now: float) -> bool:
        """Whether a prompt of so many tokens is not sent now."""
        return any(now < end and tokens >= least for end, least in self._until)
