"""What settings name: models, rows, functions. Whether it is there, before anything is imported.

Only what is wrong for sure is refused here, by a look at the file system. Whoever opens a thing
asks here first, too, so that each mistake has one message wherever it is found.
"""

import os
import re
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from minirl.base.errors import require
from minirl.base.reading import is_file
from minirl.config.rl import RLConfig
from minirl.config.shared import (
    EvaluateConfig,
    ExportConfig,
    LogConfig,
    MergeConfig,
    RowsConfig,
    SamplingConfig,
    TrainingConfig,
)
from minirl.config.supervised import DPOConfig, KTOConfig, ServeConfig, SupervisedConfig

GYM = "reasoning_gym:"
ROW_FILES = (".jsonl", ".json", ".parquet", ".csv", ".gz", ".zst")
HUB_DATASET = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
HUB_MODEL = r"[\w-][\w.-]*(/[\w-][\w.-]*)?"
OWN_FOLDERS = ("runs", "models")  # Of this repository; a hub id could have the same form.
# A file with a function in it, perhaps for the adapter of another library.
FUNCTION_FILE = re.compile(r"(?:(?:openrlhf|trl|verl):)?(?P<file>.+\.py)(?::.*)?", re.DOTALL)


def check_named(cfg: object) -> None:
    """Refuse a config that names what is not there.

    Args:
        cfg: of any program.

    Raises:
        UserError: for the first thing that is missing.
    """
    check_models(cfg)
    if isinstance(cfg, SamplingConfig | SupervisedConfig):
        _check_rows(cfg.data)
    if isinstance(cfg, ExportConfig):
        check_run(cfg.run)
    if isinstance(cfg, SamplingConfig):
        functions = cfg.reward.function
        for name in [functions] if isinstance(functions, str) else functions:
            _check_file(name, "reward.function")
        _check_file(cfg.env.name.partition("?")[0], "env.name")
    if isinstance(cfg, RLConfig):
        _check_file(cfg.algo.advantage, "algo.advantage")
        _check_file(cfg.algo.loss, "algo.loss")
        replay = cfg.rollout.replay
        require(
            not replay or os.path.isdir(replay),
            f"rollout.replay = {replay}: no such folder; give the folder `rollouts` of a run that "
            "had rollout.dump",
        )


def check_models(cfg: object) -> None:
    """Refuse a config that names a model that is not there. Raises UserError."""
    for setting, model in _models(cfg):
        if model:
            check_model(model, setting)


def _models(cfg: object) -> Iterable[tuple[str, str]]:
    """Return each setting that names a model, and its value."""
    if isinstance(cfg, TrainingConfig) and cfg.policy.model != "scratch":
        yield "policy.model", cfg.policy.model
    if isinstance(cfg, SamplingConfig):
        yield "reward.model", cfg.reward.model
    if isinstance(cfg, RLConfig):
        yield "ref.model", cfg.ref.model
        yield "critic.model", cfg.critic.model
    if isinstance(cfg, DPOConfig | KTOConfig):
        yield "reference", cfg.reference
    if isinstance(cfg, EvaluateConfig | ServeConfig | MergeConfig):
        yield "model", cfg.model


def check_model(model: str, setting: str) -> None:
    """Refuse what is neither a folder nor of the form of a hub id.

    Args:
        model: the value of the setting.
        setting: what names the model, for the message.

    Raises:
        UserError: there is no such folder, and it cannot be on a hub.
    """
    owner, slash, _ = model.partition("/")
    is_path = slash and (owner in OWN_FOLDERS or os.path.isdir(owner))
    is_hub_id = re.fullmatch(HUB_MODEL, model) and not is_path
    require(
        is_hub_id or os.path.isdir(model),
        f"{setting} = {model!r} is neither a folder nor a hub id (NAME or OWNER/NAME); if a recipe "
        "asks for it, the comment at its top says how it is made",
    )


def check_run(run: str | Path) -> None:
    """Refuse a folder that is not that of a run. Raises UserError."""
    require(
        is_file(Path(run) / "config.yaml"),
        f"run = {run} is not the folder of a run: it has no config.yaml",
    )


def check_source(source: str, setting: str) -> None:
    """Refuse a source of rows that is no file, no folder, no hub id and no generator.

    Args:
        source: as data/sources.py describes it.
        setting: what names it, for the message.

    Raises:
        UserError: there is nothing of that name.
    """
    place = source.partition("?")[0]
    is_hub_id = re.fullmatch(HUB_DATASET, place) and not place.endswith(ROW_FILES)
    is_there = place and (is_file(place) or os.path.isdir(place))
    require(
        place.startswith(GYM) or is_hub_id or is_there,
        f"{setting} = {source!r}: no such file; give a JSONL, JSON, Parquet or CSV file, a "
        f"folder or hub id of datasets or {GYM}NAME (if a recipe asks for it, the comment at its "
        "top says how it is made)",
    )


def _check_rows(data: RowsConfig) -> None:
    for setting, sources in (("data.train", data.train), ("data.eval", data.eval)):
        for source in [sources] if isinstance(sources, str) else sources:
            if source:
                check_source(source, setting)
    template = data.chat_template
    require(
        not template or is_file(template),
        f"data.chat_template = {template!r}: no such file; give the path of a text file",
    )


def _check_file(name: str, setting: str) -> None:
    """Refuse a function in a file that is not there. Raises UserError.

    Args:
        name: the value of the setting; who looks a registered name up refuses it if it is unknown.
        setting: what names the function, for the message.
    """
    in_file = FUNCTION_FILE.fullmatch(name)
    if in_file:
        require(is_file(in_file["file"]), f"{setting} = {name}: no file {in_file['file']}")


def check_installed(cfg: LogConfig) -> None:
    """Refuse a tracker if its package is missing, before anything is loaded. Raises UserError."""
    for name, project in (("wandb", cfg.wandb), ("trackio", cfg.trackio)):
        require(
            not project or find_spec(name) is not None,
            f"log.{name} = {project} needs the package {name}, which is not installed; "
            f"`pip install {name}`, or leave log.{name} empty",
        )
