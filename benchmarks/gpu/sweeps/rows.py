"""The runs of the sweep: six families from 100M to 8B parameters, lengths, precisions and activation checkpointing."""

import math
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from typing import Any

from shoal.catalogue.shapes import find_shape, shape_from_sizes
from sweeps.folders import FOLDERS

SEED = 1234
WARMUP_SECONDS, MEASURED_SECONDS = 1.5, 2.5
FEWEST_WARMUP, MOST_WARMUP = 3, 12
FEWEST_STEPS, MOST_STEPS = 4, 30
TINY_SIZES = {"hidden": 64, "layers": 2, "heads": 4, "ffn": 128, "vocab": 512, "positions": 256}
TINY_LENGTH, TINY_MICRO_BATCH, TINY_STEPS = 64, 2, 2


@dataclass(frozen=True)
class Row:
    """A run on one device, named after its settings."""

    shape: str
    length: int
    micro_batch: int
    precision: str = "bf16-mixed"
    recompute: str = "none"
    optimizer: str = "adamw"
    config: dict[str, Any] = field(default_factory=dict)  # further keys of the config
    note: str = ""
    accumulated: int = 1  # micro-batches per step
    held_out: bool = False  # measured after the last constant of the forecast was set

    @property
    def name(self) -> str:
        settings = [self.precision]
        settings += [self.recompute] if self.recompute != "none" else []
        settings += [self.optimizer] if self.optimizer != "adamw" else []
        settings += [self.note] if self.note else []
        return f"{self.shape} {self.micro_batch}x{self.length} {' '.join(settings)}"

    def as_dict(self, *, tiny: bool = False) -> dict[str, Any]:
        """What a record says of its row."""
        return {"row": self.name, "held_out": self.held_out, "config": self.values(tiny=tiny)}

    def sizes(self, *, tiny: bool = False) -> str | dict[str, Any]:
        """`model.shape`: a name of the catalogue, or dimensions."""
        if not tiny:
            return OTHER_SHAPES.get(self.shape, self.shape)
        others = OTHER_SHAPES.get(self.shape)
        shape = find_shape(self.shape) if others is None else shape_from_sizes(**others)
        kv_heads = 2 if shape.kv_heads < shape.heads else 4
        return {**TINY_SIZES, "family": shape.family, "kv_heads": kv_heads, "tied": shape.tied}

    def values(self, *, tiny: bool = False) -> dict[str, Any]:
        """The keys of the config that the forecast depends on. The data is added where it is measured."""
        length, micro_batch = (TINY_LENGTH, TINY_MICRO_BATCH) if tiny else (self.length, self.micro_batch)
        folder = self.shape in FOLDERS
        return {
            **({"model.from": self.shape} if folder else {"model.shape": self.sizes(tiny=tiny)}),
            "data.max_length": length,
            "train.global_batch": micro_batch * self.accumulated,
            "train.micro_batch": micro_batch,
            "train.precision": self.precision,
            "train.recompute": self.recompute,
            "train.optimizer.name": self.optimizer,
            **self.config,
        }


# Published sizes that are not in the catalogue. Dimensions that it has no key for, such as the head size, are the
# family's usual ones.
OTHER_SHAPES: dict[str, dict[str, Any]] = {
    "gpt2-medium": {
        "family": "gpt2", "hidden": 1024, "layers": 24, "heads": 16, "ffn": 4096, "vocab": 50_257, "positions": 1024,
        "tied": True,
    },
    "gpt2-large": {
        "family": "gpt2", "hidden": 1280, "layers": 36, "heads": 20, "ffn": 5120, "vocab": 50_257, "positions": 1024,
        "tied": True,
    },
    "gpt2-xl": {
        "family": "gpt2", "hidden": 1600, "layers": 48, "heads": 25, "ffn": 6400, "vocab": 50_257, "positions": 1024,
        "tied": True,
    },
    "pythia-1.4b": {
        "family": "neox", "hidden": 2048, "layers": 24, "heads": 16, "ffn": 8192, "vocab": 50_304, "positions": 2048,
        "tied": False,
    },
    "smollm2-360m": {
        "family": "llama", "hidden": 960, "layers": 32, "heads": 15, "kv_heads": 5, "ffn": 2560, "vocab": 49_152,
        "positions": 8192, "tied": True,
    },
    "smollm2-1.7b": {
        "family": "llama", "hidden": 2048, "layers": 24, "heads": 32, "ffn": 8192, "vocab": 49_152, "positions": 8192,
        "tied": True,
    },
    "qwen2.5-1.5b": {
        "family": "qwen2", "hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "ffn": 8960, "vocab": 151_936,
        "positions": 131_072, "tied": True,
    },
    "qwen3-0.4b": {
        "family": "qwen3", "hidden": 1024, "layers": 28, "heads": 16, "kv_heads": 8, "ffn": 3072, "vocab": 151_936,
        "positions": 40_960, "tied": True,
    },
    "mistral-0.7b": {
        "family": "mistral", "hidden": 1536, "layers": 20, "heads": 12, "kv_heads": 4, "ffn": 5376, "vocab": 32_000,
        "positions": 32_768, "tied": False,
    },
}  # fmt: skip

LORA = {"adapter.kind": "lora", "adapter.rank": 16, "adapter.alpha": 16}
QLORA = {**LORA, "adapter.kind": "qlora", "adapter.quantize": "nf4-dq"}
NARROW = {"adapter.rank": 8, "adapter.targets": ["q_proj", "v_proj"]}
WIDE = {"adapter.rank": 64, "adapter.alpha": 64, "adapter.dropout": 0.05}
MASKED = {"train.objective": "masked_lm", "model.add_tokens": ["<mask>"]}
EVERY_SECOND = {"train.recompute": {"every": 2}}
HOST = {"parallel.strategy": "fsdp", "parallel.offload": "cpu"}
TRUE, FULL32, HALF, FP8 = "bf16-true", "32-true", "16-mixed", "fp8"
SMALL_STATE = "adamw8bit"


def _unseen(*rows: Row) -> list[Row]:
    return [replace(row, held_out=True) for row in rows]


ROWS = [
    # The table of the issue that asked for the sweep.
    Row("gpt2", 1024, 32),
    Row("gpt2", 1024, 32, config={"model.dropout": 0.1}, note="dropout"),
    Row("pythia-160m", 1024, 16),
    Row("smollm2-135m", 512, 32),
    Row("mistral-7b", 8192, 1, TRUE, "selective", SMALL_STATE),
    Row("llama3.2-1b", 4096, 2, FULL32),
    Row("llama3.2-1b", 16_384, 1),
    Row("pythia-2.8b", 2048, 4, FP8),
    Row("tinyllama-1.1b", 2048, 8, recompute="full"),
    # 100M to 200M parameters.
    Row("gpt2", 1024, 16, TRUE, "selective"),
    Row("gpt2", 512, 64, HALF),
    Row("gpt2", 512, 16, FULL32),
    Row("pythia-160m", 2048, 8, FULL32),
    Row("pythia-160m", 512, 32, TRUE),
    Row("pythia-160m", 2048, 16, FP8),
    Row("smollm2-135m", 8192, 4, recompute="full"),
    Row("smollm2-135m", 2048, 16, HALF),
    Row("smollm2-135m", 2048, 8, FULL32, "selective"),
    Row("smollm2-135m", 8192, 2, TRUE),
    # 300M to 800M.
    Row("gpt2-medium", 1024, 16),
    Row("gpt2-large", 1024, 16, recompute="selective"),
    Row("pythia-410m", 1024, 16, recompute="cheap"),
    Row("pythia-410m", 2048, 8, FP8),
    Row("qwen2.5-0.5b", 2048, 8),
    Row("qwen2.5-0.5b", 16_384, 1, recompute="full"),
    Row("qwen2.5-0.5b", 512, 32, TRUE, "cheap"),
    Row("qwen3-0.4b", 4096, 4, recompute="cheap"),
    Row("qwen3-0.4b", 4096, 4, FP8),
    Row("mistral-0.7b", 4096, 4),
    Row("mistral-0.7b", 2048, 4, FULL32, "full"),
    # 1B to 1.6B.
    Row("llama3.2-1b", 4096, 4),
    Row("llama3.2-1b", 4096, 8, FP8),
    Row("llama3.2-1b", 512, 32),
    Row("llama3.2-1b", 2048, 8, recompute="cheap"),
    Row("llama3.2-1b", 4096, 4, TRUE, "offload", SMALL_STATE),
    Row("llama3.2-1b", 8192, 2, FP8, "selective"),
    Row("tinyllama-1.1b", 2048, 4, FULL32, "cheap"),
    Row("pythia-1b", 2048, 8),
    Row("pythia-1b", 2048, 8, TRUE, "full"),
    Row("gpt2-xl", 1024, 8, TRUE),
    # 2.8B to 3.2B.
    Row("pythia-2.8b", 2048, 4, recompute="selective"),
    Row("llama3.2-3b", 4096, 2, recompute="cheap"),
    Row("llama3.2-3b", 16_384, 1, recompute="full"),
    Row("llama3.2-3b", 4096, 2, FP8, "selective"),
    # 7B and 8B.
    Row("llama3-8b", 4096, 2, TRUE, "cheap"),
    Row("llama3-8b", 8192, 1, TRUE, "full", SMALL_STATE),
    Row("qwen2.5-7b", 2048, 4, TRUE, "selective", SMALL_STATE),
    Row("qwen3-8b", 4096, 1, TRUE, "selective", SMALL_STATE),
    Row("pythia-6.9b", 1024, 8, TRUE, "full"),
    Row("mistral-7b", 2048, 4, TRUE, "cheap"),
    Row("codellama-7b", 16_384, 1, TRUE, "offload", SMALL_STATE),
    Row("llama2-7b", 4096, 1, recompute="full"),
    # Adapters.
    Row("llama3-8b", 2048, 4, config=LORA, note="lora"),
    Row("llama3-8b", 2048, 4, recompute="offload", config=QLORA, note="qlora"),
    Row("mistral-7b", 8192, 1, recompute="full", config={**LORA, **NARROW}, note="lora-q-v"),
    # Optimizer state, or everything, in host memory.
    Row("llama3.2-1b", 4096, 4, config={"parallel.offload": "optimizer"}, note="offload-optimizer"),
    Row("llama3.2-1b", 4096, 4, config=HOST, note="offload-cpu"),
    Row("llama3.2-3b", 2048, 8, recompute="full", config=HOST, note="offload-cpu"),
    # Held out: chosen and measured after the last constant of the forecast was set with the rows above.
    Row("gpt2", 512, 32, recompute="full", held_out=True),
    Row("gpt2-medium", 1024, 8, FULL32, held_out=True),
    Row("gpt2-medium", 512, 32, HALF, "cheap", held_out=True),
    Row("gpt2-large", 1024, 8, TRUE, held_out=True),
    Row("gpt2-xl", 1024, 8, "bf16-mixed", "selective", SMALL_STATE, held_out=True),
    Row("pythia-160m", 1024, 32, HALF, "selective", held_out=True),
    Row("pythia-410m", 512, 16, FULL32, held_out=True),
    Row("pythia-410m", 2048, 16, TRUE, "full", held_out=True),
    Row("pythia-1b", 1024, 8, FP8, "cheap", held_out=True),
    Row("pythia-1.4b", 2048, 8, held_out=True),
    Row("pythia-2.8b", 1024, 8, TRUE, "cheap", SMALL_STATE, held_out=True),
    Row("pythia-6.9b", 2048, 4, TRUE, "selective", SMALL_STATE, held_out=True),
    Row("smollm2-135m", 1024, 16, FP8, held_out=True),
    Row("smollm2-360m", 2048, 8, held_out=True),
    Row("smollm2-1.7b", 2048, 4, recompute="cheap", held_out=True),
    Row("llama3.2-1b", 8192, 2, HALF, "full", held_out=True),
    Row("llama3.2-1b", 1024, 16, TRUE, held_out=True),
    Row("llama3.2-1b", 2048, 8, config=LORA, note="lora", held_out=True),
    Row("tinyllama-1.1b", 2048, 8, FP8, held_out=True),
    Row("tinyllama-1.1b", 1024, 16, HALF, "selective", held_out=True),
    Row("llama3.2-3b", 2048, 4, TRUE, held_out=True),
    Row("llama3.2-3b", 8192, 1, "bf16-mixed", "selective", SMALL_STATE, held_out=True),
    Row("llama3-8b", 2048, 4, TRUE, "none", SMALL_STATE, held_out=True),
    Row("qwen2.5-0.5b", 4096, 4, FP8, held_out=True),
    Row("qwen2.5-1.5b", 4096, 2, held_out=True),
    Row("qwen2.5-7b", 4096, 2, recompute="cheap", config={**LORA, **NARROW}, note="lora-q-v", held_out=True),
    Row("qwen3-0.4b", 8192, 2, TRUE, held_out=True),
    Row("qwen3-8b", 2048, 2, config=QLORA, note="qlora", held_out=True),
    Row("mistral-0.7b", 1024, 16, HALF, held_out=True),
    Row("mistral-0.7b", 8192, 2, FP8, "full", held_out=True),
    Row("mistral-7b", 16_384, 1, TRUE, "full", SMALL_STATE, held_out=True),
    # Held out as well: kinds of runs that none of the rows above is. Other optimizers.
    *_unseen(
        Row("llama3.2-1b", 2048, 8, optimizer="lion"),
        Row("llama3.2-1b", 2048, 8, optimizer="muon"),
        Row("qwen2.5-0.5b", 4096, 4, optimizer="muon"),
        Row("gpt2-large", 1024, 8, TRUE, optimizer="sgd"),
        Row("llama3.2-3b", 2048, 4, TRUE, "full", "lion"),
        # Gradient accumulation.
        Row("llama3.2-1b", 4096, 2, accumulated=8, note="accumulate-8"),
        Row("llama3.2-3b", 2048, 2, TRUE, "cheap", accumulated=4, note="accumulate-4"),
        Row("qwen2.5-7b", 2048, 2, config=LORA, accumulated=4, note="lora accumulate-4"),
        # Without the fast path.
        Row("llama3.2-1b", 2048, 4, config={"train.compile": False}, note="uncompiled"),
        Row("gpt2", 1024, 16, config={"train.compile": False, "model.dropout": 0.1}, note="uncompiled dropout"),
        Row("qwen3-1.7b", 4096, 1, TRUE, "full", config={"train.compile": False}, note="uncompiled"),
        Row("qwen2.5-0.5b", 2048, 4, config={"train.loss_impl": "plain"}, note="plain-loss"),
        Row("pythia-410m", 1024, 8, config={"model.attention": "eager"}, note="eager-attention"),
        # Adapters and frozen weights.
        Row("llama3.2-3b", 2048, 4, config={**LORA, "adapter.dora": True}, note="dora"),
        Row("mistral-7b", 2048, 2, recompute="full", config={**LORA, **WIDE}, note="lora-64-dropout"),
        Row("qwen3-4b", 2048, 4, config={**QLORA, "adapter.quantize": "bnb.nf4-dq"}, note="qlora-bnb"),
        Row("llama2-7b", 4096, 1, TRUE, config=LORA, note="lora"),
        Row("llama3.1-8b", 2048, 4, FP8, config=LORA, note="lora"),
        Row("qwen2.5-3b", 2048, 2, config={**LORA, "adapter.train_also": ["*embed_tokens*"]}, note="lora-embeddings"),
        Row("llama3.2-3b", 2048, 4, config={"model.freeze": ["*embed_tokens*", "model.layers.?.*"]}, note="freeze"),
        # Other activation checkpointing, other sizes.
        Row("llama3-8b", 4096, 1, TRUE, optimizer=SMALL_STATE, config=EVERY_SECOND, note="every-2"),
        Row("qwen3-4b", 4096, 1, TRUE, "full"),
        Row("qwen3-1.7b", 4096, 2),
        Row("qwen2.5-3b", 8192, 1, recompute="selective"),
        # Other objectives.
        Row("llama3.2-1b", 1024, 4, config={"train.objective": "dpo"}, note="dpo"),
        Row("llama3.2-3b", 1024, 4, config={**LORA, "train.objective": "dpo"}, note="lora dpo"),
        Row("qwen2.5-0.5b", 2048, 4, config={"train.objective": "orpo"}, note="orpo"),
        Row("bert-large", 512, 32, config=MASKED, note="masked-lm"),
        # Model types that are trained from a folder.
        Row("gemma3-270m", 2048, 8),
        Row("gemma3-1b", 2048, 4),
        Row("olmo2-1b", 4096, 2),
        Row("phi3-mini", 2048, 2, config=LORA, note="lora"),
        Row("smollm3-3b", 2048, 2, TRUE, "cheap"),
        Row("starcoder2-3b", 2048, 2, config=LORA, note="lora"),
        Row("qwen3-moe-1.5b", 2048, 4),
    ),
]  # fmt: skip


def select(patterns: list[str], held_out: bool | None, part: str | None) -> list[Row]:
    """The rows whose names contain one of the patterns (all without patterns), and of those every N-th for `K/N`."""
    chosen = [row for row in ROWS if not patterns or any(fnmatch(row.name, f"*{pattern}*") for pattern in patterns)]
    chosen = [row for row in chosen if held_out is None or row.held_out is held_out]
    if part is None:
        return chosen
    index, count = (int(number) for number in part.split("/"))
    if not 1 <= index <= count:
        raise SystemExit(f"--part {part}: the first number has to be between 1 and the second.")
    return chosen[index - 1 :: count]


def count_steps(seconds: float, *, tiny: bool = False) -> tuple[int, int]:
    """(warmup, measured) steps, if the forecast of a step is `seconds`."""
    if tiny:
        return 1, TINY_STEPS
    warmup = min(max(math.ceil(WARMUP_SECONDS / seconds), FEWEST_WARMUP), MOST_WARMUP)
    return warmup, min(max(math.ceil(MEASURED_SECONDS / seconds), FEWEST_STEPS), MOST_STEPS)
