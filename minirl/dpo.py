"""Direct preference optimization on pairs of answers.

    torchrun --nproc-per-node 2 -m minirl.dpo --config configs/dpo_spell_backward.yaml

Mesh, steps and files of a run are those of minirl.sft.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    from minirl.config.supervised import DPOConfig
    from minirl.supervise import cli

    cli.run(DPOConfig, "minirl.dpo:DPOTrainer.main")

import dataclasses
import hashlib
import json
import pickle
from pathlib import Path

import numpy as np

from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.base.errors import require
from minirl.base.files import remove
from minirl.base.reading import is_file, library_reads
from minirl.config.supervised import DPOConfig
from minirl.data.examples import Chats, Pairs
from minirl.parallel.machines import check_can_write, check_same
from minirl.run.supervised import PairTrainer, Task
from minirl.train.frozen import Reference
from minirl.train.policy import Minibatch, Policy
from minirl.train.updates import annotate_examples
from minirl.types.packed import Trajectory


class DPOTrainer(PairTrainer):
    """A run with a frozen reference, or with the reference's log-probs in the rows."""

    cfg: DPOConfig
    task = Task("dpo", Pairs, pairs=True)

    def check_model(self) -> None:
        """Refuse now a reference cache that cannot be read, or could not be written."""
        cache = Path(self.cfg.reference_cache)
        if not self.cfg.reference_cache:
            return
        if not self.mesh.broadcast(is_file(cache), 0):
            check_can_write(cache, "reference_cache", self.mesh)
            return
        with library_reads(f"reference_cache = {cache}"), np.load(cache) as arrays:
            json.loads(str(arrays["about"]))

    def load_reference(self) -> Reference | None:
        """Return the reference; None: the rows have its log-probs, from `reference_cache`.

        If there is no such file, one pass of the reference over all rows writes it. Raises
        UserError.
        """
        cfg = self.cfg
        folder = self.find_reference(cfg.reference)
        with self.timer.phase("reference"):
            if not cfg.reference_cache:
                return self.make_reference(folder)
            cache = Path(cfg.reference_cache)
            contents = self._describe_cache(folder)
            # All do as rank 0, which wrote the file.
            if self.mesh.broadcast(self.mesh.rank == 0 and cache.exists(), 0):
                found = "there" if cache.exists() else "missing"
                check_same({f"reference_cache = {cache}": found}, self.mesh)
                with library_reads(f"reference_cache = {cache}"), np.load(cache) as arrays:
                    logprobs = dict(arrays)
                    saved = json.loads(str(logprobs.pop("about", "{}")))
                different = [name for name in contents if saved.get(name) != contents[name]]
                require(
                    not different,
                    f"reference_cache = {cache} is of another run: its {', '.join(different)} "
                    "differ; name another file or remove it",
                )
            else:
                with self.make_reference(folder).awake() as reference:
                    logprobs = self._compute_logprobs(reference)
                if self.mesh.rank == 0:
                    # The file is there in whole or not at all. The ending is what savez would add.
                    partial = cache.with_name(cache.name + ".partial.npz")
                    partial.parent.mkdir(parents=True, exist_ok=True)
                    remove(partial)
                    np.savez(
                        partial,
                        about=json.dumps(contents),
                        **logprobs,  # type: ignore[arg-type]  # none is named allow_pickle
                    )
                    partial.rename(cache)
            for prefix, rows in self._splits().items():
                for name, values in logprobs.items():
                    if name.startswith(f"{prefix}/"):
                        rows.reference_logprobs[name.removeprefix(f"{prefix}/")] = values
        return None

    def make_loss(self) -> Loss:
        """Return the loss of the config: DPO, IPO or hinge."""
        return preference.dpo(self.cfg.algo)

    def make_batches(self, examples: list[Trajectory]) -> Minibatch:
        """Return micro-batches with the reference's log-probs."""
        batches = super().make_batches(examples)
        if self.ref:
            self.annotate_reference(batches)
        else:
            for batch in batches:
                batch.ref_logprobs = batch.engine_logprobs  # the cache's are in their place
        return batches

    def _splits(self) -> dict[str, Chats]:
        return {"train": self.rows, "held_out": self.held_out}

    def _compute_logprobs(self, reference: Policy) -> dict[str, np.ndarray]:
        """Return "<split>/<row>-<0: chosen, 1: rejected>" -> float32 [L], of all ranks. Collective.

        Ranks that work on the same sequences have the same log-probs; one of them reports.
        """
        size = self.cfg.batch_size
        computed = []
        for prefix, rows in self._splits().items():
            for first in range(0, len(rows), size):
                block = range(first, min(first + size, len(rows)))
                examples = []
                for row, pair in rows.encoded_rows(block).items():
                    examples += [dataclasses.replace(t, group=row) for t in pair]
                for t, logprobs in annotate_examples(reference, examples, self.cfg.tokens_per_rank):
                    if self.mesh.rank % self.mesh.num_copies == 0:
                        name = f"{prefix}/{t.group}-{t.episode}"
                        computed.append((name, logprobs.astype(np.float32)))
        return dict(sum(self.mesh.gather(computed), []))

    def _describe_cache(self, folder: Path) -> dict[str, str]:
        """Return what the reference's log-probs depend on: dtype and hashes. Collective."""
        hashes = []
        size = self.cfg.batch_size
        for rows in self._splits().values():
            for first in range(0, len(rows), size):
                block = range(first, min(first + size, len(rows)))
                for n, pair in rows.encoded_rows(block).items():
                    hashes.append((n, hashlib.sha256(pickle.dumps(pair)).hexdigest()))
        in_order = sorted(sum(self.mesh.gather(hashes), []))
        data = hashlib.sha256(repr(in_order).encode())
        weights = hashlib.sha256()
        if self.mesh.rank == 0:
            for path in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
                with path.open("rb") as file:
                    weights.update(hashlib.file_digest(file, "sha256").digest())
        return {
            "dtype": self.cfg.policy.dtype,
            "data": data.hexdigest(),
            "reference": self.mesh.gather(weights.hexdigest())[0],
        }
