"""The settings of SFT, reward models, DPO and KTO; `shared.py` has those of all programs."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

from minirl.config.policy import Dtype
from minirl.config.shared import LimitsConfig, RowsConfig, TrainingConfig
from minirl.config.values import (
    Epochs,
    MaxTokens,
    Minutes,
    NonNegative,
    NonNegativeInt,
    Port,
    Positive,
    PositiveInt,
)


@dataclass(kw_only=True)
class ChatsConfig(RowsConfig):
    """Rows to imitate, with `messages`, with `prompt` and `completion`, or with `text`.

    From reasoning_gym the prompt is the question, and the answer is in the column `answer`. No
    prompt is in the loss.
    """

    messages_key: str = "messages"  # Column of a chat: messages with role and content.
    #: Column of what follows the prompt: a text or a list of messages. Else `output`.
    completion_key: str = "completion"
    #: Column of a plain text; all its tokens are in the loss. No chat template is applied.
    text_key: str = "text"
    #: Which assistant turns of a chat are in the loss.
    train_on: Literal["all_turns", "last_turn"] = "all_turns"
    #: Longer rows are cut at their end. A row left without a token in the loss is dropped.
    max_tokens: MaxTokens = 2048


@dataclass(kw_only=True)
class HeldOutConfig:
    """Evaluation of the loss on held-out rows."""

    every: NonNegativeInt = 50  # Steps between evaluations; 0: only before and after.


@dataclass(kw_only=True)
class PairsConfig(RowsConfig):
    """Pairs of answers of which one was preferred, with `prompt`, `chosen` and `rejected`.

    Each is a text or messages. Without a prompt the two answers are whole texts or whole chats that
    begin alike. From reasoning_gym the answer to a question is preferred to that of another.
    """

    #: Column of an answer: a text, messages that follow the prompt, or the whole chat.
    chosen_key: str = "chosen"
    rejected_key: str = "rejected"  # Column of the other answer.
    #: Column of how much better the chosen answer is (a number), for the reward model's sigmoid
    #: loss. Rows without it count as 0.
    margin_key: str = "margin"
    #: Pairs with a longer sequence are dropped: a cut one would not be what was judged. Pairs
    #: of two equal answers are dropped, too.
    max_tokens: MaxTokens = 2048


@dataclass(kw_only=True)
class LabelledConfig(ChatsConfig):
    """Single answers that were judged: rows to imitate with a `label`, but no plain texts.

    From reasoning_gym the label of the answer to a question is true, that of another's is false;
    every other question, by its hash, has the wrong one.
    """

    #: Column of the judgement: true (or 1) for an answer that is wanted, false (or 0) for one that
    #: is not.
    label_key: str = "label"
    #: Longer rows are dropped: a cut one would not be what was judged.
    max_tokens: MaxTokens = 2048


@dataclass(kw_only=True)
class SupervisedConfig(TrainingConfig):
    """The settings that SFT, reward models, DPO and KTO share."""

    num_epochs: Epochs = 1.0  # Passes over the rows.
    num_steps: NonNegativeInt = 0  # Optimizer steps; 0: as many as num_epochs takes.
    batch_size: PositiveInt = 64  # Rows (or pairs) of an optimizer step, over all ranks.
    data: ChatsConfig | PairsConfig = field(default_factory=ChatsConfig)
    eval: HeldOutConfig = field(default_factory=HeldOutConfig)


@dataclass(kw_only=True)
class SFTConfig(SupervisedConfig):
    """Fine-tune: `torchrun --nproc-per-node N -m minirl.sft --config FILE [--flag value ...]`."""

    output: str = "runs/sft"
    data: ChatsConfig = field(default_factory=ChatsConfig)


@dataclass(kw_only=True)
class RewardModelLossConfig:
    """The loss of a reward model."""

    loss: Literal["sigmoid", "logexp"] = "sigmoid"  # Bradley-Terry with margins, or without.
    #: Weight of the squared sum of a pair's scores, which holds their mean near 0 (0.01 is usual).
    center_coef: NonNegative = 0.0


@dataclass(kw_only=True)
class DPOLossConfig:
    """The loss of direct preference optimization."""

    #: Of the difference of two rewards. sigmoid: DPO. ipo: squared, without an end. hinge: SLiC.
    loss: Literal["sigmoid", "ipo", "hinge"] = "sigmoid"
    #: Scale of the reward beta log(policy / reference). The larger, the nearer the policy stays to
    #: the reference.
    beta: Positive = 0.1
    #: Of loss sigmoid: the chance that a pair is the wrong way round (cDPO).
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    #: Weight of the chosen answer's negative log-likelihood per token.
    nll_coef: NonNegative = 0.0
    length_normalized: bool = False  # Log-probs are means over the tokens of an answer.


@dataclass(kw_only=True)
class KTOLossConfig:
    """The loss of learning from single answers that were judged."""

    #: kto: against the KL to the reference, which answers of other rows of the batch estimate.
    #: apo_zero_unpaired: against 0, without that estimate, which saves two forward passes.
    loss: Literal["kto", "apo_zero_unpaired"] = "kto"
    #: Scale of the reward beta log(policy / reference). The larger, the nearer the policy stays to
    #: the reference.
    beta: Positive = 0.1
    #: Weight of wanted answers. Where one kind is rare, raise its own weight: the paper keeps
    #: desirable_weight * (their number) at 1 to 4/3 of undesirable_weight * (the others').
    desirable_weight: NonNegative = 1.0
    undesirable_weight: NonNegative = 1.0  # Weight of the other answers.


@dataclass(kw_only=True)
class RMConfig(SupervisedConfig):
    """Train a reward model: `torchrun --nproc-per-node N -m minirl.rm --config FILE`."""

    output: str = "runs/rm"
    data: PairsConfig = field(default_factory=PairsConfig)
    algo: RewardModelLossConfig = field(default_factory=RewardModelLossConfig)


@dataclass(kw_only=True)
class ServeConfig:
    """Serve a reward model over HTTP: `python -m minirl.rm serve FOLDER [--port N]`.

    It answers the protocol of `reward.function = http://...`.
    """

    command: Literal["serve"]  # What to do; there is nothing else.
    #: Folder or hub id of what minirl.rm leaves, or of any AutoModelForSequenceClassification with
    #: one label.
    model: str
    host: str = "127.0.0.1"  # 0.0.0.0 lets other machines connect, too.
    port: Port = 5000  # Of the server.
    dtype: Dtype = "auto"  # Of the forward. auto: as policy.dtype in training.
    #: A longer text is scored by its last tokens. 0: 8192, or as many as the model has positions.
    max_tokens: NonNegativeInt = 0
    #: Tokens in a forward. Texts of requests that come while the model runs share the next one.
    tokens_per_batch: PositiveInt = 16384
    #: Environment variable with the key that clients must send, as a bearer token. Empty: no key.
    api_key_env: str = ""
    limits: LimitsConfig = field(default_factory=LimitsConfig)
    timeout_minutes: Minutes = 30.0  # Time limit of torch's process group, of one process here.


@dataclass(kw_only=True)
class DPOConfig(SupervisedConfig):
    """Train by DPO: `torchrun --nproc-per-node N -m minirl.dpo --config FILE`."""

    output: str = "runs/dpo"
    data: PairsConfig = field(default_factory=PairsConfig)
    algo: DPOLossConfig = field(default_factory=DPOLossConfig)
    #: Folder or hub id of the frozen reference. Empty: policy.model as it is given.
    reference: str = ""


@dataclass(kw_only=True)
class KTOConfig(SupervisedConfig):
    """Train by KTO: `torchrun --nproc-per-node N -m minirl.kto --config FILE [--flag value ...]`.

    Rows have `prompt`, `completion` and `label`; see data/README.md.
    """

    output: str = "runs/kto"
    data: LabelledConfig = field(default_factory=LabelledConfig)
    algo: KTOLossConfig = field(default_factory=KTOLossConfig)
    #: Folder or hub id of the frozen reference. Empty: policy.model as it is given.
    reference: str = ""
