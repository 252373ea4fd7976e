"""Chips that are not there, to compile for: one device of a topology, `v5p:2x2x1` or `h100:8`.

XLA's compilers need no device, but a description of one: libtpu holds those of TPUs by name, those of GPUs are the
files of `gpus/`.
"""

import functools
import importlib.util
import os
import pathlib
import subprocess
import sys

import jax
from jax.experimental import topologies

from research.errors import ConfigError
from research.hardware import topology_chip
from research.measure.program import versions
from research.settings.config import Settings

# To be set before jax is imported, for libtpu to load where no TPU is, and more than once.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "TPU_ACCELERATOR_TYPE": "v5p-8",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}
_GPUS = pathlib.Path(__file__).with_name("gpus")
_HOST_GPUS = 8  # of one host
_CUDA = ("jax-cuda13-plugin", "jax-cuda13-pjrt", "nvidia-cuda-nvcc")


def check(settings: Settings) -> None:
    """Asks whether `aot.topology` can be compiled for, by the compiler of its platform.

    Raises:
      ConfigError: the compiler is not installed, or there is no such topology.
    """
    topology = settings.aot.topology
    if topology_chip(topology).platform == "gpu":
        if not _num_gpus(topology):
            raise settings.aot.error("topology", f"CHIP or CHIP:N, with N from 1 to {_HOST_GPUS} GPUs of one host")
        if not (importlib.util.find_spec("jax_cuda13_plugin") and importlib.util.find_spec("nvidia")):
            raise ConfigError(
                "jax's plugin for CUDA is not installed: pip install -r requirements-gpu-aot.txt, or make aot-gpu"
            )
        return
    if importlib.util.find_spec("libtpu") is None:
        raise ConfigError("libtpu is not installed: pip install -r requirements-tpu.txt, or make aot")
    program = (
        "from jax.experimental import topologies; import sys\n"
        "topologies.get_topology_desc(platform='tpu', topology_name=sys.argv[1])"
    )
    command = (sys.executable, "-c", program, topology)
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1].partition(": ")[2]
        raise settings.aot.error("topology", f"a mesh that its chip comes in ({said})")


@functools.cache
def devices(topology: str) -> list[jax.Device]:
    """The devices of a topology, which programs can be compiled for, but not run on."""
    chip = topology_chip(topology)
    if chip.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    description = (_GPUS / f"{chip.name}.txtpb").read_text(encoding="utf-8")
    return topologies.get_topology_desc(
        platform="cuda", target_config=description, topology=f"1x1x{_num_gpus(topology)}"
    ).devices


def lowering_platform(topology: str) -> str:
    """The platform as JAX's lowering calls it."""
    return {"tpu": "tpu", "gpu": "cuda"}[topology_chip(topology).platform]


def compilers(topology: str) -> dict[str, str]:
    """The versions of what compiles for a topology."""
    others = ("libtpu",) if topology_chip(topology).platform == "tpu" else _CUDA
    return versions("jax", *others, "tokamax")


def _num_gpus(topology: str) -> int:
    """The number of GPUs that a topology names; 0 if it is not one that a host has."""
    _, colon, number = topology.partition(":")
    known = {str(n): n for n in range(1, _HOST_GPUS + 1)}
    return known.get(number, 0) if colon else 1
