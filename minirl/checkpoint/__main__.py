"""Write a model of a checkpoint, also under torchrun.

    python -m minirl.checkpoint export runs/mine --best

Adapters are merged a file at a time, without a model in memory.
"""

if __name__ == "__main__":  # First the flags: the imports below take seconds. It does not return.
    from minirl.config.shared import ExportConfig
    from minirl.supervise import cli

    cli.run(ExportConfig, "minirl.checkpoint.__main__:export_checkpoint")

from functools import partial
from pathlib import Path
from typing import Any

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
from minirl.checkpoint.state import describe_model, read_description, require_same_base
from minirl.config.parse import load_config
from minirl.config.policy import PolicyConfig
from minirl.config.shared import ExportConfig
from minirl.config.validate import check_run
from minirl.model import build, causal, loading
from minirl.model.adapters import files, lora, nf4
from minirl.model.causal import SCORE, CausalModel
from minirl.model.loading import open_weights
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
        source = build.find_folder(policy.model, f"{run / 'config.yaml'}: policy.model")
    kind = "adapter" if cfg.adapter else "model"
    output = Path(cfg.output or run / f"{kind}-{checkpoint.name}")
    with errors_of_all(mesh):  # when it ends all ranks have looked
        require(not output.exists(), f"--output {output} exists; name another folder or remove it")
        damage = find_damage(checkpoint)
        require(
            not damage, f"{checkpoint} is damaged ({damage}); use another one of {run} by --step"
        )

    dtype = getattr(torch, policy.dtype)
    trained_dtype = torch.promote_types(dtype, torch.float32)
    config = build.read_config(source)
    shapes = saved_shapes(checkpoint)
    saved = read_description(checkpoint)
    now = describe_model(config)
    with errors_of_all(mesh, same_everywhere=True):
        trained_one = saved["model"].partition(", adapters")[0]
        require(
            trained_one == now,
            f"{checkpoint} is of another model ({trained_one}) than policy.model = {source} is now "
            f"({now}); bring the old one back",
        )
    if policy.lora.rank:
        with errors_of_all(mesh, same_everywhere=True):
            require_same_base(str(checkpoint), saved, loading.hash_of_weights(source), source)
        # The base on the meta device with its adapters, and tensors for what is trained.
        new = frozenset({SCORE} & shapes.keys())
        model = build.make_meta_model(config, dtype, score=SCORE in new)
        model.adapters = lora.attach(model, policy.lora, trained_dtype, "policy.lora", new=new)
        trained = {}
        for name, p in causal.trained(model).items():
            trained[name] = torch.empty(p.shape, dtype=trained_dtype)
        read_state(checkpoint, {"model": trained}, alone=True)
        if cfg.adapter:
            tensors = {}
            for name, t in trained.items():
                tensors[files.name_in_file(name)] = files.to_file(name, t).contiguous()
            files.add_tied_head(model, tensors)
            described = files.describe(model, policy, source)
            publish_adapter(tensors, described, output, mesh)
        else:
            shapes = {name: t.shape for name, t in causal.tensors(model).items()}
            plan = plan_folder(source, shapes, dtype, mesh.world_size)
            read_files = partial(read_merged, plan, model, open_weights(source), trained)
            write_model(plan, read_files, output, mesh)
    else:
        if config.tie_word_embeddings:
            shapes.pop("lm_head.weight", None)

        def read(names: list[str]) -> dict[str, Tensor]:
            whole = {name: torch.empty(shapes[name], dtype=trained_dtype) for name in names}
            read_state(checkpoint, {"model": whole}, alone=True)
            return whole

        write_model(plan_folder(source, shapes, dtype, mesh.world_size), read, output, mesh)
    if mesh.rank == 0:
        print(output)


def read_merged(
    plan: FolderPlan,
    model: CausalModel,
    weights: dict[str, Any],
    trained: dict[str, Tensor],
    names: list[str],
) -> dict[str, Tensor]:
    """Return tensors of a model with its adapters merged.

    Args:
        plan: the folder that they are written to.
        model: on the meta device, with adapters.
        weights: those of the base, as `open_weights` returns them.
        trained: the values of what is trained, whole, by name.
        names: the tensors to return.
    """
    assert model.adapters
    buffers = causal.buffers(model)
    merged = {}
    for name in names:
        if name in trained:
            merged[name] = trained[name]
            continue
        dtype = buffers[name].dtype if name in buffers else plan.dtype
        whole = torch.empty(plan.shapes[name], dtype=dtype)
        loading.fill_shard(whole, plan.slices[name], weights)
        if name in model.adapters.packed:
            whole = nf4.rounded(whole)
        module, _, weight = name.rpartition(".")
        a, b = (f"{module}.{lora.adapter_of(weight, which)}" for which in (LORA_A, LORA_B))
        if b in trained:
            whole = lora.merge(whole, trained[b], trained[a], model.adapters.scale)
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
    exporter.write(output, lambda folder: write_files_of_rank(plan, folder, mesh.rank, read))
    exporter.wait()
