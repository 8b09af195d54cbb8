"""A meshfill process that serves: what the tests of a pool start, watch and end."""
import os
import re
import signal
import subprocess
import threading
import time

from cli_harness import MESHFILL, TIMEOUT_SECONDS


class Process:
    """A meshfill that logs lines on standard error; `prefix` is a command that runs it, `environment` is added."""

    def __init__(self, *arguments, prefix=(), environment=None):
        self.process = subprocess.Popen(
            [*prefix, MESHFILL, *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True,
            env={**os.environ, **(environment or {})}
        )
        self.lines = []
        self.sent = set()  # signals
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self):
        for line in self.process.stderr:
            self.lines.append(line)

    def wait_for(self, pattern, count=1, seconds=TIMEOUT_SECONDS):
        """The first match, once `count` lines match."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            matches = [match for line in list(self.lines) if (match := re.search(pattern, line))]
            if len(matches) >= count:
                return matches[0]
            if self.process.poll() is not None and not self.reader.is_alive():
                break
            time.sleep(0.01)
        raise AssertionError(f"no {count} lines match {pattern!r} in:\n" + "".join(self.lines))

    def signal(self, number):
        self.sent.add(number)
        self.process.send_signal(number)

    def wait(self):
        status = self.process.wait(TIMEOUT_SECONDS)
        self.reader.join(TIMEOUT_SECONDS)
        self.process.stderr.close()
        return status

    def end(self):
        """Kills it where it still runs. It fails where a signal ended it that nobody here sent: it crashed."""
        if self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
        status = self.wait()
        if status < 0 and -status not in self.sent:
            raise AssertionError(f"{self.process.args} ended by {signal.Signals(-status).name}:\n" + "".join(self.lines))
