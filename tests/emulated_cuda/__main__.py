"""Run a script as if there were a GPU, on a machine that has none: with a CUDA device that is made of the CPU's memory.

```bash
python tests/emulated_cuda recipes/grpo_sketch.py --max_steps 3
python tests/emulated_cuda -m pytest tests/test_trainer.py
```

What it shows: everything is on the device where it has to be, because tensors of two devices are refused as a GPU refuses them;
code that only runs on CUDA runs; memory is counted as it is allocated and freed. What it cannot show: kernels and their
rounding (the CPU's compute), speed, streams, and what a GPU's own attention and matrix products need. Single numbers on
the CPU are taken everywhere, also where CUDA refuses them, and `copy.deepcopy` of a tensor does not work.

It needs a C++ compiler (`c++`, or `CXX`), and torch's build without CUDA. `device.cpp` is compiled once, in about 15 s.
"""

import contextlib
import ctypes
import hashlib
import importlib.metadata
import importlib.util
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any


HERE = Path(__file__).resolve().parent
CACHE = HERE.parents[1] / ".pytest_cache" / "emulated_cuda"


def build() -> Path:
    """The compiled device, made anew when `device.cpp` or torch has changed."""
    source = HERE / "device.cpp"
    said = source.read_bytes() + importlib.metadata.version("torch").encode()
    library = CACHE / f"{hashlib.sha256(said).hexdigest()[:16]}.so"
    if not library.exists():
        spec = importlib.util.find_spec("torch")
        assert spec is not None and spec.origin is not None
        torch = Path(spec.origin).parent
        CACHE.mkdir(parents=True, exist_ok=True)
        part = library.with_suffix(f".{os.getpid()}")
        command = [os.environ.get("CXX", "c++"), "-O1", "-shared", "-fPIC", "-std=c++20", str(source), "-o", str(part)]
        command += [f"-I{torch / 'include'}", f"-I{torch / 'include' / 'torch' / 'csrc' / 'api' / 'include'}"]
        command += [f"-L{torch / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{torch / 'lib'}"]
        subprocess.run(command, check=True)
        part.replace(library)
    return library


class Stream:
    """Work is done when the call returns, so that there is nothing to wait for."""

    cuda_stream = 0

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, stream: Any) -> None: ...
    def synchronize(self) -> None: ...


class Event:
    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def synchronize(self) -> None: ...

    def record(self, *args: Any) -> None:
        self.time = time.perf_counter()

    def elapsed_time(self, end: "Event") -> float:
        return 1e3 * (end.time - self.time)


class Device(contextlib.nullcontext[None]):
    """In the place of `torch.cuda.device(...)`."""

    def __init__(self, *args: Any) -> None:
        super().__init__()


def install() -> None:
    """Load the device, import torch, and have `torch.cuda` know it."""
    device = ctypes.CDLL(str(build()))  # before torch, which looks for a device once
    import torch

    for counter in (device.memory_allocated, device.max_memory_allocated):
        counter.restype = ctypes.c_int64
    total = 24 << 30
    properties = SimpleNamespace(
        name="Emulated GPU", major=9, minor=0, total_memory=total, multi_processor_count=1, warp_size=32
    )
    state = torch.zeros(16, dtype=torch.uint8)  # of random numbers, which come from the CPU's generator
    functions: dict[str, Any] = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "is_bf16_supported": lambda including_emulation=True: True,
        "is_current_stream_capturing": lambda: False,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "empty_cache": lambda: None,
        "ipc_collect": lambda: None,
        "get_device_name": lambda device=None: properties.name,
        "get_device_capability": lambda device=None: (properties.major, properties.minor),
        "get_device_properties": lambda device=None: properties,
        "mem_get_info": lambda device=None: (total - device_memory(), total),
        "memory_allocated": lambda device=None: device_memory(),
        "memory_reserved": lambda device=None: device_memory(),
        "max_memory_allocated": lambda d=None: device.max_memory_allocated(),
        "max_memory_reserved": lambda d=None: device.max_memory_allocated(),
        "reset_peak_memory_stats": lambda d=None: device.reset_peak_memory_stats(),
        "manual_seed": lambda seed: None,
        "manual_seed_all": lambda seed: None,
        "get_rng_state": lambda device="cuda": state,
        "set_rng_state": lambda state, device="cuda": None,
        "get_rng_state_all": lambda: [state],
        "set_rng_state_all": lambda states: None,
        "current_stream": lambda device=None: Stream(),
        "default_stream": lambda device=None: Stream(),
        "stream": lambda stream: contextlib.nullcontext(),
        "device": Device,
        "device_of": Device,
        "Stream": Stream,
        "Event": Event,
    }
    device_memory = device.memory_allocated
    for name, function in functions.items():
        for module in (torch.cuda, torch.cuda.random):
            if hasattr(module, name):
                setattr(module, name, function)
    torch._C._cuda_getDevice = lambda: 0
    torch.accelerator.is_available = lambda: True
    torch.accelerator.device_count = lambda: 1
    torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.synchronize = lambda device=None: None

    from trl.kernels import chunked_logprob

    chunked_logprob._use_triton = lambda device: False  # it compiles for a GPU


if __name__ == "__main__":
    install()
    sys.argv.pop(0)
    if not sys.argv:
        sys.exit(__doc__)
    if sys.argv[0] == "-m":
        sys.argv.pop(0)
        sys.path.insert(0, os.getcwd())
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
        runpy.run_path(sys.argv[0], run_name="__main__")
