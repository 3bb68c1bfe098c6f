"""Megatron's optimizer and learning-rate schedule from `OptimizerConfig`."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from actors.policy.policy_state import LossScale
from configs.policy import LossScaleConfig, OptimizerConfig

_FOREVER = 10**9  # decay steps of a schedule that never decays


def build_optimizer(
    config: OptimizerConfig, model: Any, dtype: torch.dtype, scale: LossScaleConfig, *, distributed: bool
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
            fp16=dtype == torch.float16,
            initial_loss_scale=scale.initial,
            min_loss_scale=scale.minimum,
            loss_scale_window=scale.growth_steps,
            hysteresis=scale.hysteresis,
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


def loss_scale(optimizer: MegatronOptimizer) -> LossScale | None:
    """Where the loss scale stands; None: there is none, as the dtype is not float16."""
    states = [scaler.state_dict() for scaler in _scalers(optimizer)]
    return LossScale.model_validate(states[0] | {"scale": float(states[0]["scale"])}) if states else None


def set_loss_scale(optimizer: MegatronOptimizer, state: LossScale | None) -> None:
    """Go on from there. Without a state, or without a loss scale, nothing is changed."""
    if state is None:
        return
    for scaler in _scalers(optimizer):
        scaler.load_state_dict(state.model_dump() | {"scale": torch.tensor([state.scale], dtype=torch.float32)})


def _scalers(optimizer: MegatronOptimizer) -> list[Any]:
    # All have the same: each sees whether any rank's gradients overflowed.
    found = [getattr(one, "grad_scaler", None) for one in optimizer.chained_optimizers]
    return [scaler for scaler in found if scaler is not None]


def take_moments(optimizer: MegatronOptimizer) -> None:
    """Allocate the moments, as zeros, by a step that changes nothing: its rate and the gradients are 0, and it is not counted.

    Before the first step only, with gradients of 0: weights and steps are then, bit for bit, what they would be without it.
    """
    inner = [one.optimizer for one in optimizer.chained_optimizers]
    if any(state for one in inner for state in one.state.values()):
        return  # moments that are there would shrink
    rates, scale = [group["lr"] for group in optimizer.param_groups], loss_scale(optimizer)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.prepare_grads()
    set_loss_scale(optimizer, scale)
    clip_and_step(optimizer, optimizer.get_grad_norm())
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    for one in inner:
        for group in one.param_groups:
            if not isinstance(one, torch.optim.Adam):  # AdamW is one; fused ones of other packages count by group
                group["step"] = 0
        for state in one.state.values():
            if "step" in state:
                state["step"].zero_()
    optimizer.zero_grad()


def clip_and_step(optimizer: MegatronOptimizer, grad_norm: float | torch.Tensor) -> None:
    """What `optimizer.step()` does after `prepare_grads()` and `get_grad_norm()`, whose result is `grad_norm`."""
    if optimizer.config.clip_grad > 0:
        clip_grad_by_total_norm_fp32(optimizer.get_parameters(), optimizer.config.clip_grad, grad_norm)
    optimizer.step_with_ready_grads()
