"""Sums of two numbers from 2 to 30, which a model of 135 million weights learns on a CPU. Needs no network.

```bash
python recipes/data/addition.py    # into data/addition: 841 sums, 128 of them held out
```
"""

import argparse
import random
from typing import Any

import sources


SYSTEM = "You answer briefly."
NUMBERS = range(2, 31)


def problem(a: int, b: int) -> dict[str, Any]:
    question = f"What is {a} + {b}? Answer with the number only."
    return {"prompt": [{"role": "system", "content": SYSTEM}, *sources.user_message(question)], "answer": str(a + b)}


def problems(held_out: int = 128) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and held-out problems, in a fixed random order; a + b and b + a are on the same side."""
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if a <= b]
    random.Random(0).shuffle(pairs)
    train: list[dict[str, Any]] = []
    test: list[dict[str, Any]] = []
    for a, b in pairs:
        both = [problem(a, b)] if a == b else [problem(a, b), problem(b, a)]
        (test if len(test) + len(both) <= held_out else train).extend(both)
    random.Random(1).shuffle(train)
    return train, test


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num_held_out", type=int, default=128)
    parser.add_argument("--output", default="data/addition", help="Folder to write.")
    args = parser.parse_args(arguments)
    train, test = problems(args.num_held_out)
    sources.write(args.output, "train", train)
    sources.write(args.output, "test", test)


if __name__ == "__main__":
    main()
