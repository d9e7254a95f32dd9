"""DAPO-Math-7.5K to train on and MATH-500 to evaluate on, as in LoGRA, appendix C.1.

```bash
python recipes/data/dapo_math.py                                          # from the Hub, into data/dapo-math-7.5k
python recipes/data/dapo_math.py --train dapo-math-17k.parquet --test math500.jsonl
```

The training problems are the first 7,500 prompts of DAPO-Math-17k that differ in their first message, in the order of the
dataset. The two sets are not compared with each other, as in the paper.
"""

import argparse
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import sources


DAPO = "BytedTsinghua-SIA/DAPO-Math-17k"
MATH500 = "HuggingFaceH4/MATH-500"


def first_occurrences(rows: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Rows whose first prompt message has not been seen before; reads no further than it is asked to."""
    seen: set[str] = set()
    for row in rows:
        key = row["prompt"][0]["content"]
        if key not in seen:
            seen.add(key)
            yield row


def dapo_problem(row: dict[str, Any]) -> dict[str, Any]:
    """A row of DAPO-Math-17k (`prompt`, a chat, and `reward_model`) as a problem."""
    return {"prompt": row["prompt"], "answer": str(row["reward_model"]["ground_truth"])}


def math500_problem(row: dict[str, Any]) -> dict[str, Any]:
    """A row of MATH-500 (`problem`, `answer`) as a problem."""
    return {"prompt": sources.user_message(row["problem"]), "answer": str(row["answer"])}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=DAPO, help="DAPO-Math-17k on the Hub, or a local file or folder.")
    parser.add_argument("--test", default=MATH500, help="MATH-500 on the Hub, or a local file or folder.")
    parser.add_argument("--num_train", type=int, default=7500, help="Training prompts.")
    parser.add_argument("--output", default="data/dapo-math-7.5k", help="Folder to write.")
    args = parser.parse_args(arguments)

    source = sources.rows(args.train, "train", option="--train")
    train = [dapo_problem(row) for row in itertools.islice(first_occurrences(source), args.num_train)]
    if len(train) < args.num_train:
        print(f"note: the source has {len(train):,} different prompts, and {args.num_train:,} were asked for")
    sources.write(args.output, "train", train)
    test = [math500_problem(row) for row in sources.rows(args.test, "test", option="--test")]
    sources.write(args.output, "test", test)


if __name__ == "__main__":
    main()
