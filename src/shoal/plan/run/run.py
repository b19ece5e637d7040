"""A training run as the forecast sees it: everything that memory and time depend on, and nothing else."""

from dataclasses import dataclass, replace
from math import ceil

from shoal.plan.run.settings import ONE, Settings
from shoal.plan.run.trained import FROZEN, Adapter, Trained

__all__ = ["FROZEN", "ONE", "Adapter", "Run", "Trained"]

# What frozen matrices under adapters that are autograd functions may be stored as, and the layers that one function is
# for. Adapters are PEFT's after all unless each of its layers has one (get_peft_model in unsloth/models/llama.py,
# apply_lora_kernel_patches in axolotl/monkeypatch/lora_kernels.py).
FUSED = (None, "nf4", "fp4")
FUSED_TOGETHER = (("q_proj", "k_proj", "v_proj"), ("o_proj",), ("gate_proj", "up_proj", "down_proj"))


@dataclass(frozen=True)
class Run(Settings):
    """A training run: its settings, the dtypes of its tensors, and which of its operations are one kernel."""

    @property
    def mixed(self) -> bool:
        """Whether fp32 master weights are trained with low-precision compute copies."""
        return (self.precision in ("bf16-mixed", "16-mixed", "fp8") and not self.narrow) or self.upcasts_shards

    @property
    def buffers_gradients(self) -> bool:
        """Whether gradients are parts of a buffer that is there from the beginning, as Megatron's without adapters."""
        traits = self.traits
        buffered = traits.masters_with_optimizer and (traits.wide_gradients or traits.accumulates_in_matmuls)
        apart = traits.flattens_gradients or traits.planned_memory or self.data_parallelism.shards_gradients
        return buffered and self.mixed and self.adapter is None and not apart

    @property
    def narrow(self) -> bool:
        """Whether weights, gradients and optimizer state are in 16 bits."""
        return self.precision == "bf16-true" or (self.precision == "fp8" and self.traits.narrow_weights)

    @property
    def upcasts_shards(self) -> bool:
        """Whether 16-bit weights become fp32 master weights when FSDP shards them."""
        trained = self.sharded and self.adapter is None
        return self.traits.upcasts_shards and trained and self.narrow

    @property
    def foreach_step(self) -> bool:
        """Whether AdamW is PyTorch's foreach one."""
        foreach = self.traits.foreach_step
        of_torch = self.optimizer == "adamw" and not self.paged_optimizer  # that is bitsandbytes'
        return of_torch and (foreach is True or (foreach == "eager" and not self.compiled))

    @property
    def splits_head(self) -> bool:
        """Whether the head under an adapter is applied to a part of the tokens after the other."""
        return self.traits.adapted_head_tokens > 0 and self.adapter is not None and self.loss == "plain"

    @property
    def head_parts(self) -> int:
        """The number of these parts."""
        return ceil(self.length / self.traits.adapted_head_tokens) if self.splits_head else 1

    @property
    def casts_dequantized(self) -> bool | str:
        """Whether matrices are dequantized to fp16 and cast to bf16: in both passes, or only `backward`."""
        return self.traits.dequantizes_in_half if self.compute_bytes == 2 and not self.is_half else False

    @property
    def casts_shards(self) -> bool:
        """Whether FSDP casts trained weights as it gathers them (its mixed precision, also around autocast), so that
        blocks see them in the compute dtype only, and so does what an embedding returns."""
        return self.upcasts_shards or (self.traits.casts_per_use and self.sharded and self.adapter is None)

    @property
    def weight_bytes(self) -> int:
        return 2 if self.narrow and not self.upcasts_shards else 4

    @property
    def trained_bytes(self) -> int:
        """Bytes per element of what is trained: PEFT's adapters are in fp32 whatever their base is in."""
        if self.adapter is None or not self.traits.peft:
            return self.weight_bytes
        return 2 if self.traits.narrow_adapters == "quantized" and self.adapter.quantize is not None else 4

    @property
    def compute_bytes(self) -> int:
        return 4 if self.precision == "32-true" else 2

    @property
    def frozen_bytes(self) -> int:
        """Bytes per element of the weights under an adapter that are not quantized."""
        wide = self.traits.wide_base and self.mixed and self.adapter is not None and self.adapter.quantize is None
        return 4 if wide else self.compute_bytes

    @property
    def casts_weights(self) -> bool:
        """Whether autocast casts the weights of blocks whenever they are used; those under an adapter are usually in 16
        bits."""
        wide = self.adapter is None or self.frozen_bytes > self.compute_bytes
        return self.traits.casts_per_use and self.mixed and wide and not self.casts_shards

    @property
    def layer_bytes(self) -> int:
        """Bytes per element of what a block's linear layers return. A quantized layer computes in 16 bits and returns
        the dtype of its input, which is fp32 if all else is upcast (Linear4bit in bitsandbytes/nn/modules.py). To what
        an 8-bit one returns, autocast adds the product of outlier channels in 16 bits."""
        wide = self.adapter is not None and self.adapter.upcasts and self.adapter.quantize is not None
        if wide and self.in_int8 and self.autocasts and not self.traits.int8_layouts:
            return self.compute_bytes
        return 4 if wide or self.widens_norms else self.compute_bytes

    @property
    def in_int8(self) -> bool:
        """Whether frozen layers are bitsandbytes' 8-bit ones."""
        return self.adapter is not None and self.adapter.quantize == "int8" and self.traits.peft

    def read_bytes(self, reads: str) -> int:
        """Bytes per element of what a block's linear layer reads, by `Linear.reads`, before the layer casts it."""
        if reads == "attention":
            return self.attention_bytes
        # The second projections of latent attention read norms too, and are named after them.
        normed = reads.endswith(("norm", " input"))
        upcast = self.adapter is not None and self.adapter.upcasts
        return 4 if upcast and normed else self.layer_bytes

    @property
    def expert_bytes(self) -> int:
        """Bytes per element of what the experts of a mixture compute with: those of their weights, which PEFT upcasts
        with all that is not quantized."""
        if not (self.traits.wide_experts and self.traits.experts == "grouped"):
            return self.compute_bytes
        upcast = self.adapter is not None and self.adapter.quantize is not None and self.adapter.upcasts
        return 4 if upcast else self.weight_bytes if self.casts_weights else self.compute_bytes

    @property
    def widens_norms(self) -> bool:
        """Whether blocks compute in fp32 because of autocast: it computes layer_norm, unlike an RMSNorm that is written
        out, in fp32, and a quantized layer returns the dtype of its input."""
        quantized = self.adapter is not None and self.adapter.quantize in ("nf4", "fp4")
        return quantized and self.traits.peft and self.autocasts and not self.shape.traits.rms_norm

    @property
    def autocasts(self) -> bool:
        """Whether the forward pass runs under autocast."""
        return self.mixed if self.traits.autocasts == "mixed" else self.traits.autocasts

    @property
    def narrow_adapters(self) -> bool:
        """Whether PEFT's adapters are in 16 bits."""
        quantized = self.adapter is not None and self.adapter.quantize is not None
        which = self.traits.narrow_adapters
        if which == "unquantized":
            return self.narrow and not quantized
        return quantized if which == "quantized" else which

    def fuses_adapter(self, name: str) -> bool:
        """Whether the adapter of a layer is part of an autograd function of its own, which is not for layers in 8 bits,
        not for DoRA and experts, and may not be with dropout."""
        adapter, fused = self.adapter, self.traits.fused_adapters
        if adapter is None or not fused or adapter.dora or adapter.quantize not in FUSED:
            return False
        if adapter.dropout and fused != "dropout":
            return False
        functions = FUSED_TOGETHER[:-1] if self.shape.routed else FUSED_TOGETHER
        return any(name in layers and set(layers) <= set(adapter.targets) for layers in functions)

    @property
    def fuses_activation(self) -> bool:
        """Whether the MLP's activation function is one kernel with the product that follows."""
        if self.traits.fused_activation == "adapted":
            return self.fuses_adapter("down_proj")
        return self.traits.fused_activation or self.compiled or self.fuses_adapter("down_proj")

    @property
    def adapter_input_bytes(self) -> int:
        """Bytes per element of an adapter's input, as saved: PEFT casts it to fp32 and autocast back."""
        own = self.narrow_adapters or self.traits.fused_adapters
        wide = self.traits.peft and not own and not self.autocasts
        return 4 if wide else self.compute_bytes

    @property
    def head_bytes(self) -> int:
        """Bytes per element in which the head computes: without autocast, one that is upcast to fp32 returns that."""
        upcast = self.adapter is not None and self.adapter.upcasts and not self.autocasts
        return 4 if upcast else self.compute_bytes

    @property
    def attention_bytes(self) -> int:
        """Bytes per element of queries, keys and values. Autocast has attention compute in 16 bits, whatever the layers
        return."""
        return self.compute_bytes if self.autocasts else self.layer_bytes

    @property
    def adapter_bytes(self) -> int:
        """Bytes per element in which adapters compute: PEFT's in fp32, unless autocast casts what they read."""
        if self.adapter is None or not self.traits.peft:
            return self.compute_bytes
        return self.adapter_input_bytes

    @property
    def reduced_bytes(self) -> int:
        """Bytes per element of a gradient that is reduced: ZeRO and Accelerate communicate in 16 bits."""
        if self.mixed and self.traits.masters_with_optimizer:
            wide = self.traits.widens_reduction or (self.traits.wide_gradients and self.precision != "16-mixed")
            return 4 if wide else self.compute_bytes
        return self.compute_bytes if self.traits.narrow_reduction and self.sharded else self.reduce_bytes

    @property
    def added_bytes(self) -> int:
        """Bytes per element in which gradients of micro-batches are added up, if the optimizer has the fp32 weights."""
        return self.compute_bytes if self.traits.widens_reduction else self.reduced_bytes

    @property
    def updated_bytes(self) -> int:
        """Bytes per element of an updated weight that is all-gathered after the step."""
        return self.compute_bytes if self.mixed and self.traits.masters_with_optimizer else self.weight_bytes

    @property
    def gathers_after_step(self) -> bool:
        """Whether each rank updates a shard of the weights, and all-gathers those of the others: ZeRO-1, and ZeRO-2 as
        DeepSpeed implements it."""
        strategy = self.data_parallelism
        replicated = self.traits.masters_with_optimizer and not strategy.shards_weights
        return strategy.partitions_update or (replicated and strategy.shards_optimizer)

    @property
    def residual_bytes(self) -> int:
        """Bytes per element of the residual stream."""
        if self.adapter is not None and (self.adapter.upcasts or self.widens_norms):
            return 4
        # Of ours with an adapter: parallel/precision.py.
        wide = self.traits.wide_residual_stream and (self.adapter is None or self.frozen_bytes > self.compute_bytes)
        return self.weight_bytes if wide and not self.casts_shards else self.compute_bytes

    @property
    def recomputes_cheap(self) -> bool:
        """Whether compiled blocks recompute cheap elementwise results that the compiler would otherwise save."""
        return self.compiled and self.recompute not in ("none", "offload-all") and self.traits.recomputes_cheap

    @property
    def fuses_softmax(self) -> bool:
        """Whether materialized scores are scaled, masked and normalized in one kernel. Liger has none for it."""
        fused, compiled = self.traits.fused_softmax, self.compiled and not self.traits.liger_kernels
        return fused == "always" or (fused == "compiled" and compiled)

    @property
    def in_autocast(self) -> bool:
        """Whether blocks run under autocast, or as under it; layouts with 16-bit weights do without."""
        return self.mixed and not self.traits.masters_with_optimizer

    @property
    def upcasts_softmax(self) -> bool:
        """Whether the model code computes the softmax of materialized scores in fp32 and casts it back, as transformers
        does in families with rotary embeddings, and OPT's in fp16; GPT-2's and BERT's leave it to autocast."""
        upcasts = self.shape.traits.rotary or self.shape.traits.upcasts_softmax or self.clamps_scores
        return upcasts and self.traits.fused_softmax != "always" and self.attention_bytes < 4

    @property
    def rotates_in_fp32(self) -> bool:
        """Whether rotated queries and keys are in fp32, though what attention reads besides is not."""
        return self.traits.wide_rotary and self.shape.model_type == "gpt_neox" and self.attention_bytes < 4

    @property
    def clamps_scores(self) -> bool:
        """Whether masked scores are clamped by one more kernel, which saves them: transformers' OPTAttention in fp16,
        where it also upcasts the softmax."""
        return self.shape.model_type == "opt" and self.precision == "16-mixed"

    @property
    def is_half(self) -> bool:
        """Whether the 16 bits are fp16's; a device without bf16 computes in nothing else."""
        return self.precision == "16-mixed" or self.traits.half or self.gpu.bf16 is None

    @property
    def autocasts_softmax(self) -> bool:
        """Whether autocast casts materialized scores to fp32 for the softmax, and leaves them in it until the next
        matmul. Without autocast, and in layouts with 16-bit weights, the softmax is in the compute dtype."""
        return self.in_autocast and self.traits.fused_softmax != "always" and not self.upcasts_softmax

    @property
    def writes_out_gelu(self) -> bool:
        """Whether GELU is several elementwise kernels, as in transformers' GPT-2, not in models that are only like it.
        Autocast computes its power, and what follows, in fp32."""
        written_out = self.shape.traits.unfused_gelu and self.shape.is_family
        return written_out and not self.compiled and self.traits.fused_activation is not True

    @property
    def writes_out_erf(self) -> bool:
        """Whether GELU is several elementwise kernels by its definition, as the system has it."""
        written_out = self.traits.erf_gelu or (
            self.shape.traits.unfused_erf and self.traits.fused_activation is not True
        )
        return written_out and not self.compiled and not self.shape.traits.gated

    @property
    def peak(self) -> float:
        """The device's peak FLOP/s for this precision, as MFU counts it."""
        if self.precision == "32-true":
            return self.gpu.fp32
        return self.gpu.fp16 if self.precision == "16-mixed" else self.gpu.bf16 or self.gpu.fp16

    def with_(self, **changes: object) -> "Run":
        return replace(self, **changes)  # type: ignore[arg-type]
