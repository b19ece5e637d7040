"""The optimizer step of bitsandbytes' 8-bit AdamW, which computes more than it moves."""

from shoal.catalogue.multiprocessors import cycles, multiprocessors
from shoal.catalogue.shapes import parameters as count_parameters
from shoal.plan.run.run import Run

# Elements per clock and multiprocessor of bitsandbytes' 8-bit AdamW, which searches a table of 256 values for each of
# its moments: 106 million of SmolLM2-135M in 3.56 ms on an H200 (benchmarks/gpu/trainer_h200/kernels.jsonl); on an RTX
# 3090 0.111, as steps with it take longer than those with AdamW in bf16 (thad0ctor/Gefen-X).
QUANTIZED_STEP_RATE = 106.2e6 / 3.564e-3 / (132 * 1.98e9)


def eight_bit_step(run: Run, parameters: float) -> float:
    """Seconds of bitsandbytes' 8-bit AdamW, which other systems use, by its elements."""
    if run.optimizer != "adamw8bit" or run.traits.fused_step or multiprocessors(run.gpu) is None:
        return 0.0
    wide = run.traits.wide_embedding_state * run.trained.embedding * run.shape.vocab * run.shape.hidden
    share = 1 - min(1.0, wide / count_parameters(run.shape))
    return share * parameters / (QUANTIZED_STEP_RATE * cycles(run.gpu))
