"""SketchConfig: what it refuses, its presets, its file, and TRL's parser."""

import dataclasses
import json
import math
import re

import pytest
from trl import GRPOConfig, ModelConfig, RLOOConfig, ScriptArguments, SFTConfig, TrlParser

from trl_sketch import SketchConfig, get_sketch_model


FIELDS = [f.name for f in dataclasses.fields(SketchConfig)]

# A value other than the default for every field, as YAML, as words of a command line, and as it should arrive.
EVERY_FIELD = {
    "rank": ("16", ["16"], 16),
    "rank_pattern": ("{down_proj: 8}", ['{"down_proj": 8}'], {"down_proj": 8}),
    "target_modules": ("[q_proj, down_proj]", ["q_proj", "down_proj"], ["q_proj", "down_proj"]),
    "exclude_modules": ("[k_proj, v_proj]", ["k_proj", "v_proj"], ["k_proj", "v_proj"]),
    "layers_to_transform": ("[0, 2]", ["0", "2"], [0, 2]),
    "layers_pattern": ("blocks", ["blocks"], "blocks"),
    "projection": ("gaussian", ["gaussian"], "gaussian"),
    "refresh": ("never", ["never"], "never"),
    "share_projection": ("false", ["false"], False),
    "projection_seed": ("7", ["7"], 7),
    "update_rule": ("sgd", ["sgd"], "sgd"),
    "norm": ("matrix", ["matrix"], "matrix"),
    "update_ratio": ("6e-5", ["6e-5"], 6e-5),
    "beta1": ("0.8", ["0.8"], 0.8),
    "beta2": ("0.99", ["0.99"], 0.99),
    "relative_epsilon": ("1e-6", ["1e-6"], 1e-6),
    "spectral_power": ("0.5", ["0.5"], 0.5),
    "weight_precision": ("fp32", ["fp32"], "fp32"),
    "kl_budget": ("1e-3", ["1e-3"], 1e-3),
    "kl_budget_final": ("1e-4", ["1e-4"], 1e-4),
    "kl_schedule": ("constant", ["constant"], "constant"),
    "kl_schedule_steps": ("300", ["300"], 300),
    "kl_probe": ("finite_difference", ["finite_difference"], "finite_difference"),
    "kl_probe_responses": ("4", ["4"], 4),
    "kl_probe_max_tokens": ("512", ["512"], 512),
    "alpha_max": ("1.5", ["1.5"], 1.5),
    "log_realized_kl": ("10", ["10"], 10),
    "mismatch_subtraction": ("false", ["false"], False),
    "mismatch_ema": ("0.5", ["0.5"], 0.5),
    "mismatch_floor": ("0.25", ["0.25"], 0.25),
    "vllm_sync": ("sketch", ["sketch"], "sketch"),
    "full_sync_every": ("7", ["7"], 7),
    "skip_nonfinite_steps": ("true", ["true"], True),
}


def test_every_field_is_in_the_tests_and_has_a_help_text():
    assert list(EVERY_FIELD) == FIELDS
    for f in dataclasses.fields(SketchConfig):
        assert len(f.metadata["help"]) > 20, f.name
        assert EVERY_FIELD[f.name][2] != getattr(SketchConfig(), f.name), f.name


def test_defaults():
    config = SketchConfig()
    assert (config.rank, config.projection, config.refresh) == (256, "hadamard", "every_step")
    assert (config.update_rule, config.norm, config.update_ratio) == ("row_adam", "global", None)
    assert (config.beta2, config.relative_epsilon, config.weight_precision) == (0.95, 1e-8, "auto")
    assert config.share_projection and config.projection_seed is None


def test_kl_budget_may_only_fall():
    with pytest.raises(ValueError, match=r"kl_budget_final=0.1 is above kl_budget=0.01.*constant"):
        SketchConfig(kl_budget=0.01, kl_budget_final=0.1)
    assert SketchConfig(kl_budget=0.01, kl_budget_final=0.1, kl_schedule="constant").kl_budget == 0.01
    assert SketchConfig(kl_budget=0.01, kl_budget_final=None).kl_budget_final == pytest.approx(0.001)
    assert SketchConfig(kl_budget=None, kl_budget_final=None).kl_budget is None


# ---------------------------------------------------------- values


CHOICES = {
    "projection": "hadamard, rademacher, gaussian, orthonormal",
    "update_rule": "row_adam, sgd, adam",
    "norm": "global, matrix, none",
    "weight_precision": "auto, bf16, fp32",
    "kl_schedule": "cosine, constant",
    "kl_probe": "auto, jvp, finite_difference",
}


@pytest.mark.parametrize(("name", "allowed"), CHOICES.items())
def test_choices(name, allowed):
    for value in allowed.split(", "):
        assert getattr(SketchConfig(**{name: value, "refresh": "never"}), name) == value
    for value in ("nonsense", "", None, 3):
        with pytest.raises(ValueError, match=f"{name} must be one of {allowed}, got {value!r}"):
            SketchConfig(**{name: value})


def check_refused(name: str, values: tuple, allowed: str) -> None:
    for value in values:
        with pytest.raises(ValueError) as error:
            SketchConfig(**{name: value})
        assert str(error.value).startswith(name), value
        assert re.search(allowed, str(error.value)), value


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("rank", (0, -1, 1.5), "a positive integer"),
        ("rank_pattern", ({"a": 0}, {"a": 1.5}, '{"a": -1}'), "positive integers"),
        ("refresh", ("sometimes", "0", 0, -2, 1.5), "positive number of steps"),
        ("update_ratio", (0, 0.0, -1e-3, 1.0, 3, math.nan, math.inf), r"None or in \(0, 1\)"),
        ("beta1", (1.0, -0.1, math.nan), r"in \[0, 1\)"),
        ("beta2", (1.0, -0.1, math.nan), r"in \[0, 1\)"),
        ("relative_epsilon", (-1e-8, 1.0, math.nan), r"in \[0, 1\)"),
        ("spectral_power", (-0.1, 1.1, math.nan, None, "x", True), r"in \[0, 1\]"),
        ("kl_budget", (0, -1e-4, math.nan, math.inf, "x"), "None or positive and finite"),
        ("kl_budget_final", (0, -1e-4, math.nan, "x"), "None or positive"),
        ("kl_schedule_steps", (0, -1, 1.5), "None or a positive number of steps"),
        ("kl_probe_responses", (0, -1, 1.5, None), "a positive integer"),
        ("kl_probe_max_tokens", (0, -1, 1.5, None), "a positive integer"),
        ("alpha_max", (0, -1.0, math.inf, math.nan, None), "positive and finite"),
        ("log_realized_kl", (-1, 1.5, "x"), "a number of steps, or 0"),
        ("mismatch_subtraction", ("yes", None), "True or False"),
        ("mismatch_ema", (0, -0.1, 1.1, math.nan), r"in \(0, 1\]"),
        ("mismatch_floor", (0, -0.1, 1.1, math.nan), r"in \(0, 1\]"),
    ],
)
def test_bad_values_are_refused_with_the_field_and_what_is_allowed(name, values, allowed):
    check_refused(name, values, allowed)


@pytest.mark.parametrize(
    ("name", "values", "allowed"),
    [
        ("rank", (True, "8", None), "a positive integer"),
        ("rank_pattern", (["a"], 3, "[1]", "nonsense"), "positive integers"),
        ("refresh", (None, True), "positive number of steps"),
        ("update_ratio", ("small",), r"None or in \(0, 1\)"),
        ("beta1", (None, "x"), r"in \[0, 1\)"),
        ("beta2", (None, "x"), r"in \[0, 1\)"),
        ("relative_epsilon", (None, "x"), r"in \[0, 1\)"),
        ("projection_seed", ("x", 1.5), "integer"),
        ("share_projection", ("yes", None), "True or False"),
        ("target_modules", (3, [1]), "names|regular expression"),
        ("exclude_modules", (3, [1]), "names|regular expression"),
        ("layers_to_transform", (["a"], [0.5]), "integer|indices"),
    ],
)
def test_values_of_another_type_are_refused_as_well(name, values, allowed):
    check_refused(name, values, allowed)


def test_values_at_the_edge_are_taken():
    for name, values in {
        "rank": (1, 10**6),
        "rank_pattern": (None, {}, {"down_proj": 1}, '{"q_proj": 4}'),
        "refresh": ("1", 1, 7, "1000"),
        "update_ratio": (1e-9, 0.999),
        "beta2": (0, 0.0, 0.9999),
        "relative_epsilon": (0.0, 0.5),
        "spectral_power": (0, 0.0, 0.5, 1, 1.0),
        "projection_seed": (0, 123456789012),
    }.items():
        for value in values:
            SketchConfig(**{name: value})


def test_refresh_in_steps():
    steps = {refresh: SketchConfig(refresh=refresh).refresh_steps for refresh in ("every_step", "never", "12", 3)}
    assert steps == {"every_step": 1, "never": None, "12": 12, 3: 3}


def test_combinations_that_mean_nothing_are_refused():
    for refresh in ("every_step", "5"):
        with pytest.raises(ValueError, match="update_rule='adam' .* set refresh='never'"):
            SketchConfig(update_rule="adam", refresh=refresh)
    SketchConfig(update_rule="adam", refresh="never")
    with pytest.raises(ValueError, match="update_ratio=0.001 has no meaning with norm='none'"):
        SketchConfig(norm="none", update_ratio=1e-3)


def test_one_name_in_a_list_selects_as_in_peft(tiny_qwen3):
    """A list of names is matched by their ends, a string as a regular expression; one name is still a list."""
    for target in (["q_proj"], ["self_attn.q_proj"], ["layers.0.self_attn.q_proj", "layers.1.self_attn.q_proj"]):
        model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4, target_modules=target))
        assert [type(layer.self_attn.q_proj).__name__ for layer in model.model.layers] == ["SketchLinear"] * 2, target
        assert type(model.model.layers[0].self_attn.k_proj).__name__ == "Linear"
    for target in (r".*\.0\..*_proj", [r".*\.0\..*_proj"]):  # a command line can only give a list
        model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4, target_modules=target))
        kinds = [type(layer.self_attn.q_proj).__name__ for layer in model.model.layers]
        assert kinds == ["SketchLinear", "Linear"], target


# ---------------------------------------------------------- presets


def test_logra_preset():
    config = SketchConfig.logra()
    assert (config.rank, config.projection, config.refresh) == (256, "rademacher", "every_step")
    assert (config.update_rule, config.beta2, config.relative_epsilon) == ("row_adam", 0.95, 1e-8)
    assert config.norm == "global" and config.update_ratio is None
    config = SketchConfig.logra(rank=64, projection="gaussian")
    assert (config.rank, config.projection, config.update_rule) == (64, "gaussian", "row_adam")


def test_rgc_preset():
    config = SketchConfig.rgc(32)
    assert (config.rank, config.projection, config.update_rule) == (32, "orthonormal", "sgd")
    assert (config.norm, config.weight_precision) == ("matrix", "fp32")
    config = SketchConfig.rgc(rank=8, update_ratio=1e-4, weight_precision="bf16")
    assert (config.rank, config.update_ratio, config.weight_precision) == (8, 1e-4, "bf16")
    with pytest.raises(ValueError, match="rank must be"):
        SketchConfig.rgc(0)


# ---------------------------------------------------------- file


@pytest.mark.parametrize(
    "config",
    [
        SketchConfig(),
        SketchConfig.logra(),
        SketchConfig.rgc(4, update_ratio=6e-5),
        SketchConfig(**{name: value for name, (_, _, value) in EVERY_FIELD.items()}),
        SketchConfig(target_modules=r".*\.mlp\..*", refresh=5),
    ],
)
def test_file_round_trip(config, tmp_path):
    folder = tmp_path / "deep" / "er"
    config.save_pretrained(folder)
    assert [p.name for p in folder.iterdir()] == ["sketch_config.json"]
    assert SketchConfig.from_pretrained(folder) == config
    assert SketchConfig.from_pretrained(str(folder)) == config
    assert set(json.loads((folder / "sketch_config.json").read_text())) >= set(FIELDS)


def test_a_file_with_an_unknown_field_or_a_bad_value_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="sketch_config.json"):
        SketchConfig.from_pretrained(tmp_path)
    path = tmp_path / "sketch_config.json"
    path.write_text(json.dumps({"rank": 8, "new_thing": 1, "another": 2}))
    with pytest.raises(ValueError, match="unknown fields: another, new_thing"):
        SketchConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps({"rank": 0}))
    with pytest.raises(ValueError, match="rank must be a positive integer, got 0"):
        SketchConfig.from_pretrained(tmp_path)
    path.write_text(json.dumps({"rank": 8}))  # of an older version: the rest is at its default
    assert SketchConfig.from_pretrained(tmp_path) == SketchConfig(rank=8)


# ---------------------------------------------------------- TRL's parser


def test_no_field_collides_with_trls():
    for other in (GRPOConfig, SFTConfig, RLOOConfig, ModelConfig, ScriptArguments):
        taken = {f.name for f in dataclasses.fields(other)}
        assert not taken & set(FIELDS), other.__name__


GIVEN = [pytest.param({name: value}, id=name) for name, value in EVERY_FIELD.items()] + [
    pytest.param(EVERY_FIELD, id="all")
]


def expected_of(given) -> SketchConfig:
    return SketchConfig(**{name: value for name, (_, _, value) in given.items()})


@pytest.mark.parametrize("given", GIVEN)
def test_every_field_from_the_command_line(given, tmp_path):
    words = ["--output_dir", str(tmp_path), "--bf16", "false", "--report_to", "none"]
    for name, (_, value, _) in given.items():
        words += [f"--{name}", *value]
    _, config = TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(words)
    assert config == expected_of(given)


@pytest.mark.parametrize("given", GIVEN)
def test_every_field_from_yaml(given, tmp_path):
    path = tmp_path / "config.yaml"
    lines = [f"output_dir: {tmp_path}", "bf16: false", "report_to: none", "learning_rate: 2e-6"]
    path.write_text("\n".join(lines + [f"{name}: {text}" for name, (text, _, _) in given.items()]))
    args, config = TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(["--config", str(path)])
    assert config == expected_of(given)
    assert args.learning_rate == 2e-6


def test_the_command_line_wins_over_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nbf16: false\nreport_to: none\nrank: 16\nprojection: gaussian\n")
    words = ["--config", str(path), "--rank", "4"]
    _, config = TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(words)
    assert config == SketchConfig(rank=4, projection="gaussian")


def test_more_yaml_spellings(tmp_path):
    for text, expected in {
        "target_modules: [q_proj]": SketchConfig(target_modules=["q_proj"]),
        "rank_pattern: null": SketchConfig(),
        "update_ratio: 0.00006": SketchConfig(update_ratio=6e-5),
        "projection_seed: 0": SketchConfig(projection_seed=0),
    }.items():
        path = tmp_path / "config.yaml"
        path.write_text(f"output_dir: {tmp_path}\nbf16: false\nreport_to: none\n{text}\n")
        _, config = TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(["--config", str(path)])
        assert config == expected, text


def test_refresh_as_a_number_in_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nbf16: false\nreport_to: none\nrefresh: 4\n")
    _, config = TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(["--config", str(path)])
    assert config.refresh_steps == 4


def test_target_modules_as_one_string_in_yaml(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(f"output_dir: {tmp_path}\nbf16: false\nreport_to: none\ntarget_modules: '.*mlp.*_proj'\n")
    _, config = TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(["--config", str(path)])
    assert config.target_modules == ".*mlp.*_proj"


def test_a_bad_choice_on_the_command_line_names_the_choices(tmp_path, capsys):
    with pytest.raises(SystemExit):
        TrlParser([GRPOConfig, SketchConfig]).parse_args_and_config(
            ["--output_dir", str(tmp_path), "--projection", "nonsense"]
        )
    assert "hadamard" in capsys.readouterr().err
