"""Direct preference optimization on pairs of answers; mesh, verbs and files of a run are those of minirl.sft.

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
from minirl.config_supervised import DPOConfig
from minirl.data.pairs import Pairs
from minirl.policy import Policy
from minirl.rm import PairTrainer
from minirl.run import find_teacher
from minirl.sft import annotated
from minirl.types import Packed, Trajectory, UserError


class Trainer(PairTrainer):
    """With a frozen reference, or what it said of every row."""

    name = "dpo"
    ref: Policy | None = None

    def load_others(self) -> None:
        cfg, config = self.cfg, self.policy.model.config
        folder = find_teacher(cfg.reference, config, cfg.parallel.tensor, "reference") if cfg.reference else self.folder
        with self.timer.phase("reference"):
            if cfg.reference_cache:
                self.use_cache(Path(cfg.reference_cache), folder)
            else:
                self.load_reference(folder)

    def make_loss(self) -> Loss:
        return preference.dpo(self.cfg.algo)

    def load_reference(self, folder: Path) -> None:
        self.ref = Policy(self.cfg.policy, folder, self.mesh, trainable=False, sequence_parallel=self.cfg.parallel.sequence, timer=self.timer)

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

    def use_cache(self, file: Path, folder: Path) -> None:
        """Let the rows carry the reference's log-probs, from the file or from one pass over them, which writes it. Raises UserError for a file of
        something else."""
        mesh, sets = self.mesh, {"train": self.rows, "held_out": self.held_out}
        about = self.about(folder)
        if file.exists():
            with np.load(file) as arrays:
                found = dict(arrays)
            saved = json.loads(str(found.pop("about", "{}")))
            if other := [name for name in about if saved.get(name) != about[name]]:
                raise UserError(f"reference_cache = {file} is of another run: its {', '.join(other)} differ; name another file or remove it")
        else:
            self.load_reference(folder)
            own = {f"{name}/{row}": logprobs for name, rows in sets.items() for row, logprobs in self.annotated(rows) if mesh.rank % mesh.num_copies == 0}
            found = {name: logprobs for part in mesh.gather(own) for name, logprobs in part.items()}
            self.ref = None
            if mesh.rank == 0:
                file.parent.mkdir(parents=True, exist_ok=True)
                partial = file.with_name(file.name + ".partial.npz")  # the ending that savez would add
                np.savez(partial, about=json.dumps(about), **found)
                partial.rename(file)
        for name, rows in sets.items():
            rows.logprobs = {row: found[f"{name}/{row}"] for row in (f"{n}-{episode}" for n in rows.encoded for episode in range(2))}

    def annotated(self, rows: Pairs) -> list[tuple[str, np.ndarray]]:
        """("<row>-<episode>", float32 [L]) of what this rank computes."""
        out = []
        for first in range(0, len(rows), self.cfg.batch_size):
            examples = rows.examples(range(first, min(first + self.cfg.batch_size, len(rows))))
            found = annotated(self.ref, examples, self.cfg.tokens_per_rank, "ref_logprobs")
            out += [(f"{rows.row(t.group)}-{t.episode}", logprobs.astype(np.float32)) for t, logprobs in found]
        return out

    def about(self, folder: Path) -> dict[str, str]:
        """What the reference's log-probs depend on."""
        own = [(n, hashlib.sha256(pickle.dumps(pair)).hexdigest()) for rows in (self.rows, self.held_out) for n, pair in rows.encoded.items()]
        data = hashlib.sha256(repr(sorted(row for part in self.mesh.gather(own) for row in part)).encode())
        weights = hashlib.sha256()
        for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]) if self.mesh.rank == 0 else []:
            with file.open("rb") as opened:
                weights.update(hashlib.file_digest(opened, "sha256").digest())
        return {"dtype": self.cfg.policy.dtype, "data": data.hexdigest(), "reference": self.mesh.gather(weights.hexdigest())[0]}


if __name__ == "__main__":
    cli.run(DPOConfig, Trainer.main)
