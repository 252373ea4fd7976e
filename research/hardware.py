"""What TPU chips are, and can do at best, for blocks, rooflines and utilisation.

Source: the specification tables of Cloud TPU's documentation (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and tpu7x,
read on 2026-11-29); of v4, whose cores JAX shows one by one when it compiles ahead of time, and of TPU7x, a device is
half a chip.
"""

import dataclasses

LANES = 128  # of a TPU's vector unit: blocks are multiples of it


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX sees it.

    Attributes:
      name: as in the name of a topology, `v5p:2x2x1`.
      flops: bfloat16 FLOP/s.
      bandwidth: bytes/s between HBM and the cores.
      hbm_bytes: of memory; the compiler leaves a program slightly more or less.
    """

    name: str
    flops: float
    bandwidth: float
    hbm_bytes: int

    @classmethod
    def of(cls, name: str, teraflops: float, gigabytes_per_second: float, gib: int, devices: int = 1) -> "Chip":
        """A chip by the units of its data sheet, which shows as that many devices."""
        return cls(name, teraflops * 1e12 / devices, gigabytes_per_second * 1e9 / devices, gib * 2**30 // devices)


# By JAX's `device_kind`.
CHIPS = {
    "TPU v4": Chip.of("v4", 275, 1228, 32, devices=2),
    "TPU v5 lite": Chip.of("v5e", 197, 819, 16),
    "TPU v5": Chip.of("v5p", 459, 2765, 95),
    "TPU v6 lite": Chip.of("v6e", 918, 1638, 32),
    "TPU7x": Chip.of("tpu7x", 2307, 7380, 192, devices=2),
}
NAMES = tuple(chip.name for chip in CHIPS.values())


def find_chip(kind: str) -> Chip | None:
    """The chip of a JAX device kind, None where it is not in the table."""
    return CHIPS.get(kind)
