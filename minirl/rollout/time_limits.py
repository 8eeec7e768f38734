"""Time limits for code that the config names, outside a rollout."""

import contextlib
from collections.abc import Callable
from typing import Any

from minirl.base.errors import UserError
from minirl.base.oversight import Oversight
from minirl.config.rl import RLConfig
from minirl.config.shared import EnvConfig, EvaluateConfig, TrainingConfig
from minirl.envs.base import Env


def limited_imports(
    cfg: RLConfig | EvaluateConfig, watch: Oversight
) -> contextlib.AbstractContextManager[Any]:
    """End the run if what the config names is not imported within timeout_minutes."""

    def describe() -> str:
        named = {"env.name": cfg.env.name, "reward.function": cfg.reward.function}
        if isinstance(cfg, RLConfig):
            named["algo.advantage"] = cfg.algo.advantage
            named["algo.loss"] = cfg.algo.loss
        names = ", ".join(f"{setting} = {value}" for setting, value in named.items())
        return (
            f"one of {names} takes longer than timeout_minutes = {cfg.timeout_minutes:g} to "
            "import, or an environment to be made; fix its file, or raise timeout_minutes"
        )

    return watch.limit(60 * cfg.timeout_minutes, describe)


def limited_template(
    cfg: TrainingConfig | EvaluateConfig, where: str, watch: Oversight
) -> contextlib.AbstractContextManager[Any]:
    """End the run if a model's tokenizer and chat template take longer than timeout_minutes.

    A template is a program, which may have no end.

    Args:
        cfg: has the limit.
        where: the setting that names the model, and its value.
        watch: of this process.
    """

    def describe() -> str:
        return (
            f"{where}: to read its tokenizer and to render a first chat by its template, or by "
            f"data.chat_template, takes longer than timeout_minutes = {cfg.timeout_minutes:g}; "
            "take another model or template, or raise timeout_minutes"
        )

    return watch.limit(60 * cfg.timeout_minutes, describe)


def make_in_time(make_env: Callable[[], Env], cfg: EnvConfig, watch: Oversight) -> Env:
    """Make an environment. It ends the run if that takes longer than env.timeout_seconds.

    Raises:
        UserError: the constructor raised anything.
    """

    def describe() -> str:
        return (
            f"env.name = {cfg.name}: its constructor takes longer than env.timeout_seconds = "
            f"{cfg.timeout_seconds:g}; fix it, or raise env.timeout_seconds"
        )

    with watch.limit(cfg.timeout_seconds, describe):
        try:
            return make_env()
        except UserError:
            raise
        except (Exception, SystemExit, KeyboardInterrupt) as error:  # the user's code may raise any
            raise UserError(
                f"env.name = {cfg.name}: its constructor raised {type(error).__name__}: {error}"
            ) from error
