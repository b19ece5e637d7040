"""Megatron, what is built on it, and what is like it: kernels that are fused by hand, or by XLA."""

from dataclasses import replace

from plan_accuracy import TRAITS

from shoal.plan.systems.further import FURTHER
from shoal.plan.systems.modelled import FUSED_KERNELS, MEGATRON
from shoal.plan.systems.traits import SystemTraits

ALEPH = replace(
    FUSED_KERNELS,
    fused_activation=False,
    loss_kernel="never",
    accumulates_in_matmuls=False,
    flash2=True,
    widens_reduction=True,
    all_reduces=True,
    stages_of_modules=True,
    gathers_inputs_again=False,
)
# NVIDIA's BERT with a head that reads all positions and attention by a fused kernel; later NVFuser.
BERT_APEX = replace(FURTHER["nvidia-bert"], gathers_masked=False, eager_attention="never")
MEGATRONS: dict[str, SystemTraits] = {
    "oneflow": replace(MEGATRON, overlaps_gradients=True, planned_memory=True),
    # Overlaps data parallelism, and one block less in the first and the last stage.
    "llama3": replace(MEGATRON, overlaps_gradients=True, overlaps_weight_gather=True, even_stages=False),
    "internevo": FURTHER["internevo"],
    "flash-attention": MEGATRON,
    # Norms, and the sums that they read, are in fp32: call in TensorFlow2/LanguageModeling/BERT/official/nlp/modeling/
    # layers/transformer.py of NVIDIA/DeepLearningExamples; TensorFlow 1's fused_layer_norm casts in the same way.
    "tensorflow-xla": replace(MEGATRON, fused_softmax="never", planned_memory=True, wide_residual_stream=True),
    "pax": FURTHER["maxtext"],
    "maxtext": FURTHER["maxtext"],
    "bert-apex": BERT_APEX,
    # Its pretraining: --allreduce_post_accumulation is true in scripts/run_pretraining.sh.
    "bert-apex-pretraining": replace(BERT_APEX, overlaps_gradients=False),
    # Its first version, of July 2019: `gelu` in modeling.py.
    "bert-apex-2019-07": replace(BERT_APEX, loss_kernel="never", fused_activation=False, erf_gelu=True),
    # `_allgather_param` in deepspeed/runtime/zero/partition_parameters.py, with a torch.cuda.synchronize() before each.
    "deepspeed-2021": replace(
        FUSED_KERNELS,
        lists_shards=True,
        wide_gradients=False,
        accumulates_in_matmuls=False,
        even_stages=False,
    ),
    # Of 2023 and 2024, with flash attention 2 on Hopper.
    "flagscale": replace(MEGATRON, flash2=True),
    "megatron-0.6": replace(MEGATRON, flash2=True),
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
    # NeMo from 24.01 to 24.07: NVTE_FUSED_ATTN: 0 in launcher_scripts/conf/config.yaml of NeMo-Framework-Launcher
    # leaves flash attention 2, "until we've tested it more"; and where scripts set it, as two of dgxc-benchmarking's.
    "nemo-flash2": replace(TRAITS["nemo"], flash2=True),
    # With CUDA graphs: --cuda_graphs true in nemotron/launch.sh of dgxc-benchmarking on GB200, MCORE_CUDA_GRAPH=1 in
    # configs of MLPerf's LoRA.
    "nemo-graphs": replace(TRAITS["nemo"], graphs_layers=True),
    # NeMo with ub_tp_comm_overlap: False; and that with CUDA graphs.
    "nemo-plain": replace(TRAITS["nemo"], overlaps_tensor=False),
    "nemo-plain-graphs": replace(TRAITS["nemo"], overlaps_tensor=False, graphs_layers=True),
    # Its LoRA recipes of version 24.12: no MegatronCommOverlapCallback, without which nothing overlaps, no distributed
    # optimizer, and cross_entropy_loss_fusion = False (finetune_recipe in nemo/collections/llm/recipes/llama3_8b.py and
    # llama3_70b.py); and MLPerf's code of round 5.0 where a config does not set TP_COMM_OVERLAP.
    "nemo-lora": replace(
        TRAITS["nemo"],
        overlaps_tensor=False,
        overlaps_gradients=False,
        overlaps_weight_gather=False,
        overlaps_pipeline=False,
        loss_kernel="never",
    ),
    # `tp_recompute_allgather` came after July 2024.
    "nanotron": replace(FURTHER["nanotron"], gathers_inputs_again=False),
    # Aleph Alpha's scaling: bf16 gradients are all-reduced in fp32 after the backward pass (allreduce_no_retain in
    # core/optimizer), the activation and the loss are PyTorch's, and norms too unless a run names their kernel; stages
    # have equal numbers of modules (pipe_partition_uniform).
    "aleph-scaling": ALEPH,
    "aleph-scaling-plain-norm": replace(ALEPH, unfused_norms=True),
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
    "llm.c": FURTHER["llm.c"],
    "llm.q": FURTHER["llm.c"],  # its successor, with chunks of the head
    # scaled_upper_triang_masked_softmax_fusion and bias_gelu_fusion: false; ZeRO-1 with overlap_comm.
    "neox": replace(
        FUSED_KERNELS,
        fused_softmax="never",
        fused_activation=False,
        loss_kernel="never",
        wide_gradients=False,
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
    ),
    "neox-fused": FURTHER["gpt-neox"],  # its 20B.yml has both of them
    # --overlap-grad-reduce, --overlap-param-gather, --no-gradient-accumulation-fusion, and a loss that is not fused.
    "megatron-tests": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
    ),
    # The same on Blackwell, of which cuDNN up to 9.14 has no deterministic backward pass, so that Transformer Engine
    # takes flash attention 2 (attention/dot_product_attention/utils.py of version 2.8).
    "megatron-tests-flash2": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
        flash2=True,
    ),
    # AMD's Primus on Megatron: overlap_grad_reduce and overlap_param_gather true, gradient_accumulation_fusion false.
    "primus": replace(MEGATRON, accumulates_in_matmuls=False, overlaps_gradients=True, overlaps_weight_gather=True),
    # Triton kernels, the flash-attn package, weight gradients added to fp32 buffers by a kernel of their own; reduces
    # and gathers on another stream (fast_llm/engine/schedule/runner.py). Queries are a matmul apart from the keys'.
    "fast-llm": replace(
        FUSED_KERNELS,
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
        flash2=True,
    ),
    # Primus with cross_entropy_loss_fusion: false, its default (primus/configs/models/megatron/language_model.yaml).
    "primus-plain-loss": replace(
        MEGATRON,
        loss_kernel="never",
        accumulates_in_matmuls=False,
        overlaps_gradients=True,
        overlaps_weight_gather=True,
    ),
    # Megatron with Lumen's kernels: --overlap-grad-reduce, --no-gradient-accumulation-fusion, no fused cross-entropy.
    "lumen": replace(FUSED_KERNELS, loss_kernel="never", accumulates_in_matmuls=False, overlaps_gradients=True),
    # core_r0.14.0 without --cross-entropy-loss-fusion; and with --overlap-grad-reduce and --overlap-param-gather.
    "megatron-0.14": replace(MEGATRON, loss_kernel="never"),
    "megatron-0.14-overlapped": replace(
        MEGATRON, loss_kernel="never", overlaps_gradients=True, overlaps_weight_gather=True
    ),
    "bridge-recipe": FURTHER["megatron-bridge"],
    # AMD's Llama 3.1 8B of MLPerf 5.1: a DistributedDataParallelConfig without overlaps, grad_reduce_in_fp32 false
    # (src/train.py).
    "nemo-no-overlap": replace(MEGATRON, wide_gradients=False),
}
