"""Whether the experts of a model can be divided over ranks, and whether that pays."""

from typing import Any, NamedTuple

from transformers import PretrainedConfig

from minirl.base.errors import require
from minirl.config.policy import ParallelConfig
from minirl.model.families import FAMILIES, has_experts

# What configs call the number of experts of a layer.
NUMBERS = ("num_experts", "num_local_experts", "n_routed_experts")
GB = 1e9


class Mixture(NamedTuple):
    """Sizes of the layers of a mixture."""

    number: str  # Of experts, as the config calls it.
    num_experts: int
    experts_of_token: int
    hidden: int
    expert_parameters: int  # Of all experts of a layer.

    def travel_bytes(self, parallel: ParallelConfig) -> float:
        """Return the bytes that a rank sends for each of its tokens in a layer and step.

        bfloat16: there and back, forward, recomputed and backward. A token goes to its experts,
        of which 1 / `parallel.experts` are here.
        """
        elsewhere = 1 - 1 / parallel.experts
        return 6 * self.experts_of_token * self.hidden * 2 * elsewhere

    def gather_bytes(self, num_ranks: int) -> float:
        """Return the bytes that FSDP moves to and from a rank for the experts of a layer.

        In a micro-batch: bfloat16 in forward and backward, and float32 gradients.

        Args:
            num_ranks: that divide the experts.
        """
        return (2 + 2 + 4) * self.expert_parameters / num_ranks


def experts_of_token(text: Any) -> int:
    """Return how many experts a token gets in each layer, by the config of a mixture's text part.

    Raises:
        UserError: not the same number in each layer.
    """
    number = text.to_dict().get("top_k_experts") or text.num_experts_per_tok
    if isinstance(number, int):
        return number
    require(
        len(set(number)) == 1,
        f"the config's number of experts a token, {number}, differs between layers; routers are "
        "replayed and planned with one number for all: give a model that has one",
    )
    return number[0]


def mixture_of(config: PretrainedConfig) -> Mixture | None:
    """Return the sizes of a mixture, None for a model without experts."""
    if not has_experts(config):
        return None
    text = config.get_text_config()
    values = text.to_dict()
    number = next(name for name in NUMBERS if name in FAMILIES[config.model_type].divided)
    num_experts = getattr(text, number)  # some configs keep it under another name
    width = values.get("moe_intermediate_size") or values["intermediate_size"]
    hidden = values["hidden_size"]
    return Mixture(
        number=number,
        num_experts=num_experts,
        experts_of_token=experts_of_token(text),
        hidden=hidden,
        expert_parameters=num_experts * 3 * hidden * width,
    )


def check_divides(config: PretrainedConfig, role: str, num_ranks: int) -> None:
    """Refuse a mixture whose experts cannot be divided over ranks.

    Args:
        config: the model's config. One without experts is left as it is.
        role: of the model, such as policy.
        num_ranks: parallel.experts.

    Raises:
        UserError: the number does not divide that of the experts.
    """
    mixture = mixture_of(config)
    if mixture is None:
        return
    experts = mixture.num_experts
    works = [str(n) for n in range(1, experts + 1) if experts % n == 0]
    require(
        experts % num_ranks == 0,
        f"parallel.experts = {num_ranks} does not divide {mixture.number} = {experts} of the "
        f"{role}; use {', '.join(works)}",
    )


def check_experts(
    models: dict[str, PretrainedConfig],
    parallel: ParallelConfig,
    *,
    ranks_of_node: int,
    tokens_per_rank: int,
) -> None:
    """Refuse expert parallelism that cannot work, or that does not pay.

    Args:
        models: configs of the run's models, by their roles, such as policy.
        parallel: the axes.
        ranks_of_node: ranks on a node.
        tokens_per_rank: of a micro-batch.

    Raises:
        UserError: no model has experts, they cannot be divided, or their ranks are on more than
            one node.
    """
    num_ranks = parallel.experts
    if num_ranks == 1:
        return
    mixtures = {role: mixture_of(config) for role, config in models.items()}
    found = [(role, mixture) for role, mixture in mixtures.items() if mixture]
    families = [f"{role} {config.model_type}" for role, config in models.items()]
    require(
        found,
        f"parallel.experts = {num_ranks} divides the experts of mixtures, and no model here has "
        f"any ({', '.join(families)}); set it to 1",
    )
    for role, config in models.items():
        check_divides(config, role, num_ranks)

    is_inside = ranks_of_node % num_ranks == 0
    role, mixture = found[0]
    tokens = tokens_per_rank // parallel.tensor
    works = [n for n in range(1, ranks_of_node + 1) if ranks_of_node % n == 0]
    works = [n for n in works if mixture.num_experts % n == 0]
    travel = mixture.travel_bytes(parallel)
    require(
        is_inside or parallel.experts_across_nodes,
        f"parallel.experts = {num_ranks} does not fit into nodes of {ranks_of_node} ranks, so that "
        f"tokens would travel between nodes: {travel / 1e3:.0f} kB a token and layer of the {role} "
        f"(6 * num_experts_per_tok {mixture.experts_of_token} * hidden_size {mixture.hidden} * "
        f"2 bytes), {travel * tokens / GB:.2f} GB for the {tokens} tokens of a rank, for which "
        f"computation waits. With parallel.experts = {works[-1]} tokens stay on a node, and FSDP "
        f"moves {mixture.gather_bytes(works[-1]) / GB:.2f} GB a layer between nodes while other "
        f"layers compute. Use {', '.join(map(str, works))}, or add --parallel.experts-across-nodes",
    )
