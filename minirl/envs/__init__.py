"""Environments: what the policy acts in. Whoever writes one finds here all that it needs."""

from minirl.envs.base import Agent, Env, Observation, Raw, Result, Session, State

__all__ = ["Agent", "Env", "Observation", "Raw", "Result", "Session", "State"]
