"""What the scripts of this folder share: rows from the Hub or from a local copy, and files that the recipes take."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from datasets import Dataset, disable_progress_bars, load_dataset


BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}


def rows(source: str, split: str, config: str | None = None, option: str = "--source") -> Iterator[dict[str, Any]]:
    """The rows of a split, one by one and in their order.

    Args:
        source: Name on the Hub, or a local file (json, jsonl, parquet, csv) or folder.
        split: Split of a Hub dataset or folder; a file is one split by itself.
        config: Configuration of a Hub dataset.
        option: The script's option that takes a local copy, for the error.

    Raises:
        SystemExit: There is no such dataset; the message names it and says how a local copy is passed.
    """
    path = Path(source)
    try:
        if path.is_file():
            builder = BUILDERS.get(path.suffix)
            if builder is None:
                raise ValueError(f"a file must end in one of {', '.join(BUILDERS)}")
            data = load_dataset(builder, data_files=source, split="train", streaming=True)
        elif path.is_dir():
            data = load_dataset(source, split=split, streaming=True)
        else:
            data = load_dataset(source, config, split=split, streaming=True)
    except Exception as error:  # of many types: no network, offline mode, no such name, no such split
        parts = f"split {split}" + (f", configuration {config}" if config and not path.exists() else "")
        raise SystemExit(
            f"error: dataset {source} ({parts}) could not be read: {type(error).__name__}: {error}\n"
            f"Where the Hub cannot be reached, pass a local copy: {option} FILE_OR_FOLDER (json, jsonl, parquet or csv)"
        ) from error
    return iter(data)


def write(folder: str | Path, split: str, problems: list[dict[str, Any]]) -> Path:
    """Write problems (columns `prompt`, `answer` and others) as `FOLDER/SPLIT.parquet`, which `--dataset_name FOLDER` takes."""
    disable_progress_bars()
    Path(folder).mkdir(parents=True, exist_ok=True)
    file = Path(folder) / f"{split}.parquet"
    Dataset.from_list(problems).to_parquet(file)
    print(f"{file}: {len(problems):,} problems")
    return file


def user_message(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]
