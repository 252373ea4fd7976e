"""Our whole attention layer beside Hugging Face transformers' eager one, a process for every measurement.

python -m research.measure.peers KIND SEQ_LEN ours|peer      # prints seconds and peak bytes as JSON
"""

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

# The layer's sizes; window, ratios and rope are DeepSeek-V4's.
HIDDEN = 256
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
}
REPEATS = 3
THREADS = 2


def row(kind: str, seq_len: int) -> dict[str, Any]:
    """Forward and backward of one layer, batch 1, float32: ours, the peer's, and the ratio of times."""
    ours, peer = (_apart(kind, seq_len, side) for side in ("ours", "peer"))
    return {
        "kind": kind,
        "seq_len": seq_len,
        "ours_seconds": ours["seconds"],
        "peer_seconds": peer["seconds"],
        "ratio": peer["seconds"] / ours["seconds"],
        "ours_peak_bytes": ours["peak_bytes"],
        "peer_peak_bytes": peer["peak_bytes"],
    }


def _apart(kind: str, seq_len: int, side: str) -> dict[str, float]:
    command = (sys.executable, "-m", "research.measure.peers", kind, str(seq_len), side)
    return json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()[-1])


def _ours(kind: str, seq_len: int) -> Callable[[], Any]:
    import haiku as hk
    import jax
    import jax.numpy as jnp

    from research.attention.layer.attention import Attention
    from research.model import spec as model_spec
    from research.settings.config import base_config

    config = base_config()
    config.attention.update(SIZES)
    config.attention.indexer_loss_weight = 0.0  # the peer has no such loss
    spec = model_spec.from_config(config)
    layer = hk.transform(lambda x, t: Attention(spec.attention, spec.rope, kind, HIDDEN, 1e-6, "float32")(x, t))
    x = jax.random.normal(jax.random.key(0), (1, seq_len, HIDDEN))
    positions = jnp.arange(seq_len, dtype=jnp.int32)[None]
    params = jax.jit(layer.init)(jax.random.key(1), x[:, :128], positions[:, :128])

    def loss(params, x):
        return layer.apply(params, None, x, positions)[0].sum()

    compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(params, x).compile()
    return lambda: jax.block_until_ready(compiled(params, x))


def _peer(kind: str, seq_len: int) -> Callable[[], Any]:
    import torch
    from transformers.models.deepseek_v4 import configuration_deepseek_v4, modeling_deepseek_v4

    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    layer_type = {"sliding": "sliding", "csa": "compressed_sparse", "hca": "heavily_compressed"}[kind]
    config = configuration_deepseek_v4.DeepseekV4Config(
        num_hidden_layers=1,
        layer_types=[f"{layer_type}_attention"],
        mlp_layer_types=["moe"],
        hidden_size=HIDDEN,
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
    x = torch.randn(1, seq_len, HIDDEN, requires_grad=True)
    positions = torch.arange(seq_len)[None]
    behind = positions.T - positions
    unseen = (behind < 0) | (behind >= config.sliding_window)
    mask = torch.zeros(1, 1, seq_len, seq_len).masked_fill(unseen, float("-inf"))
    rotary = modeling_deepseek_v4.DeepseekV4RotaryEmbedding(config)
    angles = {label: rotary(x, positions, layer_type=label) for label in ("main", "compress")}

    def step():
        layer.zero_grad()
        x.grad = None
        out, _ = layer(x, position_embeddings=angles, position_ids=positions, attention_mask=mask)
        out.sum().backward()

    return step


def main(kind: str, seq_len: str, side: str) -> None:
    """Times one side and prints the median, and the peak of the process's memory."""
    step = {"ours": _ours, "peer": _peer}[side](kind, int(seq_len))
    step()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        step()
        times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({"seconds": statistics.median(times), "peak_bytes": peak}))


if __name__ == "__main__":
    main(*sys.argv[1:])
