"""The exit codes of all launchers: what they say, and what is made of them by whoever started one. A leaf."""

import os
import signal

FINISHED = 0
FAILED = 1
INVALID = 2  # a setting that cannot be run
INTERRUPTED = os.EX_TEMPFAIL  # 75: all that was done is saved, and it goes on when it is started again


def told(code: int) -> str:
    """How a process ended, as `subprocess` has its exit code, in words that fit a table."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
