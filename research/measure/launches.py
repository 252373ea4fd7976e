"""What a GPU program launches, counted from its final HLO: each launch costs microseconds, whatever it computes."""

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.-]+ = .*? ([a-z][\w-]*)\(")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# What moves or names buffers, or ends what another instruction has started.
_FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "add-dependency"}
_FREE |= {"opt-barrier", "partition-id", "replica-id"}


class Launches(NamedTuple):
    """Counts of one run of a program.

    Attributes:
      kernels: kernels, copies and library calls; of the branches of a conditional, those of the longest.
      loop_trips: trips of loops, one after the other; those of a loop within a loop count each time.
      unknown_loops: loops whose trips depend on data, which count as one trip.
    """

    kernels: int
    loop_trips: int
    unknown_loops: int

    def __add__(self, other: "Launches") -> "Launches":
        return Launches(*(a + b for a, b in zip(self, other, strict=True)))

    def times(self, trips: int) -> "Launches":
        """Those of a loop's body, and the loop's own trips."""
        return Launches(self.kernels * trips, self.loop_trips * trips + trips, self.unknown_loops)


def count(hlo: str) -> Launches:
    """Counts the launches of a compiled program, `jax.stages.Compiled.as_text`."""
    bodies: dict[str, list[str]] = {}
    entry = body = ""
    for line in hlo.splitlines():
        if match := _COMPUTATION.match(line):
            body = match[2]
            entry = body if match[1] else entry
            bodies[body] = []
        elif body and _INSTRUCTION.match(line):
            bodies[body].append(line)
    return _count(bodies, entry)


def _count(bodies: dict[str, list[str]], name: str) -> Launches:
    total = Launches(0, 0, 0)
    for line in bodies[name]:
        opcode = _INSTRUCTION.match(line)[1]
        if opcode == "while":
            inside = _count(bodies, _called(line, "condition")) + _count(bodies, _called(line, "body"))
            known = _TRIPS.search(line)
            total += inside.times(int(known[1])) if known else inside.times(1) + Launches(0, 0, 1)
        elif opcode == "conditional":
            branches = re.search(r"branch_computations=\{([^}]*)\}", line)
            names = re.split(r",\s*", branches[1]) if branches else []
            names += re.findall(r"(?:true|false)_computation=(%?[\w.-]+)", line)
            total += max(_count(bodies, one.lstrip("%")) for one in names)
        elif opcode == "call":
            total += _count(bodies, _called(line, "to_apply"))
        elif opcode not in _FREE and not opcode.endswith("-done"):
            total += Launches(1, 0, 0)
    return total


def _called(line: str, role: str) -> str:
    return re.search(rf"\b{role}=%?([\w.-]+)", line)[1]
