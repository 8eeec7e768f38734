"""The walk through one GRPO step: it must agree with plain PyTorch, name the code that it
shows, and show the difference that each broken rule makes."""

import re
import runpy
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from torch.distributed import run

from programs import ROOT, Ended, fork

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="two ranks with a CPU engine each"
)
BREAKS = ("loss-scale", "logprob-temperature", "stale-engine")


@pytest.fixture(scope="module")
def walked(tmp_path_factory) -> Ended:
    """With every rule broken in turn. Plain PyTorch agrees afterwards, so the broken ones have
    changed nothing."""
    log = tmp_path_factory.mktemp("walk")
    return fork("minirl.walk", ["--break", *BREAKS], log, 300, world=2)


def test_it_starts_its_two_ranks_itself(monkeypatch):
    """Under torchrun, whose files are in a temporary folder; it leaves nothing on the disk."""
    started = []

    def start(command, env):
        assert list(Path(env["TMPDIR"]).iterdir()) == []
        started.append((command, env))
        return subprocess.CompletedProcess(command, 3)

    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr(subprocess, "run", start)
    monkeypatch.setattr(sys, "argv", ["walk", "--break", *BREAKS])
    with pytest.raises(SystemExit) as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # another test has imported it
        runpy.run_module("minirl.walk", run_name="__main__")
    assert stop.value.code == 3  # torchrun's
    ((command, env),) = started
    assert not Path(env["TMPDIR"]).exists()
    assert command[:3] == [sys.executable, "-m", "torch.distributed.run"]
    config, _, program = run.config_from_args(run.parse_args(command[3:]))
    assert config.nproc_per_node == 2
    assert config.local_addr == "127.0.0.1"  # the machine's name may lead nowhere
    assert program[-6:] == ["-m", "minirl.walk", "--break", *BREAKS]


def pairs(text: str, left: str, right: str) -> dict[str, tuple[float, float]]:
    """Numbers that stand side by side, by name."""
    found = re.findall(rf"^ +(\w+) +{left} (\S+) \| {right} (\S+)", text, re.MULTILINE)
    return {name: (float(a), float(b)) for name, a, b in found}


def broken(text: str, name: str) -> dict[str, tuple[float, float]]:
    """(wrong, right) of each number that the broken rule changes."""
    section = text.split(f"--break {name}\n")[1]
    return pairs(re.split(r"--break|\n\n", section)[0], "broken", "right")


def test_plain_pytorch_agrees(walked):
    assert walked.code == 0, walked.out + walked.err
    sides = pairs(walked.out, "plain PyTorch", "minirl")
    assert set(sides) == {"loss", "grad_norm"}
    for plain, minirl in sides.values():
        assert plain == pytest.approx(minirl, rel=1e-6, abs=1e-7) and plain != 0
    differences = re.findall(r"relative difference (\S+)$", walked.out, re.MULTILINE)
    assert len(differences) == 2 and max(map(float, differences)) < 1e-7


def test_ten_stations_name_the_code_that_they_show(walked):
    assert re.findall(r"^(\d+)\. ", walked.out, re.MULTILINE) == [str(n) for n in range(1, 11)]
    places = re.findall(r"^ +code +(\S+):(\d+) (\S+)$", walked.out, re.MULTILINE)
    assert len(places) >= 10
    for file, line, name in places:
        text = (ROOT / file).read_text().splitlines()[int(line) - 1]
        assert re.search(rf"\bdef {name.split('.')[-1]}\(", text), (file, line, name)


def test_each_broken_rule_shows_its_difference(walked):
    for name in ("loss-scale", "logprob-temperature"):
        for metric in ("loss", "grad_norm"):
            wrong, right = broken(walked.out, name)[metric]
            assert wrong != pytest.approx(right, rel=1e-4), (name, metric)
    assert set(broken(walked.out, "loss-scale")) == {"loss", "grad_norm"}
    for name in ("logprob-temperature", "stale-engine"):
        wrong, right = broken(walked.out, name)["mismatch"]
        assert wrong > 1e-2 and right < 1e-4, name
