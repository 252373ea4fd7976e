"""What the steps do to time and memory: a trace of some of them, and the peaks of all."""

import contextlib
import pathlib
import resource
from collections.abc import Iterator
from typing import Self

import jax

FOLDER = "profile"


class Profiler:
    """Traces some steps into a folder; a context manager, so that a trace cut short is written, too.

    The folder holds what xprof and TensorBoard read, `perfetto_trace.json.gz` for ui.perfetto.dev, and `memory.prof`,
    the device's allocations after the last traced step, for pprof.
    """

    def __init__(self, folder: pathlib.Path, first: int, steps: int) -> None:
        """Traces `steps` steps from `first` on; none where it is 0, and in the first process alone."""
        self._folder = folder
        self._traced = range(first, first + steps) if jax.process_index() == 0 else range(0)
        self._running = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if self._running:
            self._stop()

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Within it a step is done, and waited for."""
        if step not in self._traced:
            yield
            return
        if not self._running:
            jax.profiler.start_trace(self._folder, create_perfetto_trace=True)
            self._running = True
        with jax.profiler.StepTraceAnnotation("train", step_num=step):
            yield
        if step == self._traced[-1]:
            self._stop()
            jax.profiler.save_device_memory_profile(str(self._folder / "memory.prof"))

    def _stop(self) -> None:
        self._running = False
        jax.profiler.stop_trace()


def peak_memory() -> dict[str, int]:
    """Peak bytes of this process so far: of the host, and of its fullest device where the platform counts them."""
    stats = [device.memory_stats() or {} for device in jax.local_devices()]
    peaks = [stat["peak_bytes_in_use"] for stat in stats if "peak_bytes_in_use" in stat]
    host = {"peak_host_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
    return host | ({"peak_device_bytes": max(peaks)} if peaks else {})
