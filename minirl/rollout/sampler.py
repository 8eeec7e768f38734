"""The sampler: pulls prompts by ticket, drives the engine step by step, grades answers beside it, returns trajectories."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from transformers import PreTrainedTokenizerBase

from minirl.data.datasets import Prompts
from minirl.parallel.mesh import Mesh
from minirl.rollout.engine import Completion, RolloutEngine, Sampling
from minirl.rollout.env import Env
from minirl.types import Trajectory


class Sampler:
    """Samples groups of answers with this rank's engine. The unit of work is a prompt with all its samples: a ticket."""

    def __init__(self, engine: RolloutEngine, env: Env, tokenizer: PreTrainedTokenizerBase, mesh: Mesh, *, seed: int, tickets: str, threads: int):
        self.engine, self.env, self.tokenizer, self.mesh, self.seed = engine, env, tokenizer, mesh, seed
        on_cuda = mesh.device.type == "cuda"
        self.tickets = tickets if tickets != "auto" else "pull" if on_cuda else "round_robin"
        self.pool = ThreadPoolExecutor(threads, thread_name_prefix="reward")
        self._num_queues = 0

    def collect(self, prompts: Prompts, tickets: range, num_samples: int, sampling: Sampling, *, version: int = 0) -> list[Trajectory]:
        """Answer the prompts of `tickets`, `num_samples` each, together with the engines of the other ranks.

        Returns this rank's groups, in the order of their tickets, each whole; ranks that follow an engine's leader return none.
        Every rank must call it alike. Raises UserError from a reward function.
        """
        queue = self._pull(tickets) if self.tickets == "pull" else iter(tickets[self.engine.replica :: self.engine.num_replicas])
        # At most an even share at once: with room for all, the engine that asks first would take everything.
        room = min(self.engine.cfg.max_num_seqs, -(-len(tickets) // self.engine.num_replicas) * num_samples)
        live: dict[str, tuple[int, int, list[int], dict]] = {}
        graded: list[tuple[Trajectory, Future]] = []
        more = True
        while live or more:
            while more and (not live or len(live) + num_samples <= room):  # a ticket is taken only when its work can begin
                ticket = next(queue, None)
                more = ticket is not None
                if more:
                    live |= self._submit(prompts, ticket, num_samples, sampling)
            for request, completion in self.engine.step() if live else ():
                ticket_of, i, tokens, row = live.pop(request)
                if self.engine.is_leader:
                    trajectory = _trajectory(tokens, completion, group=ticket_of, episode=i, version=version)
                    text = self.tokenizer.decode(completion.tokens, skip_special_tokens=True)
                    trajectory.info = {"completion": text, "prompt": row["prompt"], "stopped": completion.stopped, "source": row.get("data_source")}
                    graded.append((trajectory, self.pool.submit(self.env.step, row, text, trajectory.info)))
        for trajectory, future in graded:
            trajectory.reward = future.result()
        return sorted((t for t, _ in graded), key=lambda t: (t.group, t.episode))

    def collect_varied(self, prompts: Prompts, first: int, num: int, extra: int, inside: tuple[float, float], num_samples: int, sampling: Sampling, *,
                       version: int = 0) -> tuple[list[Trajectory], int]:
        """`num` groups from ticket `first` on; those whose mean reward is not strictly `inside` are replaced by the groups of at most `extra`
        further tickets. If that is not enough, the earliest of them are in after all. Returns this rank's part of the groups, and
        the next ticket. DAPO's dynamic sampling (arXiv 2503.14476, sec. 3.2).
        """
        groups: dict[int, list[Trajectory]] = {}
        varied: dict[int, bool] = {}  # of all ranks
        tickets = range(first, first + num)
        while tickets:
            sampled: dict[int, list[Trajectory]] = {}
            for t in self.collect(prompts, tickets, num_samples, sampling, version=version):
                sampled.setdefault(t.group, []).append(t)
            groups |= sampled
            own = {ticket: inside[0] < sum(t.reward for t in group) / len(group) < inside[1] for ticket, group in sampled.items()}
            for part in self.mesh.gather(own):
                varied |= part
            tickets = range(tickets.stop, min(tickets.stop + num - sum(varied.values()), first + num + extra))
        chosen = sorted(varied, key=lambda ticket: (not varied[ticket], ticket))[:num]
        return [t for ticket in sorted(groups) if ticket in chosen for t in groups[ticket]], tickets.start

    def _submit(self, prompts: Prompts, ticket: int, num_samples: int, sampling: Sampling) -> dict[str, tuple[int, int, list[int], dict]]:
        """Queue a group; returns request id -> (ticket, number of the sample, prompt, row)."""
        row = prompts.row(ticket)
        tokens = prompts.encode({**row, "prompt": self.env.reset(row)})
        row = {**row, "rendered_prompt": self.tokenizer.decode(tokens)}
        for i in range(num_samples):
            self.engine.add(f"{ticket}-{i}", tokens, sampling, _sample_seed(self.seed, ticket, i))
        return {f"{ticket}-{i}": (ticket, i, tokens, row) for i in range(num_samples)}

    def _pull(self, tickets: range) -> Iterator[int]:
        """Take the next ticket that no engine has taken: one counter on torchrun's store, so long answers balance themselves."""
        key = f"minirl/tickets/{self._num_queues}"
        self._num_queues += 1
        while True:
            taken = self.mesh.store.add(key, 1) - 1 if self.engine.is_leader else 0
            taken = self.engine.tensor_parallel_broadcast(taken)
            if taken >= len(tickets):
                return
            yield tickets[taken]


def _sample_seed(seed: int, ticket: int, sample: int) -> int:
    """A seed of its own for every sample, the same whoever generates it."""
    return int(np.random.SeedSequence([seed, ticket, sample]).generate_state(1, np.uint32)[0])


def _trajectory(prompt: list[int], completion: Completion, *, group: int, episode: int, version: int) -> Trajectory:
    num_prompt = len(prompt)
    tokens = np.array(prompt + completion.tokens, dtype=np.int32)
    logprobs = np.zeros(len(tokens), dtype=np.float32)
    logprobs[num_prompt:] = completion.logprobs
    return Trajectory(tokens=tokens, sampled=np.arange(len(tokens)) >= num_prompt, logprobs=logprobs, group=group, episode=episode, version=version)
