"""Every case: which tool trains which model on how many rows, and what it is compared with."""

from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

# What is compared with what, in the order of the table and the chart.
JOBS = {
    "1b-4": "Llama-1.24B shape, full training, rows of 4096, micro-batch 4",
    "1b-8": "Llama-1.24B shape, full training, rows of 4096, micro-batch 8",
    "1b-fp8-4": "Llama-1.24B shape, float8 products in the blocks, rows of 4096, micro-batch 4",
    "1b-fp8-8": "Llama-1.24B shape, float8 products in the blocks, rows of 4096, micro-batch 8",
    "lora": "Llama-3-8B shape, LoRA rank 8 on q and v, rows of 2048, micro-batch 4",
    "qlora": "Llama-3-8B shape, QLoRA (NF4, double quantised) rank 8 on q and v, rows of 2048, micro-batch 4",
    "8b": "Llama-3-8B shape, full training on one card, rows of 4096, micro-batch 2",
    "rank": "Llama-3-8B shape, one rank of FSDP over 8, rows of 8192, micro-batch 2 (compute only)",
    "packing": "Llama-1.24B shape, instructions of 250 tokens on average and 2048 at most: targets a second",
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
TINY_LENGTH, TINY_ROWS = 64, 2


@dataclass(frozen=True)
class Case:
    """`runner` is a module of this package, or `ours`; `needs` are packages without which it is skipped."""

    name: str
    job: str
    label: str
    runner: str
    shape: str | dict[str, Any]
    length: int
    rows: int
    needs: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    # For ours: `shoal bench COMMAND`, and keys of the config.
    command: str = "train"
    ranks: int = 1  # of a job of which one rank runs
    config: dict[str, Any] = field(default_factory=dict)
    data: str = "text"  # or `instructions`
    # Rows of different lengths take longer to settle, and differ from step to step.
    longer: int = 1

    @property
    def adapter(self) -> bool:
        return bool(self.options.get("adapter"))


SMALL, LARGE = "llama3.2-1b", "llama3-8b"
TRAINER = ("transformers", "accelerate")
LIGER = (*TRAINER, "liger_kernel")
LITGPT = ("litgpt", "lightning")
HAND = ("transformers", "liger_kernel")


def _small(name: str, rows: int, label: str, runner: str, **more: Any) -> Case:
    job = f"1b-fp8-{rows}" if "fp8" in name else f"1b-{rows}"
    return Case(f"1b-{name}-{rows}", job, label, runner, SMALL, 4096, rows, **more)


def _large(name: str, job: str, label: str, runner: str, **more: Any) -> Case:
    length, rows = (4096, 2) if job == "8b" else (2048, 4)
    return Case(name, job, label, runner, LARGE, length, rows, **more)


def _instructions(name: str, label: str, rows: int, pack: bool) -> Case:
    return Case(
        name,
        "packing",
        label,
        "ours",
        SMALL,
        2048,
        rows,
        config={"data.pack": pack},
        data="instructions",
        longer=3,
    )


BFLOAT16 = {"dtype": "bfloat16"}
SHORT_OF_MEMORY = {
    "train.precision": "bf16-true",
    "train.optimizer.name": "adamw8bit",
    "train.recompute": {"every": 2},
}
WITH_MORE = {"train.precision": "bf16-true", "train.recompute": "cheap"}
CASES = [
    _small("ours", 4, "shoal", "ours"),
    _small("hf-trainer", 4, "HF Trainer", "hf_trainer", needs=TRAINER),
    _small("hf-trainer-liger", 4, "HF Trainer + Liger", "hf_trainer", needs=LIGER, options={"liger": True}),
    _small("litgpt", 4, "LitGPT's loop", "litgpt_loop", needs=LITGPT),
    _small("hand", 4, "loop by hand", "hand_loop", needs=HAND),
    _small("ours", 8, "shoal", "ours"),
    _small("hf-trainer-liger", 8, "HF Trainer + Liger", "hf_trainer", needs=LIGER, options={"liger": True}),
    _small("litgpt", 8, "LitGPT's loop", "litgpt_loop", needs=LITGPT),
    _small("hand", 8, "loop by hand", "hand_loop", needs=HAND),
    _small("ours-fp8", 4, "shoal, fp8", "ours", config={"train.precision": "fp8"}),
    _small("ours-fp8", 8, "shoal, fp8", "ours", config={"train.precision": "fp8"}),
    _small(
        "hand-fp8", 8, "loop by hand, torchao float8", "hand_loop", needs=(*HAND, "torchao"),
        options={"float8": True},
    ),
    _large(
        "lora-hf-trainer", "lora", "HF Trainer + PEFT", "hf_trainer", needs=(*TRAINER, "peft"),
        options={"adapter": "lora", **BFLOAT16},
    ),
    _large(
        "lora-hf-trainer-liger", "lora", "HF Trainer + PEFT + Liger", "hf_trainer", needs=(*LIGER, "peft"),
        options={"adapter": "lora", "liger": True, **BFLOAT16},
    ),
    _large("lora-litgpt", "lora", "LitGPT LoRA, bf16-true", "litgpt_loop", needs=LITGPT, options={"adapter": "lora"}),
    _large("lora-hand", "lora", "loop by hand", "hand_loop", needs=(*HAND, "peft"), options={"adapter": "lora"}),
    _large(
        "qlora-hf-trainer-liger", "qlora", "HF Trainer + PEFT + Liger + bitsandbytes", "hf_trainer",
        needs=(*LIGER, "peft", "bitsandbytes"), options={"adapter": "qlora", "liger": True, **BFLOAT16},
    ),
    _large("8b-ours-small", "8b", "shoal, bf16-true, 8-bit AdamW, recompute", "ours", config=SHORT_OF_MEMORY),
    _large("8b-ours-large", "8b", "shoal, bf16-true, AdamW", "ours", config=WITH_MORE),
    _large(
        "8b-hf-trainer-liger", "8b", "HF Trainer + Liger, 8-bit AdamW, recompute", "hf_trainer",
        needs=(*LIGER, "bitsandbytes"),
        options={"liger": True, "optimizer": "adamw_bnb_8bit", "recompute": True, **BFLOAT16},
    ),
    Case(
        "rank-ours", "rank", "shoal, recompute selective", "ours", LARGE, 8192, 2, command="rank", ranks=8,
        config={"parallel.strategy": "fsdp", "train.recompute": "selective"},
    ),
    _instructions("packing-packed", "shoal, packed, 8 rows", 8, pack=True),
    _instructions("packing-padded", "shoal, padded, 8 rows", 8, pack=False),
    # As many rows as fit in the card if all of them should be of the longest.
    _instructions("packing-padded-32", "shoal, padded, 32 rows", 32, pack=False),
]  # fmt: skip


def fits(case: Case, patterns: list[str]) -> bool:
    """Whether the case's name has one of the patterns in it, which may hold * and ?; always, without patterns."""
    return not patterns or any(fnmatch(case.name, f"*{pattern}*") for pattern in patterns)


def select(patterns: list[str], tiny: bool) -> list[Case]:
    chosen = [case for case in CASES if fits(case, patterns)]
    if not tiny:
        return chosen
    # Two cases that differ in their sizes only are one when they are tiny.
    small: dict[str, Case] = {}
    for case in map(shrink, chosen):
        small.setdefault(str(replace(case, name="", job="", label="")), case)
    return list(small.values())


def shrink(case: Case) -> Case:
    """The same case, so small that a CPU runs it in seconds."""
    shape = {**TINY_SHAPE, "tied": case.shape == SMALL}
    length = 2 * TINY_LENGTH if case.data == "instructions" else TINY_LENGTH
    return replace(case, shape=shape, length=length, rows=TINY_ROWS, longer=1)
