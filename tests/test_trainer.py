"""`SketchGRPOTrainer`: runs of TRL's real GRPO loop on a tiny random Qwen3, on the CPU."""

import copy
import inspect
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3ForCausalLM,
    TrainerCallback,
    get_constant_schedule,
    set_seed,
)
from trl import GRPOConfig, GRPOTrainer

from trl_sketch import SketchCallback, SketchConfig, SketchGRPOTrainer, SketchOptimizer, get_sketch_model
from trl_sketch.model import sketch_state


PROMPTS = Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl", "m", "dd", "cab", "hi"] * 4})
Weights = dict[str, torch.Tensor]


def alphabet_reward(completions: list[str], **kwargs: Any) -> list[float]:
    """The mean place of the letters in the alphabet: it differs between almost any two completions."""
    return [sum(ord(c) - ord("a") for c in text) / (10 * max(len(text), 1)) for text in completions]


def length_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [len(text) / 4 for text in completions]


def without_kl_control(cls: type[GRPOTrainer], model: Any) -> dict[str, Any]:
    """The default configuration but for KL control, which has tests of its own."""
    is_sketched = isinstance(model, torch.nn.Module) and "_sketch_state" in vars(model)
    return {"peft_config": SketchConfig(kl_budget=None)} if cls is SketchGRPOTrainer and not is_sketched else {}


@pytest.fixture
def make(policy_folder: str, tmp_path: Path) -> Callable[..., Any]:
    """`make(peft_config=…, callbacks=…, learning_rate=…)`: a trainer; what it does not take itself goes to GRPOConfig."""

    def build(cls: type[GRPOTrainer] = SketchGRPOTrainer, model: Any = policy_folder, **kwargs: Any) -> Any:
        taken = set(inspect.signature(GRPOTrainer.__init__).parameters)
        arguments = {
            "reward_funcs": alphabet_reward,
            "train_dataset": PROMPTS,
            "processing_class": AutoTokenizer.from_pretrained(policy_folder),
            **without_kl_control(cls, model),
        } | {name: value for name, value in kwargs.items() if name in taken}
        settings = {
            "output_dir": str(tmp_path / "out"),
            "use_cpu": True,
            "bf16": False,
            "max_steps": 2,
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 4,
            "learning_rate": 1e-3,
            "lr_scheduler_type": "constant",
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": "none",
            "disable_tqdm": True,
        } | {name: value for name, value in kwargs.items() if name not in taken}
        return cls(model=model, args=GRPOConfig(**settings), **arguments)

    return build


def load(folder: str | Path, **kwargs: Any) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, **kwargs)


def weights(model: torch.nn.Module) -> Weights:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def selected(trainer: Any) -> list[str]:
    """The names of the sketched weights."""
    return [f"{name}.weight" for name in sketch_state(trainer.model).layers]


def differing(first: Weights, second: Weights) -> list[str]:
    """The names of the weights that are not the same to the last bit."""
    assert first.keys() == second.keys()
    return [name for name in first if not torch.equal(first[name], second[name])]


def assert_same(first: Weights, second: Weights) -> None:
    names = differing(first, second)
    assert names == []


def train(trainer: Any, **kwargs: Any) -> Any:
    """Train from the seed that the trainer sets when it is made: others may have drawn random numbers since."""
    set_seed(trainer.args.seed)
    trainer.train(**kwargs)
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [entry[name] for entry in trainer.state.log_history if name in entry]


class Recorder(TrainerCallback):
    """Notes, at each event of a step, what the sketches and the projections look like."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.keys: list[tuple[str, list[int]]] = []  # (event, keys of the projections)
        self.norms: list[tuple[str, float]] = []  # (event, norm of all sketches)
        self.logs: list[dict[str, Any]] = []
        self.has_grad = False

    def note(self, event: str, model: torch.nn.Module) -> None:
        state = sketch_state(model)
        self.events.append(event)
        self.keys.append((event, state.keys.tolist()))
        self.norms.append((event, state.flat.norm().item()))
        self.has_grad |= any(parameter.grad is not None for parameter in model.parameters())

    def at(self, event: str, notes: list[tuple[str, Any]]) -> list[Any]:
        return [value for name, value in notes if name == event]

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.note("step_begin", model)

    def on_substep_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.note("substep_end", model)

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.note("pre_optimizer_step", model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        self.note("step_end", model)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))


# ------------------------------------------------------------------------------------------------ what it takes


def test_takes_every_parameter_of_trl(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = [name for name in inspect.signature(GRPOTrainer.__init__).parameters if name != "self"]
    ours = [name for name in inspect.signature(SketchGRPOTrainer.__init__).parameters if name != "self"]
    named = [name for name in ours if name != "kwargs"]
    assert named == theirs[: len(named)], "positional arguments must mean the same"

    received: dict[str, Any] = {}

    class Stopped(Exception):
        pass

    def receive(self: Any, **kwargs: Any) -> None:
        received.update(kwargs)
        raise Stopped

    monkeypatch.setattr(GRPOTrainer, "__init__", receive)
    given: dict[str, Any] = {name: object() for name in theirs}
    given |= {"model": "name", "args": None, "optimizers": (None, None), "quantization_config": None}
    given["peft_config"] = SketchConfig()
    with pytest.raises(Stopped):
        SketchGRPOTrainer(**given)
    own = {"peft_config", "quantization_config"}
    assert {name: received[name] for name in theirs if name not in own} == {
        name: given[name] for name in theirs if name not in own
    }
    assert not isinstance(received.get("peft_config"), SketchConfig), "TRL refuses a config that is not PEFT's"


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(TypeError, match="no_such_argument"):
        SketchGRPOTrainer("model", no_such_argument=1)


def test_model_by_path_or_as_object_trains_alike(make: Callable[..., Any], policy_folder: str) -> None:
    by_path, by_object = make(), make(model=load(policy_folder, dtype=torch.float32))
    train(by_path)
    train(by_object)
    assert_same(weights(by_path.model), weights(by_object.model))


def test_a_model_that_was_never_saved(make: Callable[..., Any], policy_folder: str) -> None:
    config = load(policy_folder).config
    config._name_or_path = ""
    torch.manual_seed(3)
    trainer = make(model=Qwen3ForCausalLM(config), beta=0.1)
    before = weights(trainer.model)
    train(trainer)
    assert differing(before, weights(trainer.model))
    assert_same(before, weights(trainer.ref_model))


def test_no_config_means_the_default(make: Callable[..., Any]) -> None:
    assert sketch_state(make(peft_config=None).model).config == SketchConfig()


def test_config_is_used_and_left_as_it_was(make: Callable[..., Any]) -> None:
    config = SketchConfig(kl_budget=None, rank=4, target_modules=["q_proj"], refresh="never")
    trainer = make(peft_config=config, seed=7)
    state = sketch_state(trainer.model)
    assert state.config is config or state.config == config
    assert {name.rpartition(".")[2] for name in state.layers} == {"q_proj"}
    assert {layer.group.rank for layer in state.layers.values()} == {4}
    assert state.seed == 7
    assert config == SketchConfig(kl_budget=None, rank=4, target_modules=["q_proj"], refresh="never")


def test_projection_seed_goes_before_the_trainers_seed(make: Callable[..., Any]) -> None:
    assert sketch_state(make(peft_config=SketchConfig(kl_budget=None, projection_seed=5), seed=7).model).seed == 5
    assert sketch_state(make(peft_config=SketchConfig(kl_budget=None, projection_seed=0), seed=7).model).seed == 0


def test_lora_config_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"LoraConfig.*trl\.GRPOTrainer"):
        make(peft_config=LoraConfig(r=4))


def test_other_configs_are_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"trl_sketch\.SketchConfig.*dict"):
        make(peft_config={"rank": 4})


def test_peft_model_is_refused(make: Callable[..., Any], policy_folder: str) -> None:
    model = get_peft_model(load(policy_folder), LoraConfig(r=2, target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"PeftModel.*merge_and_unload.*trl\.GRPOTrainer"):
        make(model=model)


def test_foreign_optimizer_is_refused(make: Callable[..., Any], policy_folder: str) -> None:
    model = load(policy_folder)
    with pytest.raises(ValueError, match="AdamW.*SketchOptimizer"):
        make(model=model, optimizers=(torch.optim.AdamW(model.parameters()), None))


def test_optimizer_of_another_model_is_refused(make: Callable[..., Any], policy_folder: str) -> None:
    other = get_sketch_model(load(policy_folder), SketchConfig(kl_budget=None, rank=4))
    with pytest.raises(ValueError, match="optimizer"):
        make(optimizers=(SketchOptimizer(other), None))


def test_quantization_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="quantization_config"):
        make(quantization_config=object())


def test_fp16_is_refused(make: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match="bf16=True"):
        make(fp16=True)


def test_deepspeed_is_refused(policy_folder: str, tmp_path: Path) -> None:
    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False, report_to="none")
    args.deepspeed = "zero3.json"  # the constructor would look for the package
    with pytest.raises(ValueError, match="deepspeed.*leave it out"):
        SketchGRPOTrainer(policy_folder, alphabet_reward, args)


def test_weight_decay_is_warned_about(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    make()
    assert "weight_decay" not in caplog.text
    make(weight_decay=0.1)
    assert [record.levelname for record in caplog.records if "weight_decay" in record.message] == ["WARNING"]


def test_a_sketched_model_with_its_optimizer_and_scheduler(make: Callable[..., Any], policy_folder: str) -> None:
    model = get_sketch_model(load(policy_folder, dtype=torch.float32), SketchConfig(kl_budget=None, rank=8))
    with pytest.raises(ValueError, match="already accumulates sketches"):
        make(model=model, peft_config=SketchConfig(kl_budget=None, rank=4))
    optimizer = SketchOptimizer(model, lr=2e-3)
    trainer = make(model=model, optimizers=(optimizer, get_constant_schedule(optimizer)))
    train(trainer)
    from_config = make(peft_config=SketchConfig(kl_budget=None, rank=8), learning_rate=2e-3)
    train(from_config)
    assert_same(weights(model), weights(from_config.model))


# ------------------------------------------------------------------------------------------------ one step


def test_one_projection_per_step_and_empty_sketches_after_it(make: Callable[..., Any]) -> None:
    recorder = Recorder()
    train(make(gradient_accumulation_steps=3, max_steps=3, callbacks=[recorder]))
    assert recorder.events == ["step_begin", "substep_end", "substep_end", "pre_optimizer_step", "step_end"] * 3
    keys = [keys for _, keys in recorder.keys]
    for step in range(3):
        begin, *within, after = keys[5 * step : 5 * step + 5]
        assert all(key == begin for key in within), "the projection changed within an accumulation"
        assert not set(begin) & set(after), "a projection was not redrawn"
    assert recorder.at("step_begin", recorder.norms) == [0, 0, 0]
    assert recorder.at("step_end", recorder.norms) == [0, 0, 0]
    substeps = recorder.at("substep_end", recorder.norms)
    assert all(norm > 0 for norm in substeps)
    assert substeps[0] != substeps[1]
    assert not recorder.has_grad


def test_refresh_every_two_steps_and_never(make: Callable[..., Any]) -> None:
    for refresh, expected in (("2", [0, 0, 1, 1]), ("never", [0, 0, 0, 0])):
        recorder = Recorder()
        train(
            make(max_steps=4, callbacks=[recorder], peft_config=SketchConfig(kl_budget=None, rank=8, refresh=refresh))
        )
        drawn = recorder.at("step_begin", recorder.keys)
        assert [drawn.index(keys) // 2 for keys in drawn] == expected


def test_only_selected_weights_change_and_all_of_them(make: Callable[..., Any]) -> None:
    recorder = Recorder()
    trainer = make(max_steps=3, callbacks=[recorder], peft_config=SketchConfig(kl_budget=None, rank=8))
    before = weights(trainer.model)
    names = selected(trainer)
    assert len(names) == 14
    assert not any(parameter.requires_grad for parameter in trainer.model.parameters())
    train(trainer)
    changed = [name for name, weight in weights(trainer.model).items() if not torch.equal(weight, before[name])]
    assert sorted(changed) == sorted(names)
    assert not recorder.has_grad
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_same_seed_same_bits_and_another_seed_other_projections(make: Callable[..., Any]) -> None:
    runs = []
    for seed in (1, 1, 2):
        trainer = make(seed=seed, peft_config=SketchConfig(kl_budget=None, rank=8))
        keys = sketch_state(trainer.model).keys.tolist()
        train(trainer)
        runs.append((keys, weights(trainer.model)))
    assert runs[0][0] == runs[1][0]
    assert_same(runs[0][1], runs[1][1])
    assert not set(runs[0][0]) & set(runs[2][0])


DENSE_CASES = {
    "one microbatch": {"max_steps": 1},
    "four microbatches": {"max_steps": 1, "gradient_accumulation_steps": 4},
    "accumulation beyond a generation": {
        "max_steps": 1,
        "gradient_accumulation_steps": 3,
        "steps_per_generation": 2,
    },
    "accumulation within a generation": {
        "max_steps": 2,
        "learning_rate": 0.05,
        "gradient_accumulation_steps": 2,
        "steps_per_generation": 5,
    },
    "num_iterations and beta": {
        "max_steps": 2,
        "learning_rate": 0.05,
        "gradient_accumulation_steps": 2,
        "num_iterations": 2,
        "beta": 0.5,
    },
    "clipping": {"max_steps": 1, "max_grad_norm": 0.05},
    "no clipping": {"max_steps": 1, "max_grad_norm": 0.0},
    "reentrant checkpointing": {"max_steps": 1, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    "no checkpointing": {"max_steps": 1, "gradient_checkpointing": False},
    "two rewards": {
        "max_steps": 1,
        "reward_funcs": [alphabet_reward, length_reward],
        "reward_weights": [1.0, 0.5],
    },
}


@pytest.mark.parametrize("case", DENSE_CASES)
def test_full_rank_sketches_train_as_dense_sgd_does(make: Callable[..., Any], policy_folder: str, case: str) -> None:
    """With AᵀA = I exactly, S A is the dense gradient; what is left is the int8 factor's rounding."""
    settings = {"learning_rate": 0.5} | DENSE_CASES[case]
    sketch = make(peft_config=SketchConfig(kl_budget=None, rank=64, update_rule="sgd", norm="none"), **settings)
    names = selected(sketch)
    model = load(policy_folder, dtype=torch.float32)
    before = weights(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    model.enable_input_require_grads()
    sgd = torch.optim.SGD([model.get_parameter(name) for name in names], lr=settings["learning_rate"])
    dense = make(GRPOTrainer, model=model, optimizers=(sgd, None), **settings)
    train(sketch)
    train(dense)

    assert logged(sketch, "loss") == pytest.approx(logged(dense, "loss"), rel=2e-3, abs=2e-4)
    assert logged(sketch, "num_tokens") == logged(dense, "num_tokens")
    if settings.get("max_grad_norm") != 0:  # without clipping the dense run's norm is over its own parameters, too
        assert logged(sketch, "grad_norm") == pytest.approx(logged(dense, "grad_norm"), rel=5e-3)
    for name in names:
        ours = sketch.model.get_parameter(name).detach() - before[name]
        theirs = dense.model.get_parameter(name).detach() - before[name]
        assert theirs.norm() > 0
        assert (ours - theirs).norm() < 0.015 * theirs.norm(), name
        assert torch.cosine_similarity(ours.flatten(), theirs.flatten(), dim=0) > 0.999, name


def test_max_grad_norm_bounds_the_step_of_norm_none(make: Callable[..., Any]) -> None:
    """The sketch moves a weight by lr · ‖S A‖, and ‖S‖ is clipped."""
    moved = {}
    for max_grad_norm in (1e-3, 2e-3, 1e3):
        config = SketchConfig(kl_budget=None, rank=64, update_rule="sgd", norm="none")
        trainer = make(max_steps=1, learning_rate=1.0, max_grad_norm=max_grad_norm, peft_config=config)
        before = weights(trainer.model)
        train(trainer)
        (norm,) = logged(trainer, "grad_norm")
        assert norm > 0.1, "the norm before clipping is logged"
        change = [trainer.model.get_parameter(name) - before[name] for name in selected(trainer)]
        moved[max_grad_norm] = sum(part.square().sum().item() for part in change) ** 0.5
    assert moved[1e-3] == pytest.approx(1e-3, rel=0.01)
    assert moved[2e-3] == pytest.approx(2e-3, rel=0.01)
    assert moved[1e3] == pytest.approx(norm, rel=0.01)


def test_sketches_from_before_training_are_dropped(make: Callable[..., Any]) -> None:
    """`Trainer` calls model.zero_grad() before its first step: leftovers of an interrupted run do not count."""
    clean, dirty = make(max_steps=1), make(max_steps=1)
    ids = torch.arange(3, 11)[None]
    dirty.model(input_ids=ids, labels=ids).loss.backward()
    assert sketch_state(dirty.model).flat.norm() > 0
    train(clean)
    train(dirty)
    assert_same(weights(clean.model), weights(dirty.model))


def test_training_twice_continues(make: Callable[..., Any]) -> None:
    trainer = make(max_steps=1)
    train(trainer)
    first = weights(trainer.model)
    train(trainer)
    assert differing(first, weights(trainer.model))
    assert sum(isinstance(callback, SketchCallback) for callback in trainer.callback_handler.callbacks) == 1
    assert sketch_state(trainer.model).step == 2


def test_forward_uses_the_fused_head_and_checkpointing(make: Callable[..., Any]) -> None:
    trainer = make(max_steps=1)
    assert trainer.args.gradient_checkpointing
    seen: list[tuple[bool, bool]] = []
    trainer.model.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append((torch.is_grad_enabled(), bool(kwargs.get("fused_lm_head")))),
        with_kwargs=True,
    )
    train(trainer)
    assert (True, True) in seen and (True, False) not in seen
    assert trainer.model.is_gradient_checkpointing
    assert logged(trainer, "entropy")[0] > 0


@pytest.mark.parametrize("bf16", [False, True])
def test_checkpointing_does_not_change_the_result(make: Callable[..., Any], bf16: bool) -> None:
    results = []
    for settings in (
        {"gradient_checkpointing": False},
        {"gradient_checkpointing": True},
        {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}},
    ):
        trainer = make(bf16=bf16, peft_config=SketchConfig(kl_budget=None, rank=8), **settings)
        train(trainer)
        assert logged(trainer, "grad_norm")[0] > 0
        results.append(weights(trainer.model))
    assert_same(results[0], results[1])
    assert_same(results[0], results[2])


# ------------------------------------------------------------------------------------------------ reference model


def test_reference_is_the_initial_model(make: Callable[..., Any], policy_folder: str) -> None:
    trainer = make(beta=0.1, max_steps=3)
    initial = weights(load(policy_folder, dtype=torch.float32))
    assert_same(weights(trainer.ref_model), initial)
    train(trainer)
    assert_same(weights(trainer.ref_model), initial)
    kl = logged(trainer, "kl")
    assert kl[0] == 0
    assert min(kl[1:]) > 1e-4


def test_reference_of_a_model_that_differs_from_its_checkpoint(make: Callable[..., Any], policy_folder: str) -> None:
    model = load(policy_folder, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    initial = weights(model)
    assert differing(initial, weights(load(policy_folder, dtype=torch.float32)))
    trainer = make(model=model, beta=0.1)
    assert_same(weights(trainer.ref_model), initial)
    train(trainer)
    assert_same(weights(trainer.ref_model), initial)
    assert differing(weights(trainer.model), initial)
    assert logged(trainer, "kl")[0] == 0
    assert logged(trainer, "kl")[1] > 0
    pointers = {parameter.data_ptr() for parameter in trainer.model.parameters()}
    assert not pointers & {parameter.data_ptr() for parameter in trainer.ref_model.parameters()}


def test_reference_of_an_object_has_no_dropout(make: Callable[..., Any], policy_folder: str) -> None:
    """TRL loads its reference in eval mode; a copy of a model in training mode must be put there."""
    model = load(policy_folder, dtype=torch.float32, attention_dropout=0.5)
    model.train()
    trainer = make(model=model, beta=0.1)
    assert not trainer.ref_model.training


def test_reference_of_a_sketched_model(make: Callable[..., Any], policy_folder: str) -> None:
    model = get_sketch_model(load(policy_folder, dtype=torch.float32), SketchConfig(kl_budget=None, rank=8))
    initial = weights(model)
    trainer = make(model=model, beta=0.1)
    train(trainer)
    assert_same(weights(trainer.ref_model), initial)
    assert differing(weights(trainer.model), initial)
    assert logged(trainer, "kl")[0] == 0


def test_reference_in_bf16(make: Callable[..., Any]) -> None:
    """Selected weights become bfloat16, the reference's do not; under autocast both compute the same."""
    trainer = make(beta=0.1, bf16=True)
    initial = weights(trainer.ref_model)
    train(trainer)
    assert_same(weights(trainer.ref_model), initial)
    assert logged(trainer, "kl")[0] == 0
    assert logged(trainer, "kl")[1] > 0


@pytest.mark.parametrize("bf16", [False, True])
def test_sync_ref_model(make: Callable[..., Any], bf16: bool) -> None:
    trainer = make(beta=0.1, sync_ref_model=True, ref_model_sync_steps=2, ref_model_mixup_alpha=0.75, bf16=bf16)
    before = weights(trainer.ref_model)
    train(trainer)
    after, policy = weights(trainer.ref_model), weights(trainer.model)
    assert differing(before, after)
    for name in before:
        torch.testing.assert_close(after[name], 0.25 * before[name] + 0.75 * policy[name].to(before[name].dtype))


# ------------------------------------------------------------------------------------------------ evaluation, data


def test_evaluation_leaves_weights_and_sketches_alone(make: Callable[..., Any]) -> None:
    trainer = make(eval_dataset=PROMPTS.select(range(4)), per_device_eval_batch_size=4)
    ids = torch.arange(3, 11)[None]
    trainer.model.train()
    trainer.model(input_ids=ids, labels=ids).loss.backward()
    state, before = sketch_state(trainer.model), weights(trainer.model)
    sketches, keys = state.flat.clone(), state.keys.clone()
    assert sketches.norm() > 0
    metrics = trainer.evaluate()
    assert metrics["eval_reward"] > 0
    assert torch.equal(state.flat, sketches)
    assert torch.equal(state.keys, keys)
    assert_same(weights(trainer.model), before)


def test_evaluation_during_training(make: Callable[..., Any]) -> None:
    seen: list[tuple[float, Weights]] = []

    class AtEvaluation(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
            seen.append((sketch_state(model).flat.norm().item(), weights(model)))

        on_evaluate = on_step_end

    recorder = Recorder()
    trainer = make(
        logging_steps=2,  # the first evaluation finds metrics of training that are not logged yet
        eval_strategy="steps",
        eval_steps=1,
        eval_dataset=PROMPTS.select(range(4)),
        per_device_eval_batch_size=4,
        callbacks=[recorder, AtEvaluation()],
    )
    train(trainer)
    assert len(seen) == 4  # end of step and evaluation, twice
    assert all(norm == 0 for norm, _ in seen)
    assert_same(seen[0][1], seen[1][1])
    assert_same(seen[2][1], seen[3][1])
    assert differing(seen[1][1], seen[2][1])
    evaluations = [entry for entry in trainer.state.log_history if "eval_loss" in entry]
    assert [entry["step"] for entry in evaluations] == [1, 2]
    assert not any("sketch" in name or name == "grad_norm" for entry in evaluations for name in entry)
    (logs,) = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert logs["grad_norm"] == pytest.approx(sum(recorder.at("pre_optimizer_step", recorder.norms)) / 2, rel=1e-5)


def test_epochs_and_a_short_last_accumulation(make: Callable[..., Any]) -> None:
    """Without max_steps: 8 prompts, 4 completions each, are 8 microbatches an epoch, 3 + 3 + 2."""
    recorder = Recorder()
    trainer = make(
        max_steps=-1,
        num_train_epochs=1,
        train_dataset=PROMPTS.select(range(8)),
        gradient_accumulation_steps=3,
        steps_per_generation=1,
        callbacks=[recorder],
    )
    train(trainer)
    assert trainer.state.global_step == sketch_state(trainer.model).step == 3
    assert recorder.events.count("substep_end") == 5
    assert recorder.at("step_end", recorder.norms) == [0, 0, 0]


def test_two_reward_functions(make: Callable[..., Any]) -> None:
    trainer = make(reward_funcs=[alphabet_reward, length_reward], reward_weights=[1.0, 2.0])
    train(trainer)
    for total, first, second in zip(
        logged(trainer, "reward"),
        logged(trainer, "rewards/alphabet_reward/mean"),
        logged(trainer, "rewards/length_reward/mean"),
        strict=True,
    ):
        assert total == pytest.approx(first + 2 * second, abs=1e-5)
    assert min(logged(trainer, "grad_norm")) > 0


def test_chat_template(make: Callable[..., Any]) -> None:
    """Prompts of messages: the template puts the role's first letter before each, and an `a` at the end."""
    seen: list[Any] = []

    def reward(completions: list[Any], prompts: list[Any], **kwargs: Any) -> list[float]:
        seen.extend(completions)
        return alphabet_reward([completion[-1]["content"] for completion in completions])

    data = Dataset.from_list([{"prompt": [{"role": "user", "content": text}]} for text in PROMPTS["prompt"]])
    trainer = make(train_dataset=data, reward_funcs=reward)
    prompt_ids: list[Any] = []
    original = trainer._tokenize_prompts
    trainer._tokenize_prompts = lambda prompts: prompt_ids.append(original(prompts)) or prompt_ids[-1]
    before = weights(trainer.model)
    train(trainer)
    assert seen and all(completion[-1]["role"] == "assistant" for completion in seen)
    text = trainer.processing_class.decode(prompt_ids[0][0][0])
    assert text.startswith("<unk>") and text.endswith("a"), text  # "u" is not in the vocabulary
    assert differing(weights(trainer.model), before)


def test_custom_rollout_function(make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """An argument that SketchGRPOTrainer does not name reaches TRL."""
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")

    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [[3 + (7 * i) % 13, 4] for i in range(len(prompts))]
        return {"prompt_ids": [[5, 6]] * len(prompts), "completion_ids": ids, "logprobs": [[-1.0, -1.0]] * len(ids)}

    trainer = make(rollout_func=rollout, max_steps=1)
    train(trainer)
    assert logged(trainer, "completions/mean_length") == [2.0]
    assert logged(trainer, "grad_norm")[0] > 0


# ------------------------------------------------------------------------------------------------ logs, callbacks


def test_logs(make: Callable[..., Any]) -> None:
    recorder = Recorder()
    trainer = make(
        callbacks=[recorder],
        max_steps=4,
        lr_scheduler_type="linear",
        peft_config=SketchConfig(kl_budget=None, update_rule="sgd"),
    )
    before = weights(trainer.model)
    train(trainer)
    # the sketch's norm as the model held it when the optimizer was about to step
    norms = recorder.at("pre_optimizer_step", recorder.norms)
    assert logged(trainer, "grad_norm") == pytest.approx(norms, rel=1e-5)
    assert min(norms) > 0
    names = selected(trainer)
    count = sum(before[name].numel() for name in names)
    norm = sum(before[name].double().square().sum().item() for name in names) ** 0.5
    rates = logged(trainer, "learning_rate")
    assert rates == pytest.approx([1e-3, 7.5e-4, 5e-4, 2.5e-4])
    ratios = logged(trainer, "sketch/update_ratio")
    assert ratios[0] == pytest.approx(rates[0] * count**0.5 / norm, rel=1e-5)
    assert ratios == pytest.approx([rate * count**0.5 / norm for rate in rates], rel=0.01)


def test_the_logged_ratio_is_the_movement(make: Callable[..., Any]) -> None:
    trainer = make(max_steps=1, peft_config=SketchConfig(kl_budget=None, rank=8, update_ratio=1e-3))
    before = weights(trainer.model)
    train(trainer)
    assert logged(trainer, "sketch/update_ratio") == pytest.approx([1e-3])
    change = [(trainer.model.get_parameter(name) - before[name]).norm() for name in selected(trainer)]
    norms = [before[name].norm() for name in selected(trainer)]
    assert torch.stack(change).norm() / torch.stack(norms).norm() == pytest.approx(1e-3, rel=0.01)


def test_metrics_are_means_over_the_logged_steps(make: Callable[..., Any]) -> None:
    each, pairs = make(max_steps=4, logging_steps=1), make(max_steps=4, logging_steps=2)
    train(each)
    train(pairs)
    for name in ("grad_norm", "sketch/update_ratio"):
        a, b, c, d = logged(each, name)
        assert logged(pairs, name) == pytest.approx([(a + b) / 2, (c + d) / 2])


@pytest.mark.parametrize("added", ["to __init__", "to the trainer", "as a class"])
def test_users_callbacks_see_every_event_and_the_metrics(make: Callable[..., Any], added: str) -> None:
    recorder = Recorder()
    made: list[Recorder] = [recorder]
    if added == "to __init__":
        trainer = make(callbacks=[recorder])
    elif added == "as a class":

        class Own(Recorder):
            def __init__(self) -> None:
                super().__init__()
                made[0] = self

        trainer = make(callbacks=[Own])
    else:
        trainer = make()
        trainer.add_callback(recorder)
    train(trainer)
    assert made[0].events == ["step_begin", "pre_optimizer_step", "step_end"] * 2
    steps = [logs for logs in made[0].logs if "loss" in logs]
    assert len(steps) == 2
    for logs, entry in zip(steps, trainer.state.log_history, strict=False):
        assert logs["grad_norm"] > 0
        assert logs["sketch/update_ratio"] > 0
        assert {"reward", "loss", "learning_rate"} <= logs.keys()
        assert logs == {name: value for name, value in entry.items() if name != "step"}
    assert "train_runtime" in made[0].logs[-1] and "grad_norm" not in made[0].logs[-1]


def test_a_second_sketch_callback_does_not_change_the_update(make: Callable[..., Any]) -> None:
    """Someone who comes from another trainer adds one by hand: proposing twice must not happen silently."""
    one, two = make(), make(callbacks=[SketchCallback()])
    train(one)
    try:
        train(two)
    except (RuntimeError, ValueError):
        return
    assert_same(weights(one.model), weights(two.model))


def test_tensorboard_gets_the_metrics(make: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = make(report_to="tensorboard")
    train(trainer)
    files = list(tmp_path.rglob("events.out.tfevents*"))
    assert files
    tags = {tag for file in files for tag in EventAccumulator(str(file)).Reload().Tags()["scalars"]}
    assert {"train/sketch/update_ratio", "train/grad_norm", "train/reward"} <= tags


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (SketchConfig(kl_budget=None, rank=8), {}),
        (SketchConfig(kl_budget=None, rank=8, update_ratio=1e-2), {"bf16": True, "lr_scheduler_type": "linear"}),
        (
            SketchConfig(kl_budget=None, rank=8, update_rule="adam", refresh="never"),
            {"gradient_accumulation_steps": 2, "beta": 0.1},
        ),
    ],
    ids=["default", "bf16 and a schedule", "adam, accumulation and a reference"],
)
def test_checkpoints_and_resume(
    make: Callable[..., Any], tmp_path: Path, config: SketchConfig, changes: dict[str, Any]
) -> None:
    """Two steps, a checkpoint and two more are four steps, to the last bit."""
    settings = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "peft_config": config} | changes
    recorder = Recorder()
    whole = make(callbacks=[recorder], **settings)
    train(whole)
    checkpoint = tmp_path / "out" / "checkpoint-2"
    assert SketchConfig.from_pretrained(checkpoint) == config
    assert SketchConfig.from_pretrained(tmp_path / "out" / "checkpoint-4") == config
    assert json.loads((checkpoint / "trainer_state.json").read_text())["log_history"][0]["sketch/update_ratio"] > 0

    resumed_recorder = Recorder()
    resumed = make(callbacks=[resumed_recorder], **settings)
    train(resumed, resume_from_checkpoint=str(checkpoint))
    assert resumed.state.global_step == 4
    assert sketch_state(resumed.model).step == 4
    assert recorder.at("step_begin", recorder.keys)[2:] == resumed_recorder.at("step_begin", resumed_recorder.keys)
    assert_same(weights(whole.model), weights(resumed.model))
    assert logged(resumed, "grad_norm") == logged(whole, "grad_norm")


def test_a_resumed_run_keeps_its_projections(make: Callable[..., Any], tmp_path: Path) -> None:
    """The seed of the projections is that of the checkpoint, also where the script's seed has changed."""
    train(make(seed=1, max_steps=1, save_strategy="steps", save_steps=1))
    recorder = Recorder()
    resumed = make(seed=2, max_steps=2, callbacks=[recorder])
    train(resumed, resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    whole = Recorder()
    train(make(seed=1, max_steps=2, callbacks=[whole]))
    assert recorder.at("step_begin", recorder.keys) == whole.at("step_begin", whole.keys)[1:]


def save_and_compare(trainer: Any, folder: Path, dtype: torch.dtype | None) -> PreTrainedModel:
    """Save, load with transformers alone, compare names and values, and the logits; return what was loaded."""
    trainer.save_model(str(folder))
    loaded = load(folder, **({} if dtype is None else {"dtype": dtype}))
    assert type(loaded) is Qwen3ForCausalLM
    trained = weights(trainer.model)
    assert list(trained) == [name for name, _ in loaded.named_parameters()]
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter.float(), trained[name].float()), name
    return loaded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_saved_model_gives_the_trained_models_logits(make: Callable[..., Any], tmp_path: Path, dtype: str) -> None:
    trainer = make(bf16=dtype == "bfloat16", model_init_kwargs={"dtype": dtype})
    before = weights(trainer.model)
    train(trainer)
    assert differing(before, weights(trainer.model))
    assert {str(parameter.dtype) for parameter in trainer.model.parameters()} == {f"torch.{dtype}"}
    loaded = save_and_compare(trainer, tmp_path / "saved", None)
    assert loaded.dtype == getattr(torch, dtype)
    trained = trainer.accelerator.unwrap_model(trainer.model, keep_fp32_wrapper=False).eval()
    ids = torch.randint(3, 16, (3, 9))
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, trained(ids).logits.to(loaded.dtype))


def test_a_model_with_a_tied_head(make: Callable[..., Any], tmp_path: Path, policy_folder: str) -> None:
    config = load(policy_folder).config
    config.tie_word_embeddings = True
    trainer = make(model=Qwen3ForCausalLM(config), peft_config=SketchConfig(kl_budget=None, rank=8))
    train(trainer)
    loaded = save_and_compare(trainer, tmp_path / "saved", None)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight


def test_fp32_model_under_bf16_keeps_selected_weights_in_bf16(
    make: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="trl_sketch"):
        trainer = make(bf16=True)
    assert len([record for record in caplog.records if "bfloat16" in record.message]) == 1
    names = selected(trainer)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.dtype == (torch.bfloat16 if name in names else torch.float32), name
    before = weights(trainer.model)
    train(trainer)
    assert all(not torch.equal(weights(trainer.model)[name], before[name]) for name in names)
    loaded = save_and_compare(trainer, tmp_path / "saved", torch.float32)
    ids = torch.randint(3, 16, (3, 9))
    trained = trainer.model.eval()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(loaded(ids).logits, trained(ids).logits)


def test_fp32_training_logs_no_conversion(make: Callable[..., Any], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="trl_sketch"):
        trainer = make()
    assert "bfloat16" not in caplog.text
    assert {parameter.dtype for parameter in trainer.model.parameters()} == {torch.float32}


def test_generation_is_that_of_an_ordinary_model(make: Callable[..., Any], tmp_path: Path, policy_folder: str) -> None:
    trainer = make()
    prompt = {"input_ids": torch.tensor([[3, 4, 5], [7, 8, 9]]), "attention_mask": torch.ones(2, 3, dtype=torch.int64)}
    greedy = {"do_sample": False, "max_new_tokens": 12}
    plain = load(policy_folder, dtype=torch.float32)
    assert torch.equal(trainer.model.eval().generate(**prompt, **greedy), plain.generate(**prompt, **greedy))
    train(trainer)
    trainer.save_model(str(tmp_path / "saved"))
    loaded = load(tmp_path / "saved")
    assert torch.equal(trainer.model.eval().generate(**prompt, **greedy), loaded.generate(**prompt, **greedy))


def test_model_card(make: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make(max_steps=1, save_strategy="steps", save_steps=1)
    train(trainer)
    for card in (tmp_path / "out" / "README.md").read_text(), _new_card(trainer, tmp_path):
        assert "gradient sketches" in card and "trl_sketch" in card
        assert "LoGRA" in card and "2610.06647" in card
        assert "RGC" in card and "Randomized Gradient Compression" in card
        assert "shao2024deepseekmath" in card
        assert "- trl-sketch" in card and "- grpo" in card and "- trl\n" in card


def _new_card(trainer: Any, tmp_path: Path) -> str:
    """The card that push_to_hub writes."""
    trainer.create_model_card(model_name="some-model")
    return (tmp_path / "out" / "README.md").read_text()


# ------------------------------------------------------------------------------------------------ learning


@pytest.mark.parametrize(
    "config",
    [
        SketchConfig(kl_budget=None, rank=8),
        SketchConfig(kl_budget=None, rank=8, update_rule="sgd"),
        SketchConfig.rgc(8),
        SketchConfig(kl_budget=None, rank=8, update_rule="adam", refresh="never"),
    ],
    ids=["default", "sgd", "rgc", "adam"],
)
def test_the_reward_rises(make: Callable[..., Any], config: SketchConfig) -> None:
    """A reward for one letter of the thirteen: from less than 1 in 6 to more than 3 in 5, in 20 steps."""

    def letters(completions: list[str], **kwargs: Any) -> list[float]:
        return [text.count("h") / 4 for text in completions]

    trainer = make(
        reward_funcs=letters,
        max_steps=20,
        learning_rate=2e-3,
        per_device_train_batch_size=32,
        num_generations=8,
        bf16=True,
        peft_config=copy.deepcopy(config),
    )
    train(trainer)
    rewards = logged(trainer, "reward")
    assert rewards[0] < 0.15
    assert sum(rewards[-3:]) / 3 > 0.6
