"""Settings of where programs run and are recorded, and of measurements."""

import dataclasses
import os
from collections.abc import Iterator

from research import hardware
from research.settings.group import POSITIVE, Allowed, Group, one_of, setting, some_of


@dataclasses.dataclass(frozen=True)
class Distributed(Group, group="distributed"):
    """Several processes that train one model."""

    coordinator: str = setting("", "host:port of process 0; auto: asked of the cluster; empty: one process")
    num_processes: int = setting(0, "with host:port")
    process_id: int = setting(0, "with host:port")

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """See `Group`."""
        if self.coordinator in ("", "auto"):
            for name in ("num_processes", "process_id"):
                if getattr(self, name):
                    yield name, "0, unless distributed.coordinator is host:port"
            return
        host, _, port = self.coordinator.rpartition(":")
        if not host or not port.isdecimal():
            yield "coordinator", "host:port, auto, or empty"
        if self.num_processes < 1:
            yield "num_processes", f"1 or more with coordinator={self.coordinator}"
        if not 0 <= self.process_id < self.num_processes:
            yield "process_id", f"from 0 to num_processes - 1 = {self.num_processes - 1}"


@dataclasses.dataclass(frozen=True)
class Bench(Group, group="bench"):
    """Timing single attentions."""

    repeats: int = setting(5, "timed runs of each program, after one that is not", POSITIVE)
    timeout_minutes: float = setting(10.0, "for one point, after which it is a row that says so", POSITIVE)


@dataclasses.dataclass(frozen=True)
class Aot(Group, group="aot"):
    """Compiling for chips that are not there."""

    topology: str = setting(
        "v5p:2x2x1",
        "chip and mesh to compile for, one device of it",
        Allowed(
            lambda topology: topology.partition(":")[0] in hardware.NAMES,
            f"CHIP:MESH, of GPUs CHIP:NUMBER, with a chip among {', '.join(hardware.NAMES)}",
        ),
    )
    what: tuple[str, ...] = setting(
        ("op",),
        "op: one attention; layer: with its projections; step: an update of the whole model",
        some_of("op", "layer", "step"),
    )
    timeout_minutes: float = setting(10.0, "for one program", POSITIVE)


def _stays_below(path: str) -> bool:
    """Whether a path, or the empty one, leads to a folder below the one that it starts from, on every file system."""
    names = path.split("/") if path else []
    return all(name not in ("", ".", "..") and "\0" not in name and len(name.encode()) <= 255 for name in names)


@dataclasses.dataclass(frozen=True)
class Run(Group, group="run"):
    """A run's folder."""

    root: str = setting("runs", "folder of all runs")
    id: str = setting(
        "",
        "folder below root; empty: made from the date, the experiment and the overrides",
        Allowed(_stays_below, "a relative path without . and .., of names of at most 255 bytes"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.root:
            raise self.error("root", "a folder; . is the one you are in")
        object.__setattr__(self, "root", os.path.expanduser(self.root))


@dataclasses.dataclass(frozen=True)
class Wandb(Group, group="wandb"):
    """The mirror of a run's metrics."""

    mode: str = setting(
        "auto", "auto: online when logged in, else offline", one_of("auto", "online", "offline", "disabled")
    )
    project: str = setting("compressed-attention", "that runs are logged to")
