"""The running reward baseline on two ranks: one number, of the rewards of both."""

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from ranks import run
from transformers import AutoTokenizer, PrinterCallback

from trl_sketch import SketchConfig, SketchGRPOConfig, SketchGRPOTrainer
from trl_sketch.baseline import running_advantages


PROMPTS = Dataset.from_dict({"prompt": ["abc", "bcad", "fgh", "kl", "m", "dd", "cab", "hi"] * 4})


def alphabet_reward(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(ord(c) - ord("a") for c in text) / (10 * max(len(text), 1)) for text in completions]


class Watched(SketchGRPOTrainer):
    """Notes the rewards of each rank and the advantages that it was given."""

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        self.own = alphabet_reward(texts)
        return super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)

    def _generate_and_score_completions(self, inputs: Any) -> Any:
        output = super()._generate_and_score_completions(inputs)
        self.seen.append((self.own, output["advantages"].tolist()))
        return output


def train(folder: str, output: str, resume: bool) -> tuple[list[Any], list[float], dict[str, torch.Tensor], float]:
    trainer = Watched(
        model=folder,
        reward_funcs=alphabet_reward,
        args=SketchGRPOConfig(
            output_dir=output,
            use_cpu=True,
            bf16=False,
            max_steps=4,
            per_device_train_batch_size=3,
            num_generations=1,
            advantage_baseline="running",
            scale_rewards="none",
            max_completion_length=4,
            learning_rate=1e-3,
            logging_steps=1,
            save_steps=2,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        ),
        train_dataset=PROMPTS,
        processing_class=AutoTokenizer.from_pretrained(folder),
        peft_config=SketchConfig(kl_budget=None, rank=8),
    )
    trainer.remove_callback(PrinterCallback)
    trainer.seen = []
    trainer.train(resume_from_checkpoint=str(Path(output, "checkpoint-2")) if resume else None)
    name = "sketch/reward_baseline"
    baselines = [entry[name] for entry in trainer.state.log_history if name in entry]
    weights = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    return trainer.seen, baselines, weights, trainer.reward_baseline


def test_two_ranks_have_one_baseline_and_resume_with_it(policy_folder: str, tmp_path: Path) -> None:
    first, second = run(2, train, policy_folder, str(tmp_path), False, launched=True)
    assert first[1] == second[1] and first[3] == second[3]
    assert all(torch.equal(first[2][name], second[2][name]) for name in first[2])
    baseline = None
    for (rewards, advantages), (others, their_advantages) in zip(first[0], second[0], strict=True):
        assert len(rewards) == len(others) == 3
        expected, _, baseline = running_advantages(torch.tensor(rewards + others), baseline, weight=0.1)
        torch.testing.assert_close(torch.tensor(advantages + their_advantages), expected)
    for resumed, straight in zip(
        run(2, train, policy_folder, str(tmp_path), True, launched=True), (first, second), strict=True
    ):
        assert resumed[1] == straight[1] and resumed[3] == straight[3]
        assert all(torch.equal(resumed[2][name], straight[2][name]) for name in straight[2])
