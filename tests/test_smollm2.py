"""Two steps of `recipes/smollm2-135m`, a real pretrained model, as a person starts them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import addition
import pytest
import yaml

from trl_sketch.records import RunRecord


RECIPES = Path(__file__).parents[1] / "recipes"


@pytest.mark.slow
def test_two_steps_of_smollm2_on_sums(tmp_path: Path) -> None:
    addition.main(["--output", str(tmp_path / "addition")])
    few = (
        "--max_steps 2 --per_device_train_batch_size 8 --num_generations 4 --num_eval_problems 8 --rollout_gap_every 1"
    )
    command = [sys.executable, RECIPES / "grpo_sketch.py", "--config", RECIPES / "smollm2-135m" / "sketch.yaml"]
    command += [
        "--dataset_name",
        tmp_path / "addition",
        "--output_dir",
        tmp_path / "out",
        "--save_trained_model",
        "false",
    ]
    done = subprocess.run(
        [*map(str, command), *few.split()],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "smollm2-135m on" in done.stdout
    record = RunRecord.load(tmp_path / "out")
    settings = yaml.safe_load((RECIPES / "smollm2-135m" / "sketch.yaml").read_text())
    assert record.finished and record.steps == 2 and record.method["kl_budget"] == settings["kl_budget"]
    assert [entry["sketch/kl_budget"] for entry in record.log] == pytest.approx([settings["kl_budget"]] * 2)
    for entry in record.log:  # the weights are bf16: what a rollout engine has is what was trained
        assert 0 < entry["sketch/predicted_kl"] <= entry["sketch/kl_budget"] * 1.001 and entry["rollout_gap/max"] == 0
    # 210 matrices: an entry of the sketch is four bytes, beside four a row and some more of RowAdam.
    rows = 30 * (576 + 192 + 192 + 576 + 1536 + 1536 + 576)
    assert record.memory["sketch"] == 4 * rows * settings["rank"]
    assert 4 * rows <= record.memory["optimizer"] <= 1.2 * 4 * rows, json.dumps(record.memory)
    assert "gradient" not in record.memory and len(record.accuracy["after"]["greedy"]) == 8
