"""Direct preference optimization on pairs of answers; mesh, verbs and files of a run are those of
minirl.sft.

torchrun --nproc-per-node 2 -m minirl.dpo --config configs/dpo_spell_backward.yaml
"""

import hashlib
import json
import pickle
from pathlib import Path

import numpy as np

from minirl import cli
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.config.supervised import DPOConfig
from minirl.errors import UserError
from minirl.inputs import find_teacher
from minirl.policy import Policy, annotate_examples
from minirl.supervised import PairTrainer
from minirl.types import Packed, Trajectory


class Trainer(PairTrainer):
    """With a frozen reference, or what it said of every row."""

    name = "dpo"
    ref: Policy | None = None

    def load_others(self) -> None:
        cfg, config = self.cfg, self.policy.model.config
        folder = (
            find_teacher(cfg.reference, config, cfg.parallel.tensor, "reference")
            if cfg.reference
            else self.folder
        )
        with self.timer.phase("reference"):
            if not (cfg.reference_cache and Path(cfg.reference_cache).exists()):
                self.ref = Policy(
                    cfg.policy,
                    folder,
                    self.mesh,
                    trainable=False,
                    sequence_parallel=cfg.parallel.sequence,
                    timer=self.timer,
                )
            if cfg.reference_cache:
                self.use_cache(Path(cfg.reference_cache), self.about(folder))

    def make_loss(self) -> Loss:
        return preference.dpo(self.cfg.algo)

    def batches(self, examples: list[Trajectory]) -> list[Packed]:
        batches = super().batches(examples)
        if self.ref:
            with self.timer.phase("annotate"):
                self.ref.sleeper.wake_parameters()
                self.ref.annotate([batches], "ref_logprobs")
                self.ref.sleeper.sleep_parameters()
        else:
            for batch in batches:
                batch.ref_logprobs = batch.engine_logprobs
        return batches

    def use_cache(self, file: Path, about: dict[str, str]) -> None:
        """Let the rows carry the reference's log-probs, from one pass of it over them, which writes
        the file, or from the file. Raises UserError for a file of something else.
        """
        mesh, size, sets = (
            self.mesh,
            self.cfg.batch_size,
            {"train": self.rows, "held_out": self.held_out},
        )
        if self.ref is None:
            with np.load(file) as arrays:
                found = dict(arrays)
            saved = json.loads(str(found.pop("about", "{}")))
            if other := [name for name in about if saved.get(name) != about[name]]:
                raise UserError(
                    f"reference_cache = {file} is of another run: its {', '.join(other)} differ; name another file or remove it"
                )
        else:
            parts = [
                (name, rows, range(first, min(first + size, len(rows))))
                for name, rows in sets.items()
                for first in range(0, len(rows), size)
            ]
            own = {
                f"{name}/{rows.row(t.group)}-{t.episode}": logprobs.astype(np.float32)
                for name, rows, part in parts
                for t, logprobs in annotate_examples(
                    self.ref, rows.examples(part), self.cfg.tokens_per_rank
                )
                if mesh.rank % mesh.num_copies == 0
            }
            found = {name: logprobs for part in mesh.gather(own) for name, logprobs in part.items()}
            self.ref = None
            if mesh.rank == 0:
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_name(
                    file.name + ".partial.npz"
                )  # the ending that savez would add
                np.savez(partial, about=json.dumps(about), **found)
                partial.rename(file)
        for name, rows in sets.items():
            rows.logprobs = {
                row: found[f"{name}/{row}"]
                for row in (f"{n}-{episode}" for n in rows.encoded for episode in range(2))
            }

    def about(self, folder: Path) -> dict[str, str]:
        """What the reference's log-probs depend on."""
        own = [
            (n, hashlib.sha256(pickle.dumps(pair)).hexdigest())
            for rows in (self.rows, self.held_out)
            for n, pair in rows.encoded.items()
        ]
        data = hashlib.sha256(
            repr(sorted(row for part in self.mesh.gather(own) for row in part)).encode()
        )
        weights = hashlib.sha256()
        for file in (
            sorted([*folder.glob("*.safetensors"), folder / "config.json"])
            if self.mesh.rank == 0
            else []
        ):
            with file.open("rb") as opened:
                weights.update(hashlib.file_digest(opened, "sha256").digest())
        return {
            "dtype": self.cfg.policy.dtype,
            "data": data.hexdigest(),
            "reference": self.mesh.gather(weights.hexdigest())[0],
        }


if __name__ == "__main__":
    cli.run(DPOConfig, Trainer.main)
