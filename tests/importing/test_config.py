import json

import pytest

from experiments import deepseek_v4
from research.errors import ConfigError
from research.importing import config
from research.settings.config import Settings, base_config, read
from research.settings.fields import override

TINY = deepseek_v4._TINY


def settings(described):
    made = base_config()
    override(made, config.overrides(described))
    return read(made)


@pytest.mark.parametrize(
    ("name", "prefix", "repeated", "repeats"),
    [
        ("flash", ("sliding", "sliding", "csa"), ("hca", "csa"), 20),
        ("pro", ("hca", "hca", "csa"), ("hca", "csa"), 29),
    ],
)
def test_published_models_are_a_prefix_of_hash_layers_and_a_stack(name, prefix, repeated, repeats):
    model = read(deepseek_v4.get_config(name)).model
    assert (model.prefix, model.layers, model.repeats) == (prefix, repeated, repeats)


@pytest.mark.parametrize(
    ("kinds", "hashed", "expected"),
    [
        ("aaaa", 0, ("", "a")),
        ("abab", 0, ("", "ab")),
        ("abab", 1, ("a", "bab")),
        ("cabab", 1, ("c", "ab")),
        ("abc", 3, ("", "abc")),
        ("aab", 0, ("", "aab")),
    ],
)
def test_layers_are_stacked_as_far_as_they_repeat(kinds, hashed, expected):
    prefix, layers = config.stack(tuple(kinds), hashed)
    assert ("".join(prefix), "".join(layers)) == expected
    repeats = (len(kinds) - len(prefix)) // len(layers)
    assert prefix + layers * repeats == tuple(kinds)
    assert repeats == 1 or len(prefix) >= hashed


@pytest.mark.parametrize("name", ["tiny", "flash", "pro"])
def test_what_is_written_is_read(name):
    here = read(deepseek_v4.get_config(name))
    there = settings(json.loads(json.dumps(config.write(here, "float32"))))
    assert (there.model.all_layers, there.experts, there.attention, there.rope) == (
        here.model.all_layers,
        here.experts,
        here.attention,
        here.rope,
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "deepseek_v41"}, "model_type='deepseek_v41': must be 'deepseek_v4'"),
        ({"model_type": None}, "model_type=None"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax': must be 'sqrtsoftplus'"),
        ({"n_shared_experts": 2}, "n_shared_experts=2: must be 1"),
        ({"compress_ratios": [0, 0, 4, 64, 4]}, "layers are 64; must be among 0, 4, 128"),
        ({"compress_ratios": [0, 0, 4, 128]}, "has 4 kinds for num_hidden_layers=5"),
        ({"mlp_layer_types": ["moe", "hash_moe", "moe", "moe", "moe"]}, "must be hash_moe first"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, "rope_type='linear'"),
        ({"hidden_size": "wide"}, "model.hidden='wide': must be of type int"),
        ({"tie_word_embeddings": 1}, "model.tied_head=1: must be of type bool"),
    ],
)
def test_what_is_not_the_model_is_refused(changes, said):
    with pytest.raises(ConfigError) as caught:
        config.overrides(TINY | changes)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "name", ["hc_mult", "num_hidden_layers", "routed_scaling_factor", "num_hash_layers", "head_dim"]
)
def test_what_is_missing_is_named(name):
    with pytest.raises(ConfigError, match=f"lacks {name}"):
        config.overrides({field: value for field, value in TINY.items() if field != name})


def test_the_form_of_transformers_says_the_same():
    layers = ["sliding_attention"] * 2 + ["compressed_sparse_attention", "heavily_compressed_attention"]
    layers.append("compressed_sparse_attention")
    other = {name: value for name, value in TINY.items() if name not in ("compress_ratios", "num_hash_layers")}
    del other["qk_rope_head_dim"], other["rope_scaling"], other["rope_theta"], other["compress_rope_theta"]
    other |= {"layer_types": layers, "mlp_layer_types": ["hash_moe"] * 3 + ["moe"] * 2, "partial_rotary_factor": 0.5}
    yarn = {"type": "yarn", **TINY["rope_scaling"]}
    main = {"rope_type": "default", "rope_theta": 1e4}
    other["rope_parameters"] = {"main": main, "compress": yarn | {"rope_theta": 1.6e5}}
    assert config.overrides(other) == config.overrides(TINY)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({}, "experts.count"),
        ({"experts": {"count": 4}}, "model.streams"),
        ({"experts": {"count": 4}, "model": {"streams": 2}}, "model.swiglu_limit"),
        ({"experts": {"count": 4, "shared": 0}, "model": {"streams": 2}}, "experts.shared"),
    ],
)
def test_a_model_that_has_no_such_description_is_refused(changes, field):
    with pytest.raises(ConfigError, match=rf"config\.{field}="):
        config.write(Settings().replace(**changes), "float32")


def test_a_folder_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        config.read(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="is no JSON"):
        config.read(tmp_path)
