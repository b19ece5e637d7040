"""What of a training system's code memory and time depend on; the systems that have them are in `modelled.py` and
`further.py`."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class SystemTraits:
    """Implementation traits of a training system that memory or time depend on."""

    # Eager RMSNorm saves an fp32 copy of its input; a fused kernel or a compiled block does not.
    unfused_norms: bool = True
    # The residual stream has the dtype of the master weights, as under autocast; else the compute dtype.
    wide_residual_stream: bool = False
    # `compiled` means Liger's kernels, each of which saves its own input and output.
    liger_kernels: bool = False
    # `compiled` means kernels that are fused by hand, as Transformer Engine's: residual adds are kernels of their own,
    # and queries are copied out of the output of the matmul.
    fused_by_hand: bool = False
    # Layers are modules of Transformer Engine, as Megatron's since 2023.
    transformer_engine: bool = False
    # Keys and values are repeated for every query head before attention, and saved like that.
    repeats_keys: bool = False
    # Models are transformers', or have attention as it has, and compute scores by matmuls for types without any other
    # (`types`), or for all (`always`). `model.attention` may say otherwise.
    eager_attention: Literal["never", "types", "always"] = "never"
    # Attention is given fewer heads of keys than of queries, for which SDPA has no fused kernel in fp32 and before
    # Ampere (enable_gqa; use_gqa_in_sdpa in transformers since 4.48). Else they are repeated, or it is another kernel.
    grouped_attention: bool = True
    # Attention is given copies of queries, keys and values with up to 128 more tokens per sequence, and its output is
    # copied without them: Unsloth since 2026.10.6 where SDPA runs cuDNN's kernels (_cudnn_length_bucketed_sdpa in
    # unsloth/utils/attention_dispatch.py), on Hopper without xFormers and flash-attn.
    pads_attention: bool = False
    # Padding is removed before attention and put back after it even where there is none, which copies what it reads and
    # returns.
    unpads: bool = False
    # Queries, keys and values are one matmul even in families with three.
    fused_qkv: bool = False
    # Without sharded weights, layers that read the same tensor are one matmul in compiled blocks: speed/packed.py.
    packs_projections: bool = False
    # What the model returns is cast to fp32 whether it is used or not (convert_outputs_to_fp32 in accelerate).
    widens_outputs: bool = False
    # The entropy of the logits and the largest of them are computed too, to be logged (SFTTrainer in
    # trl/trainer/sft_trainer.py since August 2025).
    logs_entropy: bool = False
    # The host waits for the loss of every micro-batch, so that the device waits while it prepares the optimizer step.
    waits_for_loss: bool = False
    # Peak bytes per logit of a plain loss: log-softmax and two gradients, in fp32.
    logit_bytes: float = 12.0
    # The model replaces its logits by an fp32 copy, and copies that without the last token of each sequence:
    # transformers before 4.46.
    shifts_logits: bool = False
    # Logits are not cast to fp32 before the loss. On a GPU, log_softmax is then in 16 bits under autocast too:
    # cross_entropy_loss in ATen/native/LossNLL.cpp gives it a dtype, which autocast leaves.
    narrow_loss: bool = False
    # A plain loss copies the logits without the last token of each sequence, and is computed for a few of them at a
    # time, whose gradients are joined again (chunked_cross_entropy in litgpt/utils.py).
    splits_logits: bool = False
    # Under adapters, the head is applied to so many tokens of each sequence at a time; logits and log-softmax of all of
    # them stay, in fp32 (lm_head_chunk_size in litgpt/finetune/lora.py). 0: to all tokens.
    adapted_head_tokens: int = 0
    # `logit_bytes` with a vocabulary sharded over tensor-parallel ranks.
    sharded_logit_bytes: float = 12.0
    # `chunked`: logits and their gradients are computed chunk by chunk. `upcast`: all logits are kept in the compute
    # dtype, and only upcast to fp32 chunk by chunk, within one kernel if compiled. `projected`: so are the logits
    # computed, of which autograd saves the log-softmax in fp32. `recomputed`: each chunk is computed again in the
    # backward pass.
    chunks: Literal["chunked", "upcast", "projected", "recomputed"] = "chunked"
    # Whether a plain loss is one fused kernel, which holds logits and their gradient once each in the compute dtype:
    # never, if blocks are compiled, or always.
    loss_kernel: Literal["never", "compiled", "always"] = "never"
    # This kernel writes the gradient over the logits, in the pass that also computes the loss, as ours does.
    loss_in_place: bool = False
    # The model is compiled with its loss, as one graph.
    compiles_loss: bool = False
    # It returns the logits too. They have no gradient, for which PyTorch fills a
    # tensor of their size with zeros (pytorch issue 131794).
    returns_logits: bool = False
    # Peak bytes per logit of such a kernel, if it holds more than that: a system that upcasts logits before, or returns
    # them cast to fp32.
    kernel_logit_bytes: float = 0.0
    # With any activation checkpointing, compiled blocks recompute elementwise results (parallel/compile.py).
    recomputes_cheap: bool = False
    # Steps that wait for the host may be replayed as CUDA graphs (`train.cuda_graphs`).
    cuda_graphs: bool = False
    # Every layer is replayed as a CUDA graph, so that the device does not wait for the host (Megatron's
    # `--enable-cuda-graph`, `--external-cuda-graph` and, since 2026, `--cuda-graph-impl`).
    graphs_layers: bool = False
    # Tokens whose logits a fused loss holds at a time; 0: it is a chunked loss. `liger`: as many as make logits as
    # large as the hidden states, rounded up to a power of two. `4 GiB`: as many as have logits of that size in fp32, in
    # one part, or in equal parts whose number is a multiple of four, each in one compiled kernel. `256 MiB`: as many as
    # have about as many logits in fp32, a power of two from 512 to 4,096 (Unsloth under TRL's SFTTrainer; under the
    # Trainer it is `4 GiB`).
    fused_rows: int | Literal["liger", "4 GiB", "256 MiB"] = 0
    # The gradient of the head's weight is computed for each of these parts, cast to fp32 and then added to that of the
    # others: Liger from 0.6.3 to 0.7 (fused_linear_cross_entropy.py); else the matmul adds to it.
    sums_head_gradient: bool = False
    # Matmul outputs that selective checkpointing saves besides attention: every second; or all but every second of
    # those that are wider than their input.
    keeps: Literal["every second", "all but widening"] = "every second"
    # fp8 matmuls save their inputs in fp8; else in the compute dtype.
    saves_fp8_inputs: bool = False
    # Inputs of fp8 matmuls are all-gathered over tensor-parallel ranks in fp8.
    gathers_in_fp8: bool = False
    # Weights and gradients are in 16 bits, and fp32 master weights are part of the optimizer state (ZeRO).
    masters_with_optimizer: bool = False
    # With sharded optimizer state, the step copies a rank's gradients into one tensor, and casts that to fp32 (step in
    # deepspeed/runtime/zero/stage_1_and_2.py, _prepare_fp32_grad_for_sub_group in stage3.py). Weights and state are
    # such tensors too, between which there are no gaps.
    flattens_gradients: bool = False
    # DDP's buckets are not its gradients, which are copied there and back (`gradient_as_bucket_view` false, PyTorch's
    # default).
    copies_to_buckets: bool = False
    # With sharded gradients and offloaded optimizer state, gradients go to the host as they are reduced, and the device
    # keeps none (partition_grads in deepspeed/runtime/zero/stage3.py).
    offloads_gradients: bool = False
    # bf16 gradients of a micro-batch stay beside the fp32 ones that they were added to until the next backward pass
    # (update_hp_grads and clear_lp_grads in deepspeed/runtime/bf16_optimizer.py).
    keeps_added_gradients: bool = False
    # Embedding and head, unless tied, are separate FSDP units; else one unit that stays unsharded between them.
    # `trained`: separate unless they are frozen under adapters.
    separate_head_unit: bool | Literal["trained"] = False
    # Master weights are cast whenever they are used (autocast); else once per step.
    casts_per_use: bool = False
    # The forward pass runs under autocast even if the weights are in 16 bits, as in Hugging Face's Trainer. It matters
    # where something is in fp32 all the same: adapters, and what PEFT upcasts. `mixed`: only if weights are in fp32.
    autocasts: bool | Literal["mixed"] = True
    # A 4-bit matmul saves its input for the backward pass: bitsandbytes before 0.43.2 (MatMul4Bit in
    # bitsandbytes/autograd/_functions.py).
    quantized_keep_inputs: bool = False
    # 8-bit layers keep their matrices in layouts for the int8 matmuls of Turing and Ampere, and return the dtype of
    # their input under autocast too: bitsandbytes before 0.45 (MatMul8bitLt in
    # bitsandbytes/autograd/_functions.py).
    int8_layouts: bool = False
    # Without packing, every sequence is padded to data.max_length; else to the longest of its micro-batch, so that
    # lengths differ from one to the next.
    pads_to_length: bool = False
    # The loop holds the logits until it has the next ones, and with their graph what bitsandbytes keeps in its autograd
    # functions (`ctx.tensors`); the backward pass frees only what is saved as PyTorch wants it.
    holds_last_logits: bool = False
    # The loop holds what the model returns, and so the logits: while the backward pass runs (`step`), or until the next
    # forward pass, with its loss, has returned (`next`). In Hugging Face's Trainer they are local to `compute_loss`.
    holds_outputs: Literal["", "step", "next"] = ""
    # 16-bit weights are in fp16, though `bf16-true` is what they are called here.
    half: bool = False
    # With fp8 matmuls too, weights are in 16 bits, as they are with `bf16-true`.
    narrow_weights: bool = False
    # The head is quantized like the matrices of blocks; else it keeps the compute dtype.
    quantizes_head: bool = False
    # Quantized matrices are dequantized to fp16 and then cast to bf16: two copies at a time (bitsandbytes before 0.43,
    # Params4bit.cuda in bitsandbytes/nn/modules.py). `backward`: only for the gradients, as Lightning quantizes from
    # fp16 and bitsandbytes 0.50 dequantizes within the forward pass's matmul.
    dequantizes_in_half: bool | Literal["backward"] = False
    # Adapters of queries, keys and values are one, whose second matmul is a convolution over transposed tensors; where
    # not all three have one, its output is copied by index into zeros (LoRAQKVLinear in litgpt/lora.py).
    joined_adapters: bool = False
    # With quantized layers, bitsandbytes' StableEmbedding takes the place of the embedding: the old one stays on the
    # device, and so does a gradient of the new one, which no optimizer zeroes (main in litgpt/finetune/lora.py).
    replaces_embedding: bool = False
    # The experts of a mixture are one tensor, which grouped matmuls compute; or they are modules that run one after the
    # other, whose linear layers are quantized too and have adapters of their own; or slices of one tensor that do.
    experts: Literal["grouped", "modules", "slices"] = "grouped"
    # Grouped matmuls are in the dtype of the weights under autocast too, which does not know of them.
    wide_experts: bool = False
    # What experts of other ranks would read and return is filled with zeros, also where no rank has others: 2, and 3 if
    # what is between their layers is filled too.
    masked_experts: int = 0
    # The scales of 4-bit blocks are no parameters, so that every rank keeps all of them on its device (bitsandbytes'
    # quant_state); else they are sharded and offloaded with the weights.
    replicates_scales: bool = False
    # With an 8-bit optimizer, the embedding's state is in fp32.
    wide_embedding_state: bool = False
    # Of what tensor-parallel ranks all-gather along the sequence for a linear layer, each saves its own part, which is
    # gathered again in the backward pass beside a matmul; and gradients of inputs are summed beside the matmul of those
    # of weights (LinearWithGradAccumulationAndAsyncCommunication in megatron/core/tensor_parallel/layers.py, from 2022
    # on). Not where weights are frozen.
    gathers_inputs_again: bool = False
    # An input of several fp8 matmuls is cast once, into both layouts; else once per matmul, in forward and backward.
    casts_once: bool = False
    # Weights are cast to fp8 in the first micro-batch of a step, and the others use that; else in every micro-batch.
    keeps_fp8_weights: bool = False
    # The allocator uses expandable segments, which hardly fragment.
    expandable_segments: bool = False
    # Memory is laid out before the first step, without gaps, rather than taken from a caching allocator (XLA, OneFlow).
    planned_memory: bool = False
    # The head is computed at a vocabulary that tensor cores can read (models/head.py), or by the compiler.
    pads_vocabulary: bool = False
    # The year of its libraries, if these are not today's: those of 2023 and 2024 are slower on Hopper.
    software: int = 0
    # On Hopper and later, attention is flash attention 2: the flash-attn package, or torch before 2026, whose SDPA
    # preferred it to cuDNN's.
    flash2: bool = False
    # Adapters are PEFT's: in fp32, so that each adapted layer casts its input and saves it on its own; dropout too is
    # each layer's own; and DoRA computes `B A` and `W + B A` in full, and saves the outputs of both.
    peft: bool = False
    # Adapters are autograd functions of their own (unsloth/kernels/fast_lora.py, axolotl/kernels/lora.py): layers that
    # read one tensor save it once, in its dtype; what an adapter returns is added by its matmul (`addmm_`); and in a
    # gated MLP, the backward pass computes the product of its factors again, and overwrites them with their gradients.
    # A function is for queries, keys and values, for the output of attention, or for the MLP; where not all layers of
    # one have adapters, these are PEFT's, and so they are with dropout unless this is `dropout`.
    fused_adapters: bool | Literal["dropout"] = False
    # The activation function of the MLP is one kernel, compiled or not, that saves only its inputs. `adapted`: only if
    # all layers of the MLP have fused adapters, else the MLP is transformers' own, also if `compiled`.
    fused_activation: bool | Literal["adapted"] = False
    # The backward pass of a gated MLP computes the product of its factors again, with their gradients, in place of
    # saving it as the input of the last layer (_SwiGLUFusedFunc in xformers/ops/swiglu_op.py).
    multiplies_again: bool = False
    # An RMSNorm that is written out multiplies with its scale in fp32, so that it saves what it has normalized in fp32
    # if the scale is trained; else in the dtype of its input.
    wide_norms: bool = False
    # Rotary embeddings are one kernel, compiled or not, rather than several.
    fused_rotary: bool = False
    # Else they rotate the halves of a head, as transformers does; or pairs of neighbours, in fp32: one of each pair at
    # a time (RotaryPositionalEmbeddings in torchtune/modules/position_embeddings.py), or as complex numbers
    # (apply_rotary_emb in torchtitan/models/llama3/model.py). All of them rotate the halves of Qwen's heads. `wide
    # halves`: halves, in fp32, as which cosines and sines are kept, and joined with the channels that are not rotated
    # (apply_rope in litgpt/model.py).
    rotary: Literal["halves", "fp32 halves", "pairs", "complex"] = "halves"
    # These adapters are in the dtype of the frozen weights after all: PEFT before 0.12, and where a script casts them.
    # `quantized`: in 16 bits, with their optimizer state, if the weights are quantized, as TRL's SFTTrainer casts them.
    # `unquantized`: in the dtype of the weights if these are in 16 bits.
    narrow_adapters: bool | Literal["quantized", "unquantized"] = False
    # Where attention is not one kernel, whether scaling, mask and softmax are one, in the compute dtype, rather than
    # several in fp32: never, if blocks are compiled, or always (Megatron's).
    fused_softmax: Literal["never", "compiled", "always"] = "compiled"
    # Softmax and SiLU are written out in elementwise operations, each of which saves what its own gradient needs: the
    # exponentials beside their quotient, and the sigmoid.
    written_out: bool = False
    # GELU is written out by its definition, with erf: five elementwise kernels, as in BERT's code before PyTorch 1.4.
    erf_gelu: bool = False
    # AdamW runs kernel by kernel over all parameters (torch's foreach), which needs a copy of their size; else fused.
    # `eager`: unless blocks are compiled.
    foreach_step: bool | Literal["eager"] = False
    # Tensors of the size of all that is updated, in fp32, which another AdamW holds at a time: two of PyTorch's before
    # version 2.1 if that is one tensor (the root of the second moments, and its quotient or sum: torch/optim/adamw.py).
    step_copies: int = 0
    # Checkpointed blocks are FSDP units, rather than FSDP units having checkpointed blocks: the recomputed forward pass
    # gathers and frees a block's weights on its own, so that the backward pass gathers them once more.
    checkpoints_units: bool = False
    # Activation checkpointing is the reentrant one, as in transformers before version 5 unless `use_reentrant` is
    # false: the whole forward pass runs again, where the other stops once all saved tensors exist. If FSDP1's units are
    # frozen, hooks on their recomputed inputs keep these inputs, and the gradients that have
    # come to them, until the end of the backward pass: _register_post_backward_reshard_only_hook in
    # torch/distributed/fsdp/_runtime_utils.py.
    reentrant: bool = False
    # Inputs of checkpointed blocks that are kept in host memory are copied while nothing else runs: back from there, or
    # in both directions.
    exposes_offload: Literal["", "back", "both"] = ""
    # The model returns keys and values of all blocks for generation (`use_cache`), which only activation checkpointing
    # by the model itself switches off: they are held to the end of the forward pass, or with the other outputs.
    caches_keys: bool = False
    # Each block of a GPT-2 or GPT-NeoX has a causal mask of all positions, as booleans: transformers before version 5,
    # GPT-NeoX's before 4.50.
    mask_buffers: bool = False
    # GPT-NeoX's queries and keys are rotated, and joined with the other channels, in fp32: transformers before 4.45.
    wide_rotary: bool = False
    # FSDP1: the parameters of a unit are views of one tensor. Else FSDP2, whose units gather into another one.
    flat_parameters: bool = False
    # With several micro-batches per step, FSDP reduces gradients only after the last one (`no_sync`), and holds them
    # unsharded until then.
    unsharded_accumulation: bool = False
    # Each rank orthogonalizes the matrices of its turn, and Muon's updates are all-reduced in 16 bits.
    shares_muon: bool = False
    # Whole matrices are assigned to ranks, each of which broadcasts those that it has updated; else all are gathered.
    broadcasts_weights: bool = False
    # Updated weights are all-gathered during the next forward pass (Megatron's overlap_param_gather); else before it.
    overlaps_weight_gather: bool = False
    # Gradients are reduced during the backward pass; else after it, or while nothing else runs.
    overlaps_gradients: bool = True
    # Elements of the buckets that gradients are copied to and reduced in, whatever blocks they are of; 0: block by
    # block, or bucket by bucket of a size that hardly matters, as DDP's.
    bucket_elements: float = 0.0
    # Pipeline stages have equal numbers of blocks, and the last one also has the head; else stages are balanced.
    even_stages: bool = False
    # These numbers count the embedding, the last norm and the head as blocks too.
    stages_of_modules: bool = False
    # Pipelines are PyTorch's: receive buffers for every micro-batch, and stage outputs that are kept. Others free both.
    torch_pipeline: bool = True
    # Context parallelism is PyTorch's ring attention: blocks of keys and values go around, and each block's output and
    # gradients are merged with those before, eagerly and in fp32.
    ring_attention: bool = False
    # Context parallelism by gathered keys: of the kernels that store no scores, only flash attention 2 has causal
    # attention of the last queries to all keys.
    gathers_keys: bool = False
    # The same with keys and values sent around while attention is computed (Transformer Engine).
    overlaps_context: bool = False
    # Tensor-parallel collectives run chunk by chunk with the matmuls around them (Transformer Engine's user buffers).
    overlaps_tensor: bool = False
    # Sequence parallelism shards the second dimension, so that what a tensor-parallel collective gathers is copied, and
    # what it scatters: always, as around DTensor's (all_gather_tensor and reduce_scatter_tensor in
    # torch/distributed/_functional_collectives.py), or if a micro-batch has several sequences. Never: it is the first.
    copies_sequences: Literal["never", "batched", "always"] = "never"
    # With several stages per pipeline rank, transfers between stages overlap with the compute of another stage.
    overlaps_pipeline: bool = False
    # ZeRO-3 fetches and releases the parameters of each module in hooks around it, in Python.
    hooks_modules: bool = False
    # ZeRO-1 and 2 reduce gradients as DeepSpeed does: each is copied to a bucket in a hook, in Python, and a rank's are
    # one tensor in the step; ZeRO-3 on one rank gathers nothing.
    hooks_gradients: bool = False
    # Each hook of a gradient also keeps account of the backward pass.
    tracks_hooks: bool = False
    # ZeRO-1 and 2 allocate the bucket of gradients in the first of their hooks; else before the backward pass.
    late_bucket: bool = False
    # Before a step each gradient is checked for overflow, as in fp16, also in bf16.
    checks_gradients: bool = False
    # ZeRO-3 gathers and reduces each matrix as a list of shards, one for every rank, while nothing else runs.
    lists_shards: bool = False
    # In mixed precision, the weights under adapters that are not quantized stay in fp32; else they are in 16 bits.
    wide_base: bool = False
    # What is not quantized under QLoRA is upcast to fp32, unless weights are sharded: prepare_model_for_kbit_training,
    # as PEFT documents it.
    upcasts_base: bool = False
    # The head of a masked language model computes logits of the masked tokens alone; else of all, as that of
    # transformers' BertForMaskedLM.
    gathers_masked: bool = False
    # The head has weights of its own even if the model ties it to the embedding.
    unties_head: bool = False
    # Trained weights in 16 bits become fp32 shards under FSDP, because mixed precision is on: prepare_model in
    # accelerate/accelerator.py and fsdp2_prepare_model in accelerate/utils/fsdp_utils.py, since version 0.28.
    upcasts_shards: bool = False
    # FSDP reduces gradients in the compute dtype, and accumulates unsharded ones in it; else in `reduce_dtype`.
    narrow_reduction: bool = False
    # Matmuls add to the gradients of earlier micro-batches; else these are added up by kernels of their own.
    accumulates_in_matmuls: bool = False
    # Matmuls that add to gradients give autograd a tensor in place of each, one for every shape of weight, which stays:
    # get_dummy_wgrad in Transformer Engine's pytorch/module/base.py.
    dummy_gradients: bool = False
    # Gradients are accumulated and reduced in fp32, though weights are in 16 bits. Megatron's are in a buffer.
    wide_gradients: bool = False
    # 16-bit gradients are cast to fp32 to be reduced, and back.
    widens_reduction: bool = False
    # Tensor parallelism is DTensor's, whose operations are dispatched in Python if blocks are not compiled.
    dtensors: bool = False
    # Gradients are all-reduced, though each rank updates only a part of the weights.
    all_reduces: bool = False
    # Packed documents are kept apart by their lengths (flash attention's variable-length kernels), without a mask.
    variable_lengths: bool = False
    # Clipping, the update and the cast to compute copies are one fused kernel.
    fused_step: bool = False
