"""What of tokamax the joined backend needs and tokamax does not promise; each fails with a word when it has moved."""

import dataclasses
import importlib
import inspect

import pytest

PRIVATE = "tokamax._src."
NEEDED = {
    "config": ["cross_compile"],
    "ops.attention.base": ["Mask", "Residuals"],
    "ops.attention.pallas_triton": ["PallasTritonFlashAttention", "Config", "block"],
    "ops.attention.pallas_triton_vjp": ["PallasTritonFlashAttentionVjp", "Config", "block", "pl"],
    "ops.attention.pallas_mosaic_gpu": ["PallasMosaicGpuFlashAttention"],
    "pallas.block": ["pallas_call", "pl", "_pids"],
}


@pytest.mark.parametrize(("module", "names"), NEEDED.items(), ids=NEEDED)
def test_names_are_where_they_were(module, names):
    try:
        found = importlib.import_module(PRIVATE + module)
    except ModuleNotFoundError:
        pytest.fail(f"tokamax has moved {PRIVATE}{module}, which backends/joined/kernels.py needs")
    missing = [name for name in names if not hasattr(found, name)]
    assert not missing, f"tokamax has moved {missing} of {PRIVATE}{module}, which backends/joined/kernels.py needs"


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("pallas_triton", {"block_q", "block_k", "num_stages", "num_warps"}),
        ("pallas_triton_vjp", {"block_m1", "block_n1", "block_m2", "block_n2", "num_stages", "num_warps"}),
    ],
)
def test_tiles_have_their_names(module, expected):
    config = importlib.import_module(f"{PRIVATE}ops.attention.{module}").Config
    names = {field.name for field in dataclasses.fields(config)}
    assert expected <= names, f"tokamax has renamed {expected - names} of {module}.Config"


def test_a_backward_pass_takes_what_it_took():
    base = importlib.import_module(f"{PRIVATE}ops.attention.base")
    given = {"mask", "bias", "precision", "logits_dtype", "logits_scale", "logits_soft_cap", "dropout_mask"}
    given |= {"dropout_rate", "paging_info", "q_indices", "k_indices", "normalize_output"}
    vjp = importlib.import_module(f"{PRIVATE}ops.attention.pallas_triton_vjp").PallasTritonFlashAttentionVjp
    taken = set(inspect.signature(vjp._fwd).parameters)
    assert given <= taken, f"tokamax's backward pass takes no {given - taken} any more"
    assert {field.name for field in dataclasses.fields(base.Mask)} >= {"bool_mask", "k_start", "k_end"}
