"""`get_sketch_model`: what is selected, what is refused and how, what stays as it was."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    GPT2Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    ViTConfig,
)

from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model, make_projection
from trl_sketch.layers import SketchLinear
from trl_sketch.model import sketch_state, summary


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
BF16 = torch.bfloat16
SIZES = {
    "vocab_size": 32,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MoE = {
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
BUILDERS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: AutoModelForCausalLM.from_config(LlamaConfig(**SIZES, num_key_value_heads=2)),
    "qwen2": lambda: AutoModelForCausalLM.from_config(Qwen2Config(**SIZES, num_key_value_heads=2)),
    "gpt2": lambda: AutoModelForCausalLM.from_config(
        GPT2Config(vocab_size=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=1, eos_token_id=2)
    ),
    "qwen3-moe": lambda: AutoModelForCausalLM.from_config(Qwen3MoeConfig(**SIZES, **MoE)),
    "mixtral": lambda: AutoModelForCausalLM.from_config(
        MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=2)
    ),
    "bert": lambda: AutoModelForMaskedLM.from_config(BertConfig(**SIZES)),
    "vit": lambda: AutoModel.from_config(
        ViTConfig(
            hidden_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            intermediate_size=32,
            image_size=8,
            patch_size=4,
        )
    ),
}


def build(kind: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return BUILDERS[kind]()


def selected(model: nn.Module, **config: Any) -> list[str]:
    """Names of the layers that a config selects, without the leading `model.layers.`."""
    get_sketch_model(model, SketchConfig(**{"rank": 4} | config))
    names = list(sketch_state(model).layers)
    assert set(names) == {n for n, m in model.named_modules() if isinstance(m, SketchLinear)}
    return [name.removeprefix("model.layers.") for name in names]


def layers(indices: tuple[int, ...] = (0, 1), names: list[str] = ATTENTION + MLP) -> set[str]:
    return {f"{i}.{'self_attn' if name in ATTENTION else 'mlp'}.{name}" for i in indices for name in names}


def refusal(model: nn.Module, **config: Any) -> str:
    """The message that a config is refused with; the model must come out untouched."""
    before = {n: (type(m), id(m)) for n, m in model.named_modules()}
    parameters = {n: (id(p), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    with pytest.raises(ValueError) as caught:
        get_sketch_model(model, SketchConfig(**{"rank": 4} | config))
    assert before == {n: (type(m), id(m)) for n, m in model.named_modules()}
    assert parameters == {n: (id(p), p.dtype, p.requires_grad) for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="call get_sketch_model"):
        sketch_state(model)
    return str(caught.value)


def ids(rows: int = 2, tokens: int = 6) -> torch.Tensor:
    return torch.randint(0, 32, (rows, tokens), generator=torch.Generator().manual_seed(5))


# ---------------------------------------------------------------------- selection


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_default_is_attention_and_mlp_of_qwen3(tiny_qwen3: Callable[..., nn.Module], tied: bool) -> None:
    model = tiny_qwen3(tie_word_embeddings=tied)
    assert set(selected(model)) == layers()
    assert type(model.lm_head) is nn.Linear
    assert summary(model)["matrices"] == 14


def test_default_is_attention_and_mlp_of_llama() -> None:
    assert set(selected(build("llama"))) == layers()


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"target_modules": ["q_proj", "down_proj"]}, layers(names=["q_proj", "down_proj"])),
        ({"target_modules": ["layers.1.mlp.up_proj"]}, {"1.mlp.up_proj"}),
        ({"target_modules": ["self_attn.q_proj"]}, layers(names=["q_proj"])),
        ({"exclude_modules": ["mlp.up_proj"]}, layers() - layers(names=["up_proj"])),
        ({"target_modules": ["model.layers.0.self_attn.q_proj"]}, {"0.self_attn.q_proj"}),
        ({"target_modules": r".*\.1\..*[qv]_proj"}, layers((1,), ["q_proj", "v_proj"])),
        ({"target_modules": [r".*\.mlp\..*"]}, layers(names=MLP)),  # one expression, from the command line
        ({"exclude_modules": ["q_proj", "mlp.up_proj"]}, layers() - layers(names=["q_proj", "up_proj"])),
        ({"exclude_modules": r".*\.mlp\..*"}, layers(names=ATTENTION)),
        ({"target_modules": ATTENTION, "exclude_modules": ["k_proj"]}, layers(names=["q_proj", "v_proj", "o_proj"])),
        ({"layers_to_transform": [1]}, layers((1,))),
        ({"layers_to_transform": [0], "target_modules": MLP}, layers((0,), MLP)),
        ({"layers_to_transform": [0], "layers_pattern": "layers"}, layers((0,))),
        ({"layers_to_transform": [0, 1], "layers_pattern": "layers", "exclude_modules": ["o_proj"]}, layers() - layers(names=["o_proj"])),
    ],
    ids=lambda value: None if isinstance(value, set) else ", ".join(f"{k}={v}" for k, v in value.items()),
)  # fmt: skip
def test_selection(tiny_qwen3: Callable[..., nn.Module], config: dict[str, Any], expected: set[str]) -> None:
    assert set(selected(tiny_qwen3(), **config)) == expected


def test_layer_indices_are_never_ignored(tiny_qwen3: Callable[..., nn.Module]) -> None:
    """Either refused with the field's name, as PEFT does, or heeded."""
    try:
        names = selected(tiny_qwen3(), target_modules=r".*[qv]_proj", layers_to_transform=[1])
    except ValueError as error:
        assert "layers_to_transform" in str(error)
    else:
        assert set(names) == layers((1,), ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"target_modules": ["qproj"]}, ["target_modules=['qproj']", "Qwen3ForCausalLM", "did you mean", "q_proj"]),
        ({"target_modules": ["gate"]}, ["did you mean", "gate_proj"]),
        ({"target_modules": ["model.layers.0.mlp.dwn_proj"]}, ["did you mean", "down_proj"]),
        ({"target_modules": ["xyz"]}, ["its linear layers are called", "down_proj, gate_proj, k_proj", "v_proj"]),
        ({"target_modules": r"encoder\..*"}, ["target_modules=", "matches no layer", "q_proj"]),
        ({"target_modules": []}, ["target_modules=[]", "q_proj"]),
        ({"exclude_modules": r".*"}, ["exclude_modules='.*'", "no linear layer", "q_proj"]),
        ({"layers_to_transform": [7]}, ["layers_to_transform=[7]", "no linear layer"]),
    ],
    ids=lambda value: None if isinstance(value, list) else ", ".join(f"{k}={v}" for k, v in value.items()),
)
def test_nothing_selected(tiny_qwen3: Callable[..., nn.Module], config: dict[str, Any], words: list[str]) -> None:
    message = refusal(tiny_qwen3(), **config)
    for word in words:
        assert word in message


def test_rank_pattern_by_name_and_by_expression(
    tiny_qwen3: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_qwen3()
    pattern = {"down_proj": 40, r"model\.layers\.1\.self_attn\.[kv]_proj": 3}
    with caplog.at_level(logging.INFO, "trl_sketch.model"):
        selected(model, rank=16, rank_pattern=pattern)
    state = sketch_state(model)
    ranks = {name: layer.group.rank for name, layer in state.layers.items()}
    assert ranks == {
        name: 40 if "down_proj" in name else 3 if name.endswith(("1.self_attn.k_proj", "1.self_attn.v_proj")) else 16
        for name in ranks
    }
    assert list(ranks.values()) == sorted(ranks.values(), reverse=True)  # sketches of one rank are adjacent
    assert caplog.records == []
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert {name: tuple(s.shape) for name, s in state.sketches.items()} == {
        name: (layer.out_features, ranks[name]) for name, layer in state.layers.items()
    }
    assert all(s.abs().sum() > 0 for s in state.sketches.values())


def test_rank_is_capped_at_the_number_of_inputs(
    tiny_qwen3: Callable[..., nn.Module], caplog: pytest.LogCaptureFixture
) -> None:
    model = tiny_qwen3()
    with caplog.at_level(logging.INFO, "trl_sketch.model"):
        get_sketch_model(model, SketchConfig())  # rank 256
    assert {layer.group.rank for layer in sketch_state(model).layers.values()} == {32, 48}
    assert len(caplog.messages) == 14
    assert "model.layers.0.mlp.down_proj has 48 inputs: its sketch has rank 48." in caplog.messages


def test_config_is_optional(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = tiny_qwen3()
    assert get_sketch_model(model) is model
    assert sketch_state(model).config == SketchConfig()


class Wrapper(nn.Module):
    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy


@pytest.mark.parametrize("wrap", [torch.compile, Wrapper], ids=["torch.compile", "module"])
def test_lm_head_of_a_wrapped_model_is_not_selected(tiny_qwen3: Callable[..., nn.Module], wrap: Any) -> None:
    wrapped = wrap(tiny_qwen3(num_hidden_layers=1))
    get_sketch_model(wrapped, SketchConfig(rank=4))
    names = set(sketch_state(wrapped).layers)
    assert len(names) >= 7
    assert not any("lm_head" in name for name in names)


def test_names_do_not_contain_what_wrappers_add(tiny_qwen3: Callable[..., nn.Module]) -> None:
    compiled = torch.compile(tiny_qwen3())
    get_sketch_model(compiled, SketchConfig(rank=4, target_modules=ATTENTION))
    assert set(selected(tiny_qwen3(), target_modules=ATTENTION)) == {
        name.removeprefix("model.layers.") for name in sketch_state(compiled).layers
    }
    assert all(name.startswith("model.layers.") for name in sketch_state(compiled).layers)


def test_classification_head_is_not_selected(tiny_qwen3: Callable[..., nn.Module]) -> None:
    """The default is attention and MLP: a head is neither."""
    model = AutoModelForSequenceClassification.from_config(tiny_qwen3().config)
    assert set(selected(model)) == layers()


# ---------------------------------------------------------------------- refusals


def test_lm_head_is_refused(tiny_qwen3: Callable[..., nn.Module]) -> None:
    message = refusal(tiny_qwen3(), target_modules=["q_proj", "lm_head"])
    assert message.startswith("lm_head is the LM head") and "take it out of target_modules" in message


def test_two_linears_with_one_weight_are_refused(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = tiny_qwen3()
    first, second = model.model.layers
    second.mlp.up_proj.weight = first.mlp.up_proj.weight
    message = refusal(model)
    assert message.startswith("model.layers.0.mlp.up_proj.weight is tied to model.layers.1.mlp.up_proj.weight")
    assert "exclude_modules=['up_proj']" in message
    assert set(selected(model, exclude_modules=["up_proj"])) == layers() - layers(names=["up_proj"])


def test_linear_tied_to_an_embedding_is_refused() -> None:
    model = nn.ModuleDict({"embed": nn.Embedding(16, 8), "proj": nn.Linear(8, 16)})
    model["proj"].weight = model["embed"].weight
    message = refusal(model)
    assert message.startswith("proj.weight is tied to embed.weight") and "exclude_modules=['proj']" in message


@pytest.mark.parametrize("config", [{}, {"target_modules": ["q_proj"]}], ids=str)
def test_lora_is_refused(tiny_qwen3: Callable[..., nn.Module], config: dict[str, Any]) -> None:
    message = refusal(get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"])), **config)
    assert "layers.0.self_attn.q_proj (Linear) belongs to a PEFT adapter" in message
    assert "merge it first (model.merge_and_unload())" in message


def test_parts_of_an_excluded_adapter_are_not_selected(tiny_qwen3: Callable[..., nn.Module]) -> None:
    """The adapter is `q_proj`; `q_proj.base_layer` and `q_proj.lora_A.default` are plain linear layers inside it."""
    model = get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"]))
    try:
        names = selected(model, exclude_modules=["q_proj", "lm_head"])
    except ValueError as error:
        assert "PEFT" in str(error)
    else:
        assert [name for name in names if "q_proj" in name] == []


def test_merged_lora_is_accepted(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"])).merge_and_unload()
    assert set(selected(model)) == layers()


@pytest.mark.parametrize("config", [{}, {"target_modules": ["c_attn"]}], ids=str)
def test_conv1d_is_refused(config: dict[str, Any]) -> None:
    message = refusal(build("gpt2"), **config)
    assert message.startswith("transformer.h.0.attn.c_attn (Conv1D) stores its weight transposed")
    assert "exclude_modules, or use a model with nn.Linear layers" in message


@pytest.mark.parametrize(
    ("kind", "config"),
    [("qwen3-moe", {}), ("qwen3-moe", {"target_modules": ["experts"]}), ("mixtral", {"target_modules": ["experts"]})],
)
def test_fused_experts_are_refused(kind: str, config: dict[str, Any]) -> None:
    message = refusal(build(kind), **config)
    assert message.startswith("model.layers.0.mlp.experts (") and "fused 3-D expert weights" in message
    assert "name the layers to train in target_modules" in message


def test_router_is_refused() -> None:
    message = refusal(build("mixtral"))
    assert message.startswith("model.layers.0.mlp.gate (MixtralTopKRouter) is not an nn.Linear")
    assert "exclude_modules" in message


@pytest.mark.parametrize("config", [{"target_modules": ATTENTION}, {"exclude_modules": ["experts", "gate"]}], ids=str)
@pytest.mark.parametrize("kind", ["qwen3-moe", "mixtral"])
def test_attention_of_a_mixture_of_experts(kind: str, config: dict[str, Any]) -> None:
    dense = build(kind)
    model = copy.deepcopy(dense)
    assert set(selected(model, **config)) == layers(names=ATTENTION)
    compare_with_dense(model, dense, {"input_ids": ids(), "labels": ids()})


class Linear4bit(nn.Linear):
    """Stands for the quantized layers that derive from nn.Linear."""


class QuantLinear(nn.Module):
    """Stands for GPTQ's and AWQ's layers, which do not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.zeros(4, 48, dtype=torch.int32))


@pytest.mark.parametrize("layer", [Linear4bit(32, 48), QuantLinear()], ids=lambda layer: type(layer).__name__)
@pytest.mark.parametrize("config", [{}, {"target_modules": ["up_proj"]}], ids=str)
def test_quantized_layers_are_refused(
    tiny_qwen3: Callable[..., nn.Module], layer: nn.Module, config: dict[str, Any]
) -> None:
    model = tiny_qwen3()
    model.model.layers[1].mlp.up_proj = layer
    message = refusal(model, **config)
    assert message.startswith(f"model.layers.1.mlp.up_proj ({type(layer).__name__}) is not a plain nn.Linear")
    assert "load the model unquantized in bfloat16" in message


class QuantizedTensor(torch.Tensor):
    """Stands for torchao's weights: a tensor subclass inside a plain nn.Linear, whose dtype reads bfloat16."""


def test_quantized_weight_tensors_are_refused(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = tiny_qwen3(BF16)
    linear = model.model.layers[1].mlp.up_proj
    linear.weight = nn.Parameter(linear.weight.data.as_subclass(QuantizedTensor))
    assert type(linear) is nn.Linear and isinstance(linear.weight, QuantizedTensor)
    assert "model.layers.1.mlp.up_proj" in refusal(model)


def test_layer_whose_forward_has_been_replaced_is_not_silently_left_out(
    tiny_qwen3: Callable[..., nn.Module],
) -> None:
    """accelerate (device_map="auto" over several devices, offloading) puts its own `forward` on each layer."""
    model = tiny_qwen3()
    add_hook_to_module(model.model.layers[0].mlp.up_proj, ModelHook())
    try:
        get_sketch_model(model, SketchConfig(rank=4))
    except ValueError as error:
        assert "model.layers.0.mlp.up_proj" in str(error)
    else:
        model(input_ids=ids(), labels=ids()).loss.backward()
        empty = [name for name, sketch in sketch_state(model).sketches.items() if not sketch.any()]
        assert empty == []


def test_fp16_is_refused(tiny_qwen3: Callable[..., nn.Module]) -> None:
    message = refusal(tiny_qwen3(torch.float16))
    assert message.startswith("model.layers.0.self_attn.q_proj has weights of type torch.float16")
    assert "dtype='bfloat16'" in message


def test_second_call_is_refused(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4))
    with pytest.raises(ValueError, match="already accumulates sketches.*once per model"):
        get_sketch_model(model, SketchConfig(rank=4))
    with pytest.raises(ValueError, match="already accumulates sketches.*once per model"):
        get_sketch_model(torch.compile(model), SketchConfig(rank=4))


def test_optimizer_needs_a_sketched_model(tiny_qwen3: Callable[..., nn.Module]) -> None:
    with pytest.raises(ValueError, match=r"no sketches: call get_sketch_model\(model, config\) first"):
        SketchOptimizer(tiny_qwen3(), lr=1e-3)


# ---------------------------------------------------------------------- models that are not language models


def compare_with_dense(model: nn.Module, dense: nn.Module, inputs: dict[str, torch.Tensor]) -> None:
    for m in (model, dense):
        m.eval()
        outputs = m(**inputs)
        loss = outputs.loss if "labels" in inputs else outputs.last_hidden_state.square().sum()
        loss.backward()
    for name, layer in sketch_state(model).layers.items():
        gradient = dense.get_submodule(name).weight.grad.double()
        projection = make_projection(
            "hadamard", layer.group.rank, layer.in_features, name=layer.group.name, dtype=torch.float64
        )
        reference = gradient @ projection.T
        assert (layer.sketch - reference).norm() < 1e-5 * reference.norm(), name


def test_encoder() -> None:
    dense = build("bert")
    model = copy.deepcopy(dense)
    names = selected(model, exclude_modules=r".*transform\.dense")
    assert {name.partition("layer.0.")[2] for name in names if "layer.0." in name} == {
        "attention.self.query",
        "attention.self.key",
        "attention.self.value",
        "attention.output.dense",
        "intermediate.dense",
        "output.dense",
    }
    assert len(names) == 12
    query = sketch_state(model).layers["bert.encoder.layer.0.attention.self.query"]
    assert query.group.members == 3
    compare_with_dense(model, dense, {"input_ids": ids(), "labels": ids()})


def test_vision_model_with_named_targets() -> None:
    dense = build("vit")
    model = copy.deepcopy(dense)
    assert len(selected(model, target_modules=r".*(attention|mlp).*")) == 6
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    compare_with_dense(model, dense, {"pixel_values": pixels})


def test_position_embeddings_are_not_called_experts() -> None:
    try:
        assert len(selected(build("vit"))) >= 6
    except ValueError as error:
        assert "expert" not in str(error)


# ---------------------------------------------------------------------- what stays


def test_names_parameters_and_modules_stay(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = tiny_qwen3()
    modules = {n: id(m) for n, m in model.named_modules()}
    parameters = {n: id(p) for n, p in model.named_parameters()}
    buffers = {n: id(b) for n, b in model.named_buffers()}
    state = {n: t.clone() for n, t in model.state_dict().items()}
    assert get_sketch_model(model, SketchConfig(rank=4)) is model
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert {n: id(m) for n, m in model.named_modules()} == modules
    assert {n: id(p) for n, p in model.named_parameters()} == parameters
    assert {n: id(b) for n, b in model.named_buffers()} == buffers
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert isinstance(model.model.layers[0].mlp.up_proj, nn.Linear)


def test_hooks_stay(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model, calls = tiny_qwen3(), []
    layer = model.model.layers[0].self_attn.q_proj
    layer.register_forward_pre_hook(lambda *_: calls.append("before"))
    layer.register_forward_hook(lambda *_: calls.append("after"))
    layer.register_full_backward_hook(lambda *_: calls.append("backward"))
    dense = copy.deepcopy(model)
    get_sketch_model(model, SketchConfig(rank=4))
    model(input_ids=ids(), labels=ids()).loss.backward()
    assert calls == ["before", "after", "backward"]
    dense(input_ids=ids(), labels=ids()).loss.backward()
    name = "model.layers.0.self_attn.q_proj"
    reference = dense.get_submodule(name).weight.grad @ make_projection("hadamard", 4, 32, name=name).T
    torch.testing.assert_close(layer.sketch, reference)


def test_everything_is_frozen(tiny_qwen3: Callable[..., nn.Module]) -> None:
    model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4, target_modules=["q_proj"]))
    assert not any(p.requires_grad for p in model.parameters())
    assert model(input_ids=ids()).logits.requires_grad  # and yet backward has a path


@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=["fp32", "bf16"])
def test_saved_model_loads_as_an_ordinary_one(
    tiny_qwen3: Callable[..., nn.Module], tmp_path: Path, dtype: torch.dtype
) -> None:
    tiny_qwen3().save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    get_sketch_model(model, SketchConfig(rank=4))
    before = model(input_ids=ids()).logits
    model(input_ids=ids(), labels=ids()).loss.backward()
    SketchOptimizer(model, lr=1e-2).step()
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype).eval()
    assert type(loaded.model.layers[0].mlp.up_proj) is nn.Linear
    with torch.no_grad():
        logits = loaded(input_ids=ids()).logits
        assert torch.equal(logits, model(input_ids=ids()).logits)
    assert not torch.equal(logits, before)
    assert {f.name for f in tmp_path.iterdir()} == {"config.json", "generation_config.json", "model.safetensors"}


def test_generation_is_unchanged(tiny_qwen3: Callable[..., nn.Module]) -> None:
    untouched, model = tiny_qwen3(), get_sketch_model(tiny_qwen3(), SketchConfig(rank=4))
    outputs = [m.generate(ids(), max_new_tokens=5, do_sample=False) for m in (untouched, model)]
    assert torch.equal(*outputs)


def test_deep_copy_reports_on_itself(tiny_qwen3: Callable[..., nn.Module], capsys: pytest.CaptureFixture) -> None:
    model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4))
    twin = copy.deepcopy(model)
    assert twin.print_trainable_parameters.model is twin
    assert sketch_state(twin) is not sketch_state(model)
    twin(input_ids=ids(), labels=ids()).loss.backward()
    assert sketch_state(twin).flat.any() and not sketch_state(model).flat.any()


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_sketched_model_survives_copying_and_pickling_at_any_time(
    duplicate: Callable[[nn.Module], nn.Module], tiny_qwen3: Callable[..., nn.Module]
) -> None:
    model = get_sketch_model(tiny_qwen3(), SketchConfig(rank=4))
    model(input_ids=ids(), labels=ids()).loss.backward()
    model.model.layers[0].self_attn.q_proj(
        torch.zeros(1, 32)
    )  # part of a group: its projected input waits for the rest
    twin = duplicate(model)
    assert torch.equal(sketch_state(twin).flat, sketch_state(model).flat)
    for each in (twin, model):
        optimizer = SketchOptimizer(each, lr=1e-3)
        optimizer.step()
        each(input_ids=ids(), labels=ids()).loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
    assert torch.equal(sketch_state(twin).flat, sketch_state(model).flat) and sketch_state(twin).flat.any()
    twin.print_trainable_parameters()


# ---------------------------------------------------------------------- precision


@pytest.mark.parametrize(
    ("loaded", "precision", "compute", "kept"),
    [
        (torch.float32, "auto", None, torch.float32),
        (torch.float32, "auto", BF16, BF16),
        (torch.float32, "bf16", None, BF16),
        (torch.float32, "bf16", BF16, BF16),
        (torch.float32, "fp32", None, torch.float32),
        (torch.float32, "fp32", BF16, torch.float32),
        (BF16, "auto", None, BF16),
        (BF16, "auto", BF16, BF16),
        (BF16, "bf16", None, BF16),
        (BF16, "fp32", None, torch.float32),
        (BF16, "fp32", BF16, torch.float32),
        (torch.float64, "auto", None, torch.float64),
    ],
    ids=str,
)
def test_precision_of_the_selected_weights(
    loaded: torch.dtype,
    precision: str,
    compute: torch.dtype | None,
    kept: torch.dtype,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = build("qwen2").to(loaded)
    before = model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    with caplog.at_level(logging.INFO, "trl_sketch.model"):
        config = SketchConfig(rank=4, weight_precision=precision)
        get_sketch_model(model, config, compute_dtype=compute)
    chosen = sketch_state(model).layers
    biases = 0
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            assert parameter.dtype == (kept if name in chosen else loaded)
        biases += name in chosen and module.bias is not None
    assert biases == 6  # q, k and v of two layers
    assert torch.equal(chosen["model.layers.0.self_attn.q_proj"].weight, before.to(kept))

    records = [(record.levelname, record.getMessage()) for record in caplog.records]
    if kept == BF16 and loaded != BF16:
        ((level, message),) = records
        assert level == "WARNING" and message.startswith("The 14 selected weights were converted to bfloat16")
    elif kept == torch.float32 and compute == BF16:
        ((level, message),) = records
        assert level == "WARNING" and "weight_precision='fp32' under bf16 autocast" in message
        assert "weight_precision='bf16' has no such dead zone" in message
    else:
        assert records == []

    context = torch.autocast("cpu", BF16, enabled=compute == BF16)
    with context:
        model(input_ids=ids(), labels=ids()).loss.backward()
    assert all(sketch.isfinite().all() and sketch.any() for sketch in sketch_state(model).sketches.values())


# ---------------------------------------------------------------------- summary


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float64], ids=["fp32", "bf16", "fp64"])
def test_summary(tiny_qwen3: Callable[..., nn.Module], dtype: torch.dtype) -> None:
    model = get_sketch_model(tiny_qwen3(dtype), SketchConfig(rank=8, rank_pattern={"down_proj": 4}))
    # q 32x32, k and v 16x32, o 32x32; gate and up 48x32, down 32x48
    trainable = 2 * (32 * 32 + 2 * 16 * 32 + 32 * 32 + 3 * 32 * 48)
    flat = sketch_state(model).flat
    assert flat.numel() == 2 * (8 * (32 + 16 + 16 + 32 + 48 + 48) + 4 * 32)
    assert summary(model) == {
        "trainable": trainable,
        "all": sum(p.numel() for p in model.parameters()),
        "matrices": 14,
        "sketch_bytes": flat.nbytes,
    }


def test_print_trainable_parameters(tiny_qwen3: Callable[..., nn.Module], capsys: pytest.CaptureFixture) -> None:
    model = get_sketch_model(tiny_qwen3(tie_word_embeddings=True), SketchConfig(rank=8))
    model.print_trainable_parameters()
    total = 15_360 + 32 * 32 + 5 * 32 + 2 * 2 * 8  # embedding (the head is tied to it), norms of the model and of q, k
    assert capsys.readouterr().out == (
        f"trainable params: 15,360 || all params: {total:,} || trainable%: {100 * 15_360 / total:.4f} || "
        f"14 sketches: 0.0 MiB\n"
    )
    # the same words as PEFT's
    get_peft_model(tiny_qwen3(), LoraConfig(r=2, target_modules=["q_proj"])).print_trainable_parameters()
    assert capsys.readouterr().out.startswith("trainable params: ")
