"""What `--help` and `--help-all` print.

The short help has the settings that most users touch, in a line each. The full one has all, with
their whole meaning.
"""

import dataclasses
import shutil
import textwrap
from collections.abc import Iterable
from itertools import groupby

from minirl.config.describe import Setting, sentence_of, settings_of

# The settings of the short help in their order, where a program has them, with a phrase for each. A
# program of few settings shows all.
COMMON = {
    "output": "folder of the run",
    "num_steps": "steps of training",
    "num_epochs": "passes over the training rows",
    "stop_at": "held-out scores that end the run early",
    "batch_size": "rows of an optimizer step",
    "resume": "go on from the newest checkpoint in `output`",
    "seed": "of everything that is drawn at random",
    "tokens_per_rank": "budget of a micro-batch; lower it to save memory",
    "model": "folder or hub id",
    "reference": "folder or hub id of the frozen reference",
    "policy.model": "folder or hub id",
    "policy.lr": "learning rate",
    "policy.lr_schedule": "of the learning rate",
    "policy.optimizer_state": "offload and 8bit save GPU memory",
    "policy.activation_checkpointing": "full saves most memory",
    "policy.lora.rank": "of low-rank adapters; 0: all weights are trained",
    "data.train": "files, folders, hub ids or generators",
    "data.eval": "the same, of held-out rows",
    "data.held_out": "rows of data.train to hold out without data.eval",
    "data.prompt_key": "column of the prompt",
    "data.answer_key": "column of the answer",
    "data.chosen_key": "column of the better answer",
    "data.rejected_key": "column of the worse answer",
    "data.completion_key": "column of what follows the prompt",
    "data.label_key": "column of what is wanted",
    "data.chat_template_kwargs": "variables of the chat template",
    "data.system_prompt": "put before chats without one",
    "data.max_prompt_tokens": "longest prompt",
    "data.max_tokens": "longest sequence",
    "rollout.prompts_per_step": "prompts of a step",
    "rollout.samples_per_prompt": "answers to each",
    "rollout.max_tokens": "longest answer",
    "rollout.temperature": "of sampling",
    "rollout.dump": "write every trajectory",
    "reward.function": "name, file.py:function or URL; several are summed",
    "reward.model": "folder or hub id of a reward model",
    "env.name": "name or file.py:Class",
    "env.max_turns": "answers of an episode",
    "algo.advantage": "name or file.py:function",
    "algo.loss": "of the policy",
    "algo.beta": "the larger, the nearer to the reference",
    "algo.updates_per_step": "optimizer steps of a step",
    "algo.num_epochs": "passes over the answers of a step",
    "algo.clip_low": "the ratio is clipped below 1 - this",
    "algo.clip_high": "and above 1 + this",
    "algo.kl_coef": "weight of the KL to the reference",
    "engine.gpu_memory_utilization": "share for vLLM",
    "engine.tensor_parallel_size": "ranks that share an engine",
    "parallel.tensor": "ranks that split every matrix",
    "parallel.context": "ranks that split every sequence",
    "eval.every": "steps between evaluations",
    "eval.samples": "answers to a held-out prompt",
    "eval.threshold": "reward of a correct answer",
    "checkpoint.every": "steps between checkpoints; 0: none",
    "checkpoint.keep": "newest ones to keep",
    "checkpoint.save_hf": "each also as a Hugging Face folder",
    "checkpoint.best_metric": "held-out score of the best, which is kept",
    "log.samples": "answers shown at each evaluation",
    "log.wandb": "project in Weights & Biases",
}
FEW_SETTINGS = 20
GENERAL = "the run"  # The title of settings that are in no section.

WIDEST = 100  # Columns of a text that people read.
LONGEST_FLAG = 42  # Of a line of the short help, in columns; a longer one has its text below.


def short_help(cls: type, program: str, values: object = None) -> str:
    """Return the settings that most users touch, in a line each.

    Args:
        cls: a config class.
        program: the module that is started.
        values: an instance, whose values are shown as the defaults; None: those of the class.
    """
    settings = list(settings_of(cls, values))
    shown = settings
    phrases: dict[str, str] = {}
    if len(settings) > FEW_SETTINGS:
        phrases = COMMON
        by_name = {setting.name: setting for setting in settings}
        shown = [by_name[name] for name in COMMON if name in by_name]
    lines = _head(cls, program, settings)
    for title, group in _sections(shown):
        lines += ["", f"{title}:"]
        for setting in group:
            lines += _short_lines(setting, phrases)
    lines.append("")
    if len(shown) < len(settings):
        lines.append(f"{len(shown)} of {len(settings)} settings; --help-all explains all of them.")
    else:
        lines.append("--help-all explains them at length.")
    return "\n".join(lines) + "\n"


def full_help(cls: type, program: str, values: object = None) -> str:
    """Return all settings with what they mean.

    Args:
        cls: a config class.
        program: the module that is started.
        values: an instance, whose values are shown as the defaults; None: those of the class.
    """
    settings = list(settings_of(cls, values))
    lines = _head(cls, program, settings)
    for title, group in _sections(settings):
        lines += ["", f"{title}:"]
        if title != GENERAL:
            lines += _wrap(group[0].section.__doc__ or "", "  ")
        for setting in group:
            flag = _with_value(setting)
            if setting.is_switch:
                flag = f"{setting.flag}, {setting.negated_flag}"
            lines += ["", f"  {flag}{_default(setting, '  (default: {})')}"]
            lines += _wrap(setting.description, "      ")
    return "\n".join(lines) + "\n"


def _head(cls: type, program: str, settings: Iterable[Setting]) -> list[str]:
    """Return how the program is called, and what it does."""
    words = [_with_value(setting) for setting in settings if setting.is_positional]
    usage = " ".join([f"usage: python -m {program}", *words, "[--flag value ...]"])
    about = [
        usage,
        "",
        *_wrap(cls.__doc__ or "", ""),
    ]
    if not words:
        about += [
            "",
            "--config FILE reads settings from a YAML file; flags win over it. "
            "A switch takes true or false, too.",
        ]
    return about


def _sections(settings: Iterable[Setting]) -> Iterable[tuple[str, list[Setting]]]:
    """Return the settings of each section with its title."""
    for section, group in groupby(settings, lambda setting: setting.name.rpartition(".")[0]):
        yield section or GENERAL, list(group)


def _with_value(setting: Setting) -> str:
    """Return a flag with what is given for it."""
    if setting.is_positional:
        name = setting.name.upper()
        return setting.value if setting.value.islower() else name
    return f"{setting.flag} {setting.value}".rstrip()


def _short_lines(setting: Setting, phrases: dict[str, str]) -> list[str]:
    """Return a setting in a line; the text is on a second one where the flag is long."""
    flag = f"  {_with_value(setting)}"
    text = phrases.get(setting.name) or sentence_of(setting.description)
    text = f"{text}{_default(setting, ' [{}]')}"
    if len(flag) >= LONGEST_FLAG:
        return [flag, f"{'':{LONGEST_FLAG}}{text}"]
    return [f"{flag:{LONGEST_FLAG}}{text}"]


def _default(setting: Setting, form: str) -> str:
    """Return the default of a setting in a form; empty if it has none."""
    value = setting.default
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return form.format("on" if value else "off")
    if isinstance(value, dict):
        value = [word for pair in value.items() for word in pair]
    if isinstance(value, list | tuple):
        value = " ".join(str(item) for item in value)
    return form.format(value if value not in ("", None) else "none")


def _wrap(text: str, indent: str) -> list[str]:
    """Return the lines of paragraphs, indented."""
    width = min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns)
    lines: list[str] = []
    for paragraph in text.split("\n\n"):
        words = " ".join(paragraph.split())
        if words:
            lines += textwrap.wrap(
                words,
                width,
                initial_indent=indent,
                subsequent_indent=indent,
                break_on_hyphens=False,
                break_long_words=False,
            )
    return lines
