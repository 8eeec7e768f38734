"""launch/install.sh: which build it chooses, and what it says of it; what a program says where the
build does not suit the machine. What it installs is what all other tests run with."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed import run

from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.supervise import lifecycle
from programs import ROOT

if os.path.exists("/dev/nvidia0"):
    pytest.skip("for machines without a GPU, which a stand-in pretends", allow_module_level=True)


@pytest.fixture
def folder(tmp_path) -> Path:
    """A repository without .venv, beside a stand-in for nvidia-smi."""
    shutil.copytree(ROOT / "launch", tmp_path / "repo" / "launch")
    shutil.copy(ROOT / "pyproject.toml", tmp_path / "repo")
    (tmp_path / "bin").mkdir()
    stand_in = tmp_path / "bin" / "nvidia-smi"
    stand_in.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H200 (UUID: x)'\n")
    stand_in.chmod(0o755)
    return tmp_path


def install(
    folder: Path, *flags: str, gpu: bool = False, **env: str
) -> subprocess.CompletedProcess:
    path = f"{folder / 'bin'}:{os.environ['PATH']}" if gpu else os.environ["PATH"]
    return subprocess.run(
        ["bash", "launch/install.sh", "--dry-run", *flags],
        cwd=folder / "repo",
        env={**os.environ, "PATH": path, **env},
        capture_output=True,
        text=True,
    )


CPU = "minirl: would install the CPU build into .venv, "
CUDA = "minirl: would install the CUDA build into .venv, "


def without_python(text: str) -> str:
    """What was said without the interpreter that it names, which depends on the machine."""
    return re.sub(r" \(Python 3\.1[12]\.\d+ of /\S+\)", "", text)


@pytest.mark.parametrize(
    ("flags", "options", "said"),
    [
        ((), {}, CPU + "because there is no NVIDIA GPU here; on a login node"),
        ((), {"gpu": True}, CUDA + "because this machine has an NVIDIA GPU"),
        (("--cuda",), {}, CUDA + "as asked for"),
        (("--cpu",), {"gpu": True}, CPU + "as asked for"),
        ((), {"MINIRL_EXTRA": "cuda"}, CUDA + "as asked for"),
        (("--cpu",), {"MINIRL_EXTRA": "cuda"}, CPU + "as asked for"),
    ],
)
def test_the_build_is_chosen_by_flag_or_by_what_is_there(folder, flags, options, said):
    ended = install(folder, *flags, **options)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "(Python 3." in ended.stdout
    assert without_python(ended.stdout).startswith(said) and len(ended.stdout.splitlines()) == 1
    assert not (folder / "repo" / ".venv").exists()


def test_a_build_that_does_not_exist_is_refused(folder):
    ended = install(folder, MINIRL_EXTRA="gpu")
    said = "minirl: MINIRL_EXTRA=gpu: it is cpu, cuda or cuda-2_11\n"
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", said)


def test_what_does_not_fit_together_is_said(folder):
    python = folder / "repo" / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\necho 'minirl 1 requires bm25s, not installed'\nexit 1\n")
    python.chmod(0o755)
    function = 'eval "$(sed -n "/^check_installed()/,/^}/p" launch/install.sh)"'
    command = ["bash", "-euo", "pipefail", "-c", f"{function}; check_installed"]
    ended = subprocess.run(command, cwd=folder / "repo", capture_output=True, text=True)
    assert ended.returncode == 0 and "minirl 1 requires bm25s" in ended.stdout, ended


def test_a_build_that_is_there_stays(folder):
    venv = folder / "repo" / ".venv"
    venv.mkdir()
    checksum = subprocess.run(
        "cksum < pyproject.toml", shell=True, cwd=folder / "repo", capture_output=True, text=True
    ).stdout.strip()
    for stamp, flags, said in (
        (f"cuda {checksum}", (), "minirl: .venv has the CUDA build already\n"),
        (f"cuda {checksum} [dev]", (), "minirl: .venv has the CUDA build already\n"),
        (f"cuda {checksum}", ("--dev",), CUDA + "as before\n"),
        (f"cuda {checksum}", ("--cpu",), CPU + "as asked for\n"),
        ("cuda 1 2", (), CUDA + "as before\n"),  # pyproject.toml has changed
    ):
        (venv / "minirl-installed").write_text(stamp + "\n")
        assert without_python(install(folder, *flags).stdout) == said, stamp
    (venv / "minirl-installed").write_text(f"cpu {checksum}\n")
    first, second = install(folder, gpu=True).stdout.splitlines()
    assert "has the CPU build, and this machine has a GPU; bash launch/install.sh --cuda" in first
    assert second == "minirl: .venv has the CPU build already"


def test_a_wrong_argument_is_refused(folder):
    ended = install(folder, "--cdua")
    assert ended.returncode == 2 and "has no argument --cdua" in ended.stderr


def test_help_is_what_the_file_begins_with(folder):
    ended = install(folder, "--help")
    assert (ended.returncode, ended.stderr) == (0, "")
    for word in ("--cuda", "--dev", "--dry-run", "PYTHON ", "MINIRL_EXTRA"):
        assert word in ended.stdout
    assert "set -e" not in ended.stdout and "#!" not in ended.stdout


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "does not run as Python"),
        ("echo 3.10.4", "is Python 3.10.4"),
        ("echo 3.13.0", "is Python 3.13.0"),
        ('case "$2" in *ensurepip*) exit 1;; esac; echo 3.12.3', "is Python 3.12.3 without venv"),
    ],
)
def test_an_interpreter_that_will_not_do_is_refused_by_name(folder, text, problem):
    python = folder / "python"
    if text:
        python.write_text(f"#!/bin/sh\n{text}\n")
        python.chmod(0o755)
    ended = install(folder, PYTHON=str(python))
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(f"minirl: PYTHON={python} {problem}")
    assert "needs Python 3.11 or 3.12" in ended.stderr


def test_an_interpreter_that_is_asked_for_is_taken_unless_venv_is_there(folder):
    said = install(folder, PYTHON=sys.executable).stdout
    version = platform.python_version()
    assert f"into .venv (Python {version} of {sys.executable})" in said
    bin_folder = folder / "repo" / ".venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "python").symlink_to(sys.executable)
    other = folder / "python"
    other.write_text("#!/bin/sh\necho 3.9.1\n")
    other.chmod(0o755)
    first, second = install(folder, PYTHON=str(other)).stdout.splitlines()
    assert first.startswith(f"minirl: .venv has Python {version}, and PYTHON={other} is not used")
    assert f"(Python {version} of .venv/bin/python)" in second


@pytest.mark.parametrize("browser", ["chromium", "google-chrome", None])
def test_ci_installs_a_browser_where_there_is_none(tmp_path, browser):
    """With stand-ins for all that it calls; each notes its name and arguments."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "launch").mkdir()
    (tmp_path / "bin").mkdir()
    note = f'#!/bin/bash\necho "$(basename $0) $* CI=$CI" >> {tmp_path}/called\n'
    names = ["apt-get", "sudo", *([browser] if browser else [])]
    for path in (*(f"bin/{name}" for name in names), "launch/check.sh", "launch/test.sh"):
        (tmp_path / path).write_text(note)
        (tmp_path / path).chmod(0o755)
    for name in ("bash", "basename", "dirname", "id"):
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    env = {"PATH": str(tmp_path / "bin"), "PYTHON": "python3"}
    subprocess.run(["bash", ".ci/run"], cwd=tmp_path, env=env, check=True)
    called = (tmp_path / "called").read_text().splitlines()
    assert called[-2:] == ["check.sh  CI=true", "test.sh  CI=true"]
    installs = [line for line in called[:-2] if line.endswith("chromium CI=true")]
    assert len(called) == (2 if browser else 4) and len(installs) == (0 if browser else 1)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """What a wheel of this repository installs."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("minirl", "configs"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    flags = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", "out", "."]
    subprocess.run([sys.executable, "-m", "pip", "wheel", *flags], cwd=folder, check=True)
    (built,) = (folder / "out").glob("minirl-*.whl")
    shutil.unpack_archive(built, folder / "site", "zip")
    return folder / "site"


@pytest.mark.parametrize("name", ["configs/quickstart_rl.yaml", "quickstart_rl"])
def test_recipes_of_a_wheel_are_found_by_name_from_any_folder(wheel, tmp_path, name):
    installed = {path.name for path in (wheel / "minirl" / "recipes").glob("*.yaml")}
    assert installed == {path.name for path in (ROOT / "configs").glob("*.yaml")}
    code = (
        "from minirl.config import parse, rl\n"
        f"cfg = parse.parse_flags(rl.RLConfig, ['--config', {name!r}, '--seed', '5'])\n"
        "print(parse.__file__, cfg.seed, cfg.output)\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(wheel)},
        capture_output=True,
        text=True,
    )
    assert ended.stdout.split() == [
        str(wheel / "minirl" / "config" / "parse.py"),
        "5",
        load_config(RLConfig, str(ROOT / "configs" / "quickstart_rl.yaml")).output,
    ], ended.stderr


def test_the_quickstart_does_not_ask_for_the_machine_by_its_name(folder):
    """A laptop's may lead nowhere, and torchrun would wait for ever. It is installed already; a
    stand-in for torchrun says what it is called with."""
    programs = folder / "repo" / ".venv" / "bin"
    programs.mkdir(parents=True)
    with open(folder / "repo" / "pyproject.toml") as file:
        sums = subprocess.run(["cksum"], stdin=file, capture_output=True, text=True).stdout
    (programs.parent / "minirl-installed").write_text(f"cpu {sums}")
    (programs / "torchrun").write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    (programs / "torchrun").chmod(0o755)
    called = subprocess.run(
        ["bash", "launch/quickstart.sh", "--num-steps", "1"],
        cwd=folder / "repo",
        capture_output=True,
        text=True,
    )
    config, _, program = run.config_from_args(run.parse_args(called.stdout.splitlines()))
    assert config.local_addr == "127.0.0.1" and config.nproc_per_node == 2
    assert program[program.index("-m") + 1] == "minirl.rl" and program[-2:] == ["--num-steps", "1"]


def test_a_recipe_of_a_clone_is_found_from_any_folder_behind_a_file_of_that_name(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    asked = ["--config", "configs/quickstart_rl.yaml"]
    assert parse_flags(RLConfig, asked) == load_config(RLConfig, str(ROOT / asked[1]))
    (tmp_path / "configs").mkdir()
    (tmp_path / asked[1]).write_text("seed: 77\n")
    assert parse_flags(RLConfig, asked).seed == 77


def test_a_program_says_that_the_gpu_is_not_used(folder, monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert lifecycle.describe_idle_gpu() == ""
    monkeypatch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert "launch/install.sh --cuda" in lifecycle.describe_idle_gpu()
    assert "may be too old for CUDA 13.0" in lifecycle.describe_idle_gpu()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert lifecycle.describe_idle_gpu() == ""
