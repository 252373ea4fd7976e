import ast
import pathlib
import re
import sys
import time

import jax
import pytest
import rich.console

from research import config as config_lib
from research import data, fields
from research.attention import backends
from research.attention.backends.splash import schedules
from research.attention.spec import AttentionSpec, RopeSpec
from research.settings.config import base_config
from research.validation import validate
from research.data import PackingSpec
from research.errors import ConfigError
from research.model import spec as model_spec
from research.runs import tracking
from research.training import report, run
from tests import tiny

ROOT = pathlib.Path(config_lib.__file__).parents[1]
RESEARCH = str(ROOT / "research")


def changed(overrides):
    config = base_config()
    fields.override(config, overrides)
    return config


def test_no_field_is_none_and_all_can_be_overridden():
    for name in fields.field_names(base_config()):
        setting = fields.value(base_config(), name)
        assert isinstance(setting, bool | int | float | str | tuple), name
        fields.override(base_config(), {name: setting})


def test_misspelled_field_cannot_be_set():
    config = base_config()
    assert config.is_locked
    for group, name in ((config, "sed"), (config.attention, "blok_q"), (config.data, "length")):
        with pytest.raises(AttributeError, match=name):
            setattr(group, name, 1)
        with pytest.raises(AttributeError, match=name):
            getattr(group, name)


def record_reads(monkeypatch, config) -> set[str]:
    """The fields that research's modules read from now on, from the config or the dataclasses made of it.

    Reads in checks, in what shows or records whole configs, and in what copies one dataclass into another do not count.
    """
    reads, groups = set(), {id(config): ""}
    groups |= {id(group): f"{name}." for name, group in config.items() if isinstance(group, type(config))}
    options = set(backends.Options.__dataclass_fields__)

    def counts():
        code = sys._getframe(2).f_code
        where, function = code.co_filename.removeprefix(RESEARCH), code.co_name
        if where == "/config.py":
            return function == "alignment"
        whole = where in ("/sweeps/experiment.py", "/fields.py", "/training/report.py")
        check = function in ("refuse_options", "__post_init__")
        return code.co_filename.startswith(RESEARCH) and not whole and not check

    def from_config(original):
        def get(self, name):
            if id(self) in groups and counts():
                reads.add(groups[id(self)] + name)
            return original(self, name)

        return get

    def from_dataclass(prefix, copied=frozenset()):
        def get(self, name):
            if name not in copied and counts():
                reads.add(prefix + name)
            return object.__getattribute__(self, name)

        return get

    for method in ("__getattr__", "__getitem__"):
        monkeypatch.setattr(type(config), method, from_config(getattr(type(config), method)))
    for cls, get in (
        (model_spec.ModelSpec, from_dataclass("model.")),
        (AttentionSpec, from_dataclass("attention.", options)),
        (backends.Options, from_dataclass("attention.")),
        (RopeSpec, from_dataclass("rope.")),
        (PackingSpec, from_dataclass("data.")),
    ):
        monkeypatch.setattr(cls, "__getattribute__", get)
    return reads


def written_reads() -> set[str]:
    """`group.field` for every `anything.group.field` in the sources; the launchers' own are not run here."""
    found = set()
    for path in (*ROOT.glob("research/**/*.py"), *ROOT.glob("launch/*.py")):
        if path != ROOT / "research/config.py":
            chains = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            found |= {f"{node.value.attr}.{node.attr}" for node in chains if isinstance(node.value, ast.Attribute)}
    return found


def test_every_field_is_read(monkeypatch, tmp_path):
    """By a run with YaRN and wandb, by the backend that has options, or by a launcher."""
    (tmp_path / "text").mkdir()
    for name in "abcdefgh":
        (tmp_path / "text" / name).write_text(f"A few words of text {name}. " * 20)
    config = tiny.get_config()
    config.model.layers = ("sliding", "csa")
    config.rope.yarn_factor = 2.0
    config.data.update(path=str(tmp_path / "text"), seq_len=16, batch_size=1, validation_fraction=0.4)
    config.train.update(steps=1, eval_batches=1)
    config.optimizer.warmup_steps = 0
    config.run.update(root=str(tmp_path / "runs"), id="one")
    config.wandb.mode = "offline"
    monkeypatch.setattr(tracking, "_PROGRAM", "research.runs.nothing")  # wandb is told, and need not be there
    with config.unlocked():
        config.train.read_by_nobody = 1
    monkeypatch.setattr(report, "base_config", lambda: config)

    reads = record_reads(monkeypatch, config)
    run.run(config, {}, rich.console.Console(quiet=True))
    config.model.layers, config.attention.backend = ("sliding", "csa", "hca"), "splash"
    config_lib.effective(config)
    config.data.task = "needle"
    data.task(config)
    assert set(fields.field_names(config)) - reads - written_reads() == {"train.read_by_nobody"}


PAIR = {"distributed.coordinator": "host:1234", "distributed.num_processes": 2}
SPLASH = {"attention.backend": "splash"}
REFUSED = [
    ({"seed": -1}, "seed=-1: must be an integer from 0 to 4294967295"),
    ({"seed": 2**32}, "seed=4294967296: must be an integer from 0 to 4294967295"),
    ({"seed": 2**64 + 1}, "seed=18446744073709551617: must be an integer from 0 to"),
    ({"model.layers": ()}, r"model.layers=\(\): must be a non-empty tuple with members among sliding, hca, csa"),
    ({"model.layers": ("hca,csa",)}, r"model.layers=\('hca,csa',\): must be .* among sliding, hca, csa"),
    ({"model.layers": ("hca", "HCA")}, r"model.layers=\('hca', 'HCA'\): must be .* among sliding, hca, csa"),
    ({"model.dtype": "float16"}, "model.dtype='float16': must be one of float32, bfloat16"),
    ({"rope.angles": "rounded"}, "rope.angles='rounded': must be one of exact, reference"),
    ({"model.remat": "full"}, "model.remat='full': must be one of none, block"),
    ({"attention.backend": "flash"}, "attention.backend='flash': must be one of auto, dot_product, .*splash"),
    ({**SPLASH, "attention.schedule": "lazy"}, "attention.schedule='lazy': must be auto or one of .*static"),
    ({**SPLASH, "attention.csa_schedule": "lazy"}, "attention.csa_schedule='lazy': must be auto or one of .*dynamic"),
    ({"attention.index_backend": "cuda"}, "attention.index_backend='cuda': must be one of auto, xla, pallas"),
    ({"attention.index_heads_at_once": 3}, "attention.index_heads_at_once=3: must be 0 .* or a divisor of 4"),
    ({"attention.index_entries_at_once": 100}, "attention.index_entries_at_once=100: must be 0 .* multiple of 128"),
    (
        {"attention.index_backend": "xla", "model.layers": ("hca",)},
        "attention.index_backend=xla: must be left at its default without a csa layer",
    ),
    (
        {"attention.index_heads_at_once": 2, "attention.csa_stage": "dense"},
        "attention.index_heads_at_once=2: must be left at its default with csa_stage=dense",
    ),
    ({**SPLASH, "attention.csa_schedule": "static"}, "attention.csa_schedule='static': cannot express csa.*dynamic"),
    (
        {**SPLASH, "attention.csa_schedule": "dynamic", "model.layers": ("hca",)},
        "attention.csa_schedule=dynamic: must be auto: model.layers has no csa layer",
    ),
    (
        {**SPLASH, "attention.schedule": "static", "model.layers": ("csa",)},
        "attention.schedule=static: must be auto: model.layers has only csa layers",
    ),
    (
        {"attention.backend": "dot_product", "attention.csa_schedule": "dynamic", "model.layers": ("csa",)},
        "attention.csa_schedule='dynamic': has no effect with backend='dot_product'; leave 'auto'",
    ),
    (
        {"attention.backend": "dot_product", "attention.block_q": 256},
        "attention.block_q=256: has no effect with backend='dot_product'; leave 0",
    ),
    (
        {"attention.backend": "blockwise", "attention.dq_reduction_steps": 3},
        "attention.dq_reduction_steps=3: has no effect with backend='blockwise'; leave 0",
    ),
    ({**SPLASH, "attention.dq_reduction_steps": 2}, "attention.dq_reduction_steps=2: must be 0 .* or 3"),
    ({**SPLASH, "attention.block_q": 100}, "attention.block_q=100: must be 0 .* or a positive multiple of 128"),
    ({**SPLASH, "attention.block_kv_dkv": -128}, "attention.block_kv_dkv=-128: must be .* positive multiple of 128"),
    ({**SPLASH, "attention.block_kv": 1024}, "attention.block_kv=1024: must be at most 512, the padded length of 512"),
    (
        {**SPLASH, "attention.block_kv": 256, "attention.block_kv_compute": 512},
        "attention.block_kv_compute=512: must divide block_kv=256",
    ),
    ({"attention.csa_stage": "warm"}, "attention.csa_stage='warm': must be one of dense, warmup, sparse"),
    (
        {"attention.csa_stage": "dense", "model.layers": ("hca",)},
        "attention.csa_stage=dense: must be sparse: model.layers has no csa layer",
    ),
    ({"attention.indexer_loss_weight": -1.0}, "attention.indexer_loss_weight=-1.0: must be 0 or more"),
    (
        {"attention.csa_stage": "dense", "attention.indexer_loss_weight": 0.5},
        "attention.indexer_loss_weight=0.5: must be 1.0 with csa_stage=dense, which has no such loss",
    ),
    (
        {"attention.csa_stage": "warmup", "attention.indexer_loss_weight": 0.0},
        "attention.indexer_loss_weight=0.0: must be positive with csa_stage=warmup, which trains nothing else",
    ),
    ({"attention.rope_width": 15}, "attention.rope_width=15: must be even"),
    ({"attention.rope_width": 34}, "attention.rope_width=34: must be at most index_head_width=32"),
    ({"attention.rope_width": 66}, "attention.rope_width=66: must be at most head_width=64"),
    ({"attention.heads_per_call": 3}, r"attention.heads_per_call=3: must be 0 \(all\) or one of 1, 2, 4, .*heads=4"),
    ({"attention.heads_at_once": 1}, r"attention.heads_at_once=1: must be 0 \(all\), or divide 4 by a multiple of 2"),
    ({"attention.heads_at_once": -2}, "attention.heads_at_once=-2: must be 0"),
    (
        {"attention.heads_at_once": 2, "attention.heads_per_call": 4},
        r"attention.heads_per_call=4: must be 0 \(all\) or one of 1, 2, the divisors of heads_at_once=2",
    ),
    (
        {
            **SPLASH,
            "attention.heads": 12,
            "attention.out_groups": 6,
            "attention.heads_at_once": 6,
            "attention.heads_per_call": 4,
        },
        r"attention.heads_per_call=4: must be 0 \(all\) or one of 1, 2, 3, 6, the divisors of heads_at_once=6",
    ),
    ({"attention.vmem_limit_kib": -1}, "attention.vmem_limit_kib=-1: must be 0"),
    ({"aot.what": ()}, r"aot.what=\(\): must be a non-empty tuple"),
    ({"aot.what": ("op", "model")}, r"aot.what=\('op', 'model'\): must be .*op, layer, step"),
    ({"aot.topology": "v9:2x2"}, "aot.topology='v9': must be .*v4, v5e, v5p, v6e, tpu7x"),
    ({"attention.heads_per_call": -1}, "attention.heads_per_call=-1: must be 0"),
    ({"attention.out_groups": 3}, "attention.out_groups=3: must be a divisor of heads=4"),
    ({"rope.yarn_factor": 0.5}, "rope.yarn_factor=0.5: must be at least 1"),
    ({"data.task": "copy"}, "data.task='copy': must be one of text, recall, needle"),
    ({"data.pairs": 3}, "data.pairs=3: must be left at its default with data.task=text"),
    ({"data.seq_len": 0}, "data.seq_len=0: must be a positive integer"),
    ({"data.batch_size": -1}, "data.batch_size=-1: must be a positive integer"),
    ({"data.chunk_len": 513}, "data.chunk_len=513: must be from 1 to seq_len=512, or 0"),
    ({"data.chunk_len": 100}, "data.chunk_len=100: .* must be a multiple of 128, .*align_starts=False"),
    ({"data.validation_fraction": 0.0}, "data.validation_fraction=0.0: must be between 0 and 1, both excluded"),
    ({"data.validation_fraction": 1.0}, "data.validation_fraction=1.0: must be between 0 and 1, both excluded"),
    ({"optimizer.warmup_steps": -1}, "optimizer.warmup_steps=-1: must be 0 or more"),
    ({"optimizer.warmup_steps": 200}, "optimizer.warmup_steps=200: must be below train.steps=200"),
    ({"optimizer.weight_decay": -0.1}, "optimizer.weight_decay=-0.1: must be 0 or more"),
    ({"optimizer.final_fraction": 1.5}, "optimizer.final_fraction=1.5: must be between 0 and 1"),
    ({"optimizer.b1": 1.0}, "optimizer.b1=1.0: must be at least 0 and below 1"),
    ({"optimizer.b2": -0.1}, "optimizer.b2=-0.1: must be at least 0 and below 1"),
    ({"train.eval_every": -1}, "train.eval_every=-1: must be 0 .* or more"),
    ({"train.checkpoint_every": -1}, "train.checkpoint_every=-1: must be 0 .* or more"),
    ({"train.keep_best": -1}, "train.keep_best=-1: must be 0 or more"),
    ({"profile.steps": -1}, "profile.steps=-1: must be from 0 to train.steps=200 less 2"),
    ({"profile.steps": 199}, "profile.steps=199: must be from 0 to train.steps=200 less 2"),
    ({"distributed.coordinator": "host"}, "distributed.coordinator='host': must be host:port, auto, or empty"),
    (PAIR | {"distributed.num_processes": 0}, "distributed.num_processes=0: must be 1 or more with .*host:1234"),
    (PAIR | {"distributed.process_id": 2}, r"distributed.process_id=2: must be from 0 to num_processes - 1 = 1"),
    ({"distributed.num_processes": 2}, "distributed.num_processes=2: must be 0, unless .*coordinator is host:port"),
    (
        {"distributed.coordinator": "auto", "distributed.process_id": 1},
        "distributed.process_id=1: must be 0, unless .*coordinator is host:port",
    ),
    ({"wandb.mode": "on"}, "wandb.mode='on': must be one of auto, online, offline, disabled"),
]
POSITIVE = {
    "model": ("repeats", "hidden", "ffn_width", "norm_eps"),
    "attention": ("window", "hca_ratio", "csa_ratio", "top_k", "heads", "head_width", "rope_width", "q_rank"),
    "rope": ("theta", "compressed_theta", "yarn_original_length", "yarn_beta_fast", "yarn_beta_slow"),
    "optimizer": ("learning_rate", "clip_norm"),
    "train": ("steps", "log_every", "eval_batches", "keep_last"),
    "bench": ("repeats", "timeout_minutes"),
    "aot": ("timeout_minutes",),
}
POSITIVE["attention"] += ("out_groups", "out_rank", "index_heads", "index_head_width")
REFUSED += [
    ({f"{group}.{name}": type(base_config()[group][name])(0)}, rf"{group}\.{name}=0(\.0)?: must be positive")
    for group, names in POSITIVE.items()
    for name in names
]
REFUSED += [({"attention.top_k": -1}, "attention.top_k=-1: must be positive")]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda case: str(case)[:60])
def test_impossible_setting_is_named_with_what_is_allowed(overrides, message):
    with pytest.raises(ConfigError) as refusal:
        validate(changed(overrides))
    assert re.match(rf"config\.{message}", str(refusal.value)), refusal.value
    assert "\n" not in str(refusal.value)


def test_every_number_has_a_bad_value_above():
    free = {"attention.sinks", "data.align_starts", "data.path", "model.tied_head", "run.id", "run.root"}
    free |= {"wandb.project", "train.start_from"}  # any text or truth value will do
    refused = {re.match(r"[a-z0-9_.]+", message.replace("\\", ""))[0] for _, message in REFUSED}
    alike = {f"attention.{name}" for name in backends.Options.__dataclass_fields__ if name.startswith("block_")}
    assert set(fields.field_names(base_config())) == refused | free | alike


def test_base_config_is_valid_at_once_and_compiles_nothing():
    config, compiled = base_config(), []

    def listen(event, *_, **__):
        if "compile" in event:
            compiled.append(event)

    for platform in ("cpu", "gpu", "tpu"):
        validate(config, platform)  # imports the backend
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        start = time.perf_counter()
        for platform in ("cpu", "gpu", "tpu"):
            validate(config, platform)
        assert time.perf_counter() - start < 0.5
        assert not compiled
        jax.jit(lambda x: x + 1)(0)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_interpreted_kernels_cannot_be_recomputed():
    config = changed({**SPLASH, "model.remat": "block"})
    with pytest.raises(NotImplementedError, match=r"config\.model\.remat=block: .*interpreted splash"):
        validate(config, "cpu")
    validate(config, "tpu")
    validate(changed({"model.remat": "block", "attention.backend": "dot_product"}), "cpu")


def test_effective_settings_of_each_kind_of_layer():
    config = changed({**SPLASH, "model.layers": ("hca", "csa", "hca"), "attention.schedule": "static"})
    settings = config_lib.effective(config, "tpu")
    assert list(settings) == ["hca", "csa"]
    assert settings["hca"].items() >= {"backend": "splash", "schedule": "static", "interpreted": False}.items()
    assert settings["csa"]["schedule"] == schedules.resolve_name("auto", "csa")
    assert {layer["block_q"] for layer in settings.values()} == {512}


@pytest.mark.parametrize(("platform", "interpreted"), [("cpu", True), ("gpu", True), ("tpu", False)])
def test_an_interpreted_indexer_is_recorded(platform, interpreted):
    config = changed({"attention.index_backend": "pallas", "attention.backend": "blockwise"})
    assert config_lib.effective(config, platform)["csa"]["index_interpreted"] is interpreted


def test_effective_heads_per_call_and_precision_are_what_is_used():
    config = changed({**SPLASH, "attention.heads_at_once": 2})
    for dtype, precision in (("float32", "highest"), ("bfloat16", "default")):
        config.model.dtype = dtype
        for layer in config_lib.effective(config, "tpu").values():
            assert (layer["heads_per_call"], layer["precision"]) == (2, precision)


@pytest.mark.parametrize(("platform", "backend"), [("cpu", "blockwise"), ("gpu", "blockwise"), ("tpu", "splash")])
def test_auto_is_recorded_as_what_it_became(platform, backend):
    settings = config_lib.effective(base_config(), platform)
    assert {layer["backend"] for layer in settings.values()} == {backend}
    assert config_lib.requested(base_config())["backend"] == "auto"


def test_requested_settings_are_recorded_as_they_were_asked():
    asked = {
        "attention.schedule": "static",
        "attention.block_q": 256,
        "attention.block_kv": 128,
        "attention.dq_reduction_steps": 3,
    }
    requested = config_lib.requested(changed({**SPLASH, **asked}))
    names = (*backends.Options.__dataclass_fields__, "index_heads_at_once", "index_entries_at_once")
    unset = {name: 0 for name in names} | {"csa_schedule": "auto", "index_backend": "auto"}
    assert requested == unset | {"backend": "splash"} | {name.partition(".")[2]: v for name, v in asked.items()}


@pytest.mark.parametrize(
    ("layers", "align", "expected"),
    [
        (("sliding",), True, 1),
        (("csa",), True, 6),
        (("hca",), True, 10),
        (("sliding", "hca", "csa"), True, 30),
        (("sliding", "hca", "csa"), False, 1),
    ],
)
def test_documents_start_where_entries_of_every_ratio_in_use_start(layers, align, expected):
    overrides = {
        "attention.csa_ratio": 6,
        "attention.hca_ratio": 10,
        "data.align_starts": align,
        "model.layers": layers,
    }
    assert config_lib.alignment(changed(overrides)) == expected
