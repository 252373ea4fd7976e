"""Checkpoints in, out and round: that of the whole model's fixture, rewritten into what the world has."""

import io
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import rich.console

from experiments import deepseek_v4
from research.errors import ConfigError
from research.importing import config as config_lib
from research.importing import safetensors, weights
from research.importing.safetensors import Outgoing
from research.runs import checkpoints
from research.runs import source as sources
from research.settings.config import base_config, read
from research.settings.fields import override
from research.training import run
from tests.parity import whole

ROOT = pathlib.Path(__file__).parents[2]
PUBLISHED = whole.FOLDER / "weights"
QUIET = rich.console.Console(quiet=True)


def arrays(folder):
    return {name: tensor.read() for name, tensor in safetensors.tensors(folder).items()}


def checkpoint(folder, tensors):
    folder.mkdir(parents=True)
    shutil.copy(PUBLISHED / "config.json", folder)
    listed = {name: Outgoing(array.shape, array.dtype, lambda array=array: array) for name, array in tensors.items()}
    safetensors.write(folder / "model.safetensors", listed)
    return folder


def load(source, root, name="imported", console=QUIET):
    settings = whole.settings(source).replace(run={"root": str(root), "id": name})
    return weights.load(source, settings, console), settings


def params(settings):
    like = weights.shapes(settings)._replace(opt_state=())
    folder = pathlib.Path(settings.run.root) / settings.run.id
    return checkpoints.read(folder / checkpoints.FOLDER, 0, like).state.params


@pytest.fixture(scope="module")
def imported(tmp_path_factory):
    return load(PUBLISHED, tmp_path_factory.mktemp("runs"))


def assert_same(one, other):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), one, other)


def test_all_of_a_checkpoint_is_in_the_run(imported):
    summary, settings = imported
    assert summary["imported"]["tensors"] == len(safetensors.tensors(PUBLISHED))
    assert_same(params(settings), whole.from_folder(PUBLISHED, settings))
    assert not (pathlib.Path(settings.run.root) / "imported" / "importing").exists()


def published_names(tensors):
    """What `save_pretrained` wrote, in the published dialect."""
    renamed = {}
    for name, array in tensors.items():
        name = name.removeprefix("model.").replace(".attn.norm.", ".attn.kv_norm.")
        renamed[name.replace("embed_tokens.", "embed.").replace("hc_head.hc_", "hc_head_")] = array
    return renamed


def module_names(tensors):
    """The same under the names of transformers' modules, experts in two tensors."""
    plain = {
        "attn.wq_a": "self_attn.q_a_proj",
        "attn.q_norm": "self_attn.q_a_norm",
        "attn.wq_b": "self_attn.q_b_proj",
        "attn.wkv": "self_attn.kv_proj",
        "attn.norm": "self_attn.kv_norm",
        "attn.wo_a": "self_attn.o_a_proj",
        "attn.wo_b": "self_attn.o_b_proj",
        "attn.attn_sink": "self_attn.sinks",
        "ffn.gate.weight": "mlp.gate.weight",
        "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
        "ffn.gate.tid2eid": "mlp.gate.tid2eid",
        "ffn.shared_experts.w1": "mlp.shared_experts.gate_proj",
        "ffn.shared_experts.w2": "mlp.shared_experts.down_proj",
        "ffn.shared_experts.w3": "mlp.shared_experts.up_proj",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        **{f"hc_{part}_{what}": f"{part}_hc.{what}" for part in ("attn", "ffn") for what in ("fn", "base", "scale")},
    }
    for there, here in (("compressor", "compressor"), ("indexer.compressor", "compressor.indexer")):
        for ours, theirs in (("wkv", "kv_proj"), ("wgate", "gate_proj"), ("ape", "position_bias"), ("norm", "kv_norm")):
            plain[f"attn.{there}.{ours}"] = f"self_attn.{here}.{theirs}"
    plain["attn.indexer.wq_b"] = "self_attn.compressor.indexer.q_b_proj"
    plain["attn.indexer.weights_proj"] = "self_attn.compressor.indexer.scorer.weights_proj"
    renamed, experts = {}, {}
    for name, array in tensors.items():
        parts = name.split(".")
        if parts[1] != "layers":
            renamed["lm_head.weight" if name == "head.weight" else name] = array
        elif "experts" in parts:
            experts[int(parts[2]), int(parts[5]), parts[6]] = array
        else:
            own = ".".join(parts[3:])
            stem = own if own in plain else own.removesuffix(".weight")
            renamed[f"model.layers.{parts[2]}.{plain[stem]}{own.removeprefix(stem)}"] = array
    for layer in {layer for layer, _, _ in experts}:
        count = 1 + max(expert for its, expert, _ in experts if its == layer)
        of = f"model.layers.{layer}.mlp.experts"
        both = [np.concatenate([experts[layer, x, "w1"], experts[layer, x, "w3"]]) for x in range(count)]
        renamed[f"{of}.gate_up_proj"] = np.stack(both)
        renamed[f"{of}.down_proj"] = np.stack([experts[layer, x, "w2"] for x in range(count)])
    return renamed


@pytest.mark.parametrize("dialect", [published_names, module_names])
def test_all_dialects_say_the_same(imported, tmp_path, dialect):
    tensors = dialect(arrays(PUBLISHED))
    assert tensors.keys() != arrays(PUBLISHED).keys()
    summary, settings = load(checkpoint(tmp_path / "other", tensors), tmp_path / "runs")
    assert summary["imported"]["digest"] == imported[0]["imported"]["digest"]
    assert_same(params(settings), params(imported[1]))


def test_published_dtypes_are_read(tmp_path):
    """FP8 and FP4 with scales, bfloat16; and blocks that predict further tokens, which are left out."""
    tensors, expected = published_names(arrays(PUBLISHED)), {}
    rng = np.random.RandomState(0)
    for name, array in list(tensors.items()):
        scale = name.removesuffix(".weight") + ".scale"
        if ".experts." in name:
            shape = (array.shape[0], array.shape[1] // 2)
            tensors[name] = rng.randint(-128, 128, shape).astype(np.int8)
            tensors[scale] = rng.randint(120, 130, (array.shape[0], 2)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
            expected[name] = weights.quantized.values(name, tensors[name], tensors[scale])
        elif name.endswith(("wq_a.weight", "wo_b.weight")):
            tensors[name] = array.astype(ml_dtypes.float8_e4m3fn)
            tensors[scale] = rng.randint(120, 130, (2, 2)).astype(np.uint8).view(ml_dtypes.float8_e8m0fnu)
            expected[name] = weights.quantized.values(name, tensors[name], tensors[scale])
        elif name.endswith(("wkv.weight", "norm.weight", "gate.weight", "embed.weight")):
            tensors[name] = array.astype(ml_dtypes.bfloat16)
            expected[name] = tensors[name].astype(np.float32)
    numbers = {name: expected.get(name, a) for name, a in tensors.items() if not name.endswith(".scale")}
    plain = checkpoint(tmp_path / "plain", numbers)
    tensors["mtp.0.enorm.weight"] = np.ones(16, np.float32)
    console = rich.console.Console(record=True, width=200, file=io.StringIO())
    summary, settings = load(checkpoint(tmp_path / "published", tensors), tmp_path / "runs", "one", console)
    assert "leaves out 1 tensors that predict further tokens" in console.export_text()
    assert summary["imported"]["left_out"] == 1
    other, plain_settings = load(plain, tmp_path / "runs", "two")
    assert summary["imported"]["digest"] == other["imported"]["digest"]
    assert_same(params(settings), params(plain_settings))


def without(name):
    return lambda tensors: {n: a for n, a in tensors.items() if n != name}


def changed(name, change):
    return lambda tensors: tensors | {name: change(tensors[name])}


TABLE = "model.layers.0.ffn.gate.tid2eid"
NORM = "model.layers.1.attn.norm.weight"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without("head.weight"), r"missing: head\.weight$"),
        (without("model.layers.4.ffn.experts.5.w2.weight"), r"missing: layers\.4\.ffn\.experts\.5\.w2\.weight"),
        (lambda t: t | {"model.layers.9.attn_norm.weight": np.ones(16)}, r"unknown: layers\.9\.attn_norm\.weight"),
        (lambda t: t | {"model.layers.1.attn.norm": np.ones(16)}, r"unknown: layers\.1\.attn\.kv_norm$"),
        (lambda t: t | {"model.layers.0.attn.wkv.scale": np.ones((3, 1), np.float32)}, "do not divide"),
        (
            lambda t: t | {"model.layers.0.ffn.gate.bias": np.ones(6, np.float32)},
            r"unknown: layers\.0\.ffn\.gate\.bias",
        ),
        (
            changed(NORM, lambda a: a[:-1]),
            r"of another shape: layers\.1\.attn\.kv_norm\.weight \[15\] instead of \[16\]",
        ),
        (changed("model.layers.0.attn.wq_b.weight", np.transpose), r"wq_b\.weight \[8, 64\] instead of \[64, 8\]"),
        (changed(TABLE, lambda a: a.astype(np.float32)), r"of another kind: .*tid2eid of float32 for int32"),
        (changed(NORM, lambda a: a.astype(np.int64)), r"of another kind: .*of int64 for float32"),
        (changed(NORM, lambda a: a.astype(ml_dtypes.float8_e4m3fn)), r"of another kind: .*of float8_e4m3fn"),
        (changed(TABLE, np.zeros_like), r"gives token id 0 the experts \[0, 0\], one of them twice"),
        (changed(TABLE, lambda a: a + 5), r"must be from 0 to 5"),
        (lambda t: t | {"layers.1.attn.kv_norm.weight": t[NORM]}, r"are both layers\.1\.attn\.kv_norm\.weight"),
    ],
)
def test_a_tensor_that_is_wrong_is_named(tmp_path, change, said):
    source = checkpoint(tmp_path / "wrong", change(arrays(PUBLISHED)))
    with pytest.raises(ConfigError, match=said):
        load(source, tmp_path / "runs")


def test_what_is_refused_by_its_names_leaves_nothing(tmp_path):
    source = checkpoint(tmp_path / "wrong", without("head.weight")(arrays(PUBLISHED)))
    with pytest.raises(ConfigError):
        load(source, tmp_path / "runs")
    assert not (tmp_path / "runs").exists()


def test_another_runs_folder_is_left_alone(imported, tmp_path):
    _, settings = imported
    other = settings.replace(experts={"scale": 2.0})
    with pytest.raises(ConfigError, match="holds another run"):
        weights.load(PUBLISHED, other, QUIET)
    assert weights.load(PUBLISHED, settings, QUIET) == imported[0]  # it is done


# Imports, and stops at the fortieth tensor.
STOPPED = """
import pathlib, sys, time
from research.importing.layout import Part
from tests.importing.test_weights import load, PUBLISHED
ours, seen = Part.ours, []
def slow(self, array):
    seen.append(self.name)
    if len(seen) == 40:
        print("forty", flush=True)
        time.sleep(600)
    return ours(self, array)
Part.ours = slow
load(PUBLISHED, pathlib.Path(sys.argv[1]))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_an_import_that_was_stopped_goes_on(imported, tmp_path, number):
    command = [sys.executable, "-c", STOPPED, str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert process.stdout.readline() == b"forty\n"
    process.send_signal(number)
    process.wait(60)
    console = rich.console.Console(record=True, width=200, file=io.StringIO())
    summary, settings = load(PUBLISHED, tmp_path, console=console)
    assert "goes on after 39 of 229 tensors" in console.export_text()
    assert summary["imported"]["digest"] == imported[0]["imported"]["digest"]
    assert_same(params(settings), params(imported[1]))


def test_an_import_of_other_files_does_not_go_on(imported, tmp_path):
    source = checkpoint(tmp_path / "source", arrays(PUBLISHED))
    work = tmp_path / "runs" / "imported" / "importing"
    work.mkdir(parents=True)
    (work / "source.json").write_text("{}")
    (work / "done.jsonl").write_text(json.dumps({"name": "head.weight", "sha256": "0"}) + "\n")
    summary, _ = load(source, tmp_path / "runs")
    assert summary["imported"]["digest"] == imported[0]["imported"]["digest"]


def test_what_is_exported_is_what_was_imported(imported, tmp_path):
    _, settings = imported
    found = sources.find("ID", settings.run.root, "imported")
    weights.save(found, tmp_path / "out", "float32", QUIET)
    assert whole.settings(tmp_path / "out").experts == whole.settings(PUBLISHED).experts
    there, here = arrays(tmp_path / "out"), published_names(arrays(PUBLISHED))
    assert there.keys() == here.keys()
    for name, array in here.items():
        assert there[name].dtype == array.dtype, name
        np.testing.assert_array_equal(there[name], array)
    with pytest.raises(ConfigError, match="is there already"):
        weights.save(found, tmp_path / "out", "float32", QUIET)


def test_an_export_in_bfloat16_keeps_what_is_float32_in_published_weights(imported, tmp_path, monkeypatch):
    monkeypatch.setattr(weights, "_FILE_BYTES", 50_000)
    files = weights.save(sources.find("ID", imported[1].run.root, "imported"), tmp_path / "out", "bfloat16", QUIET)
    assert len(files) > 2
    there = arrays(tmp_path / "out")
    index = json.loads((tmp_path / "out" / safetensors.INDEX).read_text())
    assert index["weight_map"].keys() == there.keys()
    kept = {name for name, array in there.items() if array.dtype == np.float32}
    assert {"layers.1.hc_attn_fn", "layers.1.attn.attn_sink", "layers.1.ffn.gate.bias", "hc_head_fn"} <= kept
    assert there["layers.1.attn.compressor.ape"].dtype == np.float32
    assert there["embed.weight"].dtype == ml_dtypes.bfloat16
    assert there["layers.0.ffn.gate.tid2eid"].dtype == np.int64


def test_training_starts_from_imported_weights(tmp_path):
    """And what it makes of them can be exported."""
    described = deepseek_v4._TINY | {"num_hidden_layers": 1, "compress_ratios": [0], "num_hash_layers": 0}
    config = base_config()
    override(config, config_lib.overrides(described | {"hidden_size": 16, "n_routed_experts": 4}))

    def train(name, **how):
        settings = read(config).replace(
            data={"seq_len": 64, "batch_size": 1, "path": str(ROOT / "research")},
            train={"eval_batches": 1, **how},
            optimizer={"warmup_steps": 0},
            run={"root": str(tmp_path), "id": name},
            wandb={"mode": "disabled"},
        )
        return run.run(settings, {}, QUIET)

    train("first", steps=1)
    weights.save(sources.find("ID", str(tmp_path), "first"), tmp_path / "out", "float32", QUIET)
    made = whole.settings(tmp_path / "out").replace(run={"root": str(tmp_path), "id": "again"})
    weights.load(tmp_path / "out", made, QUIET)
    summary = train("second", steps=2, start_from="again")
    assert (summary["status"], summary["started_from"]["run"]) == ("ok", str(tmp_path / "again"))
    with pytest.raises(ConfigError, match=r"start_from='again@7': .* has no checkpoint 7"):
        train("third", steps=2, start_from="again@7")
