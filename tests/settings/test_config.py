import ast
import dataclasses
import json
import pathlib
import pickle
import re
import sys
import time

import jax
import pytest
import rich.console

from research import data
from research.attention.attend import Sizes
from research.attention.spec import Spec
from research.errors import ConfigError, SettingError
from research.runs import tracking
from research.settings import fields
from research.settings.attention import Attention, Kernel
from research.settings.config import Settings, base_config, from_json, groups, read
from research.settings.group import NOT_NEGATIVE, POSITIVE, UNSET_OR_MORE, Group
from research.training import run
from research.validation import notes, validate
from tests import tiny

ROOT = pathlib.Path(__file__).parents[2]


def changed(overrides):
    """Settings with overrides, as a command line makes them."""
    config = base_config()
    fields.override(config, overrides)
    return read(config)


def test_every_setting_has_a_meaning_and_a_default_of_its_type():
    for name, group in groups():
        assert group.group == name
        assert group.__doc__
        for field in dataclasses.fields(group):
            assert field.metadata["meaning"], field.name
            written = "tuple" if isinstance(field.default, tuple) else type(field.default).__name__
            assert str(getattr(field.type, "__name__", field.type)).startswith(written), field.name
            assert isinstance(field.default, bool | int | float | str | tuple), (
                field.name
            )  # None could not be overridden


def test_all_fields_can_be_overridden():
    names = fields.field_names(base_config())
    assert set(names) == {"seed"} | {
        f"{name}.{field.name}" for name, group in groups() for field in dataclasses.fields(group)
    }
    for name in names:
        setting = fields.value(base_config(), name)
        fields.override(base_config(), {name: setting})


def test_misspelled_field_cannot_be_set():
    config = base_config()
    assert config.is_locked
    for group, name in ((config, "sed"), (config.attention, "blok_q"), (config.data, "length")):
        with pytest.raises(AttributeError, match=name):
            setattr(group, name, 1)
        with pytest.raises(AttributeError, match=name):
            getattr(group, name)


def test_settings_come_back_from_configs_and_files_as_they_were():
    settings = changed({"model.layers": ("hca",), "attention.block_q": 128, "seed": 3, "aot.what": ("op", "step")})
    assert settings != Settings()
    assert read(base_config()) == Settings()
    stored = json.loads(json.dumps(fields.as_json(settings)))
    assert from_json(stored) == settings
    del stored["attention"]["window"], stored["profile"]  # as a run from before they existed has it
    assert from_json(stored) == settings
    assert settings.replace(data={"seq_len": 64}).data.seq_len == 64


def test_nothing_can_be_changed_once_it_is_read():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Settings().attention.window = 3


def test_settings_of_one_kind_leave_the_others_out():
    settings = changed({"attention.csa_schedule": "stream", "attention.schedule": "static", "model.repeats": 3})
    alone = {kind: settings.for_kind(kind) for kind in settings.model.layers}
    assert {kind: of.model.layers for kind, of in alone.items()} == {kind: (kind,) for kind in alone}
    schedules = {kind: (of.attention.schedule, of.attention.csa_schedule) for kind, of in alone.items()}
    assert schedules == {"sliding": ("static", "auto"), "hca": ("static", "auto"), "csa": ("auto", "stream")}


def test_an_error_survives_the_way_from_one_process_to_another():
    error = SettingError("data.path", "x", "there")
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.value) == ("config.data.path='x': must be there", "data.path", "x")


def written_reads() -> set[str]:
    """`group.field` for every `anything.group.field` in the sources: what launchers read is not run here."""
    found = set()
    for path in (*ROOT.glob("research/**/*.py"), *ROOT.glob("launch/*.py")):
        if path.parent.name != "settings":
            chains = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)]
            found |= {f"{node.value.attr}.{node.attr}" for node in chains if isinstance(node.value, ast.Attribute)}
    return found


def test_every_setting_is_read(monkeypatch, tmp_path):
    """By a run with YaRN and wandb, by the backend that has options, or by a launcher; checks do not count."""
    reads = set()

    def get(self, name):
        where = sys._getframe(1).f_code.co_filename.removeprefix(f"{ROOT}/research/")
        if not where.startswith(("/", "settings/")):
            reads.add(f"{type(self).group}.{name}".lstrip("."))
        return object.__getattribute__(self, name)

    (tmp_path / "text").mkdir()
    for name in "abcdefgh":
        (tmp_path / "text" / name).write_text(f"A few words of text {name}. " * 20)
    config = tiny.get_config()
    config.model.update(prefix=("sliding",), layers=("csa",), streams=2)
    config.experts.count = 4
    config.rope.yarn_factor = 2.0
    config.data.update(path=str(tmp_path / "text"), seq_len=16, batch_size=1, validation_fraction=0.4)
    config.train.update(steps=1, eval_batches=1)
    config.optimizer.warmup_steps = 0
    config.run.update(root=str(tmp_path / "runs"), id="one")
    config.wandb.mode = "offline"
    monkeypatch.setattr(tracking, "_PROGRAM", "research.runs.nothing")  # wandb is told, and need not be there
    monkeypatch.setattr(Group, "__getattribute__", get)
    run.run(read(config), {}, rich.console.Console(quiet=True))
    config.attention.backend = "splash"
    validate(read(config))
    config.attention.backend = "joined"
    validate(read(config))
    data.task(Settings().replace(data={"task": "needle"}))
    names = {*fields.field_names(base_config()), "train.read_by_nobody"}
    assert names - reads - written_reads() == {"train.read_by_nobody"}


FLOATS = [
    f"{name}.{field.name}" for name, group in groups() for field in dataclasses.fields(group) if field.type is float
]
NO_NUMBERS = [float("nan"), float("inf"), float("-inf")]
PAIR = {"distributed.coordinator": "host:1234", "distributed.num_processes": 2}
SPLASH = {"attention.backend": "splash"}
REFUSED = [
    ({"seed": -1}, "seed=-1: must be an integer from 0 to 4294967295"),
    ({"seed": 2**32}, "seed=4294967296: must be an integer from 0 to 4294967295"),
    ({"seed": 2**64 + 1}, "seed=18446744073709551617: must be an integer from 0 to"),
    ({"model.layers": ()}, r"model.layers=\(\): must be a non-empty tuple with members among sliding, hca, csa"),
    ({"model.layers": ("hca,csa",)}, r"model.layers=\('hca,csa',\): must be .* among sliding, hca, csa"),
    ({"model.layers": ("hca", "HCA")}, r"model.layers=\('hca', 'HCA'\): must be .* among sliding, hca, csa"),
    ({"model.prefix": ("abc",)}, r"model.prefix=\('abc',\): must be a tuple with members among sliding, hca, csa"),
    ({"model.sinkhorn_rounds": 5}, "model.sinkhorn_rounds=5: must be left at 20 with model.streams=1"),
    ({"model.streams_eps": 1e-5}, "model.streams_eps=1e-05: must be left at 1e-06 with model.streams=1"),
    ({"experts.per_token": 3}, "experts.per_token=3: must be left at 2 with experts.count=0"),
    ({"experts.count": 4, "experts.per_token": 5}, "experts.per_token=5: must be from 1 to experts.count=4"),
    ({"experts.shared": 2}, "experts.shared=2: must be 0 or 1"),
    ({"experts.backend": "sparse"}, "experts.backend='sparse': must be one of auto, dense, blocks, ragged"),
    (
        {"experts.count": 4, "experts.backend": "dense", "experts.block_rows": 8},
        "experts.block_rows=8: must be left at 0 with experts.backend=dense",
    ),
    ({"experts.count": 4, "experts.hash_layers": 4}, "experts.hash_layers=4: must be from 0 to 3, the layers of"),
    (
        {"experts.count": 4, "experts.hash_layers": 2, "model.prefix": ("hca",), "model.repeats": 2},
        "experts.hash_layers=2: must be from 0 to 1, the layers of model.prefix",
    ),
    (
        {"experts.count": 4, "experts.hash_layers": 3, "experts.balance_rate": 0.1},
        "experts.balance_rate=0.1: must be left at 0.001: all layers are hash layers",
    ),
    (
        {"experts.count": 4, "experts.hash_layers": 3, "experts.balance_weight": 0.1},
        "experts.balance_weight=0.1: must be left at 0.0001: all layers are hash layers",
    ),
    ({"model.dtype": "float16"}, "model.dtype='float16': must be one of float32, bfloat16"),
    ({"attention.flash_kernel": "cuda"}, "attention.flash_kernel='cuda': must be one of auto, mosaic, triton, xla"),
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
        "attention.index_backend='xla': must be left at 'auto': model.layers has no csa layer",
    ),
    (
        {"attention.index_heads_at_once": 2, "attention.csa_stage": "dense"},
        "attention.index_heads_at_once=2: must be left at 0 with csa_stage=dense",
    ),
    (
        {**SPLASH, "attention.csa_schedule": "static"},
        "attention.csa_schedule='static': must be .*dynamic, hybrid, which can express csa",
    ),
    (
        {**SPLASH, "attention.csa_schedule": "dynamic", "model.layers": ("hca",)},
        "attention.csa_schedule='dynamic': must be left at 'auto': model.layers has no csa layer",
    ),
    (
        {**SPLASH, "attention.schedule": "static", "model.layers": ("csa",)},
        "attention.schedule='static': must be auto: model.layers has only csa layers",
    ),
    (
        {"attention.backend": "dot_product", "attention.csa_schedule": "dynamic", "model.layers": ("csa",)},
        "attention.csa_schedule='dynamic': must be left at 'auto': it has no effect with backend='dot_product'",
    ),
    (
        {"attention.backend": "dot_product", "attention.block_q": 256},
        "attention.block_q=256: must be left at 0: it has no effect with backend='dot_product'",
    ),
    (
        {"attention.backend": "blockwise", "attention.dq_reduction_steps": 3},
        "attention.dq_reduction_steps=3: must be left at 0: it has no effect with backend='blockwise'",
    ),
    ({**SPLASH, "attention.dq_reduction_steps": 2}, "attention.dq_reduction_steps=2: must be 0 .* or 3"),
    ({**SPLASH, "attention.block_q": 100}, "attention.block_q=100: must be 0 .* or a positive multiple of 128"),
    ({**SPLASH, "attention.block_kv_dkv": -128}, "attention.block_kv_dkv=-128: must be .* positive multiple of 128"),
    ({**SPLASH, "attention.block_kv": 1024}, "attention.block_kv=1024: must be at most 512, the padded length of 512"),
    (
        {**SPLASH, "attention.block_kv": 256, "attention.block_kv_compute": 512},
        "attention.block_kv_compute=512: must be a divisor of block_kv=256",
    ),
    ({"attention.csa_stage": "warm"}, "attention.csa_stage='warm': must be one of dense, warmup, sparse"),
    (
        {"attention.csa_stage": "dense", "model.layers": ("hca",)},
        "attention.csa_stage='dense': must be left at 'sparse': model.layers has no csa layer",
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
    (
        {**SPLASH, "attention.heads_per_call": 3},
        r"attention.heads_per_call=3: must be 0 \(all\) or one of 1, 2, 4, .*4 heads",
    ),
    ({"attention.heads_at_once": 1}, r"attention.heads_at_once=1: must be 0 \(all\), or divide 4 by a multiple of 2"),
    ({"attention.heads_at_once": -2}, "attention.heads_at_once=-2: must be 0"),
    (
        {**SPLASH, "attention.heads_at_once": 2, "attention.heads_per_call": 4},
        r"attention.heads_per_call=4: must be 0 \(all\) or one of 1, 2, the divisors of the 2 heads of a call",
    ),
    (
        {
            **SPLASH,
            "attention.heads": 12,
            "attention.out_groups": 6,
            "attention.heads_at_once": 6,
            "attention.heads_per_call": 4,
        },
        r"attention.heads_per_call=4: must be 0 \(all\) or one of 1, 2, 3, 6, the divisors of the 6 heads of a call",
    ),
    ({"attention.vmem_limit_kib": -1}, "attention.vmem_limit_kib=-1: must be 0"),
    ({"aot.what": ()}, r"aot.what=\(\): must be a non-empty tuple"),
    ({"aot.what": ("op", "model")}, r"aot.what=\('op', 'model'\): must be .*op, layer, step"),
    ({"aot.topology": "v9:2x2"}, "aot.topology='v9:2x2': must be .*v4, v5e, v5p, v6e, tpu7x"),
    ({**SPLASH, "attention.heads_per_call": -1}, "attention.heads_per_call=-1: must be 0"),
    ({"attention.out_groups": 3}, "attention.out_groups=3: must be a divisor of heads=4"),
    ({"rope.yarn_factor": 0.5}, "rope.yarn_factor=0.5: must be at least 1"),
    ({"data.task": "copy"}, "data.task='copy': must be one of text, recall, needle"),
    ({"data.pairs": 3}, "data.pairs=3: must be left at 0 with data.task=text"),
    ({"data.seq_len": 0}, "data.seq_len=0: must be positive"),
    ({"data.batch_size": -1}, "data.batch_size=-1: must be positive"),
    ({"data.chunk_len": 513}, "data.chunk_len=513: must be from 1 to seq_len=512, or 0"),
    ({"data.chunk_len": 100}, "data.chunk_len=100: must be a multiple of 128, .*align_starts=False"),
    ({"data.validation_fraction": 0.0}, "data.validation_fraction=0.0: must be between 0 and 1, both excluded"),
    *[({name: value}, f"{name}={value}: must be finite") for name in FLOATS for value in NO_NUMBERS],
    *[({"run.id": name}, f"run.id='{name}': must be a relative path") for name in (".", "..", "a/../b", "/a", "a//b")],
    ({"run.id": 256 * "x"}, "run.id='x*': must be .*255 bytes"),
    ({"run.root": ""}, "run.root='': must be a folder"),
    ({"train.accumulate": 3}, "train.accumulate=3: must be a divisor of data.batch_size=4"),
    ({"train.accumulate": 0}, "train.accumulate=0: must be positive"),
    ({"train.ahead": -1}, "train.ahead=-1: must be 0 or more"),
    *[
        ({f"rope.yarn_{name}": value}, f"rope.yarn_{name}={value}: must be left at .* with yarn_factor=1")
        for name, value in (("original_length", 2), ("beta_fast", 2.0), ("beta_slow", 2.0))
    ],
    ({"rope.yarn_factor": 2.0, "rope.yarn_beta_slow": 32.0}, "rope.yarn_beta_slow=32.0: must be below yarn_beta_fast"),
    ({"data.validation_fraction": float("nan")}, "data.validation_fraction=nan: must be finite and between 0 and 1"),
    ({"data.validation_fraction": -0.1}, "data.validation_fraction=-0.1: must be between 0 and 1"),
    ({"data.chunk_len": -1}, "data.chunk_len=-1: must be 0 or more"),
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
    ({"profile.steps": -1}, "profile.steps=-1: must be 0 or more"),
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
# What a kind of range refuses, in every field that has it.
BEYOND = {POSITIVE: 0, NOT_NEGATIVE: -1, UNSET_OR_MORE: -1}
REFUSED += [
    (
        {f"{name}.{field.name}": type(field.default)(BEYOND[field.metadata["allowed"]])},
        rf"{name}\.{field.name}=-?[01](\.0)?: must be {re.escape(field.metadata['allowed'].words)}",
    )
    for name, group in groups()
    for field in dataclasses.fields(group)
    if field.metadata["allowed"] in BEYOND
]
REFUSED += [({"attention.top_k": -1}, "attention.top_k=-1: must be positive")]


@pytest.mark.parametrize(("overrides", "message"), REFUSED, ids=lambda case: str(case)[:60])
def test_impossible_setting_is_named_with_what_is_allowed(overrides, message):
    with pytest.raises(ConfigError) as refusal:
        validate(changed(overrides))
    assert re.match(rf"config\.{message}", str(refusal.value)), refusal.value
    assert "\n" not in str(refusal.value)


IDLE = {
    **dict.fromkeys(("attention.csa_ratio", "attention.top_k", "attention.index_heads"), ("sliding", "hca")),
    **dict.fromkeys(("attention.index_head_width", "attention.indexer_loss_weight"), ("sliding", "hca")),
    "attention.hca_ratio": ("sliding", "csa"),
    **dict.fromkeys(("rope.compressed_theta", "rope.yarn_factor"), ("sliding",)),
}


@pytest.mark.parametrize("name", IDLE)
def test_a_setting_that_no_layer_reads_may_stand_in_a_config_and_is_no_override(name):
    """A config sets it for the kinds that a sweep varies."""
    settings = changed({"model.layers": IDLE[name], name: fields.value(base_config(), name) * 2})
    with pytest.raises(SettingError, match=rf"{name}=.*: must be left at .*: model.layers has no "):
        settings.refuse_idle([name, "seed", "attention.window"])
    Settings().refuse_idle([name])
    changed({name: fields.value(base_config(), name) * 2}).refuse_idle([name])


@pytest.mark.parametrize(
    ("overrides", "note"),
    [
        ({"attention.window": 512}, "attention.window=512: no effect on sequences of 512 tokens"),
        ({"attention.hca_ratio": 513}, "attention.hca_ratio=513: sequences of 512 tokens have no entry"),
        ({"attention.csa_ratio": 1024}, "attention.csa_ratio=1024: sequences of 512 tokens have no entry"),
        ({"attention.top_k": 128}, "attention.top_k=128: no effect on sequences of 512 tokens, which have 128 entries"),
        ({"attention.indexer_loss_weight": 0.0}, "attention.indexer_loss_weight=0.0: the indexer selects and is not"),
    ],
    ids=str,
)
def test_what_only_this_length_leaves_idle_is_noted(overrides, note):
    overrides = overrides | {"data.align_starts": False}
    (said,) = notes(validate(changed(overrides)))
    assert said.startswith(f"config.{note}")
    assert notes(validate(Settings())) == []


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("train.steps", "5e0", 5),
        ("train.steps", "4.0", 4),
        ("train.steps", "0x10", 16),
        ("optimizer.learning_rate", "1", 1.0),
        ("attention.sinks", "False", False),
        ("model.layers", "hca", ("hca",)),
        ("model.layers", "hca,csa", ("hca", "csa")),
        ("model.layers", "('hca', 'csa')", ("hca", "csa")),
        ("data.path", "a=b", "a=b"),
    ],
)
def test_texts_of_command_lines_become_values(name, text, value):
    found = fields.from_text(base_config(), name, text)
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("train.steps", "5.5", "an integer"),
        ("train.steps", "many", "an integer"),
        ("train.steps", "inf", "an integer"),
        ("train.steps", "", "an integer"),
        ("optimizer.learning_rate", "fast", "a number"),
        ("attention.sinks", "maybe", "true or false"),
        ("model.layers", "('hca'", "words, as csa,hca"),
        ("model.layers", "(1, 2)", "words, as csa,hca"),
    ],
)
def test_texts_of_another_type_are_refused(name, text, words):
    with pytest.raises(SettingError, match=re.escape(f"config.{name}={text!r}: must be {words}")):
        fields.from_text(base_config(), name, text)


def test_every_number_has_a_bad_value_above():
    free = {"attention.sinks", "data.align_starts", "data.path", "model.tied_head", "run.id", "run.root"}
    free |= {"wandb.project", "train.start_from"}  # any text or truth value will do
    refused = {re.match(r"[a-z0-9_.]+", message.replace("\\", ""))[0] for _, message in REFUSED}
    alike = {f"attention.{name}" for name in Kernel.__dataclass_fields__ if name.startswith("block_")}
    assert set(fields.field_names(base_config())) == refused | free | alike


def test_base_config_is_valid_at_once_and_compiles_nothing():
    settings, compiled = Settings(), []

    def listen(event, *_, **__):
        if "compile" in event:
            compiled.append(event)

    for platform in ("cpu", "gpu", "tpu"):
        validate(settings, platform)  # imports the backend
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        start = time.perf_counter()
        for platform in ("cpu", "gpu", "tpu"):
            validate(settings, platform)
        assert time.perf_counter() - start < 0.5
        assert not compiled
        jax.jit(lambda x: x + 1)(0)
        assert compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_interpreted_kernels_cannot_be_recomputed():
    settings = changed({**SPLASH, "model.remat": "block"})
    with pytest.raises(NotImplementedError, match=r"config\.model\.remat=block: .*interpreted splash"):
        validate(settings, "cpu")
    validate(settings, "tpu")
    validate(changed({"model.remat": "block", "attention.backend": "dot_product"}), "cpu")


def effective(overrides, platform):
    return validate(changed(overrides), platform).effective()


def test_effective_settings_of_each_kind_of_layer():
    asked = {**SPLASH, "model.layers": ("hca", "csa", "hca"), "attention.schedule": "static"}
    settings = effective(asked, "tpu")
    assert list(settings) == ["hca", "csa"]
    assert settings["hca"].items() >= {"backend": "splash", "schedule": "static", "interpreted": False}.items()
    assert settings["csa"]["schedule"] == "hybrid"
    assert {layer["block_q"] for layer in settings.values()} == {512}


@pytest.mark.parametrize(("platform", "interpreted"), [("cpu", True), ("gpu", True), ("tpu", False)])
def test_an_interpreted_indexer_is_recorded(platform, interpreted):
    asked = {"attention.index_backend": "pallas", "attention.backend": "blockwise"}
    assert effective(asked, platform)["csa"]["index_interpreted"] is interpreted


@pytest.mark.parametrize(("dtype", "precision"), [("float32", "highest"), ("bfloat16", "default")])
def test_effective_heads_per_call_and_precision_are_what_is_used(dtype, precision):
    asked = {**SPLASH, "attention.heads_at_once": 2, "model.dtype": dtype}
    for layer in effective(asked, "tpu").values():
        assert (layer["heads_per_call"], layer["precision"]) == (2, precision)


@pytest.mark.parametrize(("platform", "backend"), [("cpu", "blockwise"), ("gpu", "joined"), ("tpu", "splash")])
def test_auto_is_recorded_as_what_it_became(platform, backend):
    assert {layer["backend"] for layer in effective({}, platform).values()} == {backend}
    assert Attention().requested()["backend"] == "auto"


def test_the_op_says_what_it_will_do_for_other_sizes():
    attend = Spec.make(changed(SPLASH), "tpu").attend("hca")
    assert attend.effective(Sizes(128, 2, 64, "bfloat16", packed=False))["block_q"] == 128


def test_requested_settings_are_recorded_as_they_were_asked():
    asked = {
        "attention.schedule": "static",
        "attention.block_q": 256,
        "attention.block_kv": 128,
        "attention.dq_reduction_steps": 3,
    }
    requested = changed({**SPLASH, **asked}).attention.requested()
    names = (*Kernel.__dataclass_fields__, "index_heads_at_once", "index_entries_at_once")
    unset = {name: 0 for name in names} | {"csa_schedule": "auto", "flash_kernel": "auto"}
    unset["index_backend"] = "auto"
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
    assert Spec.make(changed(overrides)).alignment == expected
