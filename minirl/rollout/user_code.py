"""Time limits of code that the config names, before a rollout runs it."""

import contextlib
from collections.abc import Callable

from minirl.config.rl import RLConfig
from minirl.config.shared import EnvConfig, EvaluateConfig
from minirl.envs.base import Env
from minirl.parallel.limits import Limit
from minirl.parallel.watch import Watch


def limited_imports(
    cfg: RLConfig | EvaluateConfig, watch: Watch
) -> contextlib.AbstractContextManager[Limit]:
    """End the run if what the config names is not imported within timeout_minutes."""

    def describe() -> str:
        named = {"env.name": cfg.env.name, "reward.function": cfg.reward.function}
        if isinstance(cfg, RLConfig):
            named["algo.advantage"] = cfg.algo.advantage
        names = ", ".join(f"{setting} = {value}" for setting, value in named.items())
        return (
            f"one of {names} takes longer than timeout_minutes = {cfg.timeout_minutes:g} to "
            "import; mend its file, or raise timeout_minutes"
        )

    return watch.limit(60 * cfg.timeout_minutes, describe)


def make_in_time(make_env: Callable[[], Env], cfg: EnvConfig, watch: Watch) -> Env:
    """Make an environment. It ends the run if that takes longer than env.timeout_seconds."""

    def describe() -> str:
        return (
            f"env.name = {cfg.name}: its constructor takes longer than env.timeout_seconds = "
            f"{cfg.timeout_seconds:g}; mend it, or raise env.timeout_seconds"
        )

    with watch.limit(cfg.timeout_seconds, describe):
        return make_env()
