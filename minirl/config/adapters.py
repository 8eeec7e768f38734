"""Settings that cannot work together with low-rank adapters."""

from minirl.base.errors import require
from minirl.config.lora import LoraConfig
from minirl.config.policy import PolicyConfig
from minirl.config.rl import RLConfig


def validate_lora(cfg: PolicyConfig, section: str, num_tensor: int) -> None:
    """Refuse what cannot work with adapters.

    Args:
        cfg: the settings of a model.
        section: that they are, such as policy.
        num_tensor: `parallel.tensor`.

    Raises:
        UserError: adapters are asked for with a setting that has no meaning beside them, or
            settings of adapters are given without a rank.
    """
    lora = cfg.lora
    if not lora.rank:
        changed = [name for name, value in vars(LoraConfig()).items() if value != vars(lora)[name]]
        require(
            not changed,
            f"{section}.lora.{(changed or [''])[0]} is set, but {section}.lora.rank is 0, so that "
            f"there are no adapters; set {section}.lora.rank (32 is usual)",
        )
        return

    require(
        cfg.model != "scratch",
        f"{section}.model = scratch makes random weights, and {section}.lora.rank = {lora.rank} "
        f"would leave them as they are; train such a model whole first ({section}.lora.rank 0), "
        "and then adapters of what it has become",
    )

    require(
        not cfg.freeze,
        f"{section}.freeze = {cfg.freeze}: with {section}.lora.rank = {lora.rank} all weights are "
        f"frozen already; leave {section}.freeze empty, and say by {section}.lora.targets what is "
        "adapted",
    )

    require(
        not cfg.router.bias_update_rate,
        f"{section}.router.bias_update_rate = {cfg.router.bias_update_rate} moves weights of the "
        f"base, which {section}.lora.rank = {lora.rank} leaves as it is; set one of them to 0",
    )

    require(
        lora.targets,
        f"{section}.lora.targets is empty, so that nothing would get an adapter; leave it out for "
        "all linear layers",
    )

    require(
        lora.quantization == "none" or num_tensor == 1,
        f"{section}.lora.quantization = {lora.quantization} and parallel.tensor = {num_tensor}: "
        "matrices in four bits are sharded over the ranks as bytes, and not split for tensor "
        "parallelism; set parallel.tensor 1, or the quantization none",
    )

    require(
        lora.quantization == "none" or not cfg.cpu_offload,
        f"{section}.lora.quantization = {lora.quantization} and {section}.cpu_offload both save "
        "the memory of the base; set one of them",
    )


def validate_shared_base(cfg: RLConfig) -> None:
    """Refuse a critic on a base that is not the policy's, or is trained. Raises UserError."""
    policy = cfg.policy
    critic = cfg.critic
    if not critic.share_base:
        return

    for section, rank in (("policy", policy.lora.rank), ("critic", critic.lora.rank)):
        require(
            rank,
            f"critic.share_base needs a base that nobody trains, but {section}.lora.rank = 0 "
            f"trains all weights; set {section}.lora.rank (32 is usual), or unset "
            "critic.share_base",
        )

    require(
        not critic.model,
        f"critic.model = {critic.model} is a base of its own, and critic.share_base takes the "
        "policy's; set one of them",
    )

    for name, of_policy, of_critic in (
        ("dtype", policy.dtype, critic.dtype),
        ("cpu_offload", policy.cpu_offload, critic.cpu_offload),
        ("lora.quantization", policy.lora.quantization, critic.lora.quantization),
    ):
        require(
            of_policy == of_critic,
            f"critic.share_base: policy.{name} = {of_policy} and critic.{name} = {of_critic} are "
            "of the same base; set both alike",
        )
