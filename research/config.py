"""The base config, and `validate`, which checks all of it before anything is compiled.

An experiment starts from `base_config()`, changes what it studies, and hands the result to `launch/train.py`,
which applies `--config.x=y` overrides and calls `validate`. Below the model's builder there are only frozen
dataclasses (`research.model.spec`). Integers use 0 for "unset"; no field is None, which could not be overridden.
"""

import dataclasses
import math

import jax
import ml_collections

from research import data as data_lib
from research import hardware
from research.attention import backends
from research.attention.spec import ANGLES, KINDS, STAGES
from research.errors import ConfigError
from research.model import spec as model_spec
from research.model.language_model import REMAT

AOT_WHAT = ("op", "layer", "step")
DTYPES = ("float32", "bfloat16")
MOST_SEED = 2**32 - 1  # JAX makes its first key from 32 bits of an integer, without a word about the others
WARM_UP_STEPS = 2  # after which steps are timed and traced: the first ones fill caches and allocators
_SCORING = ("index_backend", "index_heads_at_once", "index_entries_at_once")
WANDB_MODES = ("auto", "online", "offline", "disabled")


def base_config() -> ml_collections.ConfigDict:
    """A small DeepSeek-V4-like language model on bytes, sized for a laptop; locked, so a misspelled field fails."""
    config = ml_collections.ConfigDict()
    config.seed = 0

    config.model = ml_collections.ConfigDict()
    config.model.layers = ("sliding", "csa", "hca")  # attention kind of each layer of one repeat
    config.model.repeats = 1  # how often `layers` is stacked; compile time does not depend on it
    config.model.hidden = 128
    config.model.ffn_width = 344  # SwiGLU's inner width
    config.model.tied_head = True  # output projection shares the embedding's matrix
    config.model.norm_eps = 1e-6
    config.model.dtype = "float32"  # compute: float32 or bfloat16; parameters are always float32
    config.model.remat = "none"  # none, or block: recompute each block in the backward pass

    config.attention = ml_collections.ConfigDict()
    config.attention.backend = "auto"  # auto: splash on TPU, else blockwise
    config.attention.schedule = "auto"  # splash, sliding and HCA layers: `schedules.TABLE`
    config.attention.csa_schedule = "auto"  # CSA layers: hybrid or dynamic (splash), stream or gather (blockwise)
    config.attention.block_q = 0  # the six block sizes and dq_reduction_steps: `backends.Options`
    config.attention.block_kv = 0
    config.attention.block_kv_compute = 0
    config.attention.block_q_dkv = 0
    config.attention.block_kv_dkv = 0
    config.attention.block_kv_dkv_compute = 0
    config.attention.dq_reduction_steps = 0
    config.attention.heads_per_call = 0  # splash: heads that a call of the kernel serves; 0 is all
    config.attention.heads_at_once = 0  # heads that a layer computes at a time, recomputing them backward; 0 is all
    config.attention.vmem_limit_kib = 0  # splash on a TPU: vector memory that a kernel may take
    config.attention.window = 128
    config.attention.hca_ratio = 128
    config.attention.csa_ratio = 4
    config.attention.top_k = 64  # compressed entries that a CSA query sees
    config.attention.heads = 4
    config.attention.head_width = 64
    config.attention.rope_width = 16  # trailing channels of a head that carry the position
    config.attention.q_rank = 64  # width of the low-rank query
    config.attention.out_groups = 2  # groups of heads of the low-rank output projection
    config.attention.out_rank = 32  # width per group of the low-rank output projection
    config.attention.index_heads = 4
    config.attention.index_head_width = 32
    config.attention.index_backend = "auto"  # of the indexer's scores: xla, or pallas, a TPU's default
    config.attention.index_heads_at_once = 0  # index heads and entries that scores are computed of at a time; 0: chosen
    config.attention.index_entries_at_once = 0
    config.attention.sinks = True  # one learned sink per head
    config.attention.csa_stage = "sparse"  # dense, warmup, sparse: `spec.STAGES`
    config.attention.indexer_loss_weight = 1.0  # of the mean over CSA layers of `indexer.loss`; 0 leaves it out

    config.rope = ml_collections.ConfigDict()
    config.rope.theta = 10_000.0  # sliding layers
    config.rope.compressed_theta = 160_000.0  # CSA and HCA layers
    config.rope.yarn_factor = 1.0  # CSA and HCA layers; 1 is no YaRN
    config.rope.yarn_original_length = 65_536
    config.rope.yarn_beta_fast = 32.0
    config.rope.yarn_beta_slow = 1.0
    config.rope.angles = "exact"  # at any position; reference: float32 products, for parity with published weights

    config.data = ml_collections.ConfigDict()
    config.data.task = "text"  # text; recall: pairs of key and value, asked for later; needle: one pair, asked for last
    config.data.pairs = 0  # in a row of recall
    config.data.path = "stdlib"  # the standard library's sources, or a file, folder or glob (.gz too)
    config.data.seq_len = 512
    config.data.batch_size = 4
    config.data.chunk_len = 0  # longest piece of a document; 0 is seq_len
    config.data.align_starts = True  # documents start where an entry of every ratio in use starts
    config.data.validation_fraction = 0.05  # of the documents, held out by file

    config.optimizer = ml_collections.ConfigDict()
    config.optimizer.learning_rate = 3e-3
    config.optimizer.final_fraction = 0.1  # of the learning rate, where the cosine ends
    config.optimizer.warmup_steps = 20
    config.optimizer.weight_decay = 0.1
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.95
    config.optimizer.clip_norm = 1.0

    config.train = ml_collections.ConfigDict()
    config.train.steps = 200
    config.train.log_every = 10
    config.train.eval_every = 100  # 0: only at the end
    config.train.eval_batches = 8
    config.train.checkpoint_every = 100  # 0: only at the end and when a signal stops the run
    config.train.keep_last = 2  # newest checkpoints that are kept
    config.train.keep_best = 1  # kept beside them: lowest validation loss, of checkpoints at a step that validates
    config.train.start_from = ""  # id of a run below run.root, or its path: its parameters and moments are taken over

    config.profile = ml_collections.ConfigDict()
    config.profile.steps = 0  # traced into the run's folder, after the first ones, which warm up

    config.distributed = ml_collections.ConfigDict()
    config.distributed.coordinator = ""  # host:port of process 0; auto: asked of the cluster; empty: one process
    config.distributed.num_processes = 0  # with host:port
    config.distributed.process_id = 0  # with host:port

    config.bench = ml_collections.ConfigDict()
    config.bench.repeats = 5  # timed runs of each program, after one that is not
    config.bench.timeout_minutes = 10.0  # for one point of a sweep, after which it is a row that says so

    config.aot = ml_collections.ConfigDict()
    config.aot.topology = "v5p:2x2x1"  # chip and mesh to compile for, one device of it: `research.hardware`
    config.aot.what = ("op",)  # op: one attention; layer: with its projections; step: an update of the whole model
    config.aot.timeout_minutes = 10.0  # for one program

    config.run = ml_collections.ConfigDict()
    config.run.root = "runs"
    config.run.id = ""  # folder below root; empty: made from the date, the experiment and the overrides

    config.wandb = ml_collections.ConfigDict()
    config.wandb.mode = "auto"  # auto (online when logged in, else offline), online, offline, disabled
    config.wandb.project = "compressed-attention"
    return config.lock()


def validate(config: ml_collections.ConfigDict, platform: str | None = None, *, checks_memory: bool = True) -> None:
    """Checks every field and how they fit together, in milliseconds and without compiling anything.

    Args:
      config: a full config, as `base_config` makes it.
      platform: 'cpu', 'gpu' or 'tpu', what it is to run on; None is `backends.platform()`.
      checks_memory: as in `backends.Target`.

    Raises:
      ConfigError: a setting is impossible, or has no effect together with the others.
      NotImplementedError: the chosen backend cannot serve the request.
    """
    check_precision()
    if type(config.seed) is not int or not 0 <= config.seed <= MOST_SEED:
        raise _error("seed", config.seed, f"an integer from 0 to {MOST_SEED}, of which no two make the same numbers")
    _check_model(config.model)
    _check_attention(config.attention)
    _check_rope(config.rope)
    _check_data(config)
    _check_training(config)
    _check_distributed(config.distributed)
    settings = effective(config, platform, checks_memory=checks_memory)
    if any(layer.get("interpreted") for layer in settings.values()):
        recomputed = (
            ("model.remat", config.model.remat, "none"),
            ("attention.heads_at_once", config.attention.heads_at_once, 0),
        )
        for name, setting, off in recomputed:
            if setting != off:
                raise NotImplementedError(
                    f"config.{name}={setting}: the interpreted splash kernel cannot be recomputed; "
                    f"use {off} here, or another backend"
                )


def check_precision() -> None:
    """Refuses JAX's 64-bit mode, under which the same config would make other numbers, with other rounding.

    Asked of JAX itself: it is as well set by `jax.config` as by the environment.

    Raises:
      ConfigError: the mode is on.
    """
    if jax.config.jax_enable_x64:
        raise ConfigError(
            "JAX_ENABLE_X64=1: must be 0, also as jax_enable_x64 of jax.config: other numbers would come of one config"
        )


def effective(
    config: ml_collections.ConfigDict, platform: str | None = None, *, checks_memory: bool = True
) -> dict[str, backends.Effective]:
    """The settings that each kind of layer in the model will really use, its backend's name among them.

    Arguments and errors as `validate`, as far as attention goes.
    """
    try:
        settings = _resolve(model_spec.from_config(config, platform, checks_memory=checks_memory), config.data.seq_len)
    except ValueError as error:
        raise ConfigError(f"config.attention.{error}") from error
    if "csa" not in settings and config.attention.csa_schedule != "auto":
        raise _error("attention.csa_schedule", config.attention.csa_schedule, "auto: model.layers has no csa layer")
    if "csa" not in settings and config.attention.csa_stage != "sparse":
        raise _error("attention.csa_stage", config.attention.csa_stage, "sparse: model.layers has no csa layer")
    if "csa" not in settings or config.attention.csa_stage == "dense":
        for name in _SCORING:
            if config.attention[name] != base_config().attention[name]:
                why = "with csa_stage=dense" if "csa" in settings else "without a csa layer"
                raise _error(f"attention.{name}", config.attention[name], f"left at its default {why}")
    if set(settings) == {"csa"} and config.attention.schedule != "auto":
        raise _error("attention.schedule", config.attention.schedule, "auto: model.layers has only csa layers")
    return settings


def requested(config: ml_collections.ConfigDict) -> dict[str, int | str]:
    """What was asked of the backend, to be recorded beside `effective`."""
    names = ["backend", "csa_schedule", *(field.name for field in dataclasses.fields(backends.Options)), *_SCORING]
    return {name: config.attention[name] for name in names}


def alignment(config: ml_collections.ConfigDict) -> int:
    """On which multiples documents start in a row: every ratio in use divides it; 1 where `align_starts` is off."""
    ratios = {"sliding": 1, "csa": config.attention.csa_ratio, "hca": config.attention.hca_ratio}
    return math.lcm(*(ratios[kind] for kind in config.model.layers)) if config.data.align_starts else 1


def _resolve(model: model_spec.ModelSpec, seq_len: int) -> dict[str, backends.Effective]:
    spec = model.attention
    backend = backends.get(spec.backend)
    settings = {}
    for kind in dict.fromkeys(model.layers):
        visibility, options = spec.visibility(kind), spec.options(kind)
        try:
            shape = (seq_len, spec.heads_of_attend, spec.head_width)
            resolved = backend.resolve(visibility, *shape, model.dtype, options, target=spec.target)
        except ValueError as error:
            # Backends know one schedule; that of CSA layers is a field of its own.
            prefix = "csa_" if kind == "csa" and str(error).startswith("schedule=") else ""
            raise ValueError(f"{prefix}{error}") from error
        settings[kind] = {"backend": spec.backend, **resolved}
        if kind == "csa" and (spec.selects or spec.trains_indexer):
            settings[kind] |= {f"index_{name}": setting for name, setting in dataclasses.asdict(spec.scoring).items()}
    return settings


def _check_model(model) -> None:
    if not model.layers or not set(model.layers) <= set(KINDS):
        raise _error("model.layers", model.layers, f"a non-empty tuple with members among {', '.join(KINDS)}")
    _positive(model, "model", "repeats", "hidden", "ffn_width", "norm_eps")
    _one_of("model.dtype", model.dtype, DTYPES)
    _one_of("model.remat", model.remat, REMAT)


def _check_attention(attention) -> None:
    sizes = "window hca_ratio csa_ratio top_k heads head_width rope_width q_rank out_groups out_rank"
    _positive(attention, "attention", *sizes.split(), "index_heads", "index_head_width")
    for name in ("head_width", "index_head_width"):
        if attention.rope_width > attention[name]:
            raise _error("attention.rope_width", attention.rope_width, f"at most {name}={attention[name]}")
    if attention.rope_width % 2:
        raise _error("attention.rope_width", attention.rope_width, "even, since channels are rotated in pairs")
    if attention.vmem_limit_kib < 0:
        raise _error("attention.vmem_limit_kib", attention.vmem_limit_kib, "0 (chosen for you) or more")
    if attention.heads % attention.out_groups:
        raise _error("attention.out_groups", attention.out_groups, f"a divisor of heads={attention.heads}")
    at_once, least = attention.heads_at_once, attention.heads // attention.out_groups
    if at_once and (at_once < 0 or attention.heads % at_once or at_once % least):
        raise _error(
            "attention.heads_at_once", at_once, f"0 (all), or divide {attention.heads} by a multiple of {least}"
        )
    per_call, served = attention.heads_per_call, at_once or attention.heads
    if per_call < 0 or (per_call and served % per_call):
        of = f"heads_at_once={at_once}" if at_once else f"heads={served}"
        allowed = f"0 (all) or one of {backends.divisors(served)}, the divisors of {of}"
        raise _error("attention.heads_per_call", per_call, allowed)
    _check_stage(attention)


def _check_stage(attention) -> None:
    _one_of("attention.csa_stage", attention.csa_stage, STAGES)
    weight, default = attention.indexer_loss_weight, base_config().attention.indexer_loss_weight
    if weight < 0:
        raise _error("attention.indexer_loss_weight", weight, "0 or more")
    if attention.csa_stage == "dense" and weight != default:
        raise _error("attention.indexer_loss_weight", weight, f"{default} with csa_stage=dense, which has no such loss")
    if attention.csa_stage == "warmup" and not weight:
        raise _error(
            "attention.indexer_loss_weight", weight, "positive with csa_stage=warmup, which trains nothing else"
        )


def _check_rope(rope) -> None:
    names = ("theta", "compressed_theta", "yarn_original_length", "yarn_beta_fast", "yarn_beta_slow")
    _positive(rope, "rope", *names)
    if rope.yarn_factor < 1:
        raise _error("rope.yarn_factor", rope.yarn_factor, "at least 1 (no YaRN)")
    _one_of("rope.angles", rope.angles, ANGLES)


def _check_data(config) -> None:
    task = config.data.task
    _one_of("data.task", task, (data_lib.TEXT, *data_lib.TASKS))
    of_others = ("pairs",) if task == data_lib.TEXT else ("path", "chunk_len", "align_starts", "validation_fraction")
    for name in of_others:
        if config.data[name] != base_config().data[name]:
            raise _error(f"data.{name}", config.data[name], f"left at its default with data.task={task}")
    try:
        if task == data_lib.TEXT:
            data_lib.packing_spec(config, alignment(config))
        else:
            data_lib.task(config)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if not 0 < config.data.validation_fraction < 1:
        raise _error("data.validation_fraction", config.data.validation_fraction, "between 0 and 1, both excluded")


def _check_training(config) -> None:
    optimizer, train = config.optimizer, config.train
    _positive(optimizer, "optimizer", "learning_rate", "clip_norm")
    _positive(train, "train", "steps", "log_every", "eval_batches", "keep_last")
    for name in ("warmup_steps", "weight_decay"):
        if optimizer[name] < 0:
            raise _error(f"optimizer.{name}", optimizer[name], "0 or more")
    if optimizer.warmup_steps >= train.steps:
        raise _error("optimizer.warmup_steps", optimizer.warmup_steps, f"below train.steps={train.steps}")
    for name in ("eval_every", "checkpoint_every"):
        if train[name] < 0:
            raise _error(f"train.{name}", train[name], "0 (only at the end) or more")
    if train.keep_best < 0:
        raise _error("train.keep_best", train.keep_best, "0 or more")
    if not 0 <= config.profile.steps <= max(0, train.steps - WARM_UP_STEPS):
        most = f"train.steps={train.steps} less {WARM_UP_STEPS} for warming up"
        raise _error("profile.steps", config.profile.steps, f"from 0 to {most}")
    for name in ("b1", "b2"):
        if not 0 <= optimizer[name] < 1:
            raise _error(f"optimizer.{name}", optimizer[name], "at least 0 and below 1")
    if not 0 <= optimizer.final_fraction <= 1:
        raise _error("optimizer.final_fraction", optimizer.final_fraction, "between 0 and 1")
    _positive(config.bench, "bench", "repeats", "timeout_minutes")
    _positive(config.aot, "aot", "timeout_minutes")
    if not config.aot.what or not set(config.aot.what) <= set(AOT_WHAT):
        raise _error("aot.what", config.aot.what, f"a non-empty tuple with members among {', '.join(AOT_WHAT)}")
    _one_of("aot.topology", config.aot.topology.partition(":")[0], hardware.NAMES)
    _one_of("wandb.mode", config.wandb.mode, WANDB_MODES)


def _check_distributed(distributed) -> None:
    coordinator, processes, process = distributed.coordinator, distributed.num_processes, distributed.process_id
    if coordinator in ("", "auto"):
        for name in ("num_processes", "process_id"):
            if distributed[name]:
                raise _error(f"distributed.{name}", distributed[name], "0, unless distributed.coordinator is host:port")
        return
    host, _, port = coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise _error("distributed.coordinator", repr(coordinator), "host:port, auto, or empty")
    if processes < 1:
        raise _error("distributed.num_processes", processes, f"1 or more with coordinator={coordinator}")
    if not 0 <= process < processes:
        raise _error("distributed.process_id", process, f"from 0 to num_processes - 1 = {processes - 1}")


def _positive(group, prefix: str, *names: str) -> None:
    for name in names:
        if not group[name] > 0:
            raise _error(f"{prefix}.{name}", group[name], "positive")


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise _error(name, repr(value), f"one of {', '.join(allowed)}")


def _error(name: str, value, allowed: str) -> ConfigError:
    return ConfigError(f"config.{name}={value}: must be {allowed}")
