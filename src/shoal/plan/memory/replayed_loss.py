"""The tensors of a plain loss in the order in which they are allocated and freed: forward pass and backward pass."""

from collections.abc import Callable

from shoal.plan.memory.head import UPCAST_CHUNKS, head, is_fused_loss
from shoal.plan.memory.segments import Allocator, Block
from shoal.plan.run.run import Run

# Bytes per logit (`SystemTraits.logit_bytes`) from which on the loss is computed in fp32; those of losses with a copy
# without the last token of each sequence, which one sequence alone does not need; and those of models that return the
# fp32 logits.
UPCAST = 10
COPIED = (6.0, 14.0)
RETURNED = 16


def logits_gradient(run: Run, memory: Allocator, end_autocast: Callable[[], None]) -> Block:
    """Logits, their loss and its backward pass; what remains is the logits' gradient in the compute dtype."""
    count = run.head_tokens * run.shape.vocab / run.mesh.tp
    logits = [memory.take(count * run.head_bytes)]
    if is_fused_loss(run):
        return _of_kernel(run, memory, end_autocast, logits.pop(), count)
    each = run.traits.logit_bytes
    itemsize = 4.0 if each >= UPCAST else run.compute_bytes
    copies = []
    if itemsize > run.head_bytes:
        copies.append(memory.take(count * itemsize))
    shifts = run.traits.shifts_logits
    if copies and (shifts or each >= RETURNED):  # returned in place of the logits
        memory.give(*logits)
        logits = [copies.pop()]
    shifted = (shifts or (each in COPIED and not run.traits.holds_outputs)) and run.micro_batch > 1
    if shifted:
        copies.append(memory.take(count * itemsize))
    softmax = memory.take(count * itemsize)
    memory.give(*copies)
    if not run.traits.holds_outputs:
        memory.give(*logits)
    end_autocast()
    gradients = [memory.take(count * itemsize), memory.take(count * itemsize)]
    memory.give(gradients[0], softmax)
    if shifted:
        gradients.append(memory.take(count * itemsize))
        memory.give(gradients.pop(1))
    narrow = memory.take(count * run.compute_bytes)
    memory.give(gradients[-1])
    if run.traits.holds_outputs:
        memory.give(*logits)
    return narrow


def upcast_chunks(run: Run, memory: Allocator) -> list[Block]:
    """A loss that upcasts the logits chunk by chunk, eagerly: what remains is the gradients of all chunks, since the
    matmuls that made the logits come later in the backward pass."""
    each = run.head_tokens * run.shape.vocab / UPCAST_CHUNKS
    logits = [memory.take(each * run.compute_bytes) for _ in range(UPCAST_CHUNKS)]
    saved = []
    for _ in logits:
        wide = memory.take(each * 4)
        saved.append(memory.take(each * 4))
        memory.give(wide)
    memory.give(*logits)
    gradients = []
    while saved:
        chosen, wide = memory.take(each * 4), memory.take(each * 4)
        memory.give(chosen, saved.pop())
        gradients.append(memory.take(each * run.compute_bytes))
        memory.give(wide)
    return gradients


def projected_chunks(run: Run, memory: Allocator) -> list[Block]:
    """A loss that also computes the logits chunk by chunk: nothing of them remains."""
    each = run.head_tokens * run.shape.vocab / UPCAST_CHUNKS
    gathered, saved = memory.take(run.head_tokens * run.shape.hidden * run.compute_bytes), []
    for _ in range(UPCAST_CHUNKS):
        narrow, wide = memory.take(each * run.compute_bytes), memory.take(each * 4)
        saved.append(memory.take(each * 4))
        memory.give(narrow, wide)
    while saved:
        chosen, wide = memory.take(each * 4), memory.take(each * 4)
        memory.give(chosen, saved.pop())
        narrow = memory.take(each * run.compute_bytes)
        memory.give(wide, narrow)
    memory.give(gathered)
    return []


# By `SystemTraits.chunks`.
CHUNKED_LOSSES = {"upcast": upcast_chunks, "projected": projected_chunks}


def _of_kernel(run: Run, memory: Allocator, end_autocast: Callable[[], None], logits: Block, count: float) -> Block:
    """A kernel writes the gradient over what it reads, the logits or a copy of them in fp32, or into a tensor of its
    own."""
    held = run.traits.kernel_logit_bytes
    copies = [memory.take(count * 4) for _ in range(int(held // 4))]
    if len(copies) < 2:
        end_autocast()
        memory.give(*copies)
        whole = head(run).peak.find("logits and loss")
        tensors = 1 if held or whole is None else max(1, round(whole.amount / (count * run.compute_bytes)))
        found = [logits, *(memory.take(count * run.compute_bytes) for _ in range(tensors - 1))]
        memory.give(*found[:-1])
        return found[-1]
    memory.give(logits, copies[0])
    end_autocast()
    padded = memory.take(count * 4)
    memory.give(copies[1])
    narrow = memory.take(count * run.compute_bytes)
    memory.give(padded)
    return narrow
