"""What `python -m minirl.checkpoint` does: export a checkpoint.

Adapters are merged a file at a time, without a model in memory.
"""

from pathlib import Path

import torch
from torch import Tensor

from minirl.base.errors import UserError, require
from minirl.checkpoint.exporting import (
    Exporter,
    FolderPlan,
    Reader,
    plan_folder,
    publish_adapter,
    write_files_of_rank,
)
from minirl.checkpoint.finding import find_damage, finished, read_best
from minirl.checkpoint.reading import read_state, saved_shapes
from minirl.config.parse import load_config
from minirl.config.policy import LoraConfig, PolicyConfig
from minirl.config.shared import ExportConfig
from minirl.config.validate import check_run
from minirl.model import build, causal, families, loading
from minirl.model.adapters import files, lora, nf4
from minirl.model.adapters.lora import merge as merge_weight
from minirl.model.causal import CausalModel
from minirl.model.loading import open_weights
from minirl.model.score import SCORE
from minirl.parallel.machines import errors_of_all
from minirl.parallel.mesh import Mesh
from minirl.parallel.tensor import LORA_A, LORA_B


def choose(run: Path, step: int | None, best: bool) -> Path:
    """Return the checkpoint that flags name; by default the newest.

    Args:
        run: the folder of a run.
        step: the flag --step.
        best: the flag --best.

    Raises:
        UserError: there is no such checkpoint.
    """
    check_run(run)
    steps = finished(run)
    require(
        steps,
        f"run = {run} has no finished checkpoint; checkpoint.every of the run says when there is "
        "one",
    )
    require(
        step is None or not best, f"--step {step} and --best name two checkpoints; give one of them"
    )
    if best:
        try:
            scored = read_best(run)
        except ValueError as error:
            raise UserError(f"--best: {error}; use --step, one of {list(steps)}") from error
        if scored is None:
            raise UserError(
                f"--best: no checkpoint of {run} is marked as the best, which "
                f"checkpoint.best_metric asks for; use --step, one of {list(steps)}"
            )
        step = scored["step"]
    elif step is None:
        step = max(steps)
    require(step in steps, f"--step {step}: {run} has no such checkpoint; use one of {list(steps)}")
    return steps[step]


def export_checkpoint(cfg: ExportConfig, mesh: Mesh) -> None:
    """Export a checkpoint of a run.

    Each rank reads the weights of the files that it writes: no model is built, no optimizer state
    is loaded.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the output folder exists.
    """
    run = Path(cfg.run)
    checkpoint = Path()
    with errors_of_all(mesh):
        if mesh.rank == 0:  # a run that is not done may write a newer one meanwhile
            checkpoint = choose(run, cfg.step, cfg.best)
    checkpoint = mesh.broadcast(checkpoint, 0)
    policy = load_config(PolicyConfig, str(run / "config.yaml"), section="policy")
    require(
        policy.lora.rank or not cfg.adapter,
        f"--adapter: {run} has trained all weights (policy.lora.rank = 0); leave it out",
    )
    if policy.model == "scratch":
        source = run / "scratch"
    else:
        source = build.find_folder(policy.model, "policy.model")
    kind = "adapter" if cfg.adapter else "model"
    output = Path(cfg.output or run / f"{kind}-{checkpoint.name}")
    with errors_of_all(mesh):  # when it ends all ranks have looked
        require(not output.exists(), f"--output {output} exists; name another folder or remove it")
        damage = find_damage(checkpoint)
        require(
            not damage, f"{checkpoint} is damaged ({damage}); use another one of {run} by --step"
        )

    dtype = getattr(torch, policy.dtype)
    shapes = saved_shapes(checkpoint)
    if not policy.lora.rank:
        if build.read_config(source).tie_word_embeddings:
            shapes.pop("lm_head.weight", None)
        master_dtype = torch.promote_types(dtype, torch.float32)

        def read(names: list[str]) -> dict[str, Tensor]:
            whole = {name: torch.empty(shapes[name], dtype=master_dtype) for name in names}
            read_state(checkpoint, {"model": whole}, alone=True)
            return whole

        write_model(plan_folder(source, shapes, dtype, mesh.world_size), read, output, mesh)
    else:
        new = frozenset({SCORE} & shapes.keys())
        base = Base(source, policy.lora, dtype, "policy.lora", new)
        read_state(checkpoint, {"model": base.trained}, alone=True)
        if cfg.adapter:
            tensors = {}
            for name, t in base.trained.items():
                tensors[files.name_in_file(name)] = files.to_file(name, t).contiguous()
            described = files.describe(base.model, policy.lora, source)
            publish_adapter(tensors, described, output, mesh)
        else:
            write_model(base.plan(mesh), base.read, output, mesh)
    if mesh.rank == 0:
        print(output)


class Base:
    """The files of a model that an adapter adapts, and what it is made of.

    Attributes:
        model: the base on the meta device, with its adapters.
        trained: tensors for what is trained, whole and in its dtype, by name; not filled.
        shapes: the shape of each tensor of the merged model, by name.
    """

    def __init__(
        self, folder: Path, cfg: LoraConfig, dtype: torch.dtype, setting: str, new: frozenset[str]
    ):
        """Read what files there are.

        Args:
            folder: the folder of the base.
            cfg: the settings of the adapters.
            dtype: the dtype of the base in computation, and of the merged files.
            setting: what holds the settings, for messages.
            new: names of parameters that are trained whole, besides `cfg.modules_to_save`.

        Raises:
            UserError: the model cannot have these adapters.
        """
        self.folder = folder
        self.dtype = dtype
        config = build.read_config(folder)
        self.model: CausalModel = build.make_meta_model(config, dtype, score=SCORE in new)
        wide = torch.promote_types(dtype, torch.float32)
        self.adapters = lora.attach(self.model, cfg, wide, setting, new=new)
        self.model.adapters = self.adapters
        self.weights = open_weights(folder)
        self.trained: dict[str, Tensor] = {}
        for name, p in causal.trained(self.model).items():
            self.trained[name] = torch.empty(p.shape, dtype=wide)
        self.shapes: dict[str, torch.Size] = {}
        for name, t in causal.tensors(self.model).items():
            self.shapes[name] = t.shape
        self.factors: dict[str, tuple[Tensor, Tensor]] = {}  # By weight: B and A.
        for name, b in self.trained.items():
            if name.endswith(LORA_B):
                a = self.trained[name.removesuffix(LORA_B) + LORA_A]
                self.factors[lora.weight_of(name)] = (b, a)

    def plan(self, mesh: Mesh) -> FolderPlan:
        """Return what is written where of the merged model."""
        return plan_folder(self.folder, self.shapes, self.dtype, mesh.world_size)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Return tensors of the merged model, when `trained` has been filled."""
        buffers = causal.buffers(self.model)
        merged = {}
        for name in names:
            if name in self.trained:
                merged[name] = self.trained[name]
                continue
            slices = families.checkpoint_slices(self.model.config, name, self.shapes[name])
            dtype = buffers[name].dtype if name in buffers else self.dtype
            whole = torch.empty(self.shapes[name], dtype=dtype)
            loading.fill_shard(whole, slices, self.weights)
            if name in self.adapters.packed:
                whole = nf4.rounded(whole)
            if name in self.factors:
                whole = merge_weight(whole, *self.factors[name], self.adapters.scale)
            merged[name] = whole
        return merged


def write_model(plan: FolderPlan, read: Reader, output: Path, mesh: Mesh) -> None:
    """Write a model's folder, which does not exist. Collective.

    Args:
        plan: what belongs into the folder.
        read: returns the tensors of one of this rank's files.
        output: where to.
        mesh: the ranks, which share the files.
    """
    exporter = Exporter(mesh)
    exporter.write(output, lambda partial: write_files_of_rank(plan, partial, mesh.rank, read))
    exporter.wait()
