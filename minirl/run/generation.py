"""The engine of a training run, with the refit that gives it weights and the sampler."""

import contextlib
import dataclasses

from minirl.config.rl import RLConfig
from minirl.data.vision import sampling_stops
from minirl.endpoint import open_endpoint
from minirl.engine.engine import RolloutEngine, Sampling
from minirl.envs.base import Agent
from minirl.refit.refit import Refit
from minirl.rollout.sampler import Sampler
from minirl.rollout.time_limits import make_in_time
from minirl.run.inputs import Inputs
from minirl.train.policy import Policy


class Generation:
    """The engine of this rank, the refit that writes the policy's weights into it, the sampler.

    Args:
        cfg: the config of the run.
        inputs: what the config names.
        policy: the trained model, which gives the engine its weights. Its timer also gets the
            seconds of refits, and of waking and sleeping.
    """

    def __init__(self, cfg: RLConfig, inputs: Inputs, policy: Policy):
        dtype: str = cfg.engine.dtype
        if dtype == "auto":
            dtype = cfg.policy.dtype.replace("float64", "float32")  # vLLM has no float64
        self.policy = policy
        # vLLM demands that its share of the device is free when it starts. So the policy sleeps
        # meanwhile, and wakes when the engine is asleep.
        policy.sleeper.sleep()
        max_model_len = cfg.engine.max_model_len + cfg.eval_extra_tokens
        self.engine = RolloutEngine(
            dataclasses.replace(cfg.engine, max_model_len=max_model_len),
            inputs.folders["policy"],
            policy.mesh,
            dtype=dtype,
            vision=inputs.prompts.vision,
            num_answers=cfg.rollout.samples_per_prompt
            * (cfg.rollout.prompts_per_step + cfg.rollout.extra_prompts + cfg.rollout.ahead),
            guides=isinstance(make_in_time(inputs.make_env, cfg.env, policy.mesh.watch), Agent),
            routes=cfg.algo.router_replay,
            timer=policy.timer,
        )
        self.refit = Refit(
            cfg.refit,
            policy.shards(),
            policy.parts(),
            self.engine,
            read=policy.merged,
            check=cfg.debug.check_refit,
        )
        self.engine.sleep()
        policy.sleeper.wake_parameters()
        # The progress of the run, for reward functions of TRL.
        self.state = inputs.rewards.state
        self.state.max_steps = cfg.num_steps * cfg.algo.updates_per_step
        self.state.is_world_process_zero = policy.mesh.rank == 0
        num_prompts = len(inputs.prompts.rows)
        self.state.num_train_epochs = cfg.num_steps * cfg.rollout.prompts_per_step / num_prompts
        self.sampler = Sampler(
            self.engine, inputs.make_env, inputs.rewards, inputs.prompts, cfg, open_endpoint
        )
        self.sampling = Sampling(
            max_tokens=cfg.rollout.max_tokens,
            stop_token_ids=sampling_stops(inputs.stop_ids, inputs.prompts.vision),
            temperature=cfg.rollout.temperature,
            context_tokens=cfg.engine.max_model_len,
        )

    def awake(self) -> contextlib.AbstractContextManager[None]:
        """Give the engine the policy's weights; inside the block it may generate. Collective."""
        state = self.state
        state.global_step = self.policy.num_updates
        state.epoch = state.num_train_epochs * state.global_step / max(1, state.max_steps)
        return self.engine.awake(self.refit, self.policy.sleeper)

    def close(self) -> None:
        """Stop the sampler and the engine."""
        self.sampler.close()
        self.engine.close()
