"""Reasoning-Gym problems: by default the eight-task mixture of LoGRA, appendix C.2 and table 3. Needs no network.

```bash
python recipes/data/reasoning_gym_mixture.py                             # into data/reasoning-gym-hard
python recipes/data/reasoning_gym_mixture.py --tasks chain_sum --settings '{"chain_sum": {"max_terms": 2}}' \
    --num_train 1000 --num_eval 100 --system_prompt "You answer briefly." --output data/chain-sum
```

The paper names neither its seeds nor its system prompt. The default prompt is Reasoning-Gym's own, which asks for the answer
between answer tags. `metadata` is JSON, for the task's verifier (`--rewards reasoning_gym`).
"""

import argparse
import contextlib
import io
import json
from typing import Any

import reasoning_gym
import sources
from reasoning_gym.utils import SYSTEM_PROMPTS


# Problem i of a seed is problem i - 1 of the next seed: evaluation starts far from training, or it would be the same problems.
EVALUATION_SEED_OFFSET = 10**6
TASKS = (
    "codeio",
    "emoji_mystery",
    "rectangle_count",
    "word_ladder",
    "pool_matrix",
    "tsumego",
    "sentence_reordering",
    "manipulate_matrix",
)


def generate(task: str, count: int, seed: int, **settings: Any) -> list[dict[str, Any]]:
    """`count` entries (`question`, `answer`, `metadata`) of a task, of the default difficulty unless `settings` say more."""
    with contextlib.redirect_stdout(io.StringIO()):  # some problems of codeio print while they are made
        data = reasoning_gym.create_dataset(task, size=count, seed=seed, **settings)
        return [data[index] for index in range(count)]


def without_repetitions(entries: list[dict[str, Any]], seen: set[str]) -> list[dict[str, Any]]:
    """The entries whose question is not in `seen` yet, in their order; their questions are added to it."""
    kept = []
    for entry in entries:
        if entry["question"] not in seen:
            seen.add(entry["question"])
            kept.append(entry)
    return kept


def problem(task: str, entry: dict[str, Any], system_prompt: str) -> dict[str, Any]:
    """An entry as a problem for the recipes."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return {
        "prompt": [*system, *sources.user_message(entry["question"])],
        "answer": entry["answer"],
        "task": task,
        "metadata": json.dumps(entry["metadata"], default=_plain),
    }


def _plain(value: Any) -> Any:
    """What JSON does not know: arrays and numbers of NumPy, sets."""
    return value.tolist() if hasattr(value, "tolist") else sorted(value) if isinstance(value, set) else str(value)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", default=list(TASKS))
    parser.add_argument("--settings", type=json.loads, default={}, help="JSON: settings of tasks, by their names.")
    parser.add_argument(
        "--num_train", type=int, default=5000, help="Training problems of a task, before repetitions go."
    )
    parser.add_argument(
        "--num_eval", type=int, default=25, help="Evaluation problems of a task, before repetitions go."
    )
    parser.add_argument("--seed", type=int, default=42, help="Of the training problems.")
    parser.add_argument("--system_prompt", default=SYSTEM_PROMPTS["default"], help="'' for none.")
    parser.add_argument("--output", default="data/reasoning-gym-hard", help="Folder to write.")
    args = parser.parse_args(arguments)

    train, evaluation = [], []
    for task in args.tasks:
        settings = args.settings.get(task, {})
        seen: set[str] = set()
        # What is in both is left out of the evaluation: in table 3, tasks with repetitions have fewer than 25 problems there.
        for problems, count, seed in (
            (train, args.num_train, args.seed),
            (evaluation, args.num_eval, args.seed + EVALUATION_SEED_OFFSET),
        ):
            kept = without_repetitions(generate(task, count, seed, **settings), seen)
            problems += [problem(task, entry, args.system_prompt) for entry in kept]
            print(f"{task}: {len(kept):,} of {count:,} for {'training' if problems is train else 'evaluation'}")
    sources.write(args.output, "train", train)
    sources.write(args.output, "test", evaluation)


if __name__ == "__main__":
    main()
