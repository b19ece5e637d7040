"""Keeping timeline of tensors that have no values."""

import torch

from shoal.bench.ledger import Ledger

MIB = 2**20


def make(mib: int) -> torch.Tensor:
    return torch.empty(mib * MIB, dtype=torch.uint8)


def test_what_is_gone_is_not_counted_and_the_fullest_moment_is_found():
    ledger = Ledger()
    with ledger:
        kept = make(1)
        ledger.label([kept], "kept")
        timeline = ledger.record()
        ledger.begin("work", "passing")
        first = make(10)
        del first
        second = make(4)
        third = second.view(-1)[:5]  # the same memory
        del second, third
    moment = timeline.peaks(ledger.names)["work"]
    assert (moment.bytes, dict(moment.terms)) == (11 * MIB, {"kept": MIB, "passing": 10 * MIB})


def test_parts_that_come_again_count_as_one():
    ledger = Ledger()
    with ledger:
        timeline = ledger.record()
        for size in (2, 5, 3):
            ledger.begin("pass", "passing")
            held = make(size)
            ledger.begin("between", "passing")
            del held
    assert timeline.peaks(ledger.names)["pass"].bytes == 5 * MIB


def test_a_name_that_is_known_late_holds_for_all_of_its_life():
    ledger = Ledger()
    with ledger:
        timeline = ledger.record()
        ledger.begin("backward", "unknown")
        gradient = make(3)
        ledger.begin("step", "unknown")
        ledger.label([gradient], "gradients")
    assert dict(timeline.peaks(ledger.names)["backward"].terms) == {"gradients": 3 * MIB}


def test_no_memory_is_taken_and_a_step_is_always_usable():
    ledger = Ledger()
    with ledger:
        ledger.building = False
        huge = torch.ones(2**40)
        assert bool((huge.sum() * 2).isfinite())


def test_what_is_left_out_is_not_counted():
    ledger = Ledger(lambda operation, purpose, tensor: operation == "aten::mm")
    with ledger:
        left, right = torch.empty(8, 8), torch.empty(8, 8)
        timeline = ledger.record()
        ledger.begin("work", "passing")
        product = left @ right
        total = product + 1
    assert timeline.peaks(ledger.names)["work"].bytes == 3 * 8 * 8 * 4
    assert total.shape == (8, 8)
