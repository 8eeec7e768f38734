"""Settings that no program can work with, and config files that say none, end by one message."""

import dataclasses
import math
import re
import typing

import pytest

from minirl import rm
from minirl.base.errors import UserError
from minirl.config.parse import load_config, parse_flags
from minirl.config.rl import RLConfig
from minirl.config.shared import EvaluateConfig, ExportConfig
from minirl.config.supervised import DPOConfig, KTOConfig, RMConfig, ServeConfig, SFTConfig
from minirl.config.validate import resolve_lengths, validate_rl

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 10)
)
# name -> the bytes of a file, and what the message must say
FILES = {
    "UTF-16": ("seed: 1".encode("utf-16"), "is not UTF-8 text.*save it as UTF-8"),
    "UTF-32": ("seed: 1".encode("utf-32"), "is not UTF-8 text"),
    "Latin-1": ("output: é".encode("latin-1"), "is not UTF-8 text"),
    "bytes": (b"\xff\xfe\x00\x01", "is not UTF-8 text"),
    "zero byte": (b"seed: 1\x00", "not valid YAML: unacceptable character"),
    "key twice": (b"seed: 1\nseed: 2\n", "'seed' is there twice; remove one(.|\n)*line 2"),
    "section twice": (b"data: {}\nseed: 1\ndata: {}\n", "'data' is there twice"),
    "key twice in a section": (b"policy: {lr: 1, lr: 2}", "'lr' is there twice"),
    "key twice below": (b"policy:\n  scratch:\n    head_dim: 32\n    head_dim: 64", "head_dim"),
    "merge key twice": (b"policy: {<<: {lr: 1}, <<: {lr: 2}}", "'<<' is there twice"),
    "billion laughs": (BOMB.encode(), "more than 10000 values.*without aliases"),
    "laughs in a section": (b"policy:\n" + re.sub("^", "  ", BOMB, flags=re.M).encode(), "aliases"),
    "a list in itself": (b"a: &a [*a]", "without aliases"),
    "a mapping in itself": (b"policy: &a {lr: *a}", "without aliases"),
    "100,000 brackets": (b"[" * 100_000, "RecursionError"),
    "100,000 braces": (b"{a: " * 100_000, "RecursionError"),
    "5,000 digits": (b"seed: " + b"9" * 5000, "4300 digits"),
    "a 99th month": (b"output: 2024-99-99", "month must be in"),
    "!!bool": (b"resume: !!bool maybe", "not valid YAML: KeyError: 'maybe'"),
    "!!int": (b"seed: !!int many", "not valid YAML: ValueError"),
    "!!float": (b"policy: {lr: !!float much}", "not valid YAML: ValueError"),
    "!!timestamp": (b"output: !!timestamp now", "not valid YAML"),
    "!!python": (b"output: !!python/object/apply:os.getcwd []", "not valid YAML.*constructor"),
    "unknown tag": (b"output: !mine a", "not valid YAML.*constructor"),
    "list as a key": (b"? [a]\n: 1", "unhashable key"),
    "mapping as a key": (b"? {a: 1}\n: 1", "unhashable key"),
    "date as a key": (b"2024-01-01: 3", "unknown setting 2024-01-01"),
    "null as a key": (b"null: 3", "unknown setting null"),
    "bool as a key": (b"true: 3", "unknown setting true"),
    "number as a key": (b"1.5: 3", "unknown setting 1.5"),
    "number in a section": (b"policy: {1: 3}", "unknown setting policy.1"),
    "empty key": (b'"": 3', "unknown setting"),
    "two documents": (b"seed: 1\n---\nseed: 2", "expected a single document"),
    "unknown alias": (b"seed: *x", "undefined alias"),
    "tab": (b"\tseed: 1", "not valid YAML"),
    "colon": (b"seed: 1: 2", "not valid YAML"),
    "no bracket": (b"policy: {lr: 1", "not valid YAML"),
    "a number": (b"0", "the file = 0 must be a mapping"),
    "false": (b"false", "the file = False must be a mapping"),
    "a text": (b"rl", "the file = 'rl' must be a mapping"),
    "a list": (b"- seed: 1", "the file = .* must be a mapping"),
    "section of a list": (b"policy: [lr]", "policy = .'lr'. must be a mapping"),
    "section of a text": (b"policy: fast", "policy = 'fast' must be a mapping"),
    "list of lists": (b"data: {train: [[a]]}", "data.train = .* should be a valid string"),
    "text for a bool": (b"resume: 'yes'", "resume = 'yes' should be a valid boolean"),
    "infinite lr": (b"policy: {lr: .inf}", "policy.lr = inf should be a finite number"),
    "1e400": (b"policy: {lr: 1e400}", "policy.lr = inf should be a finite number"),
    "nan": (b"policy: {weight_decay: .nan}", "policy.weight_decay = nan should be a finite"),
    "null seed": (b"seed: ", "seed = None should be a valid integer"),
    "JSON of another program": (b'{"epochs": 3}', "unknown setting epochs"),
}


@pytest.mark.parametrize("name", FILES)
def test_a_config_file_that_says_no_settings(tmp_path, name):
    text, message = FILES[name]
    (tmp_path / "c.yaml").write_bytes(text)
    with pytest.raises(UserError, match=message) as error:
        load_config(RLConfig, str(tmp_path / "c.yaml"))
    assert "c.yaml" in str(error.value) and len(str(error.value)) < 1500


def test_files_that_are_odd_but_fine(tmp_path):
    for text in (
        "policy: &a {lr: 1.0}\ncritic: {<<: *a, warmup_steps: 1}",
        "\ufeffseed: 3",
        "seed: !!int '3'",
        "output: 2024-01-01",
        "---\nseed: 3\n...",
        "{}",
        "null",
        "policy: &a {<<: *a}",  # nothing, merged with itself
    ):
        (tmp_path / "c.yaml").write_text(text, encoding="utf-8")
        load_config(RLConfig, str(tmp_path / "c.yaml"))


@pytest.mark.parametrize("path", ["/nowhere.yaml", "/", "a\0b", "x" * 300, "/dev/null", ""])
def test_a_config_that_is_no_file(path):
    with pytest.raises(UserError, match="--config .*: no such file"):
        load_config(RLConfig, path)


def test_two_configs_are_one_too_many(tmp_path):
    (tmp_path / "c.yaml").write_text("seed: 1")
    with pytest.raises(UserError, match="--config is given 2 times"):
        parse_flags(RLConfig, ["--config", f"{tmp_path}/c.yaml", "--config", f"{tmp_path}/c.yaml"])


def numbers_of(cls: type, prefix: str = "") -> dict[str, type]:
    """All settings of a config that hold a number, and whether it may be a fraction."""
    found: dict[str, type] = {}
    for name, hint in typing.get_type_hints(cls).items():
        if dataclasses.is_dataclass(hint):
            found |= numbers_of(hint, f"{prefix}{name}.")
        elif hint in (int, float):
            found[prefix + name] = hint
    return found


PROGRAMS = (RLConfig, EvaluateConfig, SFTConfig, RMConfig, DPOConfig, KTOConfig)
BAD = {float: (math.nan, math.inf, -math.inf), int: (10**20, -(10**20), 1.5, True, "3")}
NUMBERS = [(cls, name, kind) for cls in PROGRAMS for name, kind in numbers_of(cls).items()]


@pytest.mark.parametrize(("cls", "name", "kind"), NUMBERS, ids=lambda x: getattr(x, "__name__", x))
def test_no_setting_takes_a_number_that_is_none(cls, name, kind):
    """Every one of every program."""
    from minirl.config.parse import fill_config

    *sections, key = name.split(".")
    for value in BAD[kind]:
        values: dict = {key: value}
        for section in reversed(sections):
            values = {section: values}
        with pytest.raises(UserError) as error:
            fill_config(cls, values)
        assert str(error.value).startswith(f"{name} = {value!r} should be "), error.value


@pytest.mark.parametrize(
    ("cls", "flags"),
    [
        (EvaluateConfig, "rollout.top-p 0"),
        (EvaluateConfig, "rollout.top-p 2"),
        (EvaluateConfig, "rollout.top-p -0.1"),
        (EvaluateConfig, "rollout.top-k -5"),
        (EvaluateConfig, "rollout.min-p 2"),
        (EvaluateConfig, "rollout.min-p -1"),
        (EvaluateConfig, "eval.temperature inf"),
        (EvaluateConfig, "eval.temperature -1"),
        (EvaluateConfig, "rollout.temperature 0"),
        (EvaluateConfig, "rollout.max-tokens 0"),
        (EvaluateConfig, "eval.samples 0"),
        (EvaluateConfig, "endpoint.port 65536"),
        (EvaluateConfig, "endpoint.port -1"),
        (EvaluateConfig, "engine.kv-cache-gb inf"),
        (EvaluateConfig, "engine.kv-cache-gb 1e300"),
        (EvaluateConfig, "engine.gpu-memory-utilization 0"),
        (EvaluateConfig, "engine.gpu-memory-utilization 1.5"),
        (EvaluateConfig, "engine.sleep-level 3"),
        (EvaluateConfig, "env.timeout-seconds 1e300"),
        (EvaluateConfig, "reward.timeout-seconds 1e300"),
        (EvaluateConfig, "reward.backoff-seconds 1e300"),
        (EvaluateConfig, "reward.retries 1000"),
        (EvaluateConfig, "timeout-minutes 1e300"),
        (EvaluateConfig, "timeout-minutes 1e-9"),
        (EvaluateConfig, "data.held-out -1"),
        (RLConfig, "seed 18446744073709551616"),
        (RLConfig, "seed -1"),
        (RLConfig, "policy.scratch.hidden-size 1000000000"),
        (RLConfig, "policy.scratch.num-layers 1000000"),
        (RLConfig, "policy.scratch.head-dim 0"),
        (RLConfig, "algo.gamma 2"),
        (RLConfig, "algo.gae-lambda -1"),
        (RLConfig, "algo.clip-low 1.5"),
        (RLConfig, "policy.ema-decay 1"),
        (RLConfig, "policy.weight-decay inf"),
        (RLConfig, "num-steps -1"),
        (RLConfig, "num-steps 99999999999"),
        (DPOConfig, "algo.nll-coef inf"),
        (DPOConfig, "algo.beta 0"),
        (DPOConfig, "algo.label-smoothing 0.5"),
        (SFTConfig, "num-epochs 1e300"),
        (SFTConfig, "num-epochs 0"),
        (SFTConfig, "data.max-tokens 1"),
        (RMConfig, "algo.center-coef nan"),
        (ServeConfig, "port 70000"),
        (ServeConfig, "timeout-minutes inf"),
        (ExportConfig, "step -1"),
    ],
)
def test_a_flag_out_of_its_bounds(cls, flags):
    name, value = flags.split()
    words = {ServeConfig: ["serve", "m"], ExportConfig: ["export", "r"]}.get(cls, [])
    with pytest.raises(UserError) as error:
        parse_flags(cls, [*words, f"--{name}", value])
    assert name.replace("-", "_").replace("-", "") in str(error.value)
    assert re.search(r"should be (a finite|less|greater)", str(error.value)), error.value


def test_a_number_that_may_be_left_out_is_told_like_others():
    for flags, says in (
        (["--policy.lr", "1e-6,"], "--policy.lr: could not convert string to float: '1e-6,'"),
        (["--data.held-out", "all"], "--data.held-out: invalid literal for int() with base 10"),
    ):
        with pytest.raises(UserError, match=re.escape(f"Error parsing {says}")) as error:
            parse_flags(RLConfig, flags)
        assert "typing" not in str(error.value)
    cfg = parse_flags(RLConfig, ["--policy.lr", "None", "--data.held-out", "3"])
    assert (cfg.policy.lr, cfg.data.held_out) == (None, 3)


def test_a_temperature_that_the_engine_would_raise():
    cfg = parse_flags(RLConfig, ["--data.train", "a.jsonl", "--rollout.temperature", "0.001"])
    cfg.policy.model = "scratch"
    resolve_lengths(cfg)
    with pytest.raises(UserError, match=r"rollout.temperature = 0.001: .*use 0.01 or more"):
        validate_rl(cfg, 1)


def test_a_flag_that_is_no_text():
    for value in ("a\udcff", "\ud800"):
        with pytest.raises(UserError, match="has bytes that are not UTF-8"):
            parse_flags(RLConfig, ["--output", value])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_tokens": 513}, "max_tokens = 513: the model m has 512 positions .*use 2 to 512"),
        ({"max_tokens": 1}, "max_tokens = 1: .*use 2 to 512"),
        ({"max_tokens": 300, "tokens_per_batch": 200}, "tokens_per_batch = 200 must be at least"),
    ],
)
def test_a_served_reward_model_reads_no_more_than_its_positions(settings, message):
    with pytest.raises(UserError, match=message):
        rm.longest_text(ServeConfig(command="serve", model="m", **settings), 512)
