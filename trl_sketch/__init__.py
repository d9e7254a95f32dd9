"""Train all attention and MLP weights of a language model from low-rank gradient sketches.

```python
from trl_sketch import SketchConfig, SketchGRPOTrainer

trainer = SketchGRPOTrainer(model=..., reward_funcs=..., args=..., train_dataset=..., peft_config=SketchConfig(rank=64))
trainer.train()
```
"""

from typing import TYPE_CHECKING, Any

from .config import SketchConfig
from .kl import predicted_kl
from .model import get_sketch_model
from .optimizer import SketchOptimizer
from .projection import make_projection
from .weights import SketchUpdate


if TYPE_CHECKING:
    from .callback import SketchCallback
    from .trainer import SketchGRPOTrainer

__version__ = "0.1.0"

__all__ = [
    "SketchCallback",
    "SketchConfig",
    "SketchGRPOTrainer",
    "SketchOptimizer",
    "SketchUpdate",
    "get_sketch_model",
    "make_projection",
    "predicted_kl",
]


def __getattr__(name: str) -> Any:
    # TRL takes seconds to import, and a process that only applies updates does not need it.
    if name == "SketchCallback":
        from .callback import SketchCallback

        return SketchCallback
    if name == "SketchGRPOTrainer":
        from .trainer import SketchGRPOTrainer

        return SketchGRPOTrainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
