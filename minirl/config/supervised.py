"""The knobs of learning from what others wrote: SFT, reward models and DPO; `config.py` has what
all programs share.
"""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt

from minirl.config.shared import Positive, RowsConfig, TrainingConfig

MaxTokens = Annotated[int, Field(ge=2)]  # a token and the next one


@dataclass(kw_only=True)
class ChatsConfig(RowsConfig):
    """Rows to imitate, with `messages`, with `prompt` and `completion`, or with `text`. Of
    reasoning_gym the prompt is the question, and answers are in the column `answer`. No prompt is
    in the loss.
    """

    messages_key: str = (
        "messages"  # A chat: list of messages with role and content; any number of turns.
    )
    completion_key: str = "completion"
    """What follows it: a text or a list of messages. Where a row has no `completion`: `output`."""
    text_key: str = (
        "text"  # A plain text, every token of which is in the loss; no chat template is applied.
    )
    train_on: Literal["all_turns", "last_turn"] = (
        "all_turns"  # Which assistant turns of a chat are in the loss.
    )
    max_tokens: MaxTokens = (
        2048  # Longer rows are cut at their end; a row left without a token in the loss is dropped.
    )


@dataclass(kw_only=True)
class HeldOutConfig:
    every: NonNegativeInt = (
        50  # Steps between evaluations of the loss on held-out rows; 0: only before and after.
    )


@dataclass(kw_only=True)
class SFTConfig(TrainingConfig):
    """`torchrun --nproc-per-node N -m minirl.sft --config FILE [--flag value ...]`"""

    output: str = "runs/sft"
    num_epochs: Positive = 1.0  # Passes over the rows.
    num_steps: NonNegativeInt = 0  # Optimizer steps; 0: as many as num_epochs takes.
    batch_size: PositiveInt = 64  # Rows (or pairs) of an optimizer step, over all ranks.
    data: ChatsConfig = field(default_factory=ChatsConfig)
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)


@dataclass(kw_only=True)
class PairsConfig(RowsConfig):
    """Answers of which one was preferred, with `prompt`, `chosen` and `rejected`, each a text or
    messages. Without a prompt the two are whole texts or whole chats that begin alike. Of
    reasoning_gym a question's answer was preferred to another question's.
    """

    chosen_key: str = (
        "chosen"  # An answer, messages that follow the prompt, or the whole chat, prompt included.
    )
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    """How much better the chosen answer is (a number), for the reward model's sigmoid loss; 0 in
    rows that do not say."""
    max_tokens: MaxTokens = 2048
    """Pairs with a longer sequence are dropped: cut, it would not say what was judged. So are those
    whose answers are the same."""


@dataclass(kw_only=True)
class RewardModelLossConfig:
    loss: Literal["sigmoid", "logexp"] = "sigmoid"  # Bradley-Terry with margins, or without.
    center_coef: NonNegativeFloat = 0.0
    """Weight of the squared sum of a pair's scores, which holds their mean near 0 (0.01 is usual).
    """


@dataclass(kw_only=True)
class DPOLossConfig:
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    beta: Positive = 0.1
    """Scale of the reward beta log(policy / reference): the larger, the nearer the policy stays to
    the reference."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = (
        0.0  # Chance that a pair is the wrong way round (cDPO), of loss sigmoid.
    )
    nll_coef: NonNegativeFloat = (
        0.0  # Weight of the chosen answer's negative log-likelihood per token.
    )
    length_normalized: bool = False  # Log-probs are means over an answer's tokens.


@dataclass(kw_only=True)
class RMConfig(SFTConfig):
    """`torchrun --nproc-per-node N -m minirl.rm --config FILE [--flag value ...]`"""

    output: str = "runs/rm"
    data: PairsConfig = field(default_factory=PairsConfig)
    algo: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)


@dataclass(kw_only=True)
class ServeConfig:
    """`python -m minirl.rm serve FOLDER [--port N]`: a reward model answers the HTTP protocol of
    `reward.function = http://...`.
    """

    command: Literal["serve"]
    model: str
    """Folder or hub id of what minirl.rm left, or of any AutoModelForSequenceClassification of one
    label."""
    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines ask, too.
    port: NonNegativeInt = 5000
    dtype: Literal["float32", "bfloat16", "float64"] = "bfloat16"
    max_tokens: MaxTokens = 8192  # A longer text is scored by its last tokens.
    tokens_per_batch: PositiveInt = 16384
    timeout_minutes: Positive = 30.0


@dataclass(kw_only=True)
class DPOConfig(SFTConfig):
    """`torchrun --nproc-per-node N -m minirl.dpo --config FILE [--flag value ...]`

    A reference cache is written once before training, or read if it is of this reference, these
    rows and this dtype (float32 log-probs).
    """

    output: str = "runs/dpo"
    data: PairsConfig = field(default_factory=PairsConfig)
    algo: DPOLossConfig = field(default_factory=DPOLossConfig)
    reference: str = (
        ""  # Folder or hub id of the frozen reference; empty: policy.model as it is given.
    )
    reference_cache: str = ""
    """File (.npz) for the reference's log-probs of all rows. Empty: the reference is kept, and runs
    once per batch."""
