"""Our whole attention layer beside Hugging Face transformers' eager one: forward and backward, batch 1, float32."""

import importlib.util
import resource
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from research import errors
from research.errors import ConfigError
from research.measure.program import Program, keep, versions
from research.settings.config import Settings

PHASES = {"ours": ("forward_backward",), "peer": ("forward_backward",)}
APART = True
ENVIRONMENT: dict[str, str] = {}
# The layer's sizes; window, ratios and rope are DeepSeek-V4's.
SIZES = {
    "heads": 8,
    "head_width": 64,
    "rope_width": 16,
    "q_rank": 128,
    "out_groups": 2,
    "out_rank": 64,
    "index_heads": 4,
    "index_head_width": 32,
    "top_k": 512,
    "indexer_loss_weight": 0.0,  # the peer has no such loss
}
_HIDDEN = 256
_REPEATS = 3
_THREADS = 2


def check() -> None:
    """Raises ConfigError where the peer is not installed."""
    lacking = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    if lacking:
        raise ConfigError(
            f"{' and '.join(lacking)}: not installed: pip install -r requirements-parity.txt, or make peers"
        )


def programs(settings: Settings, platform: str) -> list[Program]:
    """Both sides, for each kind of layer."""
    del platform
    found = []
    for kind in settings.model.kinds:
        kept = keep(settings.for_kind(kind), model={"layers": (kind,), "hidden": _HIDDEN}, attention=SIZES)
        found += [Program("peers", side, kept.replace(data={"batch_size": 1})) for side in PHASES]
    return found


def timeout(settings: Settings) -> float:
    """Seconds for one program."""
    return settings.bench.timeout_minutes * 60


def identify(program: Program) -> dict[str, Any]:
    """The side, the kind of layer, its length, and the versions."""
    packages = ("jax", "jaxlib") if program.what == "ours" else ("torch", "transformers")
    (kind,) = program.settings.model.layers
    return {
        "side": program.what,
        "visibility": kind,
        "seq_len": program.settings.data.seq_len,
        "versions": versions(*packages),
    }


def rows(program: Program) -> Iterator[dict[str, Any]]:
    """The one row of a side: the median time, and the peak of the process's memory."""
    common = identify(program) | {"phase": "forward_backward"}
    try:
        yield common | _measure(program)
    except Exception as error:
        yield common | {"status": errors.kind(error), "message": str(error)[:2000]}


def _measure(program: Program) -> dict[str, Any]:
    step = {"ours": _ours, "peer": _peer}[program.what](program.settings)
    step()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"seconds": statistics.median(times), "peak_bytes": peak, "status": "ok"}


def _ours(settings: Settings) -> Callable[[], Any]:
    import haiku as hk
    import jax

    from research.attention.attend import Documents
    from research.attention.layer.attention import Attention
    from research.attention.spec import Spec

    spec, seq_len = Spec.make(settings), settings.data.seq_len
    layer = hk.transform(lambda x: Attention(spec, *spec.kinds)(x, Documents.whole(*x.shape[:2])))
    x = jax.random.normal(jax.random.key(0), (1, seq_len, _HIDDEN))
    params = jax.jit(layer.init)(jax.random.key(1), x[:, :128])

    def loss(params: hk.Params, x: jax.Array) -> jax.Array:
        return layer.apply(params, None, x)[0].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return lambda: jax.block_until_ready(compiled(params, x))


def _peer(settings: Settings) -> Callable[[], Any]:
    import torch
    from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

    torch.set_num_threads(_THREADS)
    torch.manual_seed(0)
    (kind,), seq_len = settings.model.layers, settings.data.seq_len
    layer_type = {"sliding": "sliding", "csa": "compressed_sparse", "hca": "heavily_compressed"}[kind]
    config = configuration_deepseek_v4.DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[f"{layer_type}_attention"],
        mlp_layer_types=["moe"],
        hidden_size=_HIDDEN,
        num_attention_heads=SIZES["heads"],
        head_dim=SIZES["head_width"],
        partial_rotary_factor=SIZES["rope_width"] / SIZES["head_width"],
        q_lora_rank=SIZES["q_rank"],
        o_groups=SIZES["out_groups"],
        o_lora_rank=SIZES["out_rank"],
        index_n_heads=SIZES["index_heads"],
        index_head_dim=SIZES["index_head_width"],
        index_topk=SIZES["top_k"],
        attn_implementation="eager",
    )
    layer = modeling_deepseek_v4.DeepseekV4Attention(config, layer_idx=0).float()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    x = torch.randn(1, seq_len, _HIDDEN, requires_grad=True)
    positions = torch.arange(seq_len)[None]
    behind = positions.T - positions
    unseen = (behind < 0) | (behind >= config.sliding_window)
    mask = torch.zeros(1, 1, seq_len, seq_len).masked_fill(unseen, float("-inf"))
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)
    angles = {label: rotary(x, positions, layer_type=label) for label in ("main", "compress")}

    def step() -> None:
        layer.zero_grad()
        x.grad = None
        out, _ = layer(x, position_embeddings=angles, position_ids=positions, attention_mask=mask)
        out.sum().backward()

    return step
