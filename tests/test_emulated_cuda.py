"""Training, memory measurement and benchmarks on a CUDA device, emulated in the CPU's memory: see emulated_cuda/__main__.py."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trl_sketch.records import RunRecord


ROOT = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"),
    pytest.mark.skipif(torch.version.cuda is not None, reason="torch has a CUDA of its own"),
    pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="needs a C++ compiler"),
]


def run(*arguments: str | Path, emulate: bool = True) -> subprocess.CompletedProcess[str]:
    launcher = [ROOT / "tests" / "emulated_cuda"] if emulate else []
    command = [sys.executable, *launcher, *arguments]
    return subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=300)


def good(*arguments: str | Path, emulate: bool = True) -> str:
    done = run(*arguments, emulate=emulate)
    assert done.returncode == 0, f"{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("emulated") / "script.py"


def test_it_refuses_what_a_gpu_refuses(script: Path) -> None:
    """And computes the rest, views and changes in place too; else the other tests would show nothing."""
    script.write_text(
        "import torch\n"
        "a = torch.ones(3, 4, device='cuda')\n"
        "a[:, 1:].mul_(2)\n"
        "assert a.is_cuda and (a @ a.T).cpu().tolist() == [[13.0] * 3] * 3\n"
        "for mixed in (lambda: a + torch.ones(3, 4), lambda: a @ torch.ones(4, 2), lambda: torch.cat([a, torch.ones(1, 4)]),\n"
        "              lambda: a.__setitem__(torch.tensor([0]), torch.ones(1, 4)), lambda: torch.ones(3, 4).__setitem__([1], a[:1])):\n"
        "    try:\n"
        "        mixed()\n"
        "    except RuntimeError as error:\n"
        "        assert 'to be on the same device' in str(error), error\n"
        "    else:\n"
        "        raise AssertionError('two devices were mixed')\n"
        "assert a[torch.tensor([0, 2])].shape == (2, 4)\n"
        "before = torch.cuda.memory_allocated()\n"
        "b = torch.empty(1000, device='cuda')\n"
        "assert torch.cuda.memory_allocated() - before == 4096\n"
        "del b\n"
        "assert torch.cuda.memory_allocated() == before and torch.cuda.max_memory_allocated() >= before + 4096\n"
    )
    good(script)


def test_a_model_that_is_moved_takes_its_sketches_along(script: Path) -> None:
    """Between microbatches, between proposal and step, and before it is compiled: the weights are those of the CPU."""
    script.write_text(
        "import torch\n"
        "from trl_sketch import SketchConfig, SketchOptimizer, get_sketch_model\n"
        "def train(moves):\n"
        "    torch.manual_seed(0)\n"
        "    net = torch.nn.Sequential(torch.nn.Linear(24, 40), torch.nn.Tanh(), torch.nn.Linear(40, 8))\n"
        "    model = get_sketch_model(net, SketchConfig(rank=8, target_modules=['0', '2'], kl_budget=None))\n"
        "    optimizer, x = SketchOptimizer(model, lr=1e-2), torch.randn(16, 24)\n"
        "    def backward(run=model):\n"
        "        run(x.to(model[0].weight.device)).square().mean().backward()\n"
        "    def move(to):\n"
        "        model.to(to) if moves else None\n"
        "    backward(), move('cuda'), backward(), optimizer.propose(), move('cpu'), optimizer.step()\n"
        "    move('cuda'), backward(torch.compile(model, backend='aot_eager') if moves else model), optimizer.step()\n"
        "    assert model[0].weight.is_cuda == moves\n"
        "    return [layer.weight.cpu() for layer in optimizer.layers]\n"
        "for a, b in zip(train(False), train(True)):\n"
        "    assert (a - b).norm() < 1e-5 * a.norm(), (a - b).norm() / a.norm()\n"
    )
    good(script)


@pytest.mark.slow
def test_training_is_that_of_the_cpu(tmp_path: Path) -> None:
    """The recipe finds the device and trains as on the CPU; the log has the peaks of its memory."""
    recipe = [
        ROOT / "recipes" / "grpo_sketch.py",
        "--max_steps",
        "3",
        "--num_eval_problems",
        "8",
        "--save_strategy",
        "no",
    ]
    runs = {}
    for device in ("cuda", "cpu"):
        good(*recipe, "--output_dir", tmp_path / device, emulate=device == "cuda")
        runs[device] = RunRecord.load(tmp_path / device)
    assert (runs["cuda"].device, runs["cpu"].device) == ("cuda: Emulated GPU", "cpu")
    assert runs["cuda"].memory == runs["cpu"].memory
    for on_cuda, on_cpu in zip(runs["cuda"].log, runs["cpu"].log, strict=True):
        assert on_cuda.get("reward") == on_cpu.get("reward")
        assert on_cuda.get("sketch/predicted_kl") == pytest.approx(on_cpu.get("sketch/predicted_kl"), rel=0.05)
    steps = [entry for entry in runs["cuda"].log if "sketch/peak_update_bytes" in entry]
    assert len(steps) == 3 and not any("sketch/peak_update_bytes" in entry for entry in runs["cpu"].log)
    for entry in steps:
        tensors = sum(runs["cuda"].memory.values())
        assert tensors < entry["sketch/peak_update_bytes"] <= entry["sketch/peak_loop_bytes"] < 1 << 30


@pytest.mark.slow
def test_the_trainer_resumes_and_probes_there() -> None:
    """The trainer's own tests: checkpoints, both probes, gradient checkpointing."""
    chosen = ["tests/test_trainer.py", "tests/test_kl_control.py", "-k", "checkpoints_and_resume or either_probe"]
    assert "4 passed" in good("-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *chosen)


@pytest.mark.slow
def test_everything_is_measured_there(tmp_path: Path) -> None:
    """`benchmarks/gpu.py` runs every benchmark, and `trl-sketch memory --measure cuda`."""
    page = tmp_path / "gpu.md"
    small = ["--shape", "embedded", "--tokens", "64", "--ranks", "16", "--repeats", "1", "--output", page]
    good(ROOT / "benchmarks" / "gpu.py", *small)
    text = page.read_text()
    assert text.count("\n## ") == 5 and "Failed" not in text and "sketch, hadamard | 16 |" in text
    rows = [line.strip("| ").split(" | ") for line in text.splitlines() if line.count("|") == 7]
    measured = {row[0]: float(row[3]) for row in rows if row[0] in ("sketch", "lora", "dense")}
    assert 0 < measured["sketch"] < measured["lora"] < measured["dense"]


def test_a_part_that_fails_does_not_end_the_others(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    done = run(
        ROOT / "benchmarks" / "gpu.py", "--shape", "embedded", "--ranks", "16", "--timeout", "0.01", "--output", page
    )
    assert done.returncode == 1 and page.read_text().count("**Failed**: it took more than") == 5


def test_without_a_device_it_says_so() -> None:
    done = run(ROOT / "benchmarks" / "gpu.py", emulate=False)
    assert done.returncode == 2 and "torch sees no CUDA device" in done.stderr
