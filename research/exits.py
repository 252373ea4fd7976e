"""How launchers end, and the signals that ask them to: what whoever started one makes of it. A leaf."""

import os
import signal

FINISHED = 0
FAILED = 1
INVALID = 2  # a setting that cannot be run
INTERRUPTED = os.EX_TEMPFAIL  # 75: all that was done is saved, and it goes on when it is started again

# What terminals, schedulers and people send to say that it is time to stop; Slurm's --signal is often USR1, submitit's
# USR2.
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
AGAIN_SECONDS = 2.0  # a signal so soon after the first is the same request: `timeout` and Slurm send it by two ways


def heeded() -> list[signal.Signals]:
    """The stop signals that are not ignored, as SIGHUP is under nohup; what is ignored stays so."""
    return [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]


def told(code: int) -> str:
    """How a process ended, as `subprocess` has its exit code, in words that fit a table."""
    return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
