"""The page for those who come from elsewhere: every flag of minirl on it exists, and every setting
of theirs that should be there is."""

import dataclasses
import fnmatch
import re
from typing import NamedTuple

import pytest

from programs import ROOT
from test_readme import PROGRAMS, settings

PAGE = ROOT / "configs" / "migrating.md"
# Flags of other tools that the page speaks of.
OTHER_FLAGS = {"--tee", "--best"}
# Of openrlhf/cli/train_{ppo_ray,sft,rm,dpo}.py at the commit that the page names, and of 0.11.2; at
# the end what serve_rm.py and lora_combiner.py have beside these.
OPENRLHF = """
actor.adam.betas actor.adam.eps actor.adam.lr actor.adam.weight_decay actor.aux_loss_coef
actor.dual_clip actor.entropy_coef actor.eps_clip actor.eps_clip_low_high
actor.freeze_visual_encoder actor.gradient_checkpointing_enable
actor.gradient_checkpointing_reentrant actor.loss_agg_mode actor.lr_scheduler
actor.lr_warmup_ratio actor.max_norm
actor.min_lr_ratio actor.model_name_or_path actor.muon.lr actor.muon.momentum actor.muon.nesterov
actor.muon.no_nesterov actor.muon.ns_steps actor.num_gpus_per_node actor.num_nodes actor.optim
actor.policy_loss_type adam.betas adam.eps adam.lr adam.weight_decay algo.advantage.estimator
algo.advantage.gamma algo.advantage.is_correction_enable algo.advantage.is_correction_threshold
algo.advantage.is_correction_type algo.advantage.is_correction_gating
algo.advantage.is_correction_level algo.advantage.is_correction_mode algo.advantage.lambd
algo.advantage.no_std_norm algo.kl.unbiased_gradient
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
host port batch_size lora_path model_path output_path is_rm
"""
# Of verl/trainer/config/_generated_ppo_trainer.yaml at the commit that the page names, what is of
# the reference, the critic and validation; and the settings of DAPO's reward in its examples.
VERL = """
ref.rollout_n ref.strategy ref.use_torch_compile ref.log_prob_micro_batch_size
ref.log_prob_micro_batch_size_per_gpu ref.log_prob_use_dynamic_bsz
ref.log_prob_max_token_len_per_gpu ref.profiler.enable ref.profiler.tool_config.torch.contents
ref.router_replay.mode ref.fsdp_config.param_offload ref.fsdp_config.optimizer_offload
ref.fsdp_config.offload_policy ref.fsdp_config.reshard_after_forward ref.fsdp_config.fsdp_size
ref.fsdp_config.forward_prefetch ref.fsdp_config.model_dtype ref.fsdp_config.use_torch_compile
ref.fsdp_config.wrap_policy.min_num_params ref.ulysses_sequence_parallel_size
ref.entropy_from_logits_with_chunking ref.entropy_checkpointing rollout.val_kwargs.top_k
rollout.val_kwargs.top_p rollout.val_kwargs.temperature rollout.val_kwargs.n
rollout.val_kwargs.do_sample critic.optim.lr critic.optim.optimizer critic.optim.optimizer_impl
critic.optim.lr_warmup_steps critic.optim.lr_warmup_steps_ratio critic.optim.total_training_steps
critic.optim.weight_decay critic.optim.betas critic.optim.clip_grad critic.optim.min_lr_ratio
critic.optim.num_cycles critic.optim.lr_scheduler_type critic.optim.warmup_style
critic.optim.override_optimizer_config critic.model.path critic.model.fsdp_config.param_offload
critic.model.fsdp_config.optimizer_offload critic.model.fsdp_config.fsdp_size
critic.model.tokenizer_path critic.model.override_config critic.model.external_lib
critic.model.trust_remote_code critic.model.use_shm critic.model.enable_gradient_checkpointing
critic.model.enable_activation_offload critic.model.use_remove_padding critic.model.lora_rank
critic.model.lora_alpha critic.model.target_modules critic.model.tiled_mlp.enabled
critic.model.tiled_mlp.num_shards critic.rollout_n critic.strategy critic.enable
critic.ppo_mini_batch_size critic.ppo_micro_batch_size critic.ppo_micro_batch_size_per_gpu
critic.ppo_max_token_len_per_gpu critic.ppo_epochs critic.use_dynamic_bsz critic.shuffle
critic.forward_max_token_len_per_gpu critic.forward_micro_batch_size
critic.forward_micro_batch_size_per_gpu critic.data_loader_seed critic.loss_agg_mode
critic.cliprange_value critic.checkpoint.save_contents critic.checkpoint.load_contents
critic.checkpoint.async_save critic.profiler.enable critic.ulysses_sequence_parallel_size
critic.grad_clip reward_model.reward_kwargs.overlong_buffer_cfg.enable
reward_model.reward_kwargs.overlong_buffer_cfg.len
reward_model.reward_kwargs.overlong_buffer_cfg.penalty_factor
reward_model.reward_kwargs.overlong_buffer_cfg.log reward_model.reward_kwargs.max_resp_len
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
    fields = {
        field.name
        for config in (trl.GRPOConfig, trl.ModelConfig)
        for field in dataclasses.fields(config)
    }
    listed = {name for row in rows("TRL") for name in row.theirs}
    assert fields - listed == set()
    if trl.__version__.startswith("1.16."):
        assert listed - fields == set()


def test_every_flag_of_openrlhf_has_a_row():
    listed = {name for row in rows("OpenRLHF") for name in row.theirs}
    assert listed == set(OPENRLHF.split())
    assert len(listed) == 212


def test_every_key_of_verl_s_other_models_has_one_row():
    """A name there may stand for several by a `*`."""
    listed = [name for row in rows("verl") for name in row.theirs]
    for key in VERL.split():
        assert len([name for name in listed if fnmatch.fnmatchcase(key, name)]) == 1, key
