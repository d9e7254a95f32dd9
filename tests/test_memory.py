"""The memory that is predicted, measured on tensors without data, and measured on real ones; and what keeps it low."""

import gc
import json
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from embedded import WarmStart, make_model, make_tokenizer
from torch.autograd.graph import saved_tensors_hooks
from transformers import Qwen3Config, Qwen3ForCausalLM
from trl import GRPOConfig

from trl_sketch import SketchConfig, SketchGRPOTrainer, SketchOptimizer, cli, get_sketch_model, predicted_kl
from trl_sketch.memory import (
    GIB,
    UPDATE_TEMPORARY,
    Plan,
    crossing_rank,
    largest_rank,
    plan_for,
    predict,
    predict_state,
)
from trl_sketch.memory_measure import Measurement, StorageTracker, measure, measure_on_cpu
from trl_sketch.memory_models import BUILT_IN, load_config
from trl_sketch.model import sketch_state


QWEN3, QWEN25, LLAMA = "Qwen/Qwen3-1.7B", "Qwen/Qwen2.5-Math-7B", "meta-llama/Llama-3.1-8B"
MEASURED = ("sketch", "lora", "rgc", "dense")


@lru_cache
def planned(model: str, method: str = "sketch", rank: int = 64, tokens: int = 1024, **kwargs: Any) -> Plan:
    return plan_for(model, method=method, rank=rank, tokens=tokens, **kwargs)


@lru_cache
def measured(plan: Plan, update: bool = False) -> Measurement:
    return measure(plan, update)


def predicted(model: str, method: str, rank: int = 64, **kwargs: Any) -> int:
    return predict(planned(model, method, rank, **kwargs)).total


def state_of(model: str, method: str, rank: int, **kwargs: Any) -> int:
    """Bytes above the activations, on one GPU."""
    return sum(predict_state(planned(model, method, rank, **kwargs)).values())


# ---------------------------------------------------------------------- what others have published


@pytest.mark.parametrize(("rank", "gap"), [(64, 1.784), (128, 0.943), (256, -0.738)])
def test_the_predicted_gap_of_rgc_to_lora(rank, gap):
    # figure 2 of RGC
    assert (state_of(QWEN3, "rgc", rank) - state_of(QWEN3, "lora", rank)) / GIB == pytest.approx(gap, abs=0.01)


@pytest.mark.parametrize(("rank", "gap"), [(64, 1.783), (128, 0.948), (256, -0.838)])
def test_the_gap_of_rgc_to_lora_that_was_measured(rank, gap):
    # the same figure; peaks of a step of theirs: about 1,050 tokens, an LM head of their own
    ours = predicted(QWEN3, "rgc", rank, tokens=1050) - predicted(QWEN3, "lora", rank, tokens=1050)
    assert ours / GIB == pytest.approx(gap, abs=0.35)


@pytest.mark.parametrize(("model", "saving"), [("Qwen/Qwen2.5-1.5B", 1.94), (QWEN25, 14.50)])
def test_the_savings_of_logra(model, saving):
    # table 1 of LoGRA, four training GPUs at rank 256, with S and U in fp32 and a projection in fp32 on each. What FSDP2
    # gathers is the same for both but for the gradients, which are not in the table's formula.
    sharded = {method: predict_state(planned(model, method, 256, world_size=4)) for method in ("dense", "logra")}
    dense, logra = (
        sum(size for part, size in state.items() if part != "gathered") / GIB for state in sharded.values()
    )
    assert dense - logra == pytest.approx(saving, abs=0.01)


# ---------------------------------------------------------------------- the formula against the measurement


SHAPES = [
    QWEN3,
    pytest.param(QWEN25, marks=pytest.mark.slow),
    pytest.param(LLAMA, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("method", MEASURED)
@pytest.mark.parametrize("model", SHAPES)
def test_formula_and_measurement_agree(model, method, checkpointing):
    plan = planned(model, method, checkpointing=checkpointing)
    prediction, measurement = predict(plan), measured(plan)
    assert prediction.total == pytest.approx(measurement.peak, rel=0.03)
    assert measurement.phases[prediction.phase] > 0.995 * measurement.peak  # the phase that sets the peak, or nearly
    parts = measurement.parts[measurement.peak_phase]
    for part in ("weights", "sketch", "adapter", "gradients"):
        assert prediction.parts.get(part, 0) == pytest.approx(parts.get(part, 0), abs=2e5)
    activations = measurement.phases["head"] - sum(prediction.state.values())
    assert prediction.peaks["head"] - sum(prediction.state.values()) == pytest.approx(activations, rel=0.05)


@pytest.mark.parametrize(
    ("method", "change"),
    [
        ("sketch", {"rank": 256, "microbatch": 4}),
        ("sketch", {"tokens": 5000, "checkpointing": False}),
        ("lora", {"rank": 256, "tokens": 512}),
        ("lora", {"dtype": torch.float32, "checkpointing": False}),
        ("dense", {"dtype": torch.float32}),
        ("rgc", {"rank": 16, "microbatch": 2}),
    ],
)
def test_formula_and_measurement_agree_elsewhere(method, change):
    config = load_config("Qwen/Qwen3-0.6B")
    config.num_hidden_layers, config.layer_types = 6, config.layer_types[:6]
    plan = replace(Plan(config, method, 64), **change)
    assert predict(plan).total == pytest.approx(measured(plan).peak, rel=0.03)


# ---------------------------------------------------------------------- how low it is


@pytest.mark.parametrize(("rank", "share", "lora", "above"), [(64, 0.80, 4.79, 1.20), (128, 0.67, 5.96, 1.25), (256, 0.52, 8.30, 1.33)])  # fmt: skip
def test_less_than_lora_at_every_rank(rank, share, lora, above):
    prototype = {64: 3.76, 128: 3.89, 256: 4.17}[rank]
    peak = measured(planned(QWEN3, rank=rank)).peak / GIB
    beside = (
        measured(planned(QWEN3, "lora", rank=rank)).peak / GIB
    )  # by the same head, smaller than the one of the figures
    weights = predict_state(planned(QWEN3))["weights"] / GIB
    assert peak < prototype
    assert peak <= share * min(lora, beside)
    assert peak <= above * weights


def test_activations_without_checkpointing():
    sketch, lora = (measured(planned(QWEN3, method, checkpointing=False)) for method in ("sketch", "lora"))
    kept = [m.parts["backward"]["forward"] / GIB for m in (sketch, lora)]
    assert kept[0] <= 0.76 * 2.78  # GiB, of a LoRA that casts no inputs
    assert kept[0] <= 0.76 * kept[1]


@pytest.mark.parametrize(
    ("model", "tokens", "rank"),
    [
        ("Qwen/Qwen3-0.6B", 512, 256),
        pytest.param(QWEN3, 1024, 64, marks=pytest.mark.slow),
        pytest.param(QWEN3, 4096, 256, marks=pytest.mark.slow),
        pytest.param(QWEN25, 1024, 256, marks=pytest.mark.slow),
    ],
)
def test_neither_probe_nor_update_sets_the_peak(model, tokens, rank):
    plan = planned(model, rank=rank, tokens=tokens)
    measurement, prediction = measured(plan, update=True), predict(plan)
    others = {phase: measurement.phases[phase] for phase in ("propose", "probe", "update")}
    assert max(others.values()) < measurement.phases["backward"]
    state = sum(prediction.state.values())
    assert max(others["propose"], others["update"]) - state < UPDATE_TEMPORARY
    assert others["probe"] - state == pytest.approx(prediction.peaks["probe"] - state, rel=0.2)


@pytest.mark.parametrize("microbatch", [1, 2, 8])
@pytest.mark.parametrize("tokens", [512, 1024, 2048, 4096])
@pytest.mark.parametrize("model", BUILT_IN)
def test_neither_probe_nor_update_is_predicted_to_set_the_peak(model, tokens, microbatch):
    prediction = predict(planned(model, rank=256, tokens=tokens, microbatch=microbatch))
    assert prediction.phase in ("head", "backward")


@pytest.mark.parametrize("rank", [64, 1024])
def test_an_update_of_a_large_matrix_takes_64_mib(rank):
    # the down projection of a model of 70 billion weights, one layer of it
    from transformers import LlamaConfig

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=1,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=64,
    )
    plan = Plan(config, rank=rank, tokens=64)
    measurement = measure(plan)
    largest = max(measurement.phases["propose"], measurement.phases["update"])
    assert 8 * 2**20 < largest - sum(predict_state(plan).values()) < UPDATE_TEMPORARY


# ---------------------------------------------------------------------- the embedded default, with real tensors


@pytest.fixture(scope="module")
def embedded_config() -> Any:
    return make_model(make_tokenizer(), WarmStart()).config


@pytest.mark.parametrize("checkpointing", [True, False])
@pytest.mark.parametrize("method", MEASURED)
def test_the_state_of_the_embedded_default_to_the_byte(embedded_config, method, checkpointing):
    rank = 32 if method != "lora" else 8
    plan = Plan(embedded_config, method, rank, tokens=19, microbatch=8, checkpointing=checkpointing)
    measurement, state = measure_on_cpu(plan), predict_state(plan)
    # RGC's projections go when the step is done; the others keep only seeds.
    assert measurement.parts["backward"].get("projection") == state.get("projection")
    assert measurement.left | {"projection": 0} == state | {"projection": 0}


def test_the_state_of_a_run_is_the_predicted_one(policy_folder, tmp_path):
    trainer = SketchGRPOTrainer(
        model=policy_folder,
        reward_funcs=lambda completions, **kwargs: [float(len(c)) for c in completions],
        args=GRPOConfig(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            max_steps=2,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=4,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_dict({"prompt": ["abc", "def"]}),
        peft_config=SketchConfig(rank=8, kl_budget=None),
    )
    trainer.train()
    state = predict_state(Plan(trainer.model.config, rank=8, dtype=torch.float32))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert len(logs) == 2
    for entry in logs:
        assert entry["sketch/state_bytes"] == state["sketch"] + state["projection"] + state["optimizer"]
        assert not any("peak" in name for name in entry)  # on CUDA only
    assert state["weights"] == sum(p.nbytes for p in trainer.model.parameters()) + sum(
        b.nbytes for b in trainer.model.buffers()
    )


# ---------------------------------------------------------------------- what would raise it again


def sketched(tiny_qwen3: Callable[..., Qwen3ForCausalLM], **kwargs: Any) -> Qwen3ForCausalLM:
    model = tiny_qwen3(torch.bfloat16, num_hidden_layers=3, intermediate_size=80, head_dim=12)
    return get_sketch_model(model, SketchConfig(**kwargs))


def saved_for_backward(
    layers: list[torch.nn.Module], x: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Outputs of layers that read the same input, and what autograd keeps, weights aside; a tensor once."""
    own = {p.untyped_storage()._cdata for layer in layers for p in layer.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in own:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = [layer(x) for layer in layers]
    return outputs, list(kept.values())


@pytest.mark.parametrize("projection", ["hadamard", "orthonormal"])
def test_backward_keeps_no_input_of_a_layer(tiny_qwen3, projection):
    model = sketched(tiny_qwen3, rank=4, projection=projection)
    attention = model.model.layers[0].self_attn
    source = torch.randn(2, 7, 32, dtype=torch.bfloat16, requires_grad=True)
    x = source * 1
    alive = weakref.ref(x)
    outputs, kept = saved_for_backward([attention.q_proj, attention.k_proj, attention.v_proj], x)
    # X Aᵀ, once for the three, and what it takes is its own: no view of something larger
    assert [tuple(tensor.shape) for tensor in kept] == [(2, 7, 4)]
    assert kept[0].untyped_storage().nbytes() == 2 * 7 * 4 * 2
    projected = weakref.ref(kept.pop())
    del x
    gc.collect()
    assert alive() is None and projected() is not None
    torch.stack([output.float().sum() for output in outputs]).sum().backward()
    assert source.grad is not None
    gc.collect()
    assert projected() is None  # freed by backward


def test_no_layer_of_a_model_keeps_its_input(tiny_qwen3):
    model = sketched(tiny_qwen3, rank=4)
    inputs: list[weakref.ref] = []
    for layer in sketch_state(model).layers.values():
        layer.register_forward_pre_hook(lambda module, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    # What other operations keep in any case: the attention's output, which o_proj reads.
    frozen = tiny_qwen3(torch.bfloat16, num_hidden_layers=3, intermediate_size=80, head_dim=12).requires_grad_(False)
    signs = [part for group in sketch_state(model).groups for part in group.kept]
    kept = []
    for module in (model, frozen):
        embeddings = module.get_input_embeddings()(torch.arange(14).view(2, 7)).requires_grad_()
        with StorageTracker(alignment=1) as tracker:
            for tensor in signs if module is model else []:
                tracker.assign(tensor, "projection")
            before = tracker.current
            loss = module(inputs_embeds=embeddings, use_cache=False).logits.float().sum()
            gc.collect()
            kept.append(tracker.current - before)
        del loss
    assert len(inputs) == 21
    # X Aᵀ of the four groups of each of three layers, and the loss's own numbers
    assert 0 <= kept[0] - kept[1] - 3 * 4 * 14 * 4 * 2 < 100


def test_there_is_one_copy_of_the_sketches(tiny_qwen3):
    # So large a rank that the sketches outweigh everything else there is.
    model = tiny_qwen3(torch.bfloat16, hidden_size=128, intermediate_size=192, num_hidden_layers=12, vocab_size=8)
    get_sketch_model(model, SketchConfig(rank=128))
    inputs = {"input_ids": torch.tensor([[3, 1, 4, 1]]), "labels": torch.tensor([[3, 1, 4, 1]])}
    with StorageTracker(alignment=1) as tracker:
        for tensor in [*model.parameters(), *model.buffers()]:
            tracker.assign(tensor, "weights")
        weights = tracker.current
        optimizer = SketchOptimizer(model, lr=1e-4)
        sketch = sketch_state(model).flat
        for _ in range(2):
            for _ in range(2):
                tracker.enter("backward")
                model(**inputs).loss.backward()
            tracker.enter("propose")
            optimizer.propose(max_grad_norm=1.0)
            assert sketch_state(model).flat is sketch  # U is where S was
            tracker.enter("probe")
            predicted_kl(model, inputs)
            tracker.enter("scale")
            optimizer.scale(0.5)
            tracker.enter("update")
            optimizer.step()
            assert sketch_state(model).flat is sketch
    peaks = {phase: peak for phase, (peak, _) in tracker.peaks.items()}
    assert peaks.keys() >= {"backward", "propose", "probe", "update"}
    for phase, peak in peaks.items():
        assert peak - weights < 1.5 * sketch.nbytes, phase


def test_a_kept_projection_is_in_the_type_of_the_model(tiny_qwen3):
    model = sketched(tiny_qwen3, rank=4, projection="orthonormal", share_projection=False, update_rule="sgd")
    optimizer = SketchOptimizer(model)
    model(input_ids=torch.arange(6)[None]).logits.float().sum().backward()
    kept = optimizer.state_tensors()["projection"][2:]
    assert len(kept) == 21 and all(basis.dtype == torch.bfloat16 for basis in kept)
    optimizer.step()
    assert len(optimizer.state_tensors()["projection"]) == 2  # redrawn


# ---------------------------------------------------------------------- ranks and processes


def test_where_methods_cross():
    rank = crossing_rank(planned(QWEN3, "rgc"), "lora")
    below, at = (predicted(QWEN3, "rgc", r) - predicted(QWEN3, "lora", r) for r in (rank - 1, rank))
    assert below > 0 >= at
    assert crossing_rank(planned(QWEN3, "sketch"), "lora") == 1
    assert crossing_rank(planned(QWEN3, "lora"), "sketch") is None


def test_the_largest_rank_that_fits():
    plan = planned(QWEN3)
    limit = predicted(QWEN3, "sketch", 300)
    assert largest_rank(plan, limit) == 300 and largest_rank(plan, limit - 1) == 299
    assert largest_rank(plan, 10 * limit) == 6144 and largest_rank(plan, GIB) is None


@pytest.mark.parametrize("method", MEASURED)
def test_fsdp2_shards_everything_but_the_sketches(method):
    one, four = (predict_state(planned(LLAMA, method, world_size=world)) for world in (1, 4))
    assert "gathered" in four and "gathered" not in one
    for part, size in one.items():
        replicated = part in ("sketch", "projection") or (part == "optimizer" and method in ("sketch", "rgc"))
        assert four[part] == pytest.approx(size if replicated else size / 4, rel=1e-4), part


# ---------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rank": 0}, "rank=0 must be an integer of at least 1"),
        ({"rank": 7000}, "rank=7000 is above 6144"),
        ({"tokens": 1}, "tokens=1 must be an integer of at least 2"),
        ({"microbatch": True}, "microbatch=True must be"),
        ({"world_size": 0}, "world_size=0 must be"),
        ({"method": "galore"}, "method='galore' must be one of sketch, lora, dense, rgc, logra"),
        ({"dtype": "int8"}, "dtype='int8' must be one of bfloat16, float32"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        plan_for(QWEN3, **arguments)


def test_models_that_cannot_be_loaded(tmp_path):
    with pytest.raises(ValueError, match="the folder does not exist"):
        plan_for(str(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"the folder has no config\.json"):
        plan_for(str(tmp_path))
    with pytest.raises(ValueError, match="HF_HUB_OFFLINE is set, and it is not in the cache.*Qwen/Qwen3-0.6B"):
        plan_for("nobody/nothing")
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(ValueError, match=r"is not a causal language model \(model_type 't5'\)"):
        plan_for(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(ValueError, match="Conv1D"):
        plan_for(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="could not be loaded"):
        plan_for(str(tmp_path))


def test_logra_is_predicted_only():
    with pytest.raises(ValueError, match="method='logra' cannot be measured"):
        measure(planned(QWEN3, "logra"))


def test_a_folder_gives_what_its_shape_gives(tmp_path):
    planned(QWEN3).config.save_pretrained(tmp_path)
    assert predict(plan_for(str(tmp_path), rank=64)) == predict(planned(QWEN3))
    assert predict(plan_for("Qwen/Qwen3-1.7B-Base", rank=64)) == predict(planned(QWEN3))


# ---------------------------------------------------------------------- the command


def command(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(["memory", *arguments])
    out, err = capsys.readouterr()
    return status, out, err


def test_the_command_in_a_process_of_its_own():
    run = subprocess.run(
        [sys.executable, "-m", "trl_sketch.cli", "memory", "--model", QWEN3, "--rank", "64", "--gpu-memory", "24"],
        capture_output=True,
        text=True,
        check=True,
    )
    lines = run.stdout.splitlines()
    (total,) = [line.split() for line in lines if line.startswith("  total")]
    expected = [predicted(QWEN3, method) / GIB for method in ("sketch", "lora", "dense")]
    assert total[1:] == [f"{size:.3f}" for size in expected]
    assert [line.split()[3:] for line in lines if "on 24 GiB" in line] == [["fits", "fits", "too", "large"]]
    assert "sketch needs less than lora at every rank." in lines
    assert any(line.startswith("24 GiB: sketch up to rank ") for line in lines)


def test_help_loads_nothing():
    code = (
        "import sys; from trl_sketch.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: pass\n"
        "print([name for name in ('torch', 'transformers', 'trl') if name in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]" and "memory" in run.stdout


def test_the_script_is_installed_under_its_name():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"trl-sketch": "trl_sketch.cli:main"} and callable(cli.main)


def test_json_has_bytes(capsys):
    arguments = ["--rank", "64", "--rank", "128", "--method", "sketch", "--method", "rgc", "--method", "dense"]
    status, out, _ = command(capsys, "--model", QWEN3, *arguments, "--json", "--gpu-memory", "5")
    rows = json.loads(out)
    assert status == 0
    assert [(row["method"], row["rank"]) for row in rows] == [
        ("sketch", 64), ("sketch", 128), ("rgc", 64), ("rgc", 128), ("dense", None)
    ]  # fmt: skip
    for row in rows:
        assert sum(row["parts_bytes"].values()) == row["total_bytes"] == max(row["phases_bytes"].values())
        assert row["fits"] == {"5": row["total_bytes"] <= 4 * GIB}
        assert row["measured_bytes"] is None
    assert rows[0]["less_than_lora_from_rank"] == 1


def test_all_options(capsys, tmp_path):
    planned("Qwen/Qwen3-0.6B").config.save_pretrained(tmp_path / "model")
    status, out, _ = command(
        capsys, "--model", str(tmp_path / "model"), "--tokens", "256", "--microbatch", "2", "--no-gradient-checkpointing",
        "--dtype", "float32", "--world-size", "4", "--plot", str(tmp_path / "bars.png"), "--gpu-memory", "80",
    )  # fmt: skip
    assert status == 0
    assert "2 x 256 tokens in float32, without gradient checkpointing" in out
    assert "FSDP2 on 4 GPUs: weights, adapters, gradients and moments sharded, sketches replicated" in out
    assert "gathered weights" in out
    assert (tmp_path / "bars.png").read_bytes().startswith(b"\x89PNG")


def test_measuring_from_the_command(capsys):
    status, out, _ = command(
        capsys, "--model", "Qwen/Qwen3-0.6B", "--method", "lora", "--rank", "64", "--json", "--measure", "fake"
    )
    (row,) = json.loads(out)
    assert status == 0 and row["measured_on"] == "fake"
    assert row["measured_bytes"] == measured(planned("Qwen/Qwen3-0.6B", "lora"), update=True).peak
    assert row["measured_bytes"] == pytest.approx(row["total_bytes"], rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "nobody/nothing"], "model='nobody/nothing' could not be loaded"),
        (["--model", QWEN3, "--rank", "9999"], "rank=9999 is above 6144"),
        (["--model", QWEN3, "--gpu-memory", "0.5"], "gpu_memory=0.5 must be more than 1 GiB"),
        (["--model", QWEN3, "--gpu-memory", "inf"], "gpu_memory=inf must be more than 1 GiB and less than"),
        (["--model", QWEN3, "--measure", "fake", "--world-size", "2"], "world_size=2 with measure"),
        (["--model", QWEN3, "--plot", "/nowhere/x.png"], "/nowhere/x.png"),
    ],
)
def test_mistakes_are_reported_in_a_line(capsys, arguments, message):
    status, out, err = command(capsys, *arguments)
    assert status == 2 and out == ""
    assert err.startswith("trl-sketch memory: error: ") and message in err and len(err.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_measuring_on_a_gpu_needs_one(capsys):
    status, _, err = command(capsys, "--model", QWEN3, "--measure", "cuda")
    assert status == 2 and "needs a CUDA device" in err and "`--measure fake`" in err


def test_what_is_measured_stands_beside_what_is_predicted(capsys, tmp_path):
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 64, "head_dim": 16}
    Qwen3Config(**size, num_attention_heads=4, num_key_value_heads=2).save_pretrained(tmp_path)
    arguments = [
        "--model",
        str(tmp_path),
        "--rank",
        "8",
        "--method",
        "sketch",
        "--method",
        "logra",
        "--measure",
        "fake",
    ]
    status, out, _ = command(capsys, *arguments, "--markdown")
    header, _, sketch, logra = ([cell.strip() for cell in line.split("|")[1:-1]] for line in out.splitlines())
    assert status == 0 and header[3:] == ["GiB", "measured (fake)"]
    assert sketch[3] == sketch[4] and float(sketch[4]) > 0 and logra[4] == "–"
    _, out, _ = command(capsys, *arguments)
    assert "logra is predicted only" in out
    with pytest.raises(SystemExit):
        command(capsys, *arguments, "--markdown", "--json")


@pytest.mark.parametrize("method", ["sketch", "lora", "dense", "rgc"])
def test_the_formula_holds_for_tiny_models_too(method):
    """Whose vocabulary is smaller than a tile of the LM head, and whose matrices are smaller than an update's blocks."""
    size = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 14, "head_dim": 32}
    config = Qwen3Config(**size, num_attention_heads=4, num_key_value_heads=2)
    for tokens in (64, 1024):
        plan = Plan(config, method=method, rank=16, tokens=tokens)
        assert predict(plan).total == pytest.approx(measure(plan).peak, rel=0.03)


def test_the_page_is_what_the_command_prints(capsys):
    def stripped(text: str) -> str:
        return "\n".join(line.rstrip() for line in text.splitlines())

    page = (Path(__file__).parents[1] / "docs" / "will-it-fit.md").read_text()
    calls = [line for line in page.splitlines() if line.startswith("$ trl-sketch memory")]
    assert len(calls) == 3 and sum("--markdown" in call for call in calls) == 2
    for call in calls:
        _, out, _ = command(capsys, *call.split()[3:])
        assert stripped(out) in page, f"docs/will-it-fit.md is out of date: paste the output of {call[2:]}"
