"""GSM8K: `train`, `validation` (out of train, to choose step sizes on) and `test`.

```bash
python recipes/data/gsm8k.py                                              # from the Hub, into data/gsm8k
python recipes/data/gsm8k.py --train gsm8k/train.jsonl --test gsm8k/test.jsonl
```

RGC's page names neither its prompt nor the size of its development split; both are ours here.
"""

import argparse
import random
from typing import Any

import sources


HUB = "openai/gsm8k"
INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def problem(row: dict[str, Any], instruction: str = INSTRUCTION) -> dict[str, Any]:
    """A row of GSM8K (`question`, and `answer` that ends in `#### 1,234`) as a problem."""
    _, mark, answer = row["answer"].rpartition("####")
    if not mark:
        raise ValueError(f"this answer has no '####', so it is not GSM8K's: {row['answer']!r}")
    return {
        "prompt": sources.user_message(f"{row['question']}\n{instruction}"),
        "answer": answer.strip().replace(",", ""),
    }


def split_off(problems: list[dict[str, Any]], count: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All but `count` problems, and those, drawn with a fixed seed; both in their old order."""
    chosen = set(random.Random(0).sample(range(len(problems)), count))
    rest = [p for i, p in enumerate(problems) if i not in chosen]
    return rest, [problems[i] for i in sorted(chosen)]


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--train", default=HUB, help="Dataset on the Hub, or a local file or folder.")
    parser.add_argument("--test", default=HUB, help="Dataset on the Hub, or a local file or folder.")
    parser.add_argument("--output", default="data/gsm8k", help="Folder to write.")
    parser.add_argument("--num_validation", type=int, default=512, help="Problems held out of train.")
    parser.add_argument("--instruction", default=INSTRUCTION, help="What follows the question.")
    args = parser.parse_args(arguments)

    train, test = (
        [problem(row, args.instruction) for row in sources.rows(source, split, "main", f"--{split}")]
        for source, split in ((args.train, "train"), (args.test, "test"))
    )
    train, validation = split_off(train, args.num_validation)
    for split, problems in (("train", train), ("validation", validation), ("test", test)):
        sources.write(args.output, split, problems)


if __name__ == "__main__":
    main()
