"""What PyTorch's caching allocator reserves beyond what is allocated: if sequences have varied lengths, and if blocks
are recomputed, whose forward pass leaves blocks that the loss's tensors do not fit.

    python benchmarks/plan/allocator.py

Replays the allocations of training steps on a model of the allocator (c10/cuda/CUDACachingAllocator.cpp, without
expandable segments): requests of up to 1 MiB from segments of 2 MiB, up to 10 MiB from segments of 20 MiB, larger ones
from a segment of their own; best fit; blocks are split if more than 1 MiB would remain, and merged within a segment.
The steps are those of a LoRA run of Hugging Face's models with one sequence per micro-batch, whose lengths are
log-normal around a share of the limit, or all the same. Writes `allocator.md`: the constants of `shoal/plan/memory.py`,
and what `left_by_forward` in `shoal/plan/transient.py` is compared with.
"""

import bisect
import math
import random
from pathlib import Path

MIB = 1 << 20
STEPS, SEEDS, LIMIT, SIGMA = 60, 4, 2048, 0.6
# Layers, hidden size, MLP, keys, vocabulary.
MODELS = {
    "7B, vocabulary 32,000": (32, 4096, 11_008, 4096, 32_000),
    "8B, vocabulary 128,256": (32, 4096, 14_336, 1024, 128_256),
    "1.8B, vocabulary 151,936": (24, 2048, 5504, 2048, 151_936),
}

Block = tuple[bool, int]  # whether of a small segment, address


class Allocator:
    """Segments and their blocks."""

    def __init__(self) -> None:
        self.free: list[tuple[bool, int, int]] = []  # small, size, address; sorted
        self.size: dict[int, int] = {}
        self.is_free: dict[int, bool] = {}
        self.after: dict[int, int | None] = {}
        self.before: dict[int, int | None] = {}
        self.end = 0
        self.reserved = self.allocated = self.peak = 0

    def take(self, wanted: float) -> Block:
        size = -(-int(wanted) // 512) * 512
        small = size <= MIB
        place = bisect.bisect_left(self.free, (small, size, -1))
        if place < len(self.free) and self.free[place][0] == small:
            _, found, address = self.free.pop(place)
        else:
            found = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
            address, self.end = self.end, self.end + found
            self.reserved += found
            self.after[address] = self.before[address] = None
        left = found - size
        if left > MIB or (small and left >= 512):
            self._put(small, address + size, left, before=address, after=self.after[address])
            found = size
        self.size[address], self.is_free[address] = found, False
        self.allocated += found
        self.peak = max(self.peak, self.allocated)
        return small, address

    def _put(self, small: bool, address: int, size: int, *, before: int, after: int | None) -> None:
        self.before[address], self.after[address] = before, after
        self.after[before] = address
        if after is not None:
            self.before[after] = address
        self.size[address], self.is_free[address] = size, True
        bisect.insort(self.free, (small, size, address))

    def give(self, *blocks: Block) -> None:
        for small, address in blocks:
            self.allocated -= self.size[address]
            following, preceding = self.after[address], self.before[address]
            if following is not None and self.is_free[following]:
                self._merge(small, address, following)
            if preceding is not None and self.is_free[preceding]:
                self.free.remove((small, self.size[preceding], preceding))
                self._join(preceding, address)
                address = preceding
            self.is_free[address] = True
            bisect.insort(self.free, (small, self.size[address], address))

    def _merge(self, small: bool, address: int, following: int) -> None:
        self.free.remove((small, self.size[following], following))
        self._join(address, following)

    def _join(self, address: int, following: int) -> None:
        self.size[address] += self.size[following]
        beyond = self.after[address] = self.after[following]
        if beyond is not None:
            self.before[beyond] = address


class Steps:
    """The tensors of a training step in the order in which they are allocated and freed."""

    def __init__(self, model: tuple[int, int, int, int, int], *, recomputes: bool) -> None:
        self.layers, self.hidden, self.ffn, self.keys, self.vocab = model
        self.recomputes = recomputes
        self.memory = Allocator()

    def step(self, tokens: int) -> None:
        memory, hidden, vocab = self.memory, 2 * tokens * self.hidden, tokens * self.vocab
        stream = memory.take(hidden)
        saved = []
        for _ in range(self.layers):
            output, kept = self.forward(tokens, keeps=not self.recomputes)
            saved.append((stream, kept))
            stream = output
        norm, last = memory.take(2 * hidden), memory.take(hidden)
        # Logits, their fp32 copy, the same without the last token, and the log-softmax; then their gradients.
        logits = [memory.take(size * vocab) for size in (2, 4, 4, 4)]
        memory.give(*logits[:3])
        gradients = [memory.take(4 * vocab), memory.take(4 * vocab)]
        memory.give(gradients[0], logits[3])
        narrow = memory.take(2 * vocab)
        memory.give(gradients[1])
        gradient = memory.take(hidden)
        memory.give(narrow, last, norm, stream)
        for entry, kept in reversed(saved):
            if self.recomputes:
                output, kept = self.forward(tokens, keeps=True)
                memory.give(output)
            gradient = self.backward(tokens, kept, gradient)
            memory.give(entry)
        memory.give(gradient)

    def forward(self, tokens: int, *, keeps: bool) -> tuple[Block, list[Block]]:
        memory, hidden, keys, ffn = self.memory, 2 * tokens * self.hidden, 2 * tokens * self.keys, 2 * tokens * self.ffn
        kept = self._norm(hidden)
        query, key, value = memory.take(hidden), memory.take(keys), memory.take(keys)
        kept += [value, memory.take(hidden), memory.take(keys)]
        memory.give(query, key)
        kept.append(memory.take(hidden))
        projected = memory.take(hidden)
        kept.append(memory.take(hidden))
        memory.give(projected)
        kept += self._norm(hidden)
        kept += [memory.take(ffn) for _ in range(4)]
        down, output = memory.take(hidden), memory.take(hidden)
        memory.give(down)
        if not keeps:
            memory.give(*kept)
        return output, kept if keeps else []

    def _norm(self, hidden: int) -> list[Block]:
        wide, scaled = self.memory.take(2 * hidden), self.memory.take(2 * hidden)
        self.memory.give(scaled)
        return [wide, self.memory.take(hidden)]

    def backward(self, tokens: int, kept: list[Block], gradient: Block) -> Block:
        memory, hidden, keys, ffn = self.memory, 2 * tokens * self.hidden, 2 * tokens * self.keys, 2 * tokens * self.ffn
        product, *factors = [memory.take(ffn) for _ in range(3)]
        memory.give(product)
        inputs = [memory.take(hidden), memory.take(hidden)]
        memory.give(*factors)
        wide = [memory.take(2 * hidden), memory.take(2 * hidden)]
        memory.give(*inputs)
        middle = memory.take(hidden)
        memory.give(*wide, gradient)
        attention = [memory.take(hidden), memory.take(keys), memory.take(keys)]
        entry = memory.take(hidden)
        memory.give(*attention)
        norm = memory.take(2 * hidden)
        memory.give(entry)
        result = memory.take(hidden)
        memory.give(norm, middle, *kept)
        return result


def lengths(share: float, seed: int) -> list[int]:
    drawn = random.Random(seed)
    return [max(16, min(LIMIT, int(share * LIMIT * math.exp(drawn.gauss(0, SIGMA))))) for _ in range(STEPS)]


def same_length(model: tuple[int, int, int, int, int], tokens: int) -> tuple[float, float]:
    """MiB reserved beyond the peak with recomputed blocks and sequences of one length, and those that the forward pass
    of a block holds, as `Steps.forward` has it."""
    steps = Steps(model, recomputes=True)
    for _ in range(3):
        steps.step(tokens)
    _, hidden, ffn, keys, _ = model
    held = 2 * tokens * (4 * ffn + 9 * hidden + 2 * keys)
    return (steps.memory.reserved - steps.memory.peak) / MIB, held / MIB


def main() -> None:
    rows = []
    for name, model in MODELS.items():
        for recomputes in (True, False):
            found = []
            for share in (0.25, 0.5):
                for seed in range(SEEDS):
                    steps = Steps(model, recomputes=recomputes)
                    drawn = lengths(share, seed)
                    for tokens in drawn:
                        steps.step(tokens)
                    extra = steps.memory.reserved - steps.memory.peak
                    loss = 14 * max(drawn) * model[-1]
                    found.append((extra / loss, extra / steps.memory.peak))
            of_loss, of_all = (sum(one[index] for one in found) / len(found) for index in (0, 1))
            rows.append(f"| {name} | {'full' if recomputes else 'none'} | {of_loss:.1f} | {of_all:.2f} |")
            print(rows[-1], flush=True)
    fixed = []
    for name, model in MODELS.items():
        for tokens in (1024, 2048, 4096):
            extra, held = same_length(model, tokens)
            fixed.append(f"| {name} | {tokens:,} | {extra:.0f} | {held:.0f} |")
            print(fixed[-1], flush=True)
    head = [
        "# Reserved memory with sequences of varied length",
        "",
        f"Made by `benchmarks/plan/allocator.py`: means over {2 * SEEDS} runs of {STEPS} steps. What the allocator",
        "reserves beyond the peak of allocated memory, without weights: in parts of the loss's tensors (14 bytes per",
        "logit), and of all that is allocated.",
        "",
        "| model | recompute | of the loss's tensors | of all |",
        "| --- | --- | --- | --- |",
    ]
    same = [
        "",
        "# Reserved memory with recomputed blocks",
        "",
        "The same with sequences of one length, in MiB: what is reserved beyond the peak, in the loss, and what",
        "the forward pass of a block holds for a time. The loss's tensors do not fit the blocks that it leaves.",
        "",
        "| model | tokens | beyond the peak | held in the forward pass |",
        "| --- | --- | --- | --- |",
    ]
    Path(__file__).with_name("allocator.md").write_text("\n".join([*head, *rows, *same, *fixed]) + "\n")


if __name__ == "__main__":
    main()
