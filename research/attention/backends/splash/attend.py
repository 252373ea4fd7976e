"""tokamax's splash attention kernels: the backend for TPUs. On other platforms they are interpreted.

This file is not split: all of it is about one call of the kernel, its settings, its two passes and its cost.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Float32, Int32

from research.attention import attend as attend_lib
from research.attention.attend import Attend, Documents, Effective, Inputs, Pass, Sizes
from research.attention.backends.splash import kernel as splash
from research.attention.backends.splash import layout as layout_lib
from research.attention.backends.splash import schedules
from research.attention.backends.splash.schedules import closed_form, scalar_memory
from research.attention.backends.splash.schedules.block_schedule import FULL, PARTIAL, BlockSchedule
from research.attention.indexer import selection
from research.attention.padding import round_up
from research.attention.product import precision_name
from research.attention.visibility import Visibility
from research.hardware import LANES
from research.settings.group import divisors

_DEFAULT_BLOCK = 512
_FLOAT32 = 4  # bytes
_SUBLANES = 8  # the kernel stores a float32 per row this many times
_DEFAULT_VMEM_LIMIT_KIB = 98_304  # the compiler's default, 16 MiB, is too small for the backward kernel at D = 512


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`."""
    visibility, options, heads = attend.visibility, attend.options, sizes.heads
    attend.refuse_unread("schedule", *(name for name in options.__dataclass_fields__ if name != "flash_kernel"))
    schedule = schedules.chosen(attend)
    heads_per_call = options.heads_per_call
    if heads_per_call < 0 or (heads_per_call and heads % heads_per_call):
        words = f"0 (all) or one of {divisors(heads)}, the divisors of the {heads} heads of a call"
        raise attend.error("heads_per_call", words)
    blocks = _blocks(attend, sizes.seq_len)
    layout = _layout(visibility, sizes.seq_len, blocks)
    key_steps = layout.kv_len // blocks["block_kv_dkv"]
    # With some schedules, and in the newer tokamax with segments, the kernel only supports its ring buffer of three.
    ring_only = schedules.TABLE[schedule].ring_only or (sizes.packed and splash.SEGMENTS_NEED_RING)
    ring = options.dq_reduction_steps == 3 or ring_only
    rounded = ring or key_steps <= 4  # the kernel keeps more than four partial sums in float32
    effective = {
        "schedule": schedule,
        **blocks,
        "dq_reduction_steps": 3 if ring else 0,
        "dq_partial_sums": 3 if ring else key_steps,
        "dq_dtype": jnp.dtype(sizes.dtype).name if rounded else "float32",
        "q_len": layout.q_len,
        "kv_len": layout.kv_len,
        "use_base2_exp": False,  # q would be rounded twice: see `splash.kernel`
        "heads_per_call": heads_per_call or heads,
        "vmem_limit_kib": options.vmem_limit_kib or _DEFAULT_VMEM_LIMIT_KIB,
        "precision": precision_name(sizes.dtype),
        "interpreted": attend.target.platform != "tpu",
    }
    if attend.target.checks_memory and not effective["interpreted"]:
        _check_scalar_memory(attend, layout, effective)
    return effective


def prepare(attend: Attend, documents: Documents) -> Bool[Array, "B q_len kv_len"] | None:
    """See `attend.Backend`. The runtime mask, unless the visibility selects: then each layer has its own mask."""
    visibility, schedule = attend.visibility, schedules.chosen(attend)
    if visibility.selects or not schedules.TABLE[schedule].runtime_mask:
        return None
    seq_len = documents.segments.shape[1]
    layout = _layout(visibility, seq_len, _blocks(attend, seq_len))
    return jax.vmap(lambda row_ids, col_ids: layout.runtime_mask(row_ids, col_ids, None))(
        *layout.segment_ids(documents.segments)
    )


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    q, segments, selected = inputs.q, inputs.documents.segments, inputs.selected
    layout = _layout(attend.visibility, q.shape[1], effective)
    schedule = schedules.TABLE[effective["schedule"]]
    # Comparing segments takes time in the kernel. Sequences of one document do not need it.
    uses_segments = inputs.documents.packed or schedule.runtime_mask
    sequences = {
        "q": q,
        "keys": layout.join_keys(*inputs.keys),
        "segment_ids": layout.segment_ids(segments) if uses_segments else None,
        "selected": None if selected is None else selection.capped(attend.visibility, segments, selected),
        "mask": inputs.prepared,
    }
    settings = (effective[name] for name in ("heads_per_call", "vmem_limit_kib", "precision"))
    heads = _Heads(layout, *settings, q.shape[3] ** -0.5)
    attend_one = functools.partial(_attend_one, heads, schedule, _splash_config(effective), inputs.sinks)
    # A scan over the batch instead of `jax.vmap`: under vmap a runtime mask takes ten times as long to compile, all
    # sequences share one pruned schedule, and the interpreter fails.
    out = jax.lax.map(attend_one, sequences)
    return jnp.where(segments[:, :, None, None] >= 0, out, 0)


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`. Counts the blocks that the kernels' index maps move between HBM and the core."""
    layout, config = kernel_arguments(attend.visibility, sizes.seq_len, effective)
    (first, _), (second, _) = closed_form.schedules(layout, config)
    size, width = jnp.dtype(sizes.dtype).itemsize, sizes.head_width
    q_bytes, kv_bytes = layout.q_len * width * size, layout.kv_len * width * size

    def mask_bytes(schedule: BlockSchedule) -> int:
        loaded = effective["schedule"] != "computed"
        return loaded * schedule.count(PARTIAL) * schedule.block_q * schedule.block_kv

    def active(schedule: BlockSchedule) -> int:
        return schedule.count(PARTIAL) + schedule.count(FULL)

    forward = 2 * q_bytes + active(first) * 2 * config.block_kv * width * size + mask_bytes(first)
    # Of the rows of a block of queries: q, d_out, and in float32 the log-sum-exp and the sum of out * d_out.
    row_bytes = config.block_q_dkv * (2 * width * size + 2 * _SUBLANES * _FLOAT32)
    backward = active(second) * row_bytes + 2 * kv_bytes + 4 * layout.kv_len * width * _FLOAT32 + mask_bytes(second)
    if effective["dq_reduction_steps"] == 3:
        backward += active(second) * 2 * config.block_q_dkv * width * size + 4 * q_bytes
    else:
        partial_sums = effective["dq_partial_sums"] * layout.q_len * width * jnp.dtype(effective["dq_dtype"]).itemsize
        backward += 2 * partial_sums + q_bytes
    pairs = [active(schedule) * schedule.block_q * schedule.block_kv for schedule in (first, second)]
    return Pass(pairs[0], forward), Pass(pairs[1], backward)


def build_host(attend: Attend, sizes: Sizes, effective: Effective) -> None:
    """Computes and caches the part of a schedule that the host computes before tracing, if there is one."""
    if build := schedules.TABLE[effective["schedule"]].host:
        build(*kernel_arguments(attend.visibility, sizes.seq_len, effective))


def _attend_one(
    heads: "_Heads",
    schedule: schedules.Schedule,
    config: splash.SplashConfig,
    sinks: Float32[Array, " H"] | None,
    sequence: dict[str, Any],
) -> Float[Array, "S H D"]:
    """Attention of one sequence: q [S, H, D], keys [kv_len, D], segment_ids, selected [S, C], mask [q_len, kv_len]."""
    row_ids, col_ids = sequence["segment_ids"] or (None, None)
    if schedule.runtime_mask:
        mask = sequence["mask"]
        if mask is None:
            mask = heads.layout.runtime_mask(row_ids, col_ids, sequence["selected"])
        kernel = schedule.kernel(heads.layout, config, mask)
        segment_ids = None  # already part of the mask
    else:
        kernel = schedule.kernel(heads.layout, config, sequence["selected"])
        segment_ids = None if row_ids is None else splash.SegmentIds(q=row_ids, kv=col_ids)
    return _call(heads, kernel, sequence["q"], sequence["keys"], segment_ids, sinks)


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Calls the kernel for A = `per_call` heads at a time.

    This limits the memory of the arrays that the kernel needs beside q, out and d_q: padded and transposed copies of
    them, and the backward kernel's ring buffer, which is three times as large as d_q.
    """

    layout: layout_lib.Layout
    per_call: int
    vmem_limit_kib: int
    precision: str
    scale: float

    def scan(self, body: Callable[[Any, Int32[Array, ""]], Any], state: Any, heads: int) -> Any:
        """Scans `state = body(state, first head)` over the groups of heads. All kernels are traced inside."""

        def step(state: Any, first: Int32[Array, ""]) -> tuple[Any, None]:
            # tokamax sets no precision: by default a TPU would round float32 operands to bfloat16.
            precision = jax.default_matmul_precision(self.precision)
            with splash.vmem_limit(self.vmem_limit_kib), splash.logit_scale(self.scale), precision:
                return body(state, first), None

        return jax.lax.scan(step, state, jnp.arange(0, heads, self.per_call))[0]

    def take(self, x: Float[Array, "S H D"], first: Int32[Array, ""]) -> Float[Array, "A q_len D"]:
        """The heads from `first` on, padded and transposed for the kernel."""
        group = jax.lax.dynamic_slice_in_dim(x, first, self.per_call, axis=1)
        return self.layout.pad_queries(group.swapaxes(0, 1), axis=1)

    def put(
        self, x: Float[Array, "S H D"], group: Float[Array, "A q_len D"], first: Int32[Array, ""]
    ) -> Float[Array, "S H D"]:
        """The inverse of `take`: `x` with the heads from `first` on replaced."""
        group = group[:, : self.layout.seq_len].swapaxes(0, 1)
        return jax.lax.dynamic_update_slice_in_dim(x, group.astype(x.dtype), first, axis=1)

    def slice(self, x: Float32[Array, " H *rest"] | None, first: Int32[Array, ""]) -> Float32[Array, " A *rest"] | None:
        """The heads from `first` on of an array whose first axis is heads."""
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, self.per_call)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@splash.allows_rank_promotion
def _call(
    heads: _Heads,
    kernel: splash.SplashAttentionKernel,
    q: Float[Array, "S H D"],
    keys: Float[Array, "kv_len D"],
    segment_ids: splash.SegmentIds | None,
    sinks: Float32[Array, " H"] | None,
) -> Float[Array, "S H D"]:
    """Attention of one sequence, by the kernel."""

    def body(out: Float[Array, "S H D"], first: Int32[Array, ""]) -> Float[Array, "S H D"]:
        out_group = kernel(heads.take(q, first), keys, keys, segment_ids, heads.slice(sinks, first))
        return heads.put(out, out_group, first)

    return heads.scan(body, jnp.zeros_like(q), q.shape[1])


@splash.allows_rank_promotion
def _call_forward(
    heads: _Heads,
    kernel: splash.SplashAttentionKernel,
    q: Float[Array, "S H D"],
    keys: Float[Array, "kv_len D"],
    segment_ids: splash.SegmentIds | None,
    sinks: Float32[Array, " H"] | None,
) -> tuple[Float[Array, "S H D"], tuple]:
    def body(
        state: tuple[Float[Array, "S H D"], Float32[Array, "H q_len"]], first: Int32[Array, ""]
    ) -> tuple[Float[Array, "S H D"], Float32[Array, "H q_len"]]:
        out, logsumexp = state
        args = heads.take(q, first), keys, keys, segment_ids, heads.slice(sinks, first)
        out_group, stats = kernel(*args, save_residuals=True)
        logsumexp = jax.lax.dynamic_update_slice_in_dim(logsumexp, stats["logsumexp"], first, axis=0)
        return heads.put(out, out_group, first), logsumexp

    zeros = jnp.zeros_like(q), jnp.zeros((q.shape[1], heads.layout.q_len))
    out, logsumexp = attend_lib.saved(*heads.scan(body, zeros, q.shape[1]))
    return out, (kernel, q, keys, segment_ids, sinks, out, logsumexp)


@splash.allows_rank_promotion
def _call_backward(
    heads: _Heads, residuals: tuple, d_out: Float[Array, "S H D"]
) -> tuple[None, Float[Array, "S H D"], Float[Array, "kv_len D"], None, Float32[Array, " H"] | None]:
    """The kernel's gradients, except the sinks': the kernel returns that one in q's dtype, autodiff needs float32."""
    kernel, q, keys, segment_ids, sinks, out, logsumexp = residuals

    def body(
        state: tuple[Float[Array, "S H D"], Float32[Array, "kv_len D"]], first: Int32[Array, ""]
    ) -> tuple[Float[Array, "S H D"], Float32[Array, "kv_len D"]]:
        d_q, d_keys = state
        saved = heads.take(q, first), keys, segment_ids, heads.take(out, first), heads.slice(logsumexp, first)
        gradients = splash.backward(kernel, *saved, heads.take(d_out, first))
        d_q_group, d_k, d_v = (x.astype(jnp.float32) for x in gradients)
        d_keys += d_k * heads.scale + d_v
        return heads.put(d_q, d_q_group * heads.scale, first), d_keys

    zeros = jnp.zeros_like(q), jnp.zeros(keys.shape, jnp.float32)
    d_q, d_keys = heads.scan(body, zeros, q.shape[1])
    d_sinks = None
    if sinks is not None:
        # A sink has weight exp(sink - logsumexp) and value 0.
        sink_weights = jnp.exp(sinks - logsumexp[:, : len(q)].T)
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
        d_sinks = -jnp.sum(sink_weights * delta, axis=0)
    return None, d_q, d_keys.astype(keys.dtype), None, d_sinks


_call.defvjp(_call_forward, _call_backward)


def kernel_arguments(
    visibility: Visibility, seq_len: int, effective: Effective
) -> tuple[layout_lib.Layout, splash.SplashConfig]:
    """The kernel's layout and tokamax's config, for the settings that `resolve` returned."""
    return _layout(visibility, seq_len, effective), _splash_config(effective)


def _blocks(attend: Attend, seq_len: int) -> dict[str, int]:
    """The six block sizes. A size of 0 is replaced by that of the forward kernel, or by the default."""
    options, longest = attend.options, round_up(seq_len, LANES)
    default = min(_DEFAULT_BLOCK, longest)
    blocks = {"block_q": options.block_q or default, "block_kv": options.block_kv or default}
    blocks["block_kv_compute"] = options.block_kv_compute or blocks["block_kv"]
    blocks["block_q_dkv"] = options.block_q_dkv or blocks["block_q"]
    blocks["block_kv_dkv"] = options.block_kv_dkv or blocks["block_kv"]
    blocks["block_kv_dkv_compute"] = options.block_kv_dkv_compute or blocks["block_kv_dkv"]
    for name, size in blocks.items():
        if size <= 0 or size % LANES:
            raise attend.error(name, f"0 (chosen for you) or a positive multiple of {LANES}")
        if size > longest:
            raise attend.error(name, f"at most {longest}, the padded length of {seq_len} tokens")
    for name in ("block_kv", "block_kv_dkv"):
        if blocks[name] % blocks[f"{name}_compute"]:
            raise attend.error(f"{name}_compute", f"a divisor of {name}={blocks[name]}")
    return blocks


def _check_scalar_memory(attend: Attend, layout: layout_lib.Layout, effective: Effective) -> None:
    """Raises SettingError if a kernel's lists of blocks exceed the scalar memory."""
    if schedules.TABLE[effective["schedule"]].ring_only:
        sizes = [(effective[f"block_q{suffix}"], effective[f"block_kv{suffix}"]) for suffix in ("", "_dkv")]
        lists = [scalar_memory.runtime_lists(layout, *size) for size in sizes]
    else:
        infos = [closed_form.mask_info(*part) for part in closed_form.schedules(layout, _splash_config(effective))]
        lists = [(info.block_mask.size, scalar_memory.listed(info)) for info in infos]
    for blocks, size in lists:
        if size > scalar_memory.CAPACITY:
            raise attend.error("schedule", scalar_memory.too_large(effective["schedule"], blocks, size))


def _layout(visibility: Visibility, seq_len: int, blocks: Effective) -> layout_lib.Layout:
    return layout_lib.make(
        visibility,
        seq_len,
        block_q=(blocks["block_q"], blocks["block_q_dkv"]),
        block_kv=(blocks["block_kv"], blocks["block_kv_dkv"]),
    )


def _splash_config(effective: Effective) -> splash.SplashConfig:
    names = {field.name for field in dataclasses.fields(splash.SplashConfig)}
    blocks = {name: size for name, size in effective.items() if name in names and name.startswith("block_")}
    return splash.SplashConfig(
        **blocks,
        dq_reduction_steps=effective["dq_reduction_steps"] or None,
        use_base2_exp=effective["use_base2_exp"],
        interpret=_INTERPRET if effective["interpreted"] else False,
    )


# With `interpret=True`, jax 0.10 loses aliased outputs between grid steps, so dq would be wrong without an error.
# `InterpretParams` simulates the TPU's memory; NaN in uninitialised memory exposes reads of it.
_INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")
