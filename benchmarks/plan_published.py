"""Results that others published, and the forecast's error on them, by source and by kind of training.

python benchmarks/plan_published.py [--held-out] [--source NAME]

The rows are `plan/published/rows.jsonl`, their sources `sources.json`, and models that the catalogue does not have
`models.json`. A third of the sources is held out: no constant and no trait may be chosen with them in view, and their
error is computed only with `--held-out`.
"""

import argparse
import json
import math
import statistics
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from plan_accuracy import TRAITS

from shoal.catalogue.gpus import GPUS, LINKS, Link
from shoal.catalogue.optimizers import OPTIMIZERS
from shoal.catalogue.shapes import NAMED, ModelShape, block_matrices
from shoal.config.mesh import Mesh
from shoal.plan.machine import usual_network
from shoal.plan.memory import forecast_memory
from shoal.plan.run import FROZEN, Adapter, Run, Trained
from shoal.plan.speed import forecast_speed
from shoal.plan.systems import MEGATRON, SystemTraits
from shoal.plan.terms import GIB

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "benchmarks" / "plan" / "published"
# Share of a device's peak that no training reaches.
POSSIBLE = 0.9
# The Trainer with bf16 weights before transformers 5.
EARLIER = replace(TRAITS["huggingface-bf16"], flash2=True, reentrant=True, upcasts_shards=False)
# A loop of its own around transformers' models before version 5, without autocast and `no_sync`.
LOOP = replace(
    TRAITS["huggingface-bf16"], autocasts=False, unsharded_accumulation=False, reentrant=True, upcasts_shards=False
)
UNITS = {"GiB": 1.0, "GB": 1e9 / GIB, "MiB": 1 / 1024}
# Systems without traits of their own are forecast as the nearest one that has some.
NEAREST: dict[str, SystemTraits] = {
    "oneflow": replace(MEGATRON, overlaps_gradients=True, planned_memory=True),
    # Overlaps data parallelism, and one block less in the first and the last stage.
    "llama3": replace(MEGATRON, overlaps_gradients=True, overlaps_weight_gather=True, even_stages=False),
    # `overlap_sync_grad` in its configs/7B_sft.py; gradients are reduced in the dtype of the weights, flattened and
    # cast, and updated weights sent after the step, rank by rank (internlm/solver/optimizer; `overlap_sync_param` is
    # off).
    "internevo": replace(
        MEGATRON,
        overlaps_gradients=True,
        wide_gradients=False,
        accumulates_in_matmuls=False,
        flattens_gradients=True,
        step_copies=2,
        broadcasts_weights=True,
    ),
    "flash-attention": MEGATRON,
    "tensorflow-xla": replace(MEGATRON, fused_softmax="never", planned_memory=True),
    "pax": replace(MEGATRON, fused_softmax="never", planned_memory=True),
    "maxtext": replace(MEGATRON, fused_softmax="never", planned_memory=True),
    # NVIDIA's BERT: Apex's norms and optimizer, PyTorch's DDP, scores with PyTorch's softmax; later NVFuser.
    "bert-apex": replace(
        MEGATRON, fused_softmax="compiled", accumulates_in_matmuls=False, overlaps_gradients=True, wide_gradients=False
    ),
    # Until transformers 4.45 the logits that a model returned were the fp32 copy; attention was flash attention 2.
    "huggingface-2024": replace(EARLIER, logit_bytes=16.0, upcasts_shards=True),
    # The same with `use_reentrant` false.
    "huggingface-2024-not-reentrant": replace(EARLIER, logit_bytes=16.0, upcasts_shards=True, reentrant=False),
    # The same with bitsandbytes 0.43.0 or 0.43.1 (March to July 2024), and with an earlier one.
    "huggingface-2024-03": replace(EARLIER, logit_bytes=16.0, quantized_keep_inputs=True),
    "huggingface-2023": replace(EARLIER, logit_bytes=16.0, quantized_keep_inputs=True, dequantizes_in_half=True),
    # Of 2023 with fp16 weights, which were dequantized to fp16, and no autocast; PEFT then kept the adapters of weights
    # that are not quantized in their dtype.
    "optimum": replace(TRAITS["huggingface-bf16"], logit_bytes=16.0, autocasts=False, quantized_keep_inputs=True),
    "optimum-narrow": replace(
        TRAITS["huggingface-bf16"], logit_bytes=16.0, autocasts=False, quantized_keep_inputs=True, narrow_adapters=True
    ),
    # A loop of its own around them, which checkpoints blocks within FSDP's units.
    "huggingface-2024-loop": replace(EARLIER, logit_bytes=16.0, upcasts_shards=True, checkpoints_units=False),
    # Of early 2024, with own loops; their scripts cast the adapters to the dtype of the frozen weights, and checkpoint
    # blocks within FSDP's units.
    "huggingface-narrow": replace(
        EARLIER,
        logit_bytes=16.0,
        narrow_adapters=True,
        quantized_keep_inputs=True,
        reentrant=False,
        checkpoints_units=False,
    ),
    # The same with cached keys: `use_cache` was switched off in September 2023.
    "llama-recipes-2023": replace(
        EARLIER,
        logit_bytes=16.0,
        narrow_adapters=True,
        quantized_keep_inputs=True,
        reentrant=False,
        caches_keys=True,
        checkpoints_units=False,
    ),
    # Without mixed precision; and what is allocated, not reserved, of the loss: transformers 4.45 replaced the logits
    # by their fp32 copy, so that three fp32 tensors exist at a time; 4.48 held the logits too.
    "huggingface-4.45": replace(EARLIER, logit_bytes=12.0),
    "huggingface-4.48": EARLIER,
    # The same with the kernels of fms-acceleration, whose loss overwrites the fp32 logits without the last token.
    "fms-kernels-4.45": replace(EARLIER, loss_kernel="always", kernel_logit_bytes=8.0),
    "fms-kernels-4.48": replace(EARLIER, loss_kernel="always", kernel_logit_bytes=10.0),
    # GPT-BigCode's logits were not upcast: without autocast, all of that is in 16 bits.
    "gpt-bigcode-4.48": replace(EARLIER, logit_bytes=6.0),
    "fms-kernels-gpt-bigcode": replace(EARLIER, loss_kernel="always", kernel_logit_bytes=4.0),
    # Qwen's own model code does not upcast its logits, and with DeepSpeed there is no autocast: logits, their copy
    # without the last token and the log-softmax are in 16 bits. Its 4-bit models are GPTQ's.
    "deepspeed-qwen": replace(TRAITS["deepspeed"], logit_bytes=6.0, fused_qkv=True),
    # The same of models with three matmuls: OPT in transformers, and loops with a loss of logits in 16 bits.
    "deepspeed-narrow": replace(TRAITS["deepspeed"], logit_bytes=6.0),
    # Of 2023: transformers' Llama replaced the logits by their fp32 copy, and copied them without the last token.
    "deepspeed-2023": replace(TRAITS["deepspeed"], logit_bytes=16.0),
    # Its LoRA without DeepSpeed: PEFT before 0.12, and one matmul for queries, keys and values.
    "qwen-2023": replace(EARLIER, logit_bytes=16.0, upcasts_shards=True, narrow_adapters=True, fused_qkv=True),
    # A loss of its own over 16-bit logits (benchmark/gpt/model.py); Lightning's plugin has no autocast with DeepSpeed.
    "deepspeed-lightning": replace(TRAITS["deepspeed"], logit_bytes=6.0),
    # ColossalAI's LowLevelZero: gradients stay on the device, and are cast one by one (zero/low_level).
    "colossalai": replace(TRAITS["deepspeed"], offloads_gradients=False),
    # `_allgather_param` in deepspeed/runtime/zero/partition_parameters.py, with a torch.cuda.synchronize() before each.
    "deepspeed-2021": replace(
        MEGATRON, lists_shards=True, wide_gradients=False, accumulates_in_matmuls=False, even_stages=False
    ),
    # FSDP's own mixed precision of fp32 weights (atorch/auto/model_context.py), blocks that are checkpointed within its
    # units from outside of the model, and a loop that holds the outputs: fsdp_llama2.py.
    "atorch": replace(
        EARLIER,
        logit_bytes=16.0,
        caches_keys=True,
        holds_outputs="next",
        checkpoints_units=False,
        reentrant=False,
        wide_base=True,
    ),
    # Its own AdamW then updated one parameter at a time.
    "huggingface-2022": replace(TRAITS["huggingface"], foreach_step=False, wide_embedding_state=False),
    # A loop around transformers' models without autocast: logits, their copy without the last token and the
    # log-softmax are in the dtype of the head, which PEFT upcasts with quantized blocks.
    "transformers-loop": replace(LOOP, logit_bytes=6.0),
    "transformers-loop-wide": replace(LOOP, logit_bytes=10.0),
    # The same around the loss of transformers 5's own models.
    "transformers-5-loop": replace(LOOP, logit_bytes=14.0, reentrant=False, holds_outputs="step"),
    # transformers' models under FSDP2, adapters of its own in the dtype of the layer (components/_peft/lora.py).
    "automodel": replace(LOOP, narrow_adapters=True, logit_bytes=12.0),
    "fms": TRAITS["torchtitan"],
    # torch.optim.AdamW as it is, in examples/pytorch/tensor_parallel/train.py.
    "lightning-2d": replace(TRAITS["torchtitan"], foreach_step=True),
    # Its command's loss is computed with its gradient, 1,024 tokens at a time (xtuner/v1/train/arguments/arguments.py).
    "xtuner": replace(TRAITS["torchtitan"], fused_rows=1024),
    # The model, with its loss, is compiled as a whole.
    "nanogpt": replace(TRAITS["autocast"], loss_kernel="compiled", pads_vocabulary=True, fused_activation=True),
    # The course's own modules (stanford-cs336/assignment2-systems, cs336_basics/model.py).
    "cs336": replace(TRAITS["by-hand"], written_out=True),
    "cs336-autocast": replace(TRAITS["autocast"], written_out=True),
    "plain-torch": replace(TRAITS["by-hand"], loss_kernel="compiled"),
    "compiled-torch": replace(TRAITS["by-hand"], loss_kernel="compiled", pads_vocabulary=True),
    # F.multi_head_attention_forward in its modules/multihead_attention.py has its softmax in the compute dtype.
    "fairseq": replace(TRAITS["by-hand"], fused_softmax="always"),
    # Of 2023 and 2024, with flash attention 2 on Hopper.
    "flagscale": replace(MEGATRON, flash2=True),
    "megatron-0.6": replace(MEGATRON, flash2=True),
    # Lit-GPT with the flash-attention package's norms, rotary embeddings, SwiGLU and loss.
    "lit-gpt-fused": replace(TRAITS["litgpt"], unfused_norms=False, fused_activation=True, loss_kernel="always"),
    # Without fp32 gradients: "grad_accum_dtype": "bf16" in its ds_config.json, or before it had the BF16_Optimizer.
    "megatron-deepspeed-narrow": replace(
        TRAITS["megatron-deepspeed"], wide_gradients=False, keeps_added_gradients=False
    ),
    # With pp-partition-method 'type:transformer|embedding'.
    "megatron-deepspeed-balanced": replace(TRAITS["megatron-deepspeed"], even_stages=False),
    # --overlap-grad-reduce, --overlap-param-gather and --main-grads-dtype bf16.
    "megatron-overlapped": replace(
        MEGATRON, overlaps_gradients=True, overlaps_weight_gather=True, wide_gradients=False
    ),
    # NeMo with ub_tp_comm_overlap: False.
    "nemo-plain": replace(TRAITS["nemo"], overlaps_tensor=False),
    # flash-attn's norms and attention, an eager activation and loss (cast_to_fp32 in nanotron/models/llama.py), fp32
    # gradients that FP32GradientAccumulator adds up, and stages that are balanced by get_block_compute_costs.
    "nanotron": replace(
        MEGATRON,
        fused_activation=False,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        even_stages=False,
        flash2=True,
    ),
    # Aleph Alpha's scaling: gradients are reduced in fp32 after the backward pass (allreduce_no_retain in
    # core/optimizer), the activation and the loss are PyTorch's, and norms too unless a run names their kernel.
    "aleph-scaling": replace(
        MEGATRON, fused_activation=False, loss_kernel="never", accumulates_in_matmuls=False, flash2=True
    ),
    "aleph-scaling-plain-norm": replace(
        MEGATRON,
        unfused_norms=True,
        fused_activation=False,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        flash2=True,
    ),
    # NeMo of 2022, with Apex's distributed_fused_adam before overlap_param_sync; and overlap_grad_sync: False.
    "nemo-2022": replace(TRAITS["nemo"], overlaps_tensor=False, overlaps_weight_gather=False),
    "nemo-2022-bert": replace(
        TRAITS["nemo"], overlaps_tensor=False, overlaps_weight_gather=False, overlaps_gradients=False
    ),
    # --overlapped-distributed-optimizer and --no-gradient-accumulation-fusion: buckets are reduced in the backward
    # pass, and gathered asynchronously until a parameter is used; and its comparison with Megatron's own.
    "megatron-llama": replace(
        MEGATRON, flash2=True, accumulates_in_matmuls=False, overlaps_gradients=True, overlaps_weight_gather=True
    ),
    "megatron-llama-plain": replace(MEGATRON, flash2=True, accumulates_in_matmuls=False),
    # C and CUDA: bf16 weights and gradients, fp32 master weights with the optimizer, kernels fused by hand, gradients
    # reduced block by block in the backward pass (multi_gpu_async_reduce_gradient), memory allocated once.
    "llm.c": replace(MEGATRON, wide_gradients=False, overlaps_gradients=True, planned_memory=True),
    # Its successor, with chunks of the head.
    "llm.q": replace(MEGATRON, wide_gradients=False, overlaps_gradients=True, planned_memory=True),
    # scaled_upper_triang_masked_softmax_fusion and bias_gelu_fusion: false; ZeRO-1 with overlap_comm.
    "neox": replace(
        MEGATRON,
        fused_softmax="never",
        fused_activation=False,
        loss_kernel="never",
        wide_gradients=False,
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
    ),
    # Its 20B.yml has both of them.
    "neox-fused": replace(
        MEGATRON,
        loss_kernel="never",
        wide_gradients=False,
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        even_stages=False,
    ),
    # flash_attn's GPT under autocast: fused_mlp, fused_dropout_add_ln, residual_in_fp32, its in-place loss; AdamW in
    # PyTorch's ZeroRedundancyOptimizer.
    "flash-attn-amp": replace(
        TRAITS["autocast"],
        unfused_norms=False,
        fused_activation=True,
        fused_qkv=True,
        loss_kernel="always",
        foreach_step=True,
        flash2=True,
    ),
    # Lightning's FSDP with precision 16: parameters, gradients and buffers in fp16.
    "lightning-fp16": replace(TRAITS["by-hand"], narrow_reduction=True),
    # GeminiPlugin: chunks of 16-bit weights that are gathered, fp32 masters in shards, Apex's norms.
    "colossal-gemini": replace(TRAITS["deepspeed"], unfused_norms=False, hooks_modules=False),
    # --overlap-grad-reduce, --overlap-param-gather, --no-gradient-accumulation-fusion, and a loss that is not fused.
    "megatron-tests": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
    ),
    # nanoGPT's kind of loop without DDP: gradients are reduced in the step of its sharded optimizers.
    "nanochat": replace(TRAITS["autocast"], loss_kernel="compiled", pads_vocabulary=True, overlaps_gradients=False),
}
# PyTorch's wheels had the CUDA libraries of 2023 (12.1) until version 2.5; these systems' results are of containers or
# builds with those of their day.
NEW_WHEELS = (2024, 10)
# From PEFT 0.12 on, adapters of 16-bit layers are in fp32 (autocast_adapter_dtype); before, in the layer's dtype.
FP32_ADAPTERS = (2024, 8)
# transformers 5 is the first version whose activation checkpointing is not reentrant by default; and systems without
# traits of that time that use the model's own.
NOT_REENTRANT = (2025, 12)
MODEL_CHECKPOINTS = {"deepspeed", "deepspeed-qwen", "huggingface", "huggingface-bf16", "huggingface-2022"}
CONTAINERS = {
    *(
        "bert-apex",
        "flagscale",
        "llama3",
        "llm.c",
        "maxtext",
        "megatron",
        "megatron-0.6",
        "megatron-overlapped",
        "nemo",
    ),
    *("nemo-plain", "pax"),
}
# Keys of a row that describe the run and are fields of `Run`, under the same name.
SETTINGS = {one.name for one in fields(Run)} - {"gpu", "link", "network", "mesh", "adapter", "traits", "devices"}
# What `Run.recompute` may be besides a number; single parts are `recomputed_parts`.
RECOMPUTE = {"none", "cheap", "selective", "full", "offload", "offload-all", "parts"}
# Keys that say where a figure comes from, or that `_run` reads.
OTHERS = {
    *("source", "system", "model", "gpu", "gpus", "per_node", "mesh", "sequence", "accum", "adapter", "network"),
    *("memory", "tokens_per_second_per_gpu", "unknown", "not_counted", "date"),
}


@dataclass(frozen=True)
class Published:
    """One row: a run that somebody published, with its memory or its speed."""

    source: str
    label: str
    kind: str  # full, LoRA, QLoRA
    run: Run | None  # None: the forecast cannot describe it
    gib: float | None
    memory_kind: str  # allocated, reserved, device (with the CUDA context)
    tokens: float | None  # per second and GPU
    unknown: str
    unsaid: tuple[str, ...]  # what of the run the forecast cannot say
    not_counted: str = ""  # why its speed says nothing about the forecast


@dataclass(frozen=True)
class Figure:
    """One figure with its forecast."""

    row: Published
    what: str  # memory, speed
    published: float
    forecast: float

    @property
    def error(self) -> float:
        return self.forecast / self.published - 1


@cache
def sources() -> dict[str, dict[str, Any]]:
    """Address, date and versions of every source, and whether it is held out."""
    found: dict[str, dict[str, Any]] = json.loads((FOLDER / "sources.json").read_text())
    return found


def read_published(*, held_out: bool = False) -> list[Published]:
    """The rows of the sources that are held out, or of those that are not."""
    models = json.loads((FOLDER / "models.json").read_text())
    lines = (FOLDER / "rows.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [_read(one, models) for one in found if sources()[one["source"]]["held_out"] is held_out]


def _read(line: dict[str, Any], models: dict[str, Any]) -> Published:
    adapter = line.get("adapter")
    kind = "full" if adapter is None else "QLoRA" if adapter.get("quantize") else "LoRA"
    unsaid = [key for key in line if key not in SETTINGS | OTHERS]
    run: Run | None = None
    if line["gpu"] not in GPUS:
        unsaid.append(line["gpu"])
    elif line.get("optimizer", "adamw") not in OPTIMIZERS:
        unsaid.append(line["optimizer"])
    else:
        shape = NAMED[line["model"]] if line["model"] in NAMED else ModelShape(**models[line["model"]])
        run = _run(line, shape)
    value, unit, memory_kind = line.get("memory", (math.nan, "GiB", ""))
    mesh = " ".join(f"{axis}{degree}" for axis, degree in line["mesh"].items() if degree > 1)
    extra = [kind] if kind != "full" else []
    extra += [str(line[key]) for key in ("optimizer", "offload") if key in line]
    label = (
        f"{line['system']} {line['model']} {' '.join(extra)}, {line['gpus']} × {line['gpu']}, {line['strategy']} "
        f"{mesh}, {line['micro_batch']} × {line['sequence']} × {line['accum']}, recompute {line['recompute']}, "
        f"{line['precision']}"
    )
    return Published(
        line["source"],
        " ".join(label.split()).replace(" ,", ","),
        kind,
        run,
        None if math.isnan(value) else value * UNITS[unit],
        memory_kind,
        line.get("tokens_per_second_per_gpu"),
        line["unknown"],
        tuple(unsaid),
        line.get("not_counted", "") or (_impossible(run, line) if run is not None else ""),
    )


def _impossible(run: Run, line: dict[str, Any]) -> str:
    """A sentence if the published speed is more than the device's peak: then something else than stated was run."""
    blocks, head = run.shape.layers * block_matrices(run.shape), run.shape.vocab * run.shape.hidden
    needed = 4 * (blocks + head) + 2 * (blocks + head) * (run.adapter is None)
    needed += 2 * blocks * (run.recompute == "full")
    peak = run.gpu.fp8 if run.precision == "fp8" else run.peak
    share = line.get("tokens_per_second_per_gpu", 0.0) * needed / (peak or run.peak)
    return f"matmuls alone would need {share:.2f} of the device's peak" if share > POSSIBLE else ""


def _run(line: dict[str, Any], shape: ModelShape) -> Run:
    gpu = GPUS[line["gpu"]]
    if line["system"] == "litgpt":
        shape = replace(shape, tied=False)  # its models have a head of their own
    network = LINKS[usual_network(gpu)]
    if "network" in line:
        network = Link("given", line["network"]["gb_per_second"] * 1e9, 10e-6)
    traits = TRAITS.get(line["system"]) or NEAREST[line["system"]]
    traits = replace(traits, software=_year(line))
    adapter = None
    plain = line["precision"] == "bf16-true" and not (line.get("adapter") or {}).get("quantize")
    if traits.peft and plain and _date(line) < FP32_ADAPTERS:
        traits = replace(traits, narrow_adapters=True)
    held = line.get("adapter") is not None and line["strategy"] in ("fsdp", "zero3")
    if line["system"] in MODEL_CHECKPOINTS and _date(line) < NOT_REENTRANT and not held:
        traits = replace(traits, reentrant=True)
    if line.get("adapter") is not None:
        given = dict(line["adapter"])
        adapter = Adapter(given.pop("rank"), tuple(given.pop("targets")), **given)
    settings = {
        key: tuple(value) if isinstance(value, list) else value  # a run is a key of a cache
        for key, value in line.items()
        if key in SETTINGS and key not in OTHERS
    }
    precision = line["precision"]
    assert line["recompute"] in RECOMPUTE or isinstance(line["recompute"], int), line
    return Run(
        **{
            **settings,
            "shape": shape,
            "gpu": gpu,
            "link": LINKS[gpu.link],
            "network": network,
            "length": line["sequence"],
            "devices": line["per_node"],
            "mesh": Mesh(**line["mesh"]),
            "grad_accum_steps": line["accum"],
            "reduce_bytes": 2 if precision == "bf16-true" or traits.masters_with_optimizer else 4,
            "adapter": adapter,
            "trained": Trained() if adapter is None else FROZEN,
            "traits": traits,
        }
    )


def _year(line: dict[str, Any]) -> int:
    """The year of a row's libraries, by its own date, such as 24.09, or that of its source."""
    year, month = _date(line)
    outdated = line["system"] not in CONTAINERS and (year, month) < NEW_WHEELS
    return 2023 if outdated and year == 2024 else year


def _date(line: dict[str, Any]) -> tuple[int, int]:
    """Year and month of a row, by its own date or that of its source."""
    date = f"20{line['date']}" if "date" in line else sources()[line["source"]]["date"]
    return int(date[:4]), int(date[5:7] or 1)


def compare(rows: list[Published], *, all_counted: bool = False) -> list[Figure]:
    """Every figure that the forecast can say something about; `all_counted`: also those that are not counted."""
    found = []
    for row in rows:
        if row.run is None:
            continue
        if row.gib is not None:
            memory = forecast_memory(row.run)
            of_kind = {
                "allocated": memory.allocated,
                "reserved": memory.reserved,
                "device": memory.reserved + memory.context,
            }
            found.append(Figure(row, "memory", row.gib, of_kind[row.memory_kind] / GIB))
        if row.tokens is not None and (all_counted or not row.not_counted):
            found.append(Figure(row, "speed", row.tokens, forecast_speed(row.run).tokens_per_second_per_gpu))
    return found


def errors(figures: list[Figure]) -> tuple[float, float, float]:
    """(median, 90th percentile, bias)."""
    sizes = sorted(abs(one.error) for one in figures)
    worst = sizes[min(len(sizes) - 1, math.ceil(0.9 * len(sizes)) - 1)]
    return statistics.median(sizes), worst, statistics.median(one.error for one in figures)


def print_errors(name: str, figures: list[Figure]) -> None:
    cells = [name.ljust(34)]
    for what in ("memory", "speed"):
        some = [one for one in figures if one.what == what]
        if not some:
            cells.append(" " * 44)
            continue
        median, ninety, bias = errors(some)
        cells.append(f"{what} {len(some):4}: {median:5.0%} median {ninety:5.0%} 90% {bias:+5.0%} bias")
    print("  ".join(cells))


def main() -> None:
    parser = argparse.ArgumentParser(description="The forecast's error on published results.")
    parser.add_argument("--held-out", action="store_true", help="only the sources that are kept aside")
    parser.add_argument("--source", help="every row of one source")
    arguments = parser.parse_args()
    rows = read_published(held_out=arguments.held_out)
    figures = compare(rows)
    if arguments.source:
        for one in sorted(
            (each for each in figures if each.row.source == arguments.source), key=lambda e: -abs(e.error)
        ):
            print(f"{one.error:+5.0%} {one.what} {one.published:9.1f} → {one.forecast:9.1f}  {one.row.label}")
        return
    print_errors("all", figures)
    for kind in ("full", "LoRA", "QLoRA"):
        print_errors(kind, [one for one in figures if one.row.kind == kind])
    for name in sources():
        some = [one for one in figures if one.row.source == name]
        if some:
            print_errors(name, some)
    unsaid = {one for row in rows for one in row.unsaid}
    for what in sorted(unsaid):
        print(f"cannot say: {what} in {sum(what in row.unsaid for row in rows)} rows")


if __name__ == "__main__":
    main()
