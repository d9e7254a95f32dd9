"""`trl-sketch eval` through vLLM: the answers of transformers where they are certain, and the same ones for a seed."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from trl_sketch.evaluation import EvalSettings, evaluate
from trl_sketch.evaluation_engines import TransformersEngine, VllmEngine


PROMPTS = ["abc", "d", "1+2=", "Hello, World", "zyx", "40+2="]
LONGEST = max(map(len, PROMPTS))


@pytest.fixture(scope="module")
def settings(checkpoint, tmp_path_factory: pytest.TempPathFactory) -> EvalSettings:
    data = tmp_path_factory.mktemp("data") / "problems.jsonl"
    data.write_text("".join(json.dumps({"prompt": p, "answer": p}) + "\n" for p in PROMPTS))
    options: dict[str, Any] = {"samples": 3, "temperature": 1.0, "top_p": 1.0, "max_new_tokens": 8, "batch_size": 4}
    return EvalSettings(str(checkpoint("qwen3")), str(data), backend="vllm", dtype="float32", **options)


@pytest.fixture(scope="module")
def engine(vllm_environment, settings: EvalSettings) -> Iterator[VllmEngine]:
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = VllmEngine(settings, LONGEST)
    yield engine
    engine.llm.llm_engine.engine_core.shutdown()
    cleanup_dist_env_and_memory()


def lines(engine: Any, settings: EvalSettings, output: Path) -> list[dict[str, Any]]:
    engine.settings = settings
    evaluate(settings, output, lambda *_: engine)
    return [json.loads(line) for line in output.read_text().splitlines()]


def test_greedy_answers_are_those_of_transformers(engine: VllmEngine, settings: EvalSettings, tmp_path: Path) -> None:
    greedy = replace(settings, temperature=0.0, samples=1)
    theirs = replace(greedy, backend="transformers")
    rows = lines(engine, greedy, tmp_path / "vllm.jsonl")
    assert rows == lines(TransformersEngine(theirs, LONGEST), theirs, tmp_path / "transformers.jsonl")
    assert len(rows) == len(PROMPTS) and any(row["truncated"][0] for row in rows)


def test_a_seed_gives_its_answers_in_any_batch(engine: VllmEngine, settings: EvalSettings, tmp_path: Path) -> None:
    rows = lines(engine, settings, tmp_path / "first.jsonl")
    assert all(len(set(row["completions"])) > 1 for row in rows)
    assert rows == lines(engine, replace(settings, batch_size=1), tmp_path / "again.jsonl")
    assert rows != lines(engine, replace(settings, seed=1), tmp_path / "other.jsonl")


def test_an_adapter_is_refused(settings: EvalSettings, tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/model"}')
    with pytest.raises(ValueError, match="is an adapter of some/model. Merge it"):
        VllmEngine(replace(settings, model=str(tmp_path)), LONGEST)
