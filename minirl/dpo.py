"""Direct preference optimization on pairs of answers; mesh, verbs and files of a run are those of minirl.sft.

    torchrun --nproc-per-node 2 -m minirl.dpo --config configs/dpo_longer_word.yaml
"""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np

from minirl import cli
from minirl.algo import preference
from minirl.algo.losses import Loss
from minirl.config import DPOConfig
from minirl.data.packing import exchange, pack, unpack
from minirl.data.pairs import Pairs
from minirl.parallel.mesh import Mesh
from minirl.policy import Policy
from minirl.rm import PairTrainer
from minirl.run import find_teacher
from minirl.types import Packed, Trajectory, UserError


class Trainer(PairTrainer):
    """With a frozen reference, or what it said of every row."""

    name = "dpo"

    def __init__(self, cfg: DPOConfig, mesh: Mesh):
        super().__init__(cfg, mesh)
        self.ref: Policy | None = None
        with self.timer.phase("reference"):
            vocab_size, cache = self.policy.model.config.vocab_size, Path(cfg.reference_cache)
            folder = find_teacher(cfg.reference, vocab_size, cfg.parallel.tensor, "reference") if cfg.reference else self.folder
            about = _about(cfg, folder, self.rows, self.held_out, mesh) if cfg.reference_cache else None
            if about is None or not _is_of(cache, about):
                self.ref = Policy(cfg.policy, folder, mesh, trainable=False, sequence_parallel=cfg.parallel.sequence, timer=self.timer)
            if about is not None:
                if self.ref:
                    self.write(cache, about)
                self.ref = None
                for rows, name in ((self.rows, "train"), (self.held_out, "held_out")):
                    rows.logprobs = _read(cache, name, rows)

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

    def write(self, cache: Path, about: dict) -> None:
        """The reference's log-probs of all rows: a file of each rank, in a folder that is renamed when it is whole."""
        mesh, partial = self.mesh, cache.with_name(cache.name + ".partial")
        if mesh.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
        mesh.barrier()
        for rows, name in ((self.rows, "train"), (self.held_out, "held_out")):
            found: dict[str, np.ndarray] = {}
            for first in range(0, len(rows), self.cfg.batch_size):
                numbers = range(first, min(first + self.cfg.batch_size, len(rows)))
                (micros,) = exchange(rows.examples(numbers), mesh, self.cfg.tokens_per_rank)
                for micro in micros:
                    batch = pack(micro, mesh.device, layout=self.ref.layout)
                    self.ref.annotate([[batch]], "ref_logprobs")
                    for t, logprobs in zip(micro, unpack(batch.ref_logprobs, micro, self.ref.layout), strict=True):
                        found[f"{rows.kept[rows.order[t.group]]}-{t.episode}"] = logprobs.astype(np.float32)
            if mesh.rank % mesh.num_copies == 0:
                np.savez(partial / f"{name}-{mesh.rank}.npz", **found)
        mesh.barrier()
        if mesh.rank == 0:
            (partial / "about.json").write_text(json.dumps(about, indent=2))
            partial.rename(cache)
        mesh.barrier()


def _about(cfg: DPOConfig, folder: Path, rows: Pairs, held_out: Pairs, mesh: Mesh) -> dict:
    """What the reference's log-probs depend on."""
    about = {"dtype": cfg.policy.dtype} | {name: _digest(pairs, mesh) for name, pairs in (("train", rows), ("held_out", held_out))}
    if mesh.rank == 0:
        digest = hashlib.sha256()
        for file in sorted([*folder.glob("*.safetensors"), folder / "config.json"]):
            with file.open("rb") as opened:
                digest.update(hashlib.file_digest(opened, "sha256").digest())
        about["reference"] = digest.hexdigest()
    return mesh.gather(about)[0]


def _digest(pairs: Pairs, mesh: Mesh) -> str:
    own = [(n, hashlib.sha256(repr(pair[:2]).encode()).hexdigest()) for n, pair in pairs.encoded.items()]
    return hashlib.sha256(repr(sorted(row for part in mesh.gather(own) for row in part)).encode()).hexdigest()


def _is_of(cache: Path, about: dict) -> bool:
    """False if there is none. Raises UserError for one of something else."""
    if not cache.exists():
        return False
    path = cache / "about.json"
    found = json.loads(path.read_text()) if path.exists() else {}
    if found != about:
        other = ", ".join(name for name in about if found.get(name) != about[name])
        raise UserError(f"reference_cache = {cache} is of another run: its {other} differ; name another folder or remove it")
    return True


def _read(cache: Path, name: str, rows: Pairs) -> dict[str, np.ndarray]:
    """Those of this rank's rows, on however many ranks they were written."""
    found = {}
    for file in cache.glob(f"{name}-*.npz"):
        with np.load(file) as arrays:
            found |= {key: arrays[key] for key in arrays.files if int(key.partition("-")[0]) in rows.encoded}
    return found


def main(cfg: DPOConfig, mesh: Mesh) -> None:
    trainer = Trainer(cfg, mesh)
    with trainer.run.saver:
        trainer.train()


if __name__ == "__main__":
    cli.run(DPOConfig, main)
