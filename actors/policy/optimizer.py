"""Megatron's optimizer and learning-rate schedule from `OptimizerConfig`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from configs.policy import OptimizerConfig

_FOREVER = 10**9  # decay steps of a schedule that never decays


def build_optimizer(
    config: OptimizerConfig, model: Any, dtype: torch.dtype, *, distributed: bool
) -> tuple[MegatronOptimizer, OptimizerParamScheduler]:
    """AdamW with fresh moments over a DDP-wrapped model, and its schedule at step 0.

    Call `scheduler.step(1)` before each `optimizer.step()`: the first step then has 1/warmup_steps of the rate, not 0.

    Raises:
        ValueError: the learning rate is to fall over an unknown number of steps (`OptimizerConfig.over`).
    """
    if config.decay_style != "constant" and config.decay_steps is None:
        raise ValueError(f"decay_style {config.decay_style!r} without decay_steps: take OptimizerConfig.over(updates of the run)")
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=config.lr,
            min_lr=config.min_lr,
            weight_decay=config.weight_decay,
            adam_beta1=config.beta1,
            adam_beta2=config.beta2,
            adam_eps=config.eps,
            clip_grad=config.clip_grad,
            params_dtype=dtype,
            bf16=dtype == torch.bfloat16,
            use_distributed_optimizer=distributed,
        ),
        [model],
        use_gloo_process_groups=False,
    )
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=config.decay_steps or _FOREVER,
        lr_decay_style=config.decay_style,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=0,
        wd_incr_style="constant",
    )
    return optimizer, scheduler


def scale_rate(optimizer: MegatronOptimizer, scheduler: OptimizerParamScheduler, factor: float) -> None:
    """Multiply the rates between which the schedule moves."""
    scheduler.max_lr *= factor
    scheduler.min_lr *= factor
    for group in optimizer.param_groups:
        for name in ("max_lr", "min_lr"):
            if group.get(name) is not None:
                group[name] *= factor


def clip_and_step(optimizer: MegatronOptimizer, grad_norm: float | torch.Tensor) -> None:
    """What `optimizer.step()` does after `prepare_grads()` and `get_grad_norm()`, whose result is `grad_norm`."""
    if optimizer.config.clip_grad > 0:
        clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
