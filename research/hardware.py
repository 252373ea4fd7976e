"""What chips are, and can do at best, for blocks, rooflines and utilisation.

Sources: of TPUs the specification tables of Cloud TPU's documentation (cloud.google.com/tpu/docs/v4, v5e, v5p, v6e and
tpu7x, read on 2026-11-29); of v4, whose cores JAX shows one by one when it compiles ahead of time, and of TPU7x, a
device is half a chip. Of GPUs NVIDIA's data sheets of A100, H100, H200 and B200 in their SXM form, without sparsity.
"""

import dataclasses

LANES = 128  # of a TPU's vector unit: blocks are multiples of it


@dataclasses.dataclass(frozen=True)
class Chip:
    """One device as JAX sees it.

    Attributes:
      name: as in the name of a topology, `v5p:2x2x1` or `h100:8`.
      platform: 'tpu' or 'gpu'.
      flops: bfloat16 FLOP/s.
      bandwidth: bytes/s between HBM and the cores.
      hbm_bytes: of memory; the compiler leaves a program slightly more or less.
    """

    name: str
    platform: str
    flops: float
    bandwidth: float
    hbm_bytes: int


def _tpu(name: str, teraflops: float, gigabytes_per_second: float, gib: int, devices: int = 1) -> Chip:
    """A chip by the units of its data sheet, which shows as that many devices."""
    return Chip(name, "tpu", teraflops * 1e12 / devices, gigabytes_per_second * 1e9 / devices, gib * 2**30 // devices)


def _gpu(name: str, teraflops: float, gigabytes_per_second: float, gigabytes: int) -> Chip:
    """As `_tpu`, whose data sheets count memory otherwise."""
    return Chip(name, "gpu", teraflops * 1e12, gigabytes_per_second * 1e9, gigabytes * 10**9)


# By JAX's `device_kind`.
CHIPS = {
    "TPU v4": _tpu("v4", 275, 1228, 32, devices=2),
    "TPU v5 lite": _tpu("v5e", 197, 819, 16),
    "TPU v5": _tpu("v5p", 459, 2765, 95),
    "TPU v6 lite": _tpu("v6e", 918, 1638, 32),
    "TPU7x": _tpu("tpu7x", 2307, 7380, 192, devices=2),
    "NVIDIA A100-SXM4-80GB": _gpu("a100", 312, 2039, 80),
    "NVIDIA H100 80GB HBM3": _gpu("h100", 989, 3350, 80),
    "NVIDIA H200": _gpu("h200", 989, 4800, 141),
    "NVIDIA B200": _gpu("b200", 2250, 8000, 180),
}
NAMES = tuple(chip.name for chip in CHIPS.values())


def find_chip(kind: str) -> Chip | None:
    """The chip of a JAX device kind, None where it is not in the table."""
    return CHIPS.get(kind)


def topology_chip(topology: str) -> Chip:
    """The chip in the name of a topology, which must be one of `NAMES`."""
    return next(chip for chip in CHIPS.values() if chip.name == topology.partition(":")[0])
