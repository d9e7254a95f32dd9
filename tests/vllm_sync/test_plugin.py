"""vLLM finds the backend by itself, and pays nothing for that where it is not used."""

import subprocess
import sys
from importlib.metadata import entry_points


def test_the_entry_point_is_installed():
    (entry,) = entry_points(group="vllm.general_plugins", name="trl_sketch")
    assert entry.value == "trl_sketch.sync.plugin:register"


def test_the_plugin_imports_nothing():
    code = "import sys, trl_sketch.sync.plugin; assert not {'torch', 'transformers', 'vllm', 'trl'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_registering_twice_is_as_good_as_once():
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    from trl_sketch.sync.plugin import register

    register()
    register()
    engine = WeightTransferEngineFactory._registry["sketch"]()
    assert engine.__name__ == "SketchWeightTransferEngine"
