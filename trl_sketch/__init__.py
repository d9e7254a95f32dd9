"""Train all attention and MLP weights of a language model from low-rank gradient sketches.

```python
from trl_sketch import SketchConfig, SketchGRPOTrainer

trainer = SketchGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=..., peft_config=SketchConfig(rank=64))
trainer.train()
```
"""

import importlib
from typing import TYPE_CHECKING, Any


if TYPE_CHECKING:
    from .baseline import SketchGRPOConfig
    from .callback import SketchCallback
    from .config import SketchConfig
    from .kl import predicted_kl
    from .model import get_sketch_model
    from .optimizer import SketchOptimizer
    from .projection import make_projection
    from .trainer import SketchGRPOTrainer
    from .weights import SketchUpdate

__version__ = "0.1.0"

__all__ = [
    "SketchCallback",
    "SketchConfig",
    "SketchGRPOConfig",
    "SketchGRPOTrainer",
    "SketchOptimizer",
    "SketchUpdate",
    "get_sketch_model",
    "make_projection",
    "predicted_kl",
]

# Imported when they are first asked for. TRL takes seconds to import, which a process that only applies updates does not
# need, and torch and transformers take some, which `trl-sketch --help` does not need.
_MODULES = {
    "SketchCallback": "callback",
    "SketchConfig": "config",
    "SketchGRPOConfig": "baseline",
    "SketchGRPOTrainer": "trainer",
    "SketchOptimizer": "optimizer",
    "SketchUpdate": "weights",
    "get_sketch_model": "model",
    "make_projection": "projection",
    "predicted_kl": "kl",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
