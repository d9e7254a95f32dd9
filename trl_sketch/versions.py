"""The versions whose internals the trainers build on; importing this module refuses others."""

import transformers
import trl
from packaging.specifiers import SpecifierSet


TESTED_VERSIONS = {
    "trl": (trl.__version__, ">=1.16,<1.17"),
    "transformers": (transformers.__version__, ">=5.17,<5.18"),
}
for _name, (_version, _range) in TESTED_VERSIONS.items():
    if not SpecifierSet(_range, prereleases=True).contains(_version):
        raise ImportError(
            f"trl_sketch.SketchGRPOTrainer was tested with {_name}{_range} and found {_name} {_version}, whose internals "
            f"may differ: pip install '{_name}{_range}'"
        )
