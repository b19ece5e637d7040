"""The host's time: what it takes to launch a micro-batch's kernels, which a faster device waits for."""

from shoal.plan.memory.states import adapted, quantizable, stored_tensors
from shoal.plan.run.blocks import Linear, linears
from shoal.plan.run.run import Run
from shoal.plan.run.settings import ENGINE_SINCE
from shoal.plan.speed.experts import experts_host, experts_waiting, times_run
from shoal.plan.speed.int8 import int8_host, int8_waiting
from shoal.plan.speed.launched import LLAMA_OPERATIONS, block_operations
from shoal.plan.speed.zero_host import zero_hooks, zero_step

# Host time to launch the kernels of a block, forward and backward; a faster device waits for its host. Eager that of a
# Llama; of blocks with more or fewer operations (`launched.py`) as much more or less: a GPT-NeoX, which has 112 in
# place of 171, takes 1.32 ms (benchmarks/gpu/trainer_h200/block_host.json).
EAGER_BLOCK_HOST = 2.0e-3
# An operation of BERT takes 1.4 times as long, with smaller modules around it: 17 to 18 ms for 12 blocks whatever the
# batch, and 23 ms with eager attention, on an A100 (huggingface/transformers, docs/source/en/model_doc/bert.md of April
# 2024). On the host of an H200 1.6 and 1.8 ms per block were measured (benchmarks/gpu/compiled_loss_h200).
ENCODER_HOST = 1.4
COMPILED_BLOCK_HOST = 2.2e-3  # measured on the host of an H200: benchmarks/gpu/small_h200
# The same if the model is compiled with its loss as one graph, without guards and calls between its blocks: 0.6 of it
# in one call (benchmarks/gpu/small_gpt_h200). GPT-2 with one sequence of 1,024 tokens takes an H100 12.5 ms, so at most
# 0.8 per block (Jjschwartz/gollem, experiments/gpt2).
GRAPH_BLOCK_HOST = 1.3e-3
# The same of Megatron's layers, which are modules of Transformer Engine since 2023; with fp8, which casts weights and
# inputs and keeps their scales; and of a micro-batch around its blocks: data, embedding, head, loss, its schedule. From
# runs that wait for their host, whose speed was measured beside each of them (benchmarks/gpu/megatron_h200). Published
# ones are near: 48 layers take 220 ms with one sequence of 1,024 tokens, of which 37 ms are optimizer, head and loss
# (vuiseng9/megatron-tutorials); Llama 2 70B with adapters takes 64 B200 1.2 times as long without CUDA graphs
# (docs.nvidia.com/dl-cuda-graph/latest/examples/llama2-70b-lora.html) as the 0.254 s that it takes with them
# (mlcommons/training_results_v5.0, Oracle's), for 80 layers.
ENGINE_BLOCK_HOST, ENGINE_FP8_HOST, ENGINE_MICRO_BATCH_HOST = 3.5e-3, 1.2e-3, 10e-3
# Host time of an adapted layer, eager: about twenty kernels forward and backward, and PEFT's Python between them; and
# of a quantized one, which bitsandbytes dequantizes in Python in both passes. From steps that hardly depend on the
# length of their sequences: OpenLLaMA 7B with adapters in all layers, two sequences of 256 tokens under autocast on an
# A100: 0.36 s with LoRA, and 0.68 s with QLoRA and activation checkpointing (Vertex Model Garden's benchmark report).
# About 0.04 s of that are its optimizer step, with 448 tensors.
EAGER_ADAPTER_HOST = 0.65e-3
# Without the casts of an adapter in another dtype, 14 kernels are left of 25; and ten in adapters that are not PEFT's:
# LoRALinear in torchtune/modules/peft/lora.py and litgpt/lora.py, and Unsloth's autograd functions.
NARROW_ADAPTER_HOST, OWN_ADAPTER_HOST = 0.36e-3, 0.26e-3
# What DoRA in PEFT adds to that: the kernels of whole matrices in the forward pass. A block with seven adapters took
# the host of an H200 7.9 and 8.1 ms, without DoRA 4.7 and 5.2 (benchmarks/gpu/trainer_h200/block_host.json).
DORA_HOST, DORA_KERNELS = 0.45e-3, 20
QUANTIZED_HOST = 0.41e-3
# That is of a layer that also casts, because PEFT has upcast what is around it. Without casts: a step of one sequence
# of 256 tokens with adapters on queries and values of Llama 2 7B, without autocast and with eager attention, takes 4.7
# ms per block (huggingface/optimum-benchmark, examples/training-llamas).
DEQUANTIZED_HOST = 0.11e-3
# Host time of FSDP2 for each block: hooks before and after both passes, in Python, all-gather, reshard and reduce.
# Measured with collectives that return at once: benchmarks/gpu/fsdp_host_h200.
FSDP_HOST = 2.6e-3
# How much longer a block takes if its tensor parallelism is DTensor's, which dispatches every operation in Python: with
# layers that gather and scatter along the sequence, and where each rank has all of it. Measured the same way, also with
# activation checkpointing (3.7 and 3.0 times) and with queries and keys that stay DTensors (4.8 and 4.7):
# benchmarks/gpu/tp_host_h200.
DTENSOR_HOST, REPLICATED_DTENSOR_HOST = 4.6, 3.5
# Autocast launches a cast for every weight, input and bias of a linear layer, and for their gradients. Frozen weights
# under adapters are in 16 bits already.
AUTOCAST_HOST = 1.5
# How much longer the cores of a Grace take than those of the host of an H200, of which the other times are: a forward
# pass of a linear layer of PyTorch takes it 33.2 microseconds on a GH200 and 37.1 on a GB200, a DGX H100's Xeon 13.5
# (NVIDIA/TransformerEngine, issue 2053), and that host 19.0, in the median of three calls
# (benchmarks/gpu/linear_host_h200).
H200_LINEAR = 19.04
GRACE_HOST = {"nvlink-c2c": 33.17 / H200_LINEAR, "nvlink-c2c-shared": 37.08 / H200_LINEAR}
# What a forward pass without autograd adds to that, as of a reference model; and activation checkpointing: reentrant it
# is such a pass, and otherwise every saved tensor goes through hooks in Python. Measured on blocks of a Llama with and
# without adapters, on the host of an H200: benchmarks/gpu/trainer_h200.
FORWARD_HOST, HOOKED_HOST = 0.4, 0.9
# Host time of an optimizer step, exposed where the host has waited for the loss: clipping, AdamW's lists of tensors,
# the scheduler, the next batch; and for each trained tensor, of which PEFT's are deep in a tree of modules. 8-bit AdamW
# launches its kernels tensor by tensor, and Adafactor some twenty each. Measured between backward and forward passes
# of the Trainer on the host of an H200: benchmarks/gpu/trainer_h200/kernels.jsonl.
STEP_HOST, TENSOR_HOST, ADAPTER_TENSOR_HOST = 4e-3, 0.02e-3, 0.08e-3
OPTIMIZER_HOST = {"adamw8bit": 0.09e-3, "adafactor": 0.45e-3}
# Between two kernels a device is idle for a moment, however long ago the second was launched: what step_ms has beside
# busy_ms and between_ms in the same file, in runs that do not wait for their host. Compiled blocks are forecast from
# runs that have these gaps. Kernels of an adapted layer: as above.
GAP = 1.2e-6
EAGER_ADAPTER_KERNELS, NARROW_ADAPTER_KERNELS, OWN_ADAPTER_KERNELS = 25, 14, 10


def relative_host_time(run: Run) -> float:
    """How many times as long the host takes as the one beside an H200 on which the times in this file were measured."""
    if run.host_block_ms is not None:
        return run.host_block_ms / (1e3 * EAGER_BLOCK_HOST)
    return GRACE_HOST.get(run.gpu.host_link.name, 1.0)


def host_seconds(run: Run, blocks: int, ends: int = 2) -> float:
    """Host time to launch the kernels of a micro-batch, forward and backward. `ends`: how many of the first and the
    last pipeline rank this one is."""
    if run.traits.graphs_layers:
        return 0.0
    has_engine = run.compiled and run.traits.fused_by_hand and run.has_engine
    around = ends / 2 * ENGINE_MICRO_BATCH_HOST * has_engine
    return (_launching(run, blocks) + around) * relative_host_time(run)


def launch_gaps(run: Run, blocks: int) -> float:
    """Seconds that the device is idle between the eager kernels of a micro-batch, and where the host has waited."""
    if run.gpu.is_cpu:
        return 0.0
    waiting = (experts_waiting(run) + int8_waiting(run)) * relative_host_time(run)
    if run.compiled:
        return waiting * blocks
    kernels = block_operations(run)
    if run.adapter is not None:
        kernels += sum(times_run(run, one) * _adapter_launches(run, one)[1] for one in adapted(run))
        kernels += DORA_KERNELS * _adapted_layers(run) * (run.adapter.dora and run.traits.peft)
    if run.casts_weights:
        kernels *= AUTOCAST_HOST
    # A forward pass has a third of the kernels of both.
    again = (run.repeated_share + run.reference_pass) / 3
    return (GAP * kernels * (1 + again) + waiting) * blocks


def _launching(run: Run, blocks: int) -> float:
    """Host time to launch the kernels of a micro-batch, both passes, on a host with an x86 CPU."""
    if run.compiled and not run.traits.liger_kernels:
        block = GRAPH_BLOCK_HOST if run.traits.compiles_loss else COMPILED_BLOCK_HOST
        if _is_fused_by_hand(run):
            block = ENGINE_BLOCK_HOST + ENGINE_FP8_HOST * (run.precision == "fp8" and run.has_engine)
        # Kernels that are fused by hand are launched one by one, also those of a recomputed forward pass.
        again = FORWARD_HOST * block * run.repeated_share if run.traits.fused_by_hand else 0.0
        return (block + again + experts_host(run) + zero_hooks(run) + _unit_hooks(run)) * blocks
    block = EAGER_BLOCK_HOST
    if not run.compiled:
        block *= _relative_operations(run)
    if run.adapter is not None:
        block += sum(times_run(run, one) * _adapter_launches(run, one)[0] for one in adapted(run))
        if run.adapter.dora and run.traits.peft:
            block += DORA_HOST * _adapted_layers(run)
        if run.in_int8:
            block += int8_host(run)
        elif run.adapter.quantize is not None:
            bare = run.adapter.quantize != "gptq" and run.layer_bytes == run.compute_bytes and not run.casts_dequantized
            each = DEQUANTIZED_HOST if bare else QUANTIZED_HOST
            block += each * sum(times_run(run, one) for one in quantizable(run))
    if run.casts_weights:
        block *= AUTOCAST_HOST
    if run.traits.dtensors and run.mesh.tp > 1:
        block *= DTENSOR_HOST if run.sequence_parallel else REPLICATED_DTENSOR_HOST
    again = FORWARD_HOST * block
    if not run.traits.reentrant:
        # Hooks take as long in blocks with fewer operations: 2.0 ms of GPT-2's and GPT-NeoX's (the same file).
        again = HOOKED_HOST * max(block, EAGER_BLOCK_HOST)
    launched = block + again * run.repeated_share + FORWARD_HOST * block * run.reference_pass
    return (launched + experts_host(run) + zero_hooks(run) + _unit_hooks(run)) * blocks


def _is_fused_by_hand(run: Run) -> bool:
    """Whether the host launches the fused kernels of Transformer Engine, or others like them, one by one."""
    traits = run.traits
    return traits.fused_by_hand and not traits.planned_memory and not 0 < traits.software < ENGINE_SINCE


def _unit_hooks(run: Run) -> float:
    """Host time of FSDP's hooks around a block, which is one of its units."""
    of_fsdp = run.sharded and not run.traits.hooks_modules and not run.traits.planned_memory
    return FSDP_HOST if of_fsdp else 0.0


def _relative_operations(run: Run) -> float:
    """Operations of a block relative to a Llama's, as the host's time counts them."""
    return block_operations(run) / LLAMA_OPERATIONS * (ENCODER_HOST if run.shape.traits.post_norm else 1.0)


def _adapted_layers(run: Run) -> float:
    """The adapted layers of a block that a micro-batch reaches."""
    return sum(times_run(run, one) for one in adapted(run))


def _adapter_launches(run: Run, one: Linear) -> tuple[float, int]:
    """Host time and kernels of one adapted layer."""
    if run.fuses_adapter(one.name) or not run.traits.peft:
        return OWN_ADAPTER_HOST, OWN_ADAPTER_KERNELS
    if run.narrow_adapters:
        return NARROW_ADAPTER_HOST, NARROW_ADAPTER_KERNELS
    return EAGER_ADAPTER_HOST, EAGER_ADAPTER_KERNELS


def _reads_overflow(run: Run) -> bool:
    """Whether the host reads, before the step, whether a gradient has overflowed: GradScaler does (_maybe_opt_step in
    torch/amp/grad_scaler.py), but for a fused optimizer, which reads it on the device."""
    scales = run.precision == "16-mixed" and run.in_autocast and not run.traits.fused_step
    return scales and (run.foreach_step or run.optimizer != "adamw")


def step_host_seconds(run: Run, blocks: int, device: float) -> float:
    """Host time of an optimizer step that the device, which needs `device` seconds for it, waits for."""
    if run.gpu.is_cpu:
        return 0.0
    slower = relative_host_time(run)
    if not (run.traits.waits_for_loss or _reads_overflow(run)):
        return zero_step(run, blocks) * slower
    if run.adapter is not None:
        tensors, each = 2 * stored_tensors(run, adapted(run)) * blocks, ADAPTER_TENSOR_HOST
    else:
        tensors = (stored_tensors(run, linears(run.shape, joined=run.traits.fused_qkv)) + 2) * blocks
        each = TENSOR_HOST
    launched = tensors * OPTIMIZER_HOST.get(run.optimizer, 0.0) * slower
    return (STEP_HOST + tensors * each) * slower + max(0.0, launched - device)
