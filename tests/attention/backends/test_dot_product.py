import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from research.attention.backends import dot_product
from research.attention.visibility import HeavilyCompressed, SlidingWindow
from research.settings.attention import Kernel
from tests.attention.backends import strategies as lib
from tests.oracles import assert_close, attention, visible


@pytest.mark.parametrize("packing", [lib.none, lib.documents, lib.padding])
@pytest.mark.parametrize("seq_len", [3, 70])
@pytest.mark.parametrize("kind", ["sliding", "hca", "csa"])
def test_mask_equals_loops(kind, seq_len, packing):
    visibility = lib.visibilities(window=9, hca_ratio=16)[kind]
    arguments, _ = lib.inputs(visibility, seq_len, packing(seq_len), batch=2)
    mask = dot_product.dense_mask(visibility, lib.placed(arguments).segments, arguments["selected"])
    for b in range(2):
        segments = np.zeros(seq_len) if arguments["segments"] is None else arguments["segments"][b]
        selected = None if arguments["selected"] is None else np.asarray(arguments["selected"][b])
        np.testing.assert_array_equal(mask[b], visible(visibility, segments, selected))


def test_logits_far_apart():
    """No overflow at logits of 1e5, and no weight for what is masked where the rest is as low."""
    visibility = HeavilyCompressed(8, 4)
    arguments, d_out = lib.inputs(visibility, 32, lib.padding(32))
    for factor in (1e4, -1e4):
        scaled = {**arguments, "q": jnp.abs(arguments["q"]) * factor, "local": jnp.abs(arguments["local"])}
        strategy = lib.Strategy("dot_product")
        with jax.debug_nans(True), jax.debug_infs(True):
            results = lib.differentiated(strategy, visibility)(scaled, d_out)
        # float32 has a resolution of 1e-2 at 1e5.
        assert_close(results["out"], attention(scaled, visibility, d_out)["out"], 1e-2)


@pytest.mark.parametrize("field", dataclasses.fields(Kernel), ids=lambda field: field.name)
def test_every_option_is_refused(field):
    values = {"schedule": "dynamic", "csa_schedule": "dynamic", "dq_reduction_steps": 3, "flash_kernel": "xla"}
    options = Kernel(**{field.name: values.get(field.name, 128)})
    attend = lib.Strategy("dot_product", options).attend(SlidingWindow(8))
    if field.name == "csa_schedule":  # of other layers it says nothing
        assert attend.effective(lib.sizes(64))
        attend = dataclasses.replace(attend, schedule_setting="csa_schedule")
    message = (
        rf"^config.attention.{field.name}=.*: must be left at {field.default!r}: it has no effect with backend='dot"
    )
    with pytest.raises(ValueError, match=message):
        attend.effective(lib.sizes(64))
    with pytest.raises(ValueError, match=message):
        lib.call(attend, lib.inputs(SlidingWindow(8), 64)[0])
