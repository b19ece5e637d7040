"""The ledger: memory over time of tensors without values."""

import torch

from shoal.bench.ledger import Ledger

MIB = 2**20


def make(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_freed_memory_is_not_counted_and_the_peak_is_found():
    ledger = Ledger()
    with ledger:
        kept = make(1)
        ledger.label([kept], "kept")
        timeline = ledger.record()
        ledger.begin("work", "temporary")
        first = make(10)
        del first
        second = make(4)
        third = second.view(-1)[:5]  # the same memory
        del second, third
    moment = timeline.peaks(ledger.names)["work"]
    assert (moment.bytes, dict(moment.terms)) == (11 * MIB, {"kept": MIB, "temporary": 10 * MIB})


def test_the_peak_of_a_repeated_phase_is_that_of_its_largest_repetition():
    ledger = Ledger()
    with ledger:
        timeline = ledger.record()
        for size in (2, 5, 3):
            ledger.begin("micro-batch", "temporary")
            held = make(size)
            ledger.begin("between", "temporary")
            del held
    assert timeline.peaks(ledger.names)["micro-batch"].bytes == 5 * MIB


def test_a_label_that_is_set_late_applies_to_the_whole_lifetime():
    ledger = Ledger()
    with ledger:
        timeline = ledger.record()
        ledger.begin("backward", "unknown")
        gradient = make(3)
        ledger.begin("step", "unknown")
        ledger.label([gradient], "gradients")
    assert dict(timeline.peaks(ledger.names)["backward"].terms) == {"gradients": 3 * MIB}


def test_no_memory_is_allocated_and_values_are_always_finite():
    ledger = Ledger()
    with ledger:
        ledger.building = False
        huge = torch.ones(2**40)
        assert bool((huge.sum() * 2).isfinite())


def test_excluded_operations_are_not_counted():
    ledger = Ledger(lambda operation, purpose, tensor: operation == "aten::mm")
    with ledger:
        left, right = torch.empty(8, 8), torch.empty(8, 8)
        timeline = ledger.record()
        ledger.begin("work", "temporary")
        result = left @ right
        total = result + 1
    assert timeline.peaks(ledger.names)["work"].bytes == 3 * 8 * 8 * 4
    assert total.shape == (8, 8)
