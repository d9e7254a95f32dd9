"""The recipes' YAML files: settings under the names of the command line, and two words of our own.

```yaml
include: common.yaml       # or a list; read first, from the folder of this file. What this file says goes before it.
required: [learning_rate]  # must be given on the command line, or by a file that includes this one
rank: 64
```

So the files of an experiment are a common one and, for each method, a few lines in which it differs. A file that can be run
sets `output_dir`; one that is only included does not.
"""

from pathlib import Path
from typing import Any

import yaml


def read_settings(file: str | Path, including: tuple[Path, ...] = ()) -> tuple[dict[str, Any], set[str]]:
    """Settings of a YAML file and of what it includes, and the names that still have to be given.

    Raises:
        ValueError: The file is no mapping, or includes itself.
    """
    path = Path(file).resolve()
    if path in including:
        raise ValueError(f"{path} includes itself")
    own = yaml.safe_load(path.read_text())
    if not isinstance(own, dict):
        raise ValueError(f"{path} must contain a YAML mapping")
    included = own.pop("include", [])
    required = set(own.pop("required", []))
    settings: dict[str, Any] = {}
    for name in [included] if isinstance(included, str) else included:
        others, still = read_settings(path.parent / name, (*including, path))
        settings |= others
        required |= still
    settings |= own
    return settings, required - settings.keys()


def method_of(settings: dict[str, Any]) -> str:
    """`sketch`, `lora` or `dense`: the script `grpo_<method>.py` that knows these settings."""
    return "lora" if "lora_r" in settings else "sketch" if "rank" in settings else "dense"
