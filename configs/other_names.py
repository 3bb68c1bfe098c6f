"""What TRL, verl and NeMo-RL call the settings of this project. docs/coming-from.md shows the tables; a wrong recipe is answered by them.

An entry: their name -> our field (the first that the flow has), and what differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_MOST_ANSWERS = 12  # of one block; a whole configuration of another project has hundreds of fields


@dataclass(frozen=True)
class Ours:
    """Our fields, dotted, each of which some flow has; none: the setting is not needed here. `note`: what differs, or why not."""

    fields: tuple[str, ...]
    note: str = ""


def _is(*fields: str, but: str = "") -> Ours:
    return Ours(fields, but)


_SPLIT = "the step's responses are split among the updates, and each is used once"
_BATCH = "a step is rollout.prompts_per_step x rollout.responses_per_prompt responses; they go through the model in pieces of this"
_WHOLE = "packed or dynamic"
_BYTES = "GiB, and not a part of the GPU"
_LONG = "what is too long follows from the context and rollout.max_new_tokens; drop, truncate or refuse"
_GPUS = "replicas of the model; the GPUs are those of the Ray cluster"
_RAY = "the nodes of the Ray cluster at this address"
_REWARD = "a list: {kind: python, import_path: 'package.module:function', weight: 1}"

TRL = {
    "model_name_or_path": _is("model.path"),
    "dataset_name": _is("environment.path", "data.train", but="a file, folder or URL"),
    "num_generations": _is("rollout.responses_per_prompt"),
    "num_generations_eval": _is("validation.samples_per_prompt"),
    "generation_batch_size": _is("rollout.prompts_per_step", but="prompts, and not responses"),
    "max_completion_length": _is("rollout.max_new_tokens"),
    "max_prompt_length": _is("environment.on_too_long", but=_LONG),
    "per_device_train_batch_size": _is("policy.batching.micro_batch_size", but=_BATCH),
    "gradient_accumulation_steps": _is("rollout.prompts_per_step", but="micro-batches of a step are counted by the run itself"),
    "steps_per_generation": _is("policy.updates_per_step", but=_SPLIT),
    "num_iterations": _is("policy.updates_per_step", but=_SPLIT),
    "temperature": _is("rollout.temperature"),
    "top_p": _is("rollout.top_p"),
    "chat_template_kwargs": _is("environment.chat_template_kwargs"),
    "beta": _is("policy.loss.kl_coef"),
    "use_bias_correction_kl": _is("policy.loss.kl_gradient", but="corrected"),
    "epsilon": _is("policy.loss.clip_low", but="clip_high is set apart"),
    "epsilon_high": _is("policy.loss.clip_high"),
    "delta": _is("policy.loss.dual_clip"),
    "sapo_temperature_pos": _is("policy.loss.sapo_tau_positive"),
    "sapo_temperature_neg": _is("policy.loss.sapo_tau_negative"),
    "loss_type": _is(
        "policy.loss.aggregation",
        but="grpo: sequence_mean, dapo: token_mean, dr_grpo: fixed_length; cispo and sapo are policy.loss.surrogate",
    ),
    "importance_sampling_level": _is("policy.loss.surrogate", but="sequence is gspo"),
    "mask_truncated_completions": _is("rollout.overlong_filtering"),
    "scale_rewards": _is("policy.loss.normalize_advantages", but="group, batch, none"),
    "reward_funcs": _is("rewards", but=_REWARD),
    "reward_weights": _is("rewards", but="each has its weight"),
    "vllm_importance_sampling_correction": _is("policy.loss.importance_sampling", but="token or sequence"),
    "vllm_importance_sampling_mode": _is("policy.loss.importance_sampling", but="truncate or mask is importance_beyond"),
    "vllm_importance_sampling_cap": _is("policy.loss.importance_cap"),
    "learning_rate": _is("policy.optimizer.lr"),
    "lr_scheduler_type": _is("policy.optimizer.decay_style", but="constant, linear, cosine"),
    "warmup_steps": _is("policy.optimizer.warmup_steps"),
    "warmup_ratio": _is("policy.optimizer.warmup_steps", but="steps, and not a part of them"),
    "weight_decay": _is("policy.optimizer.weight_decay"),
    "adam_beta1": _is("policy.optimizer.beta1"),
    "adam_beta2": _is("policy.optimizer.beta2"),
    "adam_epsilon": _is("policy.optimizer.eps"),
    "max_grad_norm": _is("policy.optimizer.clip_grad"),
    "bf16": _is("policy.dtype", but="bfloat16"),
    "max_steps": _is("steps"),
    "num_train_epochs": _is("epochs", "steps"),
    "run_name": _is("name"),
    "eval_steps": _is("validate_every"),
    "per_device_eval_batch_size": _is("validation_batch_size", "environment.validation_size", but="of grpo all held-out prompts are asked"),
    "save_steps": _is("checkpoint.every_steps"),
    "save_total_limit": _is("checkpoint.keep_last"),
    "resume_from_checkpoint": _is("resume"),
    "num_completions_to_print": _is("logged_samples"),
    "use_vllm": _is(but="vLLM always generates"),
    "vllm_mode": _is("placement", but="colocate is colocated, server is separate; auto sees to it"),
    "vllm_gpu_memory_utilization": _is("generation.kv_cache_gib", but=_BYTES),
    "vllm_max_model_length": _is("generation.max_model_len"),
    "vllm_tensor_parallel_size": _is("generation.tensor_parallel_size"),
    "vllm_enable_sleep_mode": _is("generation.sleep_level", but="1 or 2"),
    "max_length": _is("data.max_tokens", "generation.max_model_len"),
    "packing": _is("policy.batching.mode", but="packed"),
}

_ROLL, _ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
VERL = {
    "actor_rollout_ref.model.path": _is("model.path"),
    "actor_rollout_ref.model.use_remove_padding": _is("policy.batching.mode", but="packed"),
    "data.train_files": _is("environment.path", "data.train"),
    "data.val_files": _is("environment.validation_path", "data.validation"),
    "data.train_batch_size": _is("rollout.prompts_per_step", "batch_size"),
    "data.prompt_key": _is("environment.fields.prompt", "data.prompt_field"),
    "data.response_key": _is("data.response_field", "environment.fields.answer"),
    "data.reward_fn_key": _is("environment.fields.answer", but="reward_model.ground_truth; data_source reaches rewards as a column"),
    "data.max_prompt_length": _is("environment.on_too_long", "data.on_too_long", but=_LONG),
    "data.truncation": _is("environment.on_too_long", "data.on_too_long"),
    "data.filter_overlong_prompts": _is("environment.on_too_long", "data.on_too_long", but="drop"),
    "data.max_response_length": _is("rollout.max_new_tokens"),
    "data.apply_chat_template_kwargs": _is("environment.chat_template_kwargs"),
    f"{_ROLL}.n": _is("rollout.responses_per_prompt"),
    f"{_ROLL}.temperature": _is("rollout.temperature"),
    f"{_ROLL}.top_p": _is("rollout.top_p"),
    f"{_ROLL}.response_length": _is("rollout.max_new_tokens"),
    f"{_ROLL}.val_kwargs.n": _is("validation.samples_per_prompt"),
    f"{_ROLL}.val_kwargs.temperature": _is("rollout.validation_temperature"),
    f"{_ROLL}.dtype": _is("generation.dtype"),
    f"{_ROLL}.enforce_eager": _is("generation.enforce_eager"),
    f"{_ROLL}.gpu_memory_utilization": _is("generation.kv_cache_gib", but=_BYTES),
    f"{_ROLL}.max_model_len": _is("generation.max_model_len"),
    f"{_ROLL}.max_num_seqs": _is("generation.max_num_seqs"),
    f"{_ROLL}.tensor_model_parallel_size": _is("generation.tensor_parallel_size"),
    f"{_ROLL}.free_cache_engine": _is("generation.sleep_level", but="1 or 2"),
    f"{_ROLL}.update_weights_bucket_megabytes": _is("generation.refit_buffer_mib"),
    f"{_ROLL}.name": _is(but="vLLM always generates"),
    f"{_ACTOR}.ppo_mini_batch_size": _is("policy.updates_per_step", but=f"train_batch_size / ppo_mini_batch_size; {_SPLIT}"),
    f"{_ACTOR}.ppo_epochs": _is("policy.updates_per_step", but=_SPLIT),
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": _is("policy.batching.micro_batch_size"),
    f"{_ACTOR}.use_dynamic_bsz": _is("policy.batching.mode", but=_WHOLE),
    f"{_ACTOR}.ppo_max_token_len_per_gpu": _is("policy.batching.tokens_per_micro_batch"),
    f"{_ACTOR}.clip_ratio": _is("policy.loss.clip_low", but="clip_high is set apart"),
    f"{_ACTOR}.clip_ratio_low": _is("policy.loss.clip_low"),
    f"{_ACTOR}.clip_ratio_high": _is("policy.loss.clip_high"),
    f"{_ACTOR}.clip_ratio_c": _is("policy.loss.dual_clip"),
    f"{_ACTOR}.policy_loss.loss_mode": _is("policy.loss.surrogate", but="vanilla is clip"),
    f"{_ACTOR}.loss_agg_mode": _is(
        "policy.loss.aggregation", but="token-mean: token_mean, seq-mean-token-mean: sequence_mean, seq-mean-token-sum-norm: fixed_length"
    ),
    f"{_ACTOR}.use_kl_loss": _is("policy.loss.kl_coef", but="above 0"),
    f"{_ACTOR}.kl_loss_coef": _is("policy.loss.kl_coef"),
    f"{_ACTOR}.kl_loss_type": _is("policy.loss.kl_estimator", but="low_var_kl is k3, mse is k2"),
    f"{_ACTOR}.entropy_coeff": _is("policy.loss.entropy_coef"),
    f"{_ACTOR}.grad_clip": _is("policy.optimizer.clip_grad"),
    f"{_ACTOR}.optim.lr": _is("policy.optimizer.lr"),
    f"{_ACTOR}.optim.lr_warmup_steps": _is("policy.optimizer.warmup_steps"),
    f"{_ACTOR}.optim.total_training_steps": _is("policy.optimizer.decay_steps"),
    f"{_ACTOR}.optim.warmup_style": _is("policy.optimizer.decay_style"),
    f"{_ACTOR}.optim.weight_decay": _is("policy.optimizer.weight_decay"),
    f"{_ACTOR}.ulysses_sequence_parallel_size": _is("policy.parallel.context"),
    f"{_ACTOR}.megatron.tensor_model_parallel_size": _is("policy.parallel.tensor"),
    f"{_ACTOR}.megatron.pipeline_model_parallel_size": _is("policy.parallel.pipeline"),
    f"{_ACTOR}.megatron.context_parallel_size": _is("policy.parallel.context"),
    "algorithm.adv_estimator": _is("policy.loss.advantages", but="grpo is group_relative; or the presets: docs/algorithms.md"),
    "algorithm.norm_adv_by_std_in_grpo": _is("policy.loss.normalize_advantages", but="group or none"),
    "algorithm.use_kl_in_reward": _is("policy.loss.kl_in", but="reward"),
    "algorithm.kl_ctrl.kl_coef": _is("policy.loss.kl_coef", but="with policy.loss.kl_in: reward"),
    "algorithm.kl_penalty": _is("policy.loss.kl_estimator", but="kl is k1, mse is k2, low_var_kl is k3"),
    "algorithm.filter_groups.enable": _is("rollout.dynamic_sampling"),
    "algorithm.filter_groups.max_num_gen_batches": _is("rollout.max_num_gen_batches", but="after the last, the step trains on fewer"),
    "reward_model.overlong_buffer.len": _is("rewards", but="{kind: length, cache_tokens: N}"),
    "algorithm.rollout_correction.rollout_is": _is("policy.loss.importance_sampling"),
    "algorithm.rollout_correction.rollout_is_threshold": _is("policy.loss.importance_cap"),
    "custom_reward_function.path": _is("rewards", but=_REWARD),
    "custom_reward_function.name": _is("rewards", but=_REWARD),
    "trainer.total_training_steps": _is("steps"),
    "trainer.total_epochs": _is("epochs", "steps"),
    "trainer.experiment_name": _is("name"),
    "trainer.save_freq": _is("checkpoint.every_steps"),
    "trainer.max_actor_ckpt_to_keep": _is("checkpoint.keep_last"),
    "trainer.test_freq": _is("validate_every"),
    "trainer.default_local_dir": _is("checkpoint.url"),
    "trainer.resume_mode": _is("resume"),
    "trainer.resume_from_path": _is("resume"),
    "trainer.log_val_generations": _is("logged_samples"),
    "trainer.n_gpus_per_node": _is("policy.parallel.data", but=_GPUS),
    "trainer.nnodes": _is("ray.address", but=_RAY),
    "trainer.val_before_train": _is(but="step 0 is always validated"),
}

_ASYNC, _MCORE, _VLLM = "grpo.async_grpo", "policy.megatron_cfg", "policy.generation.vllm_cfg"
NEMO_RL = {
    "policy.model_name": _is("model.path"),
    "grpo.num_prompts_per_step": _is("rollout.prompts_per_step"),
    "grpo.num_generations_per_prompt": _is("rollout.responses_per_prompt"),
    "grpo.max_num_steps": _is("steps"),
    "grpo.max_num_epochs": _is("steps"),
    "grpo.normalize_rewards": _is("policy.loss.normalize_advantages", but="group or none"),
    "grpo.use_leave_one_out_baseline": _is("policy.loss.advantages", but="rloo"),
    "grpo.use_dynamic_sampling": _is("rollout.dynamic_sampling"),
    "grpo.dynamic_sampling_max_gen_batches": _is("rollout.max_num_gen_batches", but="after the last, the step trains on fewer"),
    "grpo.overlong_filtering": _is("rollout.overlong_filtering"),
    "grpo.val_period": _is("validate_every"),
    "grpo.val_at_start": _is(but="step 0 is always validated"),
    "grpo.max_val_samples": _is("environment.validation_size"),
    "grpo.seed": _is("seed"),
    f"{_ASYNC}.enabled": _is("mode", but="async"),
    f"{_ASYNC}.max_trajectory_age_steps": _is("asynchronous.max_trajectory_age_steps"),
    f"{_ASYNC}.in_flight_weight_updates": _is("asynchronous.in_flight_weight_updates"),
    f"{_ASYNC}.recompute_kv_cache_after_weight_updates": _is("asynchronous.recompute_kv_cache_after_weight_updates"),
    "loss_fn.reference_policy_kl_penalty": _is("policy.loss.kl_coef"),
    "loss_fn.ratio_clip_min": _is("policy.loss.clip_low"),
    "loss_fn.ratio_clip_max": _is("policy.loss.clip_high"),
    "loss_fn.ratio_clip_c": _is("policy.loss.dual_clip"),
    "loss_fn.use_importance_sampling_correction": _is("policy.loss.importance_sampling", but="token or sequence"),
    "loss_fn.truncated_importance_sampling_ratio": _is("policy.loss.importance_cap"),
    "loss_fn.sequence_level_importance_ratios": _is("policy.loss.surrogate", but="gspo"),
    "loss_fn.token_level_loss": _is("policy.loss.aggregation", but="true is token_mean, false is sequence_mean"),
    "teacher.model_name": _is("policy.teacher.path"),
    "distillation.topk_logits_k": _is("policy.teacher.top_k", but="all other tokens count as one more"),
    "policy.train_global_batch_size": _is("policy.updates_per_step", but=_SPLIT),
    "policy.train_micro_batch_size": _is("policy.batching.micro_batch_size"),
    "policy.max_total_sequence_length": _is("generation.max_model_len", "data.max_tokens"),
    "policy.precision": _is("policy.dtype"),
    "policy.max_grad_norm": _is("policy.optimizer.clip_grad"),
    "policy.optimizer.kwargs.lr": _is("policy.optimizer.lr"),
    "policy.optimizer.kwargs.weight_decay": _is("policy.optimizer.weight_decay"),
    "policy.optimizer.kwargs.betas": _is("policy.optimizer.beta1", but="and beta2"),
    "policy.optimizer.kwargs.eps": _is("policy.optimizer.eps"),
    "policy.sequence_packing.enabled": _is("policy.batching.mode", but="packed"),
    "policy.sequence_packing.train_mb_tokens": _is("policy.batching.tokens_per_micro_batch"),
    "policy.sequence_packing.algorithm": _is("policy.batching.packing"),
    "policy.dynamic_batching.enabled": _is("policy.batching.mode", but="dynamic"),
    "policy.dynamic_batching.train_mb_tokens": _is("policy.batching.tokens_per_micro_batch"),
    "policy.dtensor_cfg.tensor_parallel_size": _is("policy.parallel.tensor"),
    "policy.dtensor_cfg.context_parallel_size": _is("policy.parallel.context"),
    f"{_MCORE}.tensor_model_parallel_size": _is("policy.parallel.tensor"),
    f"{_MCORE}.pipeline_model_parallel_size": _is("policy.parallel.pipeline"),
    f"{_MCORE}.context_parallel_size": _is("policy.parallel.context"),
    f"{_MCORE}.optimizer.lr": _is("policy.optimizer.lr"),
    f"{_MCORE}.optimizer.min_lr": _is("policy.optimizer.min_lr"),
    f"{_MCORE}.optimizer.weight_decay": _is("policy.optimizer.weight_decay"),
    f"{_MCORE}.scheduler.lr_decay_style": _is("policy.optimizer.decay_style"),
    f"{_MCORE}.scheduler.lr_decay_iters": _is("policy.optimizer.decay_steps"),
    f"{_MCORE}.scheduler.lr_warmup_iters": _is("policy.optimizer.warmup_steps"),
    "policy.generation.max_new_tokens": _is("rollout.max_new_tokens"),
    "policy.generation.temperature": _is("rollout.temperature"),
    "policy.generation.top_p": _is("rollout.top_p"),
    "policy.generation.colocated.enabled": _is("placement", but="colocated or separate"),
    f"{_VLLM}.async_engine": _is("generation.executor", but="async"),
    f"{_VLLM}.precision": _is("generation.dtype"),
    f"{_VLLM}.tensor_parallel_size": _is("generation.tensor_parallel_size"),
    f"{_VLLM}.gpu_memory_utilization": _is("generation.kv_cache_gib", but=_BYTES),
    f"{_VLLM}.max_model_len": _is("generation.max_model_len"),
    f"{_VLLM}.enforce_eager": _is("generation.enforce_eager"),
    "data.train_data_path": _is("environment.path", "data.train"),
    "data.val_data_path": _is("environment.validation_path", "data.validation"),
    "data.input_key": _is("environment.fields.prompt", "data.prompt_field"),
    "data.output_key": _is("environment.fields.answer", "data.response_field"),
    "data.system_prompt_file": _is("environment.system_prompt", "data.system_prompt", but="the text itself"),
    "checkpointing.checkpoint_dir": _is("checkpoint.url"),
    "checkpointing.save_period": _is("checkpoint.every_steps"),
    "checkpointing.keep_top_k": _is("checkpoint.keep_last", but="keep_best keeps the best one as well"),
    "logger.log_dir": _is("output_dir"),
    "logger.num_val_samples_to_print": _is("logged_samples"),
    "cluster.gpus_per_node": _is("policy.parallel.data", but=_GPUS),
    "cluster.num_nodes": _is("ray.address", but=_RAY),
}

PROJECTS: dict[str, Mapping[str, Ours]] = {"TRL": TRL, "verl": VERL, "NeMo-RL": NEMO_RL}


def answers(path: Sequence[str], value: Any, has: Callable[[str], bool]) -> dict[str, str]:
    """What to say of a field that does not exist here and that another project has: by its dotted name, or by those of the fields in it.

    Args:
        path, value: of the field in the recipe.
        has: whether the flow has a dotted field.
    """
    given = list(_leaves(".".join(path), value))
    found = {name: answer for name in given if (answer := _answer(name, has)) is not None}
    if len(found) <= _MOST_ANSWERS and len(found) == len(given):
        return found
    shown = dict(list(found.items())[:_MOST_ANSWERS])
    return shown | ({".".join(path): f"no such block; {len(given) - len(shown)} more fields in it: docs/coming-from.md"} if shown else {})


def _leaves(name: str, value: Any) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(f"{name}.{key}", inner)
    else:
        yield name


def _answer(name: str, has: Callable[[str], bool]) -> str | None:
    same = [(project, theirs, ours) for project, table in PROJECTS.items() for theirs, ours in table.items() if _same(name, theirs)]
    for project, _, ours in sorted(same, key=lambda entry: (entry[1] != name, -len(entry[1]))):
        field = next((field for field in ours.fields if has(field)), None)
        if field is not None and field != name:
            return f"no such field; did you mean {field!r}? ({project}{': ' if ours.note else ''}{ours.note})"
        if not ours.fields:
            return f"no such field, and none is needed ({project}): {ours.note}"
    return None


def _same(name: str, theirs: str) -> bool:
    """Equal, or one is the end of the other: a field may stand in a block of ours, and a block of theirs may have lost its head."""
    return name == theirs or name.endswith(f".{theirs}") or ("." in name and theirs.endswith(f".{name}"))
