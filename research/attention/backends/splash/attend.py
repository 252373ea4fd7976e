"""tokamax's splash kernels: the TPU backend, interpreted elsewhere.

One file, for all of it is the one call of the kernel: what is asked of it, both of its passes, and its price.
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
from research.attention.backends.splash import layout, schedules
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
_SUBLANES = 8  # over which the kernel repeats its float32 of a row
_DEFAULT_VMEM_LIMIT_KIB = 98_304  # the compiler's own 16 MiB are too few for the backward kernel at head width 512


def resolve(attend: Attend, sizes: Sizes) -> Effective:
    """See `attend.Backend`."""
    visibility, options, heads = attend.visibility, attend.options, sizes.heads
    schedule = schedules.chosen(attend)
    at_once = options.heads_per_call
    if at_once < 0 or (at_once and heads % at_once):
        words = f"0 (all) or one of {divisors(heads)}, the divisors of the {heads} heads of a call"
        raise attend.error("heads_per_call", words)
    blocks = _blocks(attend, sizes.seq_len)
    lay = _layout(visibility, sizes.seq_len, blocks)
    key_steps = lay.kv_len // blocks["block_kv_dkv"]
    # Some schedules, and in the newer tokamax segments, leave the kernel no way but its ring buffer of three.
    forced = schedules.TABLE[schedule].ring_only or (sizes.packed and splash.SEGMENTS_NEED_RING)
    ring = options.dq_reduction_steps == 3 or forced
    few = ring or key_steps <= 4  # beyond four partial sums the kernel keeps them in float32
    effective = {
        "schedule": schedule,
        **blocks,
        "dq_reduction_steps": 3 if ring else 0,
        "dq_partial_sums": 3 if ring else key_steps,
        "dq_dtype": jnp.dtype(sizes.dtype).name if few else "float32",
        "q_len": lay.q_len,
        "kv_len": lay.kv_len,
        "use_base2_exp": False,  # it would cost q a second rounding: see `splash.kernel`
        "heads_per_call": at_once or heads,
        "vmem_limit_kib": options.vmem_limit_kib or _DEFAULT_VMEM_LIMIT_KIB,
        "precision": precision_name(sizes.dtype),
        "interpreted": attend.target.platform != "tpu",
    }
    if attend.target.checks_memory and not effective["interpreted"]:
        _check_scalar_memory(attend, lay, effective)
    return effective


def prepare(attend: Attend, documents: Documents) -> Bool[Array, "B q_len kv_len"] | None:
    """See `attend.Backend`. The runtime mask, where it is the same in all layers: CSA's differs from layer to layer."""
    visibility, schedule = attend.visibility, schedules.chosen(attend)
    if visibility.selects or not schedules.TABLE[schedule].runtime_mask:
        return None
    seq_len = documents.segments.shape[1]
    lay = _layout(visibility, seq_len, _blocks(attend, seq_len))
    return jax.vmap(lambda rows, cols: lay.runtime_mask(rows, cols, None))(*lay.segment_ids(documents.segments))


def compute(attend: Attend, effective: Effective, inputs: Inputs) -> Float[Array, "B S H D"]:
    """See `attend.Backend`."""
    q, segments, selected = inputs.q, inputs.documents.segments, inputs.selected
    lay = _layout(attend.visibility, q.shape[1], effective)
    schedule = schedules.TABLE[effective["schedule"]]
    # Segments have a price of their own in the kernel, which rows of one document need not pay.
    needed = inputs.documents.packed or schedule.runtime_mask
    sequences = {
        "q": q,
        "keys": lay.join_keys(*inputs.keys),
        "ids": lay.segment_ids(segments) if needed else None,
        "selected": None if selected is None else selection.capped(attend.visibility, segments, selected),
        "mask": inputs.prepared,
    }
    settings = (effective[name] for name in ("heads_per_call", "vmem_limit_kib", "precision"))
    heads = _Heads(lay, *settings, q.shape[3] ** -0.5)
    one = functools.partial(_attend_one, heads, schedule, _splash_config(effective), inputs.sinks)
    # Scanned over the batch, never vmapped: a vmapped runtime mask takes ten times as long to compile, vmapped
    # segment ids make all sequences share one pruned schedule, and the interpreter cannot vmap at all.
    out = jax.lax.map(one, sequences)
    return jnp.where(segments[:, :, None, None] >= 0, out, 0)


def cost(attend: Attend, sizes: Sizes, effective: Effective) -> tuple[Pass, Pass]:
    """See `attend.Backend`: the blocks that the kernels move between HBM and the core, by their index maps."""
    lay, config = kernel_of(attend.visibility, sizes.seq_len, effective)
    (first, _), (second, _) = closed_form.schedules(lay, config)
    size, width = jnp.dtype(sizes.dtype).itemsize, sizes.head_width
    q_bytes, kv_bytes = lay.q_len * width * size, lay.kv_len * width * size

    def masks(schedule: BlockSchedule) -> int:
        loaded = effective["schedule"] != "computed"
        return loaded * schedule.count(PARTIAL) * schedule.block_q * schedule.block_kv

    def active(schedule: BlockSchedule) -> int:
        return schedule.count(PARTIAL) + schedule.count(FULL)

    forward = 2 * q_bytes + active(first) * 2 * config.block_kv * width * size + masks(first)
    # The rows of a block of keys: q, d_out, and their float32 log-sum-exp and product.
    row_bytes = config.block_q_dkv * (2 * width * size + 2 * _SUBLANES * _FLOAT32)
    backward = active(second) * row_bytes + 2 * kv_bytes + 4 * lay.kv_len * width * _FLOAT32 + masks(second)
    if effective["dq_reduction_steps"] == 3:
        backward += active(second) * 2 * config.block_q_dkv * width * size + 4 * q_bytes
    else:
        partial_sums = effective["dq_partial_sums"] * lay.q_len * width * jnp.dtype(effective["dq_dtype"]).itemsize
        backward += 2 * partial_sums + q_bytes
    pairs = [active(schedule) * schedule.block_q * schedule.block_kv for schedule in (first, second)]
    return Pass(pairs[0], forward), Pass(pairs[1], backward)


def build_host(attend: Attend, sizes: Sizes, effective: Effective) -> None:
    """Makes, and keeps, what the host computes of a schedule before the program is traced, if anything."""
    if build := schedules.TABLE[effective["schedule"]].host:
        build(*kernel_of(attend.visibility, sizes.seq_len, effective))


def _attend_one(
    heads: "_Heads",
    schedule: schedules.Schedule,
    config: splash.SplashConfig,
    sinks: Float32[Array, " H"] | None,
    sequence: dict[str, Any],
) -> Float[Array, "S H D"]:
    """One sequence: its q [S, H, D] and keys [kv_len, D]."""
    rows, cols = sequence["ids"] or (None, None)
    if schedule.runtime_mask:
        mask = sequence["mask"]
        if mask is None:
            mask = heads.layout.runtime_mask(rows, cols, sequence["selected"])
        kernel = schedule.kernel(heads.layout, config, mask)
        ids = None  # already part of the mask
    else:
        kernel = schedule.kernel(heads.layout, config, sequence["selected"])
        ids = None if rows is None else splash.SegmentIds(q=rows, kv=cols)
    return _call(heads, kernel, sequence["q"], sequence["keys"], ids, sinks)


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Some heads at a time: what the kernel needs beside q, out and d_q then exists for those alone.

    The backward kernel's ring buffer alone is three times d_q; q is padded and transposed for the kernel.
    """

    layout: layout.Layout
    at_once: int
    vmem_limit_kib: int
    precision: str
    scale: float

    def each(self, body: Callable[[Any, Array], Any], state: Any, heads: int) -> Any:
        """Folds `state = body(state, first head)` over the groups; here alone are kernels traced."""

        def step(state: Any, first: Int32[Array, ""]) -> tuple[Any, None]:
            # tokamax names no precision: left alone, a TPU would round its float32 operands to bfloat16.
            precision = jax.default_matmul_precision(self.precision)
            with splash.vmem_limit(self.vmem_limit_kib), splash.logit_scale(self.scale), precision:
                return body(state, first), None

        return jax.lax.scan(step, state, jnp.arange(0, heads, self.at_once))[0]

    def take(self, x: Float[Array, "S H D"], first: Int32[Array, ""]) -> Float[Array, "at_once q_len D"]:
        """Some heads as the kernel has them."""
        some = jax.lax.dynamic_slice_in_dim(x, first, self.at_once, axis=1)
        return self.layout.pad_queries(some.swapaxes(0, 1), axis=1)

    def put(
        self, x: Float[Array, "S H D"], some: Float[Array, "at_once q_len D"], first: Int32[Array, ""]
    ) -> Float[Array, "S H D"]:
        """The reverse of `take`."""
        some = some[:, : self.layout.seq_len].swapaxes(0, 1)
        return jax.lax.dynamic_update_slice_in_dim(x, some.astype(x.dtype), first, axis=1)

    def part(
        self, x: Float32[Array, " H *rest"] | None, first: Int32[Array, ""]
    ) -> Float32[Array, " at_once *rest"] | None:
        """That of some heads."""
        return None if x is None else jax.lax.dynamic_slice_in_dim(x, first, self.at_once)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
@splash.allows_rank_promotion
def _call(
    heads: _Heads,
    kernel: splash.SplashAttentionKernel,
    q: Float[Array, "S H D"],
    keys: Float[Array, "kv_len D"],
    ids: splash.SegmentIds | None,
    sinks: Float32[Array, " H"] | None,
) -> Float[Array, "S H D"]:
    def body(out: Float[Array, "S H D"], first: Int32[Array, ""]) -> Float[Array, "S H D"]:
        return heads.put(out, kernel(heads.take(q, first), keys, keys, ids, heads.part(sinks, first)), first)

    return heads.each(body, jnp.zeros_like(q), q.shape[1])


@splash.allows_rank_promotion
def _call_forward(
    heads: _Heads,
    kernel: splash.SplashAttentionKernel,
    q: Float[Array, "S H D"],
    keys: Float[Array, "kv_len D"],
    ids: splash.SegmentIds | None,
    sinks: Float32[Array, " H"] | None,
) -> tuple[Float[Array, "S H D"], tuple]:
    def body(results: tuple[Array, Array], first: Int32[Array, ""]) -> tuple[Array, Array]:
        out, logsumexp = results
        some = heads.take(q, first), keys, keys, ids, heads.part(sinks, first)
        out_part, stats = kernel(*some, save_residuals=True)
        logsumexp = jax.lax.dynamic_update_slice_in_dim(logsumexp, stats["logsumexp"], first, axis=0)
        return heads.put(out, out_part, first), logsumexp

    nothing = jnp.zeros_like(q), jnp.zeros((q.shape[1], heads.layout.q_len))
    out, logsumexp = attend_lib.saved(*heads.each(body, nothing, q.shape[1]))
    return out, (kernel, q, keys, ids, sinks, out, logsumexp)


@splash.allows_rank_promotion
def _call_backward(heads: _Heads, residuals: tuple, d_out: Float[Array, "S H D"]) -> tuple:
    """The kernel's own gradients, but of the sinks: in bfloat16 it gives one of q's dtype, which autodiff refuses."""
    kernel, q, keys, ids, sinks, out, logsumexp = residuals  # the last one [H, q_len]

    def body(gradients: tuple[Array, Array], first: Int32[Array, ""]) -> tuple[Array, Array]:
        d_q, d_keys = gradients
        saved = heads.take(q, first), keys, ids, heads.take(out, first), heads.part(logsumexp, first)
        parts = splash.backward(kernel, *saved, heads.take(d_out, first))
        more, as_keys, as_values = (x.astype(jnp.float32) for x in parts)
        d_keys += as_keys * heads.scale + as_values  # keys serve as values too
        return heads.put(d_q, more * heads.scale, first), d_keys

    nothing = jnp.zeros_like(q), jnp.zeros(keys.shape, jnp.float32)
    d_q, d_keys = heads.each(body, nothing, q.shape[1])
    d_sinks = None
    if sinks is not None:
        # The sink takes exp(sink - logsumexp) of a row's weight away from the keys, whose mean value is `out`.
        weight = jnp.exp(sinks - logsumexp[:, : len(q)].T)
        product = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
        d_sinks = -jnp.sum(weight * product, axis=0)
    return None, d_q, d_keys.astype(keys.dtype), None, d_sinks


_call.defvjp(_call_forward, _call_backward)


def kernel_of(visibility: Visibility, seq_len: int, effective: Effective) -> tuple[layout.Layout, splash.SplashConfig]:
    """Where the kernel's rows and columns lie, and tokamax's config of it, by what `resolve` returned."""
    return _layout(visibility, seq_len, effective), _splash_config(effective)


def _blocks(attend: Attend, seq_len: int) -> dict[str, int]:
    """The six block sizes: a size not given is its forward one's, or as large as is useful."""
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


def _check_scalar_memory(attend: Attend, lay: layout.Layout, effective: Effective) -> None:
    """Raises SettingError where the lists of blocks of a kernel do not fit."""
    if schedules.TABLE[effective["schedule"]].ring_only:
        sizes = [(effective[f"block_q{suffix}"], effective[f"block_kv{suffix}"]) for suffix in ("", "_dkv")]
        taken = [scalar_memory.of_runtime_mask(lay, *size) for size in sizes]
    else:
        infos = [closed_form.mask_info(*part) for part in closed_form.schedules(lay, _splash_config(effective))]
        taken = [(info.block_mask.size, scalar_memory.listed(info)) for info in infos]
    for blocks, size in taken:
        if size > scalar_memory.CAPACITY:
            raise attend.error("schedule", scalar_memory.too_large(effective["schedule"], blocks, size))


def _layout(visibility: Visibility, seq_len: int, blocks: Effective) -> layout.Layout:
    return layout.make(
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


# The simple `interpret=True` loses aliased outputs between grid steps on jax 0.10: dq would be wrong, silently.
# This one simulates the TPU's memory, and NaN in what was never written makes a wrong read show.
_INTERPRET = pltpu.InterpretParams(uninitialized_memory="nan")
