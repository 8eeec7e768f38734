"""The page for those who come from elsewhere: every flag of minirl on it exists, and every setting
of theirs that should be there is."""

import dataclasses
import re
from typing import NamedTuple

import pytest

from programs import ROOT
from test_readme import PROGRAMS, settings

PAGE = ROOT / "configs" / "migrating.md"
# Flags of other tools that the page speaks of.
OTHER_FLAGS = {"--tee", "--best"}
# Of openrlhf/cli/train_{ppo_ray,sft,rm,dpo}.py at the commit that the page names.
OPENRLHF = """
actor.adam.betas actor.adam.eps actor.adam.lr actor.adam.weight_decay actor.aux_loss_coef
actor.dual_clip actor.entropy_coef actor.eps_clip actor.eps_clip_low_high
actor.freeze_visual_encoder actor.gradient_checkpointing_enable
actor.gradient_checkpointing_reentrant actor.lr_scheduler actor.lr_warmup_ratio actor.max_norm
actor.min_lr_ratio actor.model_name_or_path actor.muon.lr actor.muon.momentum actor.muon.nesterov
actor.muon.no_nesterov actor.muon.ns_steps actor.num_gpus_per_node actor.num_nodes actor.optim
actor.policy_loss_type adam.betas adam.eps adam.lr adam.weight_decay algo.advantage.estimator
algo.advantage.gamma algo.advantage.is_correction_enable algo.advantage.is_correction_threshold
algo.advantage.is_correction_type algo.advantage.lambd algo.advantage.no_std_norm
algo.dynamic_filtering_enable algo.dynamic_filtering_range algo.kl.estimator algo.kl.horizon
algo.kl.init_coef algo.kl.target algo.kl.use_loss ckpt.best_metric_key ckpt.disable_ds
ckpt.load_enable ckpt.max_mem ckpt.max_num ckpt.output_dir ckpt.path ckpt.save_hf ckpt.save_steps
critic.adam.betas critic.adam.eps critic.adam.lr critic.adam.weight_decay critic.freezing_steps
critic.lr_scheduler critic.lr_warmup_ratio critic.max_norm critic.min_lr_ratio
critic.model_name_or_path critic.muon.lr critic.muon.momentum critic.muon.nesterov
critic.muon.no_nesterov critic.muon.ns_steps critic.num_gpus_per_node critic.num_nodes critic.optim
critic.save_value_network critic.value_clip data.apply_chat_template data.chosen_key
data.dataloader_num_workers data.dataset data.dataset_probs data.dataset_split
data.disable_fast_tokenizer data.image_key data.input_key data.input_template data.label_key
data.max_images_per_prompt data.max_len data.max_samples data.multiturn data.output_key
data.prompt_dataset data.prompt_key data.prompt_probs data.prompt_split data.rejected_key
data.tokenizer_chat_template ds.adam_offload ds.attn_implementation ds.deepcompile ds.enable_sleep
ds.experts_implementation ds.grad_accum_dtype ds.load_in_4bit ds.lora.alpha ds.lora.dropout
ds.lora.rank ds.lora.target_modules ds.overlap_comm ds.packing_samples ds.param_dtype
ds.ring_attn_head_stride ds.ring_attn_size ds.tensor_parallel_size ds.use_liger_kernel
ds.use_universal_ckpt ds.value_head_prefix ds.zero_stage ds.zpg eval.dataset
eval.n_samples_per_prompt eval.split eval.steps eval.temperature local_rank logger.logging_steps
logger.tensorboard_dir logger.wandb.group logger.wandb.key logger.wandb.org logger.wandb.project
logger.wandb.run_name lr_scheduler lr_warmup_ratio max_norm min_lr_ratio model.aux_loss_coef
model.beta model.compute_fp32_loss_enable model.gradient_checkpointing_enable
model.gradient_checkpointing_reentrant model.ipo_enable model.label_smoothing model.loss_type
model.margin_loss_enable model.model_name_or_path model.nll_loss_coef model.pretrain_mode_enable
muon.lr muon.momentum muon.nesterov muon.no_nesterov muon.ns_steps optim ref.model_name_or_path
ref.num_gpus_per_node ref.num_nodes ref.offload reward.clip_range reward.model_name_or_path
reward.normalize_enable reward.num_gpus_per_node reward.num_nodes reward.offload
reward.overlong_buffer_len reward.overlong_penalty_factor reward.remote_url
reward.stop_properly_penalty_coef rollout.batch_size rollout.max_new_tokens
rollout.max_tokens_per_gpu rollout.micro_batch_size rollout.n_samples_per_prompt
rollout.temperature rollout.top_p rollout.vllm_generate_batch_size train.agent_func_path
train.async_enable train.async_queue_size train.batch_size train.colocate_actor_ref
train.colocate_all train.colocate_critic_reward train.dynamic_batch_enable train.ema_beta
train.enable_ema train.full_determinism_enable train.max_epochs train.max_tokens_per_gpu
train.micro_batch_size train.num_episodes train.partial_rollout_enable train.seed use_ms
vllm.enable_prefix_caching vllm.enable_sleep vllm.enforce_eager vllm.gpu_memory_utilization
vllm.num_engines vllm.sync_backend vllm.sync_with_ray vllm.tensor_parallel_size
"""


class Row(NamedTuple):
    theirs: list[str]
    ours: str


def rows(title: str) -> list[Row]:
    """The rows of all tables under a heading."""
    (part,) = re.findall(rf"^## {title}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    found = []
    for line in part.splitlines():
        cells = re.fullmatch(r"\| (.*?) \| (.*) \|", line)
        if cells and "`" in cells[1]:
            found.append(Row(re.findall(r"`([^`]+)`", cells[1]), cells[2]))
    return found


EVERYTHING = [(title, row) for title in ("OpenRLHF", "TRL", "verl") for row in rows(title)]


def test_no_setting_has_two_rows():
    for title in ("OpenRLHF", "TRL", "verl"):
        names = [name for row in rows(title) for name in row.theirs]
        assert len(names) > 60
        assert sorted(names) == sorted(set(names))


def test_every_flag_exists_and_every_row_says_something():
    known = {name for cls in PROGRAMS.values() if cls for name in settings(cls)}
    flags = {f"--{name.replace('_', '-')}" for name in known}
    flags |= {re.sub(r"([\w-]+)$", r"no-\1", flag) for flag in flags} | OTHER_FLAGS
    flags |= {re.sub(r"^--", "--no-", flag) for flag in flags}
    sections = {name.partition(".")[0] for name in known if "." in name}
    for title, row in EVERYTHING:
        named = re.findall(r"(?<![\w-])--[a-z][\w.-]*", row.ours)
        for flag in named:
            if flag.endswith("."):  # a section
                assert flag.strip("-.") in sections, (title, row)
            else:
                assert flag in flags, (title, row)
        assert named or re.match(r"always|none: |rows|`python -m", row.ours), (title, row)


def test_every_field_of_trl_has_a_row():
    trl = pytest.importorskip("trl")
    fields = {field.name for field in dataclasses.fields(trl.GRPOConfig)}
    listed = {name for row in rows("TRL") for name in row.theirs}
    assert fields - listed == set()
    if trl.__version__.startswith("1.16."):
        assert listed - fields == set()


def test_every_flag_of_openrlhf_has_a_row():
    listed = {name for row in rows("OpenRLHF") for name in row.theirs}
    assert listed == set(OPENRLHF.split())
    assert len(listed) == 200
