"""The forecasts in the tables of docs/howto and docs/concepts: by name, the settings of `shoal plan` for each row."""

from collections.abc import Callable, Iterator

from benchmarks.pictures.forecast import gib, plan, terms
from benchmarks.pictures.memory import SETTINGS as MEMORY
from benchmarks.pictures.strategy import LEAVES, figures
from shoal.plan.terms import GIB

Rows = dict[str, str]
H100 = "hardware.gpu=h100-80gb hardware.devices=8"
EIGHT_B = f"model.shape=llama3-8b {H100} data.max_length=8192"
ONE_B = "model.shape=llama3.2-1b hardware.gpu=h200 hardware.devices=1 data.max_length=4096 train.global_batch=32"


def keyed(*settings: str) -> Rows:
    """Rows that are named by what they set."""
    return {f"`{' '.join(one.split())}`": one for one in settings}


def memory() -> Iterator[str]:
    """Each term by its formula, and as the plan has it: the two agree, or no page is written."""
    parameters, devices, layers, tokens = 8_030_261_248, 8, 32, 8192
    hidden, ffn, heads, keys, head_size, vocabulary = 4096, 14336, 32, 8, 128, 128_256
    saved = layers * tokens
    formulas: dict[str, tuple[str, float]] = {
        "weights": ("4 P / N", 4 * parameters / devices),
        "optimizer state": ("8 P / N", 8 * parameters / devices),
        "gradients": ("4 P / N", 4 * parameters / devices),
        "gathered weights": ("2 · 2 V h: the head, and the buffer it is gathered into", 4 * vocabulary * hidden),
        "norm inputs": ("l T · (4 + 2) h: the first in fp32, the second in bf16", saved * 6 * hidden),
        "linear inputs": ("l T · 2 · 2 h: of attention and of the MLP", saved * 4 * hidden),
        "queries, keys, values": ("l T · 2 (h + 2 k d)", saved * 2 * (hidden + 2 * keys * head_size)),
        "attention output": ("l T · (2 h + 4 a): with the log-sum-exp of each head", saved * (2 * hidden + 4 * heads)),
        "MLP intermediates": ("l T · 2 · 3 f: gate, up and their product", saved * 6 * ffn),
        "head": ("8 T h + 6 V h: hidden states, the head's weight gradient", (8 * tokens + 6 * vocabulary) * hidden),
    }  # fmt: skip
    tree = terms(MEMORY)
    yield "| term | formula, in bytes | by the formula, GiB | `shoal plan`, GiB |"
    yield "| --- | --- | --- | --- |"
    total = 0.0
    for name, (formula, amount) in formulas.items():
        found = tree.find(name)
        assert found is not None, name
        assert abs(found.amount - amount) < 1e-3 * amount, (name, gib(found.amount), amount / GIB)
        total += amount
        yield f"| {name} | {formula} | {amount / GIB:.2f} | {gib(found.amount):.2f} |"
    yield f"| **allocated** | | {total / GIB:.2f} | {gib(tree.amount):.2f} |"


def shardings() -> Iterator[str]:
    yield "| `parallel` | GiB per device, 8 × H100 | tokens/s | GiB per device, 2 × 8, 25 Gb/s | tokens/s |"
    yield "| --- | --- | --- | --- | --- |"
    node = "model.shape=llama3.2-1b hardware.gpu=h100-80gb hardware.devices=8 data.max_length=4096 train.micro_batch=4"
    for words, settings in {
        "`strategy: ddp`": "parallel.strategy=ddp",
        "`strategy: zero1`": "parallel.strategy=zero1",
        "`strategy: zero2`": "parallel.strategy=zero2",
        "`strategy: fsdp`": "parallel.strategy=fsdp",
        "`strategy: fsdp, reshard: false`": "parallel.strategy=fsdp parallel.reshard=false",
        "`strategy: fsdp, sharding: hybrid_shard`": "parallel.strategy=fsdp parallel.sharding=hybrid_shard",
    }.items():
        cells = []
        for machine in ("", "hardware.nodes=2 hardware.network=ethernet-25"):
            if "hybrid" in settings and not machine:
                cells += ["", ""]
                continue
            choice = plan(f"{node} {settings} {machine} train.global_batch=64").choice
            cells += [f"{gib(choice.memory.worst.reserved):.1f}", f"{choice.speed.tokens_per_second_per_gpu:,.0f}"]
        yield f"| {words} | {' | '.join(cells)} |"


def strategy() -> Iterator[str]:
    """The examples of the picture, with all of their settings."""
    yield "| example | settings | the plan takes | GiB per device | tokens/s per device |"
    yield "| --- | --- | --- | --- | --- |"
    for leaf in LEAVES:
        name, memory, speed = figures(leaf)
        yield f"| {leaf.example} | `{leaf.settings}` | {name} | {memory:.1f} | {speed:,.0f} |"


TABLES: dict[str, Callable[[], Iterator[str]] | tuple[str, Rows]] = {
    "memory": memory,
    "shardings": shardings,
    "strategy": strategy,
    "tensor": (
        f"{EIGHT_B} parallel.strategy=fsdp train.global_batch=64 train.micro_batch=1",
        keyed("parallel.tp=1", "parallel.tp=2", "parallel.tp=4", "parallel.tp=8"),
    ),
    "pipeline": (
        "model.shape=llama3-8b hardware.gpu=h100-80gb hardware.devices=2 hardware.nodes=4 data.max_length=4096 "
        "parallel.strategy=ddp parallel.pp=8 train.micro_batch=1 train.recompute=full",
        keyed(
            "train.global_batch=8",
            "train.global_batch=32",
            "train.global_batch=128",
            "train.global_batch=32 parallel.pp_schedule=interleaved",
            "train.global_batch=32 parallel.pp_schedule=zero-bubble",
        ),
    ),
    "context": (
        f"model.shape=llama3.1-8b {H100} parallel.strategy=fsdp train.recompute=full train.global_batch=8 "
        "train.micro_batch=1",
        {
            f"{length:,} tokens, `{setting}`": f"data.max_length={length} {setting} parallel.cp_method=ulysses"
            for length in (32_768, 65_536, 131_072)
            for setting in ("parallel.cp=1", "parallel.cp=2", "parallel.cp=8")
        },
    ),
    "recompute": (
        f"{EIGHT_B} parallel.strategy=fsdp train.global_batch=64 train.micro_batch=1",
        keyed(*(f"train.recompute={kind}" for kind in ("none", "cheap", "selective", "full", "offload"))),
    ),
    "precision": (
        f"{ONE_B} train.micro_batch=4",
        keyed(*(f"train.precision={kind}" for kind in ("32-true", "bf16-mixed", "bf16-true", "fp8"))),
    ),
    "batch": (
        ONE_B,
        {
            f"`train.micro_batch={size}`: {32 // size} gradient accumulation steps": f"train.micro_batch={size}"
            for size in (1, 2, 4, 8, 16)
        },
    ),
    "adapters": (
        "model.shape=llama3-8b hardware.gpu=rtx4090 hardware.devices=1 data.max_length=2048 train.micro_batch=1 "
        "train.global_batch=16",
        keyed(
            "adapter.kind=none",
            "adapter.kind=lora",
            "adapter.kind=lora train.recompute=cheap",
            "adapter.kind=qlora",
            "adapter.kind=qlora train.recompute=full",
        ),
    ),
}
