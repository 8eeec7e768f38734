"""What `python -m minirl.checkpoint` does: export a checkpoint, and merge an adapter."""

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from minirl.base.errors import UserError, require
from minirl.base.log import say
from minirl.checkpoint.checksums import find_damage
from minirl.checkpoint.exporting import Exporter, publish_adapter
from minirl.checkpoint.finding import describe_damages, finished, newest_whole, read_best
from minirl.checkpoint.folder import plan_folder
from minirl.checkpoint.merging import Base, write_merged
from minirl.checkpoint.reading import read_state, saved_shapes
from minirl.config.named import check_run
from minirl.config.parse import load_config
from minirl.config.policy import PolicyConfig
from minirl.config.shared import ExportConfig, MergeConfig
from minirl.model import build, loading
from minirl.model.adapters import files
from minirl.model.weight_files import open_weights
from minirl.parallel.mesh import Mesh


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
        if scored is None or scored["step"] not in steps:
            raise UserError(
                f"--best: no checkpoint of {run} is marked as the best, which "
                f"checkpoint.best_metric asks for; use --step, one of {list(steps)}"
            )
        step = scored["step"]
    elif step is None:
        step = max(steps)
    require(step in steps, f"--step {step}: {run} has no such checkpoint; use one of {list(steps)}")
    return steps[step]


def choose_whole(run: Path, step: int | None, best: bool, mesh: Mesh) -> Path:
    """Return the checkpoint that flags name; without them the newest that is whole. Collective.

    Raises:
        UserError: there is no such checkpoint, or it is damaged.
    """
    chosen = choose(run, step, best)
    if step is not None or best:
        damage = find_damage(chosen, mesh)
        require(not damage, f"{chosen} is damaged ({damage}); use another one of {run} by --step")
        return chosen
    whole, damages = newest_whole(run, mesh)
    told = describe_damages(damages)
    if whole is None:
        raise UserError(f"no checkpoint of {run} is whole ({told})")
    if damages and mesh.rank == 0:
        say(f"exporting {whole}, because newer ones are damaged ({told})")
    return whole


def export_checkpoint(cfg: ExportConfig, mesh: Mesh) -> None:
    """Export a checkpoint of a run.

    Each rank reads the weights of its own files: no model is built, no optimizer state is loaded.
    Before that the ranks share the checkpoint's files and compare them with their checksums.

    Raises:
        UserError: there is no such checkpoint, it is damaged, or the output folder exists.
    """
    run = Path(cfg.run)
    choose(run, cfg.step, cfg.best)
    policy = load_config(PolicyConfig, str(run / "config.yaml"), section="policy")
    require(
        policy.lora.rank or not cfg.adapter,
        f"--adapter: {run} has trained all weights (policy.lora.rank = 0); leave it out",
    )
    if policy.model == "scratch":
        source = run / "scratch"
    else:
        source = build.find_folder(policy.model, "policy.model")
    if cfg.output:
        _require_new(Path(cfg.output))
    checkpoint = choose_whole(run, cfg.step, cfg.best, mesh)
    kind = "adapter" if cfg.adapter else "model"
    output = Path(cfg.output or run / f"{kind}-{checkpoint.name}")
    _require_new(output)
    mesh.barrier()  # all ranks have looked

    if policy.lora.rank:
        base = _read_adapted(checkpoint, source, policy)
        if cfg.adapter:
            _write_adapter(base, policy, source, output, mesh)
        else:
            write_merged(base, source, output, mesh)
    else:
        _export_whole(checkpoint, source, policy, output, mesh)
    if mesh.rank == 0:
        print(output)


def _export_whole(
    checkpoint: Path, source: Path, policy: PolicyConfig, output: Path, mesh: Mesh
) -> None:
    """Write the model of a checkpoint that holds all weights."""
    shapes = saved_shapes(checkpoint)
    if build.read_config(source).tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    dtype = getattr(torch, policy.dtype)
    master_dtype = torch.promote_types(dtype, torch.float32)

    def read(names: list[str]) -> dict[str, Tensor]:
        whole = {name: torch.empty(shapes[name], dtype=master_dtype) for name in names}
        read_state(checkpoint, {"model": whole}, alone=True)
        return whole

    exporter = Exporter(mesh)
    exporter.write(plan_folder(source, shapes, dtype, mesh.world_size), output, read)
    exporter.wait()


def _read_adapted(checkpoint: Path, source: Path, policy: PolicyConfig) -> Base:
    """Return the base of a run with adapters, and what a checkpoint holds of it."""
    has_score = loading.SCORE in saved_shapes(checkpoint)
    new = frozenset({loading.SCORE} if has_score else ())
    base = Base(source, policy.lora, getattr(torch, policy.dtype), "policy.lora", new)
    read_state(checkpoint, {"model": base.trained}, alone=True)
    return base


def _write_adapter(
    base: Base, policy: PolicyConfig, source: Path, output: Path, mesh: Mesh
) -> None:
    """Write the adapter of a checkpoint in PEFT's format."""
    tensors = {}
    for name, t in base.trained.items():
        tensors[files.name_in_file(name)] = files.to_file(name, t).contiguous()
    described = files.describe(base.model, policy.lora, source)
    publish_adapter(tensors, described, output, mesh)


def merge(cfg: MergeConfig, mesh: Mesh) -> None:
    """Merge an adapter.

    Raises:
        UserError: there is no adapter, or it is of another model, or the output folder exists.
    """
    folder = Path(cfg.adapter)
    settings = files.read_settings(folder, "adapter")
    modules, whole = files.read_names(folder, "adapter")
    setting = "model"
    name = cfg.model
    if not name:
        setting = f"base_model_name_or_path in {folder / files.CONFIG}"
        name = files.base_of(folder, "adapter")
        require(name, f"{setting} is empty; name the model that {folder} adapts by --model")
    source = build.find_folder(name, setting)
    output = Path(cfg.output or f"{cfg.adapter.rstrip('/')}-merged")
    _require_new(output)
    mesh.barrier()  # all ranks have looked

    settings = replace(settings, targets=modules, quantization=cfg.quantization)
    base = Base(source, settings, _dtype_of(source), "adapter", frozenset(whole))
    files.fill_trained(base.trained, folder, "adapter")
    write_merged(base, source, output, mesh)
    if mesh.rank == 0:
        print(output)


def _dtype_of(folder: Path) -> torch.dtype:
    """Return the dtype of a model's files: that of its largest weight."""
    weights = open_weights(folder)
    largest = max(weights.values(), key=lambda weight: torch.Size(weight.get_shape()).numel())
    return largest[:1].dtype


def _require_new(output: Path) -> None:
    require(not output.exists(), f"--output {output} exists; name another folder or remove it")
