"""What a config names, found and checked before anything is trained or written: the output folder
and the models.
"""

from pathlib import Path

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from minirl.config.rl import RLConfig
from minirl.config.supervised import SFTConfig
from minirl.data import chat
from minirl.data.images import Vision
from minirl.errors import UserError
from minirl.model import build, families, scratch
from minirl.parallel import tensor
from minirl.parallel.mesh import Mesh


def check_output(output: Path, resume: bool) -> None:
    """Refuse the folder of another run. Raises UserError."""
    in_the_way = (
        [p.name for p in output.iterdir() if p.name != "scratch"]
        if output.is_dir()
        else [output.name] * output.exists()
    )
    if in_the_way and not (resume and output.is_dir()):
        raise UserError(
            f"output = {output} holds {in_the_way[0]} of another run; choose another folder with --output, or go on with it by --resume"
        )


def find_model(
    cfg: RLConfig | SFTConfig, max_len: int, *, engine_on: str | None = None, chats: bool = True
) -> tuple[Path, PretrainedConfig, PreTrainedTokenizerBase, Vision | None]:
    """(folder, config, tokenizer, how it reads images) of policy.model, checked, also for an engine
    on that type of device; the folder of a scratch model is still to be made. Raises UserError.
    """
    templates = cfg.data.chat_template, cfg.data.input_template
    if cfg.policy.model == "scratch":
        folder, tokenizer = (
            Path(cfg.output) / "scratch",
            chat.use_template(scratch.make_tokenizer(cfg.policy.scratch.phrases), *templates),
        )
        config = scratch.make_config(cfg.policy.scratch, tokenizer, max_len)
    else:
        folder = build.find_folder(cfg.policy.model, "policy.model")
        config, tokenizer = build.read_config(folder), None
    engine = (
        (cfg.engine.tensor_parallel_size, cfg.engine.max_model_len, engine_on) if engine_on else ()
    )
    families.check_supported(config, f"policy.model = {cfg.policy.model}", *engine)
    tensor.check_divides(families.divided(config), cfg.parallel.tensor)
    vision = (
        Vision(folder, cfg.engine.max_images if engine_on else 0)
        if families.reads_images(config)
        else None
    )
    return (
        folder,
        config,
        tokenizer
        or chat.load_tokenizer(folder, chats=chats, template=templates[0], plain=templates[1]),
        vision,
    )


def find_teacher(
    model: str,
    policy: PretrainedConfig,
    tensor_parallel: int,
    setting: str,
    *,
    scores: bool = False,
) -> Path:
    """The folder of a model that is to read the policy's tokens, checked. `scores`: by a head of
    its own. Raises UserError.
    """
    folder = build.find_folder(model, setting)
    config = build.read_config(folder)
    families.check_supported(config, f"{setting} = {model}")
    tensor.check_divides(families.divided(config), tensor_parallel)
    if families.reads_images(config) != families.reads_images(policy):
        raise UserError(
            f"{setting} = {model} is of family {config.model_type}, and the policy of {policy.model_type}: one of them reads images; take another model"
        )
    sizes = [c.get_text_config().vocab_size for c in (config, policy)]
    if len(set(sizes)) > 1:
        raise UserError(
            f"{setting} = {model} has a vocabulary of {sizes[0]}, and the policy's is of {sizes[1]}: the policy's "
            "tokens mean nothing there; take a model with the same tokenizer"
        )
    return check_head(folder, setting) if scores else folder


def check_head(folder: Path, setting: str) -> Path:
    """A language model's would be made of zeros, which a critic can learn from and nobody else.
    Raises UserError.
    """
    if build.SCORE not in build.Weights(folder).slices:
        raise UserError(
            f"{setting} = {folder} is no reward model: its weights have no {build.SCORE}; train one with minirl.rm"
        )
    return folder


def make_scratch(cfg: RLConfig | SFTConfig, max_len: int, mesh: Mesh) -> None:
    """Write the model that `policy.model = scratch` asks for. Collective; call it when nobody can
    find a mistake any more.
    """
    mesh.barrier()  # nobody looks at the output folder any more
    folder = Path(cfg.output) / "scratch"
    if cfg.policy.model == "scratch":
        if mesh.rank == 0 and not (
            cfg.resume and folder.exists()
        ):  # other weights would be another run
            scratch.make_model(cfg.policy.scratch, folder, max_len=max_len, seed=cfg.seed)
        mesh.barrier()
