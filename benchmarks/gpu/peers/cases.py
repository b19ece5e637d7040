"""Every case: the tool, the model, the batch, and the job in which cases are compared with each other."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from shoal.catalogue.shapes import find_shape

# Cases of one job are compared with each other. In the order of the table and the chart.
JOBS = {
    "1b-4": "Llama-1.24B shape, full training, sequences of 4096, micro-batch 4",
    "1b-8": "Llama-1.24B shape, full training, sequences of 4096, micro-batch 8",
    "1b-fp8-4": "Llama-1.24B shape, float8 matmuls in the blocks, sequences of 4096, micro-batch 4",
    "1b-fp8-8": "Llama-1.24B shape, float8 matmuls in the blocks, sequences of 4096, micro-batch 8",
    "lora": "Llama-3-8B shape, LoRA rank 8 on q and v, sequences of 2048, micro-batch 4",
    "lora-all": "Llama-3-8B shape, LoRA rank 16 on all linear layers, sequences of 2048, micro-batch 4",
    "qlora": "Llama-3-8B shape, QLoRA (NF4, double quantized) rank 8 on q and v, sequences of 2048, micro-batch 4",
    "qlora-all": "Llama-3-8B shape, QLoRA (NF4, double quantized) rank 16 on all linear layers, smallest memory",
    "8b": "Llama-3-8B shape, full training on one GPU, sequences of 4096, micro-batch 2",
    "rank": "Llama-3-8B shape, one rank of FSDP over 8, sequences of 8192, micro-batch 2 (compute only)",
    "gpt2": "GPT-2 (124M), 32 sequences of 1024, without dropout",
    "gpt2-dropout": "GPT-2 (124M), 32 sequences of 1024, dropout 0.1 as in its config",
    "pythia-160m": "Pythia-160M shape, 16 sequences of 1024",
    "smollm2-135m": "SmolLM2-135M shape, 32 sequences of 512",
    "mistral-7b": "Mistral-7B shape with its window of 4096, full training on one GPU, one sequence of 8192",
    "1b-fp32": "Llama-1.24B shape, full training in fp32, sequences of 4096, micro-batch 2",
    "packing": "Llama-1.24B shape, instructions of 250 tokens on average and 2048 at most: loss tokens per second",
}
TINY_SHAPE = {
    "family": "llama",
    "hidden": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "vocab": 512,
    "positions": 256,
    "tied": True,
}
TINY_LENGTH, TINY_MICRO_BATCH = 64, 2


@dataclass(frozen=True)
class Case:
    """`runner` is a module of this package, or `ours`. Without the packages in `needs` the case is skipped."""

    name: str
    job: str
    label: str
    runner: str
    shape: str | dict[str, Any]
    length: int
    micro_batch: int
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    # For ours: `shoal bench COMMAND`, and overrides.
    command: str = "train"
    ranks: int = 1  # of the whole job; `bench rank` runs one of them
    config: dict[str, Any] = field(default_factory=dict)
    data: str = "text"  # or `instructions`
    # Factor on warmup and measured steps: steps over sequences of different lengths differ in time.
    more_steps: int = 1

    @property
    def adapter(self) -> bool:
        return bool(self.options.get("adapter"))


SMALL, LARGE = "llama3.2-1b", "llama3-8b"
TRAINER = ("transformers", "accelerate")
LIGER = (*TRAINER, "liger_kernel")
LITGPT = ("litgpt", "lightning")
HAND = ("transformers", "liger_kernel")
COMPILED = "transformers, one torch.compile"


def _small(name: str, micro_batch: int, label: str, runner: str, **more: Any) -> Case:
    job = f"1b-fp8-{micro_batch}" if "fp8" in name else f"1b-{micro_batch}"
    return Case(f"1b-{name}-{micro_batch}", job, label, runner, SMALL, 4096, micro_batch, **more)


def _large(name: str, job: str, label: str, runner: str, **more: Any) -> Case:
    length, micro_batch = (4096, 2) if job == "8b" else (2048, 4)
    return Case(name, job, label, runner, LARGE, length, micro_batch, **more)


def _instructions(name: str, label: str, micro_batch: int, pack: bool) -> Case:
    return Case(
        name,
        "packing",
        label,
        "ours",
        SMALL,
        2048,
        micro_batch,
        config={"data.pack": pack},
        data="instructions",
        more_steps=3,
    )


def _plain(job: str, shape: str, length: int, micro_batch: int, *, label: str = COMPILED, **options: Any) -> Case:
    """The plain compiled loop."""
    name = f"{job}-plain-graphs" if options.get("graphs") else f"{job}-plain"
    return Case(name, job, label, "compiled_loop", shape, length, micro_batch, needs=("transformers",), options=options)


BFLOAT16 = {"dtype": "bfloat16"}
LOW_MEMORY = {
    "train.precision": "bf16-true",
    "train.optimizer.name": "adamw8bit",
    "train.recompute": {"every": 2},
}
MORE_MEMORY = {"train.precision": "bf16-true", "train.recompute": "cheap"}
LORA = {"adapter.kind": "lora", "adapter.rank": 8, "adapter.alpha": 16, "adapter.targets": ["q_proj", "v_proj"]}
LORA_ALL = {"adapter.kind": "lora", "adapter.rank": 16, "adapter.alpha": 16}
QUANTIZED = {"adapter.kind": "qlora", "adapter.quantize": "nf4-dq"}
CHEAP = {"train.recompute": "cheap"}
SMALLEST = {"train.recompute": "offload"}
# Of GPT-2's config.json. shoal's named shapes have none unless the config asks for it.
DROPOUT = 0.1
WINDOWED = {"train.precision": "bf16-true", "train.optimizer.name": "adamw8bit", "train.recompute": "selective"}
FP8_HEAD = {"train.precision": "fp8", "train.fp8_head": True}
CASES = [
    _small("ours", 4, "shoal", "ours"),
    _small("hf-trainer", 4, "HF Trainer", "hf_trainer", needs=TRAINER),
    _small("hf-trainer-liger", 4, "HF Trainer + Liger", "hf_trainer", needs=LIGER, options={"liger": True}),
    _small("litgpt", 4, "LitGPT's loop", "litgpt_loop", needs=LITGPT),
    _small("hand", 4, "hand-written loop", "hand_loop", needs=HAND),
    _small("ours", 8, "shoal", "ours"),
    _small("hf-trainer-liger", 8, "HF Trainer + Liger", "hf_trainer", needs=LIGER, options={"liger": True}),
    _small("litgpt", 8, "LitGPT's loop", "litgpt_loop", needs=LITGPT),
    _small("hand", 8, "hand-written loop", "hand_loop", needs=HAND),
    _small("ours-fp8", 4, "shoal, fp8", "ours", config={"train.precision": "fp8"}),
    _small("ours-fp8", 8, "shoal, fp8", "ours", config={"train.precision": "fp8"}),
    _small("ours-fp8-head", 8, "shoal, fp8, also in the head", "ours", config=FP8_HEAD),
    _small(
        "hand-fp8", 8, "hand-written loop, torchao float8", "hand_loop", needs=(*HAND, "torchao"),
        options={"float8": True},
    ),
    _large("lora-ours", "lora", "shoal", "ours", config=LORA),
    _large("lora-ours-cheap", "lora", "shoal, recompute cheap", "ours", config=LORA | CHEAP),
    _large(
        "lora-hf-trainer", "lora", "HF Trainer + PEFT", "hf_trainer", needs=(*TRAINER, "peft"),
        options={"adapter": "lora", **BFLOAT16},
    ),
    _large(
        "lora-hf-trainer-liger", "lora", "HF Trainer + PEFT + Liger", "hf_trainer", needs=(*LIGER, "peft"),
        options={"adapter": "lora", "liger": True, **BFLOAT16},
    ),
    _large("lora-litgpt", "lora", "LitGPT LoRA, bf16-true", "litgpt_loop", needs=LITGPT, options={"adapter": "lora"}),
    _large("lora-hand", "lora", "hand-written loop", "hand_loop", needs=(*HAND, "peft"), options={"adapter": "lora"}),
    _large("lora-all-ours", "lora-all", "shoal", "ours", config=LORA_ALL),
    _large("lora-all-ours-cheap", "lora-all", "shoal, recompute cheap", "ours", config=LORA_ALL | CHEAP),
    _large("qlora-ours", "qlora", "shoal", "ours", config=LORA | QUANTIZED),
    _large("qlora-all-ours", "qlora-all", "shoal", "ours", config=LORA_ALL | QUANTIZED | SMALLEST),
    _large(
        "qlora-hf-trainer-liger", "qlora", "HF Trainer + PEFT + Liger + bitsandbytes", "hf_trainer",
        needs=(*LIGER, "peft", "bitsandbytes"), options={"adapter": "qlora", "liger": True, **BFLOAT16},
    ),
    _large("8b-ours-small", "8b", "shoal, bf16-true, 8-bit AdamW, recompute", "ours", config=LOW_MEMORY),
    _large("8b-ours-large", "8b", "shoal, bf16-true, AdamW", "ours", config=MORE_MEMORY),
    _large(
        "8b-ours-stochastic", "8b", "shoal, bf16-true, AdamW, stochastic rounding", "ours",
        config=MORE_MEMORY | {"train.optimizer.rounding": "stochastic"},
    ),
    _large(
        "8b-hf-trainer-liger", "8b", "HF Trainer + Liger, 8-bit AdamW, recompute", "hf_trainer",
        needs=(*LIGER, "bitsandbytes"),
        options={"liger": True, "optimizer": "adamw_bnb_8bit", "recompute": True, **BFLOAT16},
    ),
    Case(
        "rank-ours", "rank", "shoal, recompute selective", "ours", LARGE, 8192, 2, command="rank", ranks=8,
        config={"parallel.strategy": "fsdp", "train.recompute": "selective"},
    ),
    Case("gpt2-ours", "gpt2", "shoal", "ours", "gpt2", 1024, 32),
    _plain("gpt2", "gpt2", 1024, 32),
    Case(
        "gpt2-dropout-ours", "gpt2-dropout", "shoal", "ours", "gpt2", 1024, 32, config={"model.dropout": DROPOUT}
    ),
    _plain("gpt2-dropout", "gpt2", 1024, 32, dropout=DROPOUT),
    Case("pythia-160m-ours", "pythia-160m", "shoal", "ours", "pythia-160m", 1024, 16),
    _plain("pythia-160m", "pythia-160m", 1024, 16),
    Case("smollm2-135m-ours", "smollm2-135m", "shoal", "ours", "smollm2-135m", 512, 32),
    _plain("smollm2-135m", "smollm2-135m", 512, 32),
    _plain("smollm2-135m", "smollm2-135m", 512, 32, label=f"{COMPILED}, CUDA graphs", graphs=True),
    Case(
        "mistral-7b-ours", "mistral-7b", "shoal, bf16-true, 8-bit AdamW, recompute selective", "ours", "mistral-7b",
        8192, 1, config=WINDOWED,
    ),
    Case(
        "fp32-ours", "1b-fp32", "shoal, 32-true", "ours", SMALL, 4096, 2, config={"train.precision": "32-true"},
    ),
    _instructions("packing-packed", "shoal, packed, 8 sequences", 8, pack=True),
    _instructions("packing-padded", "shoal, padded, 8 sequences", 8, pack=False),
    # As many sequences as fit into memory if all of them have the maximum length.
    _instructions("packing-padded-32", "shoal, padded, 32 sequences", 32, pack=False),
]  # fmt: skip


def matches(case: Case, patterns: list[str]) -> bool:
    """Whether the name of the case contains one of the patterns (with * and ?). True if there are no patterns."""
    return not patterns or any(fnmatch(case.name, f"*{pattern}*") for pattern in patterns)


def select(patterns: list[str], tiny: bool) -> list[Case]:
    chosen = [case for case in CASES if matches(case, patterns)]
    if not tiny:
        return chosen
    # Cases that differ only in size are the same case when they are tiny.
    small: dict[str, Case] = {}
    for case in map(shrink, chosen):
        small.setdefault(str(replace(case, name="", job="", label="")), case)
    return list(small.values())


def shrink(case: Case) -> Case:
    """The same case, so small that a CPU runs it in seconds."""
    assert isinstance(case.shape, str), "the shape of a case is a name, of which this is a small version"
    named = find_shape(case.shape)
    kv_heads = TINY_SHAPE["kv_heads"] if named.kv_heads < named.heads else TINY_SHAPE["heads"]
    shape = {**TINY_SHAPE, "family": named.family, "tied": named.tied, "kv_heads": kv_heads}
    length = 2 * TINY_LENGTH if case.data == "instructions" else TINY_LENGTH
    return replace(case, shape=shape, length=length, micro_batch=TINY_MICRO_BATCH, more_steps=1)
