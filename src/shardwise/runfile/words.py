"""The keys of Hugging Face Trainer, TRL, accelerate, FSDP1, DeepSpeed and others, each with ours: a table to be read."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..config.yamltext import typed

NOT_YET = "is not built yet"


@dataclass(frozen=True)
class Word:
    """One row of the table.

    Attributes:
        ours: Dotted key here, or empty where there is none.
        value: Foreign value -> ours as typed; None where it has no counterpart.
        note: Said after the translation, or instead of it where there is none.
    """

    whose: str
    ours: str = ""
    value: Callable[[Any], str | None] = typed
    note: str = ""


HF, TRL, ACC, FSDP, DS, AXO = "Hugging Face Trainer", "TRL", "accelerate", "FSDP1", "DeepSpeed", "axolotl"


def _whole(value: Any) -> str | None:
    return (
        str(int(value))
        if isinstance(value, (int, float)) and not isinstance(value, bool) and value == int(value) and value > 0
        else None
    )


def plain(value: Any) -> str:
    return str(value).rsplit(".", 1)[-1].strip().lower() if not isinstance(value, float) else str(value)


def by_table(**table: str | None) -> Callable[[Any], str | None]:
    """A translation by table; the part after the last point is compared, without case and with ``_`` for ``-``."""
    return lambda value: table.get(plain(value).replace("-", "_"))


def if_true(then: str, otherwise: str | None = None) -> Callable[[Any], str | None]:
    return lambda value: then if plain(value) in ("true", "1", "yes") else otherwise


def tracker_names(value: Any) -> str | None:
    names = [value] if isinstance(value, str) else value if isinstance(value, list) else []
    return "[tensorboard]" if "tensorboard" in names or "all" in names else None


_STRATEGIES = {
    "full_shard": "full_shard",
    "shard_grad_op": "shard_grad_op",
    "no_shard": "no_shard",
    "ddp": "no_shard",
    "1": "full_shard",
    "2": "shard_grad_op",
    "3": "no_shard",
    "fsdp": "full_shard",
}
_ZERO = {"0": "no_shard", "1": "shard_grad_op", "2": "shard_grad_op", "3": "full_shard"}


def strategy_of(value: Any) -> str | None:
    """The first word that names a strategy; ``full_shard auto_wrap`` is how Trainer writes it."""
    if isinstance(value, bool):
        return "full_shard" if value else "no_shard"
    words = [word for one in (value if isinstance(value, list) else [value]) for word in str(one).replace(",", " ").split()]
    return next((_STRATEGIES[plain(word)] for word in words if plain(word) in _STRATEGIES), None)


def stage_of(value: Any) -> str | None:
    if isinstance(value, Mapping):
        zero = value.get("zero_optimization", value)
        return stage_of(zero.get("stage")) if isinstance(zero, Mapping) else None
    stage = "".join(c for c in plain(value) if c.isdigit())
    return _ZERO.get(stage)


def _fsdp_config(value: Any) -> str | None:
    if not isinstance(value, Mapping):
        return None
    given = [
        value[key]
        for key in ("fsdp_sharding_strategy", "sharding_strategy", "fsdp_reshard_after_forward", "reshard_after_forward")
        if key in value
    ]
    return _reshard(given[0]) if given else "full_shard"


def _reshard(value: Any) -> str | None:
    return {"true": "full_shard", "false": "shard_grad_op"}.get(plain(value)) or strategy_of(value)


def precision_of(value: Any) -> str | None:
    return _PRECISIONS.get(plain(value).replace("-", "_"))


_PRECISIONS = {
    "bf16": "bf16-mixed",
    "bfloat16": "bf16-mixed",
    "bf16_mixed": "bf16-mixed",
    "mixed": "bf16-mixed",
    "auto": "bf16-mixed",
    "amp": "bf16-mixed",
    "fp32": "fp32",
    "float32": "fp32",
    "32": "fp32",
    "32_true": "fp32",
    "float": "fp32",
    "no": "fp32",
    "fp32_true": "fp32",
}
SCHEDULES = by_table(
    cosine="cosine",
    linear="linear",
    constant="constant",
    constant_with_warmup="constant",
    cosine_with_min_lr="cosine",
    warmupdecaylr="linear",
    warmuplr="constant",
    warmupcosinelr="cosine",
)
ATTENTION = by_table(
    flash_attention_2="document",
    flash_attention_3="document",
    flash_attention="document",
    flash="document",
    fa2="document",
    flex_attention="document",
    flex="document",
    sdpa="sdpa",
    eager="sdpa",
    math="sdpa",
    true="document",
    false="auto",
)
CHECKPOINTING = by_table(
    true="full", false="none", yes="full", no="none", full="full", block="full", on="full", off="none", null="none", none="none"
)
OPTIMIZERS = by_table(
    adamw="adamw",
    adamw_torch="adamw",
    adamw_torch_fused="adamw",
    adamw_hf="adamw",
    adam="adamw",
    fusedadam="adamw",
    adamw_apex_fused="adamw",
    fused_adamw="adamw",
)
_NEVER = "nothing here takes its place"

WORDS: dict[str, Word] = {
    # what a step is
    "per_device_train_batch_size": Word(
        HF, "layout.micro_batch", _whole, "the plan finds it where it is left out; `global_batch` counts all ranks"
    ),
    "per_gpu_train_batch_size": Word(HF, "layout.micro_batch", _whole, "the plan finds it where it is left out"),
    "per_device_batch_size": Word(HF, "layout.micro_batch", _whole, "the plan finds it where it is left out"),
    "micro_batch_size": Word(AXO, "layout.micro_batch", _whole, "the plan finds it where it is left out"),
    "train_micro_batch_size_per_gpu": Word(DS, "layout.micro_batch", _whole, "the plan finds it where it is left out"),
    "per_device_eval_batch_size": Word(HF, note="evaluation takes the plan's `micro_batch`"),
    "gradient_accumulation_steps": Word(HF, "layout.grad_accum", _whole, "the plan finds it where it is left out"),
    "train_batch_size": Word(DS, "global_batch", _whole),
    "batch_size": Word("PyTorch", "global_batch", _whole, "sequences a step over all ranks"),
    "auto_find_batch_size": Word(HF, note="the plan finds it always"),
    "num_train_epochs": Word(HF, "epochs", _whole),
    "num_epochs": Word(AXO, "epochs", _whole),
    "max_steps": Word(HF, "steps", _whole),
    # precision
    "bf16": Word(HF, "precision", if_true("bf16-mixed", "fp32")),
    "fp16": Word(HF, "precision", if_true("bf16-mixed"), "fp16 is not built yet, bf16 needs no loss scaling"),
    "tf32": Word(HF, note=_NEVER),
    "mixed_precision": Word(ACC, "precision", precision_of),
    "dtype": Word("transformers", "precision", precision_of, "weights are kept in fp32 either way"),
    "torch_dtype": Word("transformers", "precision", precision_of, "weights are kept in fp32 either way"),
    "param_dtype": Word("FSDP2", "precision", precision_of),
    "mixed_precision_policy": Word(FSDP, "precision", precision_of),
    # optimizer
    "learning_rate": Word(HF, "optimizer.lr"),
    "max_lr": Word("PyTorch", "optimizer.lr"),
    "warmup_ratio": Word(HF, "optimizer.warmup"),
    "warmup_steps": Word(HF, "optimizer.warmup"),
    "num_warmup_steps": Word("transformers", "optimizer.warmup"),
    "lr_scheduler_type": Word(HF, "optimizer.schedule", SCHEDULES),
    "lr_scheduler": Word(AXO, "optimizer.schedule", SCHEDULES),
    "scheduler": Word(DS, "optimizer.schedule", SCHEDULES),
    "lr_scheduler_kwargs": Word(HF, note="`optimizer.min_lr` is a share of `lr`"),
    "max_grad_norm": Word(HF, "optimizer.clip", lambda value: typed(value) if value else "null"),
    "gradient_clipping": Word(DS, "optimizer.clip", lambda value: typed(value) if value else "null"),
    "grad_clip": Word("nanoGPT", "optimizer.clip", lambda value: typed(value) if value else "null"),
    "gradient_clip_val": Word("Lightning", "optimizer.clip", lambda value: typed(value) if value else "null"),
    "optim": Word(HF, "optimizer.name", OPTIMIZERS),
    "adam_epsilon": Word(HF, "optimizer.eps"),
    "adam_beta1": Word(HF, "optimizer.betas"),
    "adam_beta2": Word(HF, "optimizer.betas"),
    # data
    "max_seq_length": Word(TRL, "data.seq_len", _whole),
    "max_length": Word(TRL, "data.seq_len", _whole),
    "max_seq_len": Word("torchtune", "data.seq_len", _whole),
    "model_max_length": Word("transformers", "data.seq_len", _whole),
    "block_size": Word("nanoGPT", "data.seq_len", _whole),
    "cutoff_len": Word("LLaMA-Factory", "data.seq_len", _whole),
    "sequence_len": Word(AXO, "data.seq_len", _whole),
    "sequence_length": Word("torchtitan", "data.seq_len", _whole),
    "dataset_name": Word(HF, "data.train"),
    "dataset": Word("LLaMA-Factory", "data.train"),
    "datasets": Word(AXO, "data.train"),
    "train_file": Word(HF, "data.train"),
    "train_dataset": Word(HF, "data.train"),
    "validation_file": Word(HF, "data.validation"),
    "eval_dataset": Word(HF, "data.validation"),
    "val_set_size": Word(AXO, "data.validation"),
    "validation_split_percentage": Word(
        HF, "data.validation", lambda v: typed(v / 100) if isinstance(v, (int, float)) and 0 < v < 100 else None
    ),
    "dataset_text_field": Word(TRL, "data.columns.text"),
    "assistant_only_loss": Word(TRL, "data.format", if_true("chat", "text")),
    "completion_only_loss": Word(TRL, "data.format", if_true("prompt", "text")),
    "system_prompt": Word(AXO, "data.system"),
    "dataset_cache_dir": Word(HF, "data.cache_dir"),
    "packing": Word(TRL, note="rows are packed always, and documents never see each other"),
    "sample_packing": Word(AXO, note="rows are packed always, and documents never see each other"),
    "group_by_length": Word(HF, note="rows are packed, so all are of one length"),
    "dataloader_num_workers": Word(HF, note="text is tokenised once and memory-mapped: there is nothing to wait for"),
    "num_workers": Word("PyTorch", note="text is tokenised once and memory-mapped: there is nothing to wait for"),
    "dataloader_drop_last": Word(HF, note="a last batch that is short is filled with rows of weight zero"),
    "remove_unused_columns": Word(HF, note="only the columns that are needed are read"),
    "data_seed": Word(HF, "seed"),
    "random_seed": Word("PyTorch", "seed"),
    # model
    "model_name_or_path": Word(HF, "model"),
    "model_name": Word("transformers", "model"),
    "pretrained_model_name_or_path": Word("transformers", "model"),
    "base_model": Word(AXO, "model"),
    "tokenizer_name": Word(HF, "tokenizer"),
    "tokenizer_name_or_path": Word(HF, "tokenizer"),
    "attn_implementation": Word("transformers", "layout.attention", ATTENTION),
    "flash_attention": Word(AXO, "layout.attention", ATTENTION),
    "use_flash_attention_2": Word("transformers", "layout.attention", ATTENTION),
    "use_cache": Word("transformers", note="training never keeps keys and values"),
    # sharding
    "fsdp": Word(HF, "layout.strategy", strategy_of),
    "fsdp_config": Word(ACC, "layout.strategy", _fsdp_config, "units, prefetch and state dicts need no keys"),
    "fsdp_sharding_strategy": Word(ACC, "layout.strategy", strategy_of),
    "sharding_strategy": Word(FSDP, "layout.strategy", strategy_of),
    "fsdp_reshard_after_forward": Word(ACC, "layout.strategy", _reshard),
    "reshard_after_forward": Word("FSDP2", "layout.strategy", _reshard),
    "fsdp_activation_checkpointing": Word(ACC, "layout.activation_checkpointing", CHECKPOINTING),
    "gradient_checkpointing": Word(HF, "layout.activation_checkpointing", CHECKPOINTING),
    "gradient_checkpointing_kwargs": Word(HF, note="`use_reentrant` is always false"),
    "deepspeed": Word(HF, "layout.strategy", stage_of, "FSDP2 does ZeRO's work here"),
    "deepspeed_config": Word(ACC, "layout.strategy", stage_of, "FSDP2 does ZeRO's work here"),
    "zero_stage": Word(DS, "layout.strategy", stage_of),
    "zero_optimization": Word(DS, "layout.strategy", stage_of),
    "distributed_type": Word(ACC, note="it is FSDP2 always; `layout.strategy` says what is cut"),
    "cpu_offload": Word(FSDP, note=f"offload to host memory {NOT_YET}"),
    "fsdp_offload_params": Word(ACC, note=f"offload to host memory {NOT_YET}"),
    "offload_params": Word(FSDP, note=f"offload to host memory {NOT_YET}"),
    "offload_optimizer": Word(DS, note=f"offload to host memory {NOT_YET}"),
    "offload_param": Word(DS, note=f"offload to host memory {NOT_YET}"),
    **{
        word: Word(whose, note="each block of the model is a unit; nothing is to be said")
        for word, whose in (
            ("fsdp_auto_wrap_policy", ACC),
            ("auto_wrap_policy", FSDP),
            ("fsdp_transformer_layer_cls_to_wrap", ACC),
            ("transformer_layer_cls_to_wrap", FSDP),
            ("fsdp_min_num_params", ACC),
            ("min_num_params", FSDP),
        )
    },
    **{
        word: Word(whose, note=_NEVER)
        for word, whose in (
            ("fsdp_version", ACC),
            ("fsdp_backward_prefetch", ACC),
            ("backward_prefetch", FSDP),
            ("fsdp_forward_prefetch", ACC),
            ("forward_prefetch", FSDP),
            ("fsdp_use_orig_params", ACC),
            ("use_orig_params", FSDP),
            ("fsdp_sync_module_states", ACC),
            ("sync_module_states", FSDP),
            ("fsdp_cpu_ram_efficient_loading", ACC),
            ("fsdp_state_dict_type", ACC),
            ("limit_all_gathers", FSDP),
            ("ddp_find_unused_parameters", HF),
            ("ddp_backend", HF),
            ("overlap_comm", DS),
            ("local_rank", HF),
            ("do_train", HF),
            ("do_eval", HF),
        )
    },
    "num_processes": Word(ACC, "cluster.gpus_per_node", _whole, "on each machine, where there are several"),
    "nproc_per_node": Word("torchrun", "cluster.gpus_per_node", _whole),
    "num_gpus": Word(DS, "cluster.gpus_per_node", _whole),
    "num_machines": Word(ACC, "cluster.nodes", _whole),
    "num_nodes": Word("Lightning", "cluster.nodes", _whole),
    "machine_rank": Word(ACC, note="`torchrun` on each machine says it"),
    "main_process_ip": Word(ACC, note="`torchrun` on each machine says it"),
    # what is kept and said
    "output_dir": Word(HF, "run_dir"),
    "overwrite_output_dir": Word(HF, note="a run folder is never overwritten"),
    "logging_dir": Word(HF, note="everything a run writes lies in `run_dir`"),
    "logging_steps": Word(HF, "log_every", _whole),
    "eval_steps": Word(HF, "eval_every", _whole),
    "save_steps": Word(HF, "checkpoint.every", _whole),
    "save_total_limit": Word(HF, "checkpoint.keep_last", _whole),
    "load_best_model_at_end": Word(HF, "checkpoint.keep_best", if_true("1", "0")),
    "metric_for_best_model": Word(HF, note="the best is the one of the lowest validation loss"),
    "early_stopping_patience": Word(HF, "early_stop.patience", _whole),
    "resume_from_checkpoint": Word(HF, note="a flag says it: `shardwise train --resume RUN`"),
    "report_to": Word(HF, "trackers", tracker_names, "metrics.jsonl is written always, wandb is not built yet"),
    "run_name": Word(HF, "run_dir"),
    "eval_strategy": Word(HF, note="`eval_every` counts steps"),
    "evaluation_strategy": Word(HF, note="`eval_every` counts steps"),
    "save_strategy": Word(HF, note="`checkpoint.every` counts steps"),
    "logging_strategy": Word(HF, note="`log_every` counts steps"),
    "push_to_hub": Word(HF, note="`shardwise export RUN OUT` writes a folder that `hf upload` takes"),
    # not built yet
    **{
        word: Word(whose, note=f"{thing} {NOT_YET}")
        for word, whose, thing in (
            ("use_peft", TRL, "LoRA"),
            ("peft_config", TRL, "LoRA"),
            ("lora", "shardwise's plan", "LoRA"),
            ("lora_r", HF, "LoRA"),
            ("adapter", AXO, "LoRA"),
            ("load_in_8bit", "transformers", "8-bit loading"),
            ("load_in_4bit", "transformers", "4-bit loading"),
            ("torch_compile", HF, "torch.compile"),
            ("compile", "PyTorch", "torch.compile"),
            ("wandb_project", AXO, "wandb"),
            ("tensor_parallel_size", "vLLM", "tensor parallelism"),
            ("tp_size", HF, "tensor parallelism"),
            ("pipeline_parallel_size", "Megatron", "pipeline parallelism"),
            ("dp_replicate_size", HF, "hybrid sharding"),
        )
    },
}
