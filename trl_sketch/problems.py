"""Data sets of problems: on the Hub, or a local folder or file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any


FILE_BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
_SPLITS = ("test", "validation", "train")  # the first that there is, if none is named


def load_problems(
    name: str, split: str | None = None, config: str | None = None, columns: Sequence[str] = ("prompt",)
) -> Any:
    """A split of a data set, as `datasets.Dataset`.

    Args:
        name: On the Hub, or a folder, or one json, jsonl, parquet or csv file, which is a split by itself.
        split: Default: test, validation or train, the first that there is.
        config: Configuration of the data set.
        columns: That it has to have.

    Raises:
        FileNotFoundError: It is neither here nor to be had from the Hub.
        ValueError: The split or a column is missing.
    """
    from datasets import load_dataset

    path = Path(name)
    if path.suffix in FILE_BUILDERS and not path.is_dir():
        if not path.is_file():
            raise FileNotFoundError(f"--dataset {name}: there is no such file")
        problems = load_dataset(FILE_BUILDERS[path.suffix], data_files=name, split="train")
    else:
        try:
            splits: Any = load_dataset(name, config)
        except (ConnectionError, FileNotFoundError) as error:
            raise FileNotFoundError(
                f"--dataset {name} is no folder here, and the Hub did not give it ({error}): pass a local file or folder, "
                "as json, jsonl, parquet or csv"
            ) from error
        chosen = split or next((own for own in _SPLITS if own in splits), next(iter(splits)))
        if chosen not in splits:
            raise ValueError(f"--dataset {name} has no split {chosen!r}: it has {', '.join(splits)}")
        problems = splits[chosen]
    missing = [column for column in columns if column not in problems.column_names]
    if missing:
        raise ValueError(
            f"--dataset {name} lacks the column {' and '.join(missing)}; it has {', '.join(problems.column_names)}: rename it"
        )
    return problems
