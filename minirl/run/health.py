"""Whether an RL run still learns: what is wrong in several steps in a row is said once."""

from minirl.base.errors import UserError
from minirl.config.rl import DebugConfig
from minirl.train.policy import Metrics

# Shares of answers, and entropies in nats a token, beyond which a step counts as ill.
FEWEST_STOPPED = 0.02
LEAST_ENTROPY = 1e-3
MOST_ENTROPY = 5.0  # About that of 150 equally likely tokens.


def symptoms(metrics: Metrics) -> dict[str, str]:
    """Return what is wrong with a step: a name, and what it means."""
    found = {}
    if metrics.get("equal_groups") == 1.0:
        found["equal rewards"] = (
            f"all answers to each prompt earn the same (mean reward {metrics['reward']:.4g}), so "
            "that estimators that compare them learn nothing; look at the answers "
            "(--rollout.dump) and at the reward function, or take other prompts"
        )
    if metrics.get("stopped", 1.0) < FEWEST_STOPPED:
        found["runaway length"] = (
            f"no answer ends by itself (mean length {metrics['answer_tokens']:.0f} tokens); raise "
            "rollout.max_tokens, or set reward.overlong_tokens or reward.unstopped"
        )
    entropy = metrics.get("entropy", 1.0)
    if entropy < LEAST_ENTROPY:
        found["no entropy"] = (
            f"the policy's entropy is {entropy:.2g} nats a token: it gives one answer to a prompt; "
            "lower policy.lr, or set algo.entropy_coef or algo.kl_coef"
        )
    if entropy > MOST_ENTROPY:
        found["runaway entropy"] = (
            f"the policy's entropy is {entropy:.2g} nats a token: it writes noise; lower "
            "policy.lr, or set algo.kl_coef"
        )
    return found


class Health:
    """Counts the steps in a row with each symptom. All ranks see the same metrics."""

    def __init__(self, cfg: DebugConfig):
        self.cfg = cfg
        self.num_steps: dict[str, int] = {}  # In a row, by symptom.

    def check(self, step: int, metrics: Metrics) -> list[str]:
        """Return what to say after a step: symptoms that have lasted for debug.collapse_steps.

        Raises:
            UserError: there is one, and debug.end_on_collapse is set.
        """
        found = symptoms(metrics)
        self.num_steps = {name: self.num_steps.get(name, 0) + 1 for name in found}
        lasting = self.cfg.collapse_steps
        said = []
        for name, meaning in found.items():
            if lasting and self.num_steps[name] == lasting:
                said.append(f"step {step}: {name} for {lasting} steps: {meaning}")
        if said and self.cfg.end_on_collapse:
            raise UserError(f"{said[0]}. debug.end_on_collapse is set")
        return said
