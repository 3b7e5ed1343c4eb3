#!/usr/bin/env bash
# GRPO on GSM8K with verl: FSDP2, vLLM, and the policy's head by grpo_kernels (docs/start/verl.md).
#
#   python3 examples/data_preprocess/gsm8k.py --local_save_dir ~/data/gsm8k    # in a clone of verl
#   bash examples/gsm8k_verl.sh                  # one GPU; GSM8K=folder names another one than ~/data/gsm8k
#   bash examples/gsm8k_verl.sh trainer.n_gpus_per_node=8 actor_rollout_ref.model.path=Qwen/Qwen3-4B
#   bash examples/gsm8k_verl.sh --cfg job        # prints the configuration, and trains nothing
#
# For verl 0.9.1. Three options turn the library on: use_fused_kernels, impl_backend, zero_advantage. The last one allows no
# KL or entropy term: with use_kl_loss=True or an entropy_coeff, add
# actor_rollout_ref.model.fused_kernel_options.zero_advantage=train.

set -eu
data=${GSM8K:-$HOME/data/gsm8k}

exec python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$data/train.parquet" \
    data.val_files="$data/test.parquet" \
    data.train_batch_size=256 \
    data.max_prompt_length=512 \
    data.max_response_length=1024 \
    data.filter_overlong_prompts=True \
    +data.apply_chat_template_kwargs.enable_thinking=False \
    actor_rollout_ref.model.path=Qwen/Qwen3-0.6B \
    actor_rollout_ref.model.use_fused_kernels=True \
    actor_rollout_ref.model.fused_kernel_options.impl_backend=grpo_kernels \
    +actor_rollout_ref.model.fused_kernel_options.zero_advantage=score \
    actor_rollout_ref.actor.strategy=fsdp2 \
    actor_rollout_ref.actor.optim.lr=1e-6 \
    actor_rollout_ref.actor.ppo_mini_batch_size=64 \
    actor_rollout_ref.actor.use_dynamic_bsz=True \
    actor_rollout_ref.actor.ppo_max_token_len_per_gpu=16384 \
    actor_rollout_ref.actor.clip_ratio_high=0.28 \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.n=8 \
    actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
    trainer.project_name=grpo_kernels \
    trainer.experiment_name=gsm8k \
    'trainer.logger=[console]' \
    trainer.n_gpus_per_node=1 \
    trainer.nnodes=1 \
    trainer.test_freq=5 \
    trainer.save_freq=20 \
    trainer.total_epochs=2 \
    "$@"
