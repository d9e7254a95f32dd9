"""The scripts that prepare data, on small local files, and the recipes that read what they write."""

import json
from pathlib import Path
from typing import Any

import addition
import common
import dapo_math
import gsm8k
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from transformers import AutoTokenizer
from trl import GRPOConfig


def read(file: Path) -> list[dict[str, Any]]:
    return pq.read_table(file).to_pylist()


def write_jsonl(file: Path, rows: list[dict[str, Any]]) -> str:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def problems_of(folder: Path, split: str = "test") -> tuple[Dataset, list[dict[str, Any]]]:
    """What a recipe makes of `--dataset_name FOLDER`."""
    return common.load_problems(
        common.ScriptArguments(model_name_or_path="m", dataset_name=str(folder), dataset_test_split=split)
    )


def test_gsm8k(tmp_path: Path) -> None:
    train = [{"question": f"Question {i}?", "answer": f"Because.\n#### {i},000"} for i in range(1, 11)]
    test = [{"question": "What is 1 + 1?", "answer": "1 + 1 = <<1+1=2>>2\n#### 2"}]
    output = tmp_path / "out"
    sources = [
        f"--train={write_jsonl(tmp_path / 'a.jsonl', train)}",
        f"--test={write_jsonl(tmp_path / 'b.jsonl', test)}",
    ]
    gsm8k.main([*sources, "--output", str(output), "--num_validation", "3"])
    splits = {name: read(output / f"{name}.parquet") for name in ("train", "validation", "test")}
    assert [len(rows) for rows in splits.values()] == [7, 3, 1]
    assert sorted(int(row["answer"]) for row in splits["train"] + splits["validation"]) == [
        1000 * i for i in range(1, 11)
    ]
    (row,) = splits["test"]
    assert row["answer"] == "2" and row["prompt"][0]["role"] == "user"
    assert row["prompt"][0]["content"].startswith("What is 1 + 1?\n") and "boxed" in row["prompt"][0]["content"]
    dataset, held_out = problems_of(output)
    assert len(dataset) == 7 and [p["answer"] for p in held_out] == ["2"]
    assert len(problems_of(output, "validation")[1]) == 3
    with pytest.raises(ValueError, match="has no '####'"):
        gsm8k.problem({"question": "?", "answer": "2"})


def dapo_row(text: str, answer: str, index: int) -> dict[str, Any]:
    prompt = [{"role": "user", "content": text}]
    return {
        "prompt": prompt,
        "reward_model": {"ground_truth": answer, "style": "rule"},
        "extra_info": {"index": index},
    }


def test_dapo_keeps_the_first_occurrence_of_each_prompt_in_order(tmp_path: Path) -> None:
    source = [dapo_row(text, str(i), i) for i, text in enumerate(["b", "a", "b", "c", "a", "d", "e"])]
    Dataset.from_list(source).to_parquet(tmp_path / "dapo.parquet")
    math500 = [{"problem": "Find $x$.", "solution": "…", "answer": r"\frac{1}{2}", "level": 2, "unique_id": "u"}]
    output = tmp_path / "out"
    arguments = [f"--train={tmp_path / 'dapo.parquet'}", f"--test={write_jsonl(tmp_path / 'm.jsonl', math500)}"]
    dapo_math.main([*arguments, "--num_train", "4", "--output", str(output)])
    rows = read(output / "train.parquet")
    assert [(row["prompt"][0]["content"], row["answer"]) for row in rows] == [
        ("b", "0"),
        ("a", "1"),
        ("c", "3"),
        ("d", "5"),
    ]
    assert read(output / "test.parquet") == [
        {"prompt": [{"role": "user", "content": "Find $x$."}], "answer": r"\frac{1}{2}"}
    ]
    assert problems_of(output)[1][0]["answer"] == r"\frac{1}{2}"


def test_dapo_stops_reading_when_it_has_enough() -> None:
    read_rows = []

    def rows() -> Any:
        for i in range(100):
            read_rows.append(i)
            yield dapo_row(f"problem {i // 2}", str(i), i)

    first = dapo_math.first_occurrences(rows())
    assert [next(first)["extra_info"]["index"] for _ in range(3)] == [0, 2, 4]
    assert len(read_rows) == 5


def test_a_source_with_too_few_prompts_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write_jsonl(tmp_path / "d.jsonl", [dapo_row("a", "1", 0)])
    test = write_jsonl(tmp_path / "m.jsonl", [{"problem": "p", "answer": "1"}])
    dapo_math.main([f"--train={file}", f"--test={test}", f"--output={tmp_path / 'out'}"])
    assert "has 1 different prompts, and 7,500 were asked for" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("module", "name", "option"),
    [(gsm8k, "openai/gsm8k", "--train"), (dapo_math, "BytedTsinghua-SIA/DAPO-Math-17k", "--train")],
)
def test_without_a_hub_the_error_says_what_to_pass(
    module: Any, name: str, option: str, tmp_path: Path, offline: None
) -> None:
    with pytest.raises(SystemExit) as error:
        module.main(["--output", str(tmp_path / "out")])
    assert f"dataset {name} (split train" in str(error.value)
    assert f"pass a local copy: {option} FILE_OR_FOLDER" in str(error.value)
    with pytest.raises(SystemExit, match="must end in one of"):
        module.main(["--train", __file__])


def test_a_recipe_without_its_data_says_how_to_make_it(offline: None) -> None:
    with pytest.raises(FileNotFoundError, match="data/nothing is no folder here.*recipes/data has a script"):
        problems_of(Path("data/nothing"))


def test_addition(tmp_path: Path) -> None:
    addition.main(["--output", str(tmp_path)])
    train, test = (read(tmp_path / f"{split}.parquet") for split in ("train", "test"))
    assert len(train) + len(test) == 29**2 and len(test) == 128
    sides = [{row["prompt"][1]["content"] for row in rows} for rows in (train, test)]
    assert sides[0].isdisjoint(sides[1])
    for row in test:
        a, b = (int(word) for word in row["prompt"][1]["content"].split("?")[0].removeprefix("What is ").split(" + "))
        assert row["answer"] == str(a + b)
        assert f"What is {b} + {a}? Answer with the number only." in sides[1]
    assert addition.problems() == addition.problems()


def test_prompts_that_are_too_long_are_left_out(policy_folder: str, tmp_path: Path) -> None:
    """The template of this tokenizer adds two tokens, and each letter is one."""
    rows = [{"prompt": [{"role": "user", "content": "a" * n}], "answer": "x"} for n in (1, 6, 7, 20)] * 3
    file = write_jsonl(tmp_path / "p.jsonl", rows)
    script = common.ScriptArguments(
        model_name_or_path=policy_folder, dataset_name=file, max_prompt_length=8, num_eval_problems=0
    )
    job = common.prepare(script, GRPOConfig(output_dir=str(tmp_path), use_cpu=True, bf16=False))
    assert sorted(len(row["prompt"][0]["content"]) for row in job.train) == [1, 1, 1, 6, 6, 6]
    tokenizer = AutoTokenizer.from_pretrained(policy_folder)
    assert [common.prompt_length(tokenizer, p) for p in ("abc", [{"role": "user", "content": "abc"}])] == [3, 5]
