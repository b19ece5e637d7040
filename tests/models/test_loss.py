"""The loss: equal to plain cross-entropy however it is computed, and correctly masked."""

import weakref
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shoal.catalogue.shapes import shape_from_sizes
from shoal.data.loader import MicroBatch
from shoal.models import cross_entropy
from shoal.models.anatomy import read_anatomy
from shoal.models.attention import MASKLESS
from shoal.models.cross_entropy import (
    IGNORED,
    chunked_cross_entropy,
    chunked_token_losses,
    measure_full_vocabulary,
)
from shoal.models.families import transformers_config
from shoal.models.head import padded_vocabulary
from shoal.models.loss import LanguageModel, choose_loss
from tests.models.small import FAMILIES, VOCAB, drawn, mixture_config, on_meta, small_config, tokens

ROWS, WIDTH, WORDS = 37, 16, 50


@dataclass
class Case:
    hidden: Tensor
    weight: Tensor
    labels: Tensor


def make_case(dtype: torch.dtype = torch.float32, *, ignored: float = 0.3) -> Case:
    source = torch.Generator().manual_seed(3)
    hidden = torch.randn(ROWS, WIDTH, generator=source).to(dtype)
    weight = (0.5 * torch.randn(WORDS, WIDTH, generator=source)).to(dtype)
    labels = torch.randint(0, WORDS, (ROWS,), generator=source)
    labels[torch.rand(ROWS, generator=source) < ignored] = IGNORED
    return Case(hidden, weight, labels)


def with_gradients(case: Case, function: Any, scale: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    hidden, weight = case.hidden.clone().requires_grad_(), case.weight.clone().requires_grad_()
    loss = function(hidden, weight, case.labels)
    (loss * scale).backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return loss.detach(), hidden.grad, weight.grad


def plain_cross_entropy(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy((hidden @ weight.T).float(), labels, ignore_index=IGNORED, reduction="sum")


def summed_token_losses(*given: Tensor, **options: Any) -> Tensor:
    return chunked_token_losses(*given, **options).sum()


COMPUTES = [chunked_cross_entropy, summed_token_losses]


@pytest.fixture(params=[1, 5 * WORDS, 1 << 25], ids=["one row per chunk", "five rows per chunk", "one chunk"])
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_two_backward_passes_through_a_chunked_loss_give_the_same_gradients(dtype):
    """As zero-bubble schedules do: once for the inputs, and once for the weights."""
    case = make_case(dtype)
    hidden, weight = case.hidden.requires_grad_(), case.weight.requires_grad_()
    loss = chunked_cross_entropy(hidden, weight, case.labels, rows=5) * 0.01
    first, second = (torch.autograd.grad(loss, (hidden, weight), retain_graph=True) for _ in range(2))
    assert [one.dtype for one in first] == [dtype, dtype]
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("columns", [WORDS, 64], ids=["unpadded", "padded"])
@pytest.mark.parametrize("ignored", [0.0, 0.3, 0.9])
def test_a_chunked_loss_equals_the_plain_one_in_value_and_gradients(ignored, columns, compute):
    case = make_case(ignored=ignored)
    found = with_gradients(case, partial(compute, columns=columns), scale=0.37)
    wanted = with_gradients(case, plain_cross_entropy, scale=0.37)
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("chunks")
def test_a_bf16_chunked_loss_is_close_to_the_exact_one():
    case = make_case(torch.bfloat16)
    exact = Case(case.hidden.double(), case.weight.double(), case.labels)
    # 1/997 is far from any bf16 value: a scale that is cast before it is used would bias all gradients.
    value, hidden, weight = with_gradients(case, chunked_cross_entropy, scale=1 / 997)
    wanted, wanted_hidden, wanted_weight = with_gradients(exact, plain_cross_entropy, scale=1 / 997)
    assert value.dtype == torch.float32
    assert hidden.dtype == weight.dtype == torch.bfloat16
    assert float(value) == pytest.approx(float(wanted), rel=2e-3)
    for one, other in ((hidden, wanted_hidden), (weight, wanted_weight)):
        assert float((one.double() - other).norm() / other.norm()) < 6e-3
        assert float((one.double() * other).sum() / other.square().sum()) == pytest.approx(1, abs=1e-3), "not biased"


@pytest.mark.parametrize("stored", [False, True], ids=["chunked", "stored"])
def test_improbable_tokens_keep_their_gradients_in_fp16(stored):
    """Of a probability of 1e-7, fp16 alone would keep one or two bits; the loss scale is applied later."""
    hidden = torch.ones(4, 8, dtype=torch.float16)
    weight = torch.zeros(64, 8, dtype=torch.float16)
    weight[0] = 2.0  # a logit of 16
    labels, scale = torch.zeros(4, dtype=torch.long), 2.0**12
    exact = weight.double().requires_grad_()
    (F.cross_entropy(hidden.double() @ exact.T, labels, reduction="sum") * scale).backward()
    found = weight.clone().requires_grad_()
    if stored:
        loss = cross_entropy.cross_entropy(hidden @ found.T, labels, cross_entropy.measure_full_vocabulary)
    else:
        loss = chunked_cross_entropy(hidden, found, labels, rows=2)
    (loss * scale).backward()
    assert found.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(found.grad.double()[1:], exact.grad[1:], rtol=5e-3, atol=0)


@pytest.mark.parametrize("compute", COMPUTES)
def test_padding_of_the_vocabulary_has_no_probability_and_no_gradient(compute):
    """Also where all true logits are far below the zeros of the padding."""
    case = make_case()
    case.hidden = case.hidden.abs()
    case.weight = -4 * case.weight.abs()
    assert float((case.hidden @ case.weight.T).max()) < -5
    wanted = with_gradients(case, plain_cross_entropy)
    for one, other in zip(with_gradients(case, partial(compute, rows=5, columns=64)), wanted, strict=True):
        assert one.shape == other.shape
        torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_only_vocabularies_that_tensor_cores_cannot_read_are_padded():
    sizes = {50257: 50304, 50264: 50264, 128256: 128256, 7: 128}
    for dtype in (torch.bfloat16, torch.float16):
        assert {one: padded_vocabulary(torch.empty(one, 1, dtype=dtype)) for one in sizes} == sizes
    assert padded_vocabulary(torch.empty(50257, 1)) == 50257  # fp32 does not use them


@pytest.mark.usefixtures("chunks")
def test_without_loss_tokens_loss_and_gradients_are_zero():
    case = make_case()
    case.labels[:] = IGNORED
    value, hidden, weight = with_gradients(case, chunked_cross_entropy)
    assert float(value) == 0
    assert not hidden.any()
    assert not weight.any()


@pytest.mark.usefixtures("chunks")
@pytest.mark.parametrize("frozen", ["head", "hidden"])
def test_a_frozen_input_gets_no_gradient_and_the_other_an_unchanged_one(frozen):
    case = make_case()
    _, hidden_gradient, weight_gradient = with_gradients(case, plain_cross_entropy)
    hidden = case.hidden.clone().requires_grad_(frozen != "hidden")
    weight = case.weight.clone().requires_grad_(frozen != "head")
    chunked_cross_entropy(hidden, weight, case.labels).backward()
    still, moved, wanted = (weight, hidden, hidden_gradient) if frozen == "head" else (hidden, weight, weight_gradient)
    assert still.grad is None
    torch.testing.assert_close(moved.grad, wanted, rtol=2e-6, atol=2e-6)


@pytest.mark.usefixtures("chunks")
def test_without_gradients_the_value_is_the_same():
    case = make_case()
    with torch.no_grad():
        found = chunked_cross_entropy(case.hidden, case.weight.requires_grad_(), case.labels)
    assert not found.requires_grad
    torch.testing.assert_close(found, plain_cross_entropy(case.hidden, case.weight.detach(), case.labels))


def test_only_one_chunk_of_logits_and_gradients_exists_at_a_time():
    case, seen = make_case(), []

    def measure(logits: Tensor, labels: Tensor, width: int) -> tuple[Tensor, Tensor]:
        assert [one for one in seen if one() is not None] == []
        losses, grad_logits = measure_full_vocabulary(logits, labels, width)
        seen.extend([weakref.ref(logits), weakref.ref(grad_logits)])
        return losses, grad_logits

    with_gradients(case, partial(chunked_cross_entropy, measure=measure, rows=5))
    assert len(seen) > 2


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@on_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("width", "stored"),
    [(7, 7), (7, 128), (260, 260), (16384, 16384), (50257, 50257), (50257, 50304), (128256, 128256)],
)
def test_the_kernel_equals_the_cpu_implementation(width, stored, dtype):
    generator = torch.Generator().manual_seed(width)
    logits = (4 * torch.randn(65, stored, generator=generator)).to(dtype)
    logits[:, width:] = 1e4
    labels = torch.randint(0, width, (65,), generator=generator)
    labels[::5] = IGNORED
    wanted, wanted_grad = measure_full_vocabulary(logits, labels, width)
    given = logits.cuda()
    found, grad_logits = measure_full_vocabulary(given, labels.cuda(), width)
    assert grad_logits.data_ptr() == given.data_ptr()  # no second tensor as large as the logits
    torch.testing.assert_close(found.cpu(), wanted, rtol=1e-5, atol=1e-5)
    # The relative error of an exponential is the absolute error of its exponent: here logits of up to 20.
    torch.testing.assert_close(
        grad_logits.cpu(), wanted_grad, rtol=1e-4 if dtype == torch.float32 else 2**-7, atol=1e-6
    )
    assert not grad_logits[::5].any()


@on_cuda
def test_a_label_outside_of_the_vocabulary_gives_nan_and_reads_nothing_else():
    labels = torch.tensor([3, 64], device="cuda")
    for stored in (64, 128):
        losses, _ = measure_full_vocabulary(torch.zeros(2, stored, device="cuda"), labels, 64)
        assert losses.isnan().tolist() == [False, True]


@on_cuda
@pytest.mark.parametrize("columns", [WORDS, 64])
@pytest.mark.parametrize("rows", [5, 1000])
def test_a_chunked_loss_on_cuda_equals_the_one_on_a_cpu(rows, columns):
    case = make_case()
    wanted = with_gradients(case, plain_cross_entropy, scale=0.37)
    case.hidden, case.weight, case.labels = (one.cuda() for one in (case.hidden, case.weight, case.labels))
    found = with_gradients(case, partial(chunked_cross_entropy, rows=rows, columns=columns), scale=0.37)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-4, atol=1e-5)


def test_the_loss_is_chunked_only_where_the_head_allows_it():
    linear, layered = (read_anatomy(drawn(small_config(family))) for family in ("llama", "bert"))
    assert choose_loss("chunked", linear, 10, 10) == "chunked"
    assert choose_loss("chunked", layered, 10, 10) == "plain"
    assert choose_loss("auto", linear, 10, 10) == "plain"
    assert choose_loss("auto", linear, 1 << 20, 1 << 10) == "chunked"
    assert choose_loss("auto", layered, 1 << 20, 1 << 10) == "plain"


# The complete module: from a micro-batch to (loss sum, number of loss tokens).


def module_of(settings: Any, *, loss: str = "plain", seed: int = 0, **options: Any) -> LanguageModel:
    model = drawn(settings, seed=seed, **options)
    with torch.no_grad():
        for (
            parameter
        ) in model.parameters():  # larger than the usual initialization, so that every token affects the loss
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return LanguageModel(model, read_anatomy(model), loss)


def as_batch(sequences: Tensor, **more: Any) -> MicroBatch:
    return MicroBatch(sequences[:, :-1].contiguous(), sequences[:, 1:].contiguous(), **more)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "neox", "gpt2"])
def test_plain_and_chunked_train_alike(family, tied, monkeypatch):
    monkeypatch.setattr(cross_entropy, "CHUNK_LOGITS", 7 * VOCAB)
    batch = as_batch(tokens())
    batch.labels[0, :9] = IGNORED
    results = []
    for kind in ("plain", "chunked"):
        module = module_of(small_config(family, tied=tied), loss=kind)
        value, (_, count) = module(batch)
        value.backward()
        assert int(count) == int((batch.labels != IGNORED).sum())
        results.append((value.detach(), {name: parameter.grad for name, parameter in module.named_parameters()}))
    (value, gradients), (other_value, others) = results
    torch.testing.assert_close(value, other_value, rtol=1e-6, atol=0)
    for name, gradient in gradients.items():
        torch.testing.assert_close(others[name], gradient, rtol=2e-5, atol=2e-5)


def token_losses(module: LanguageModel, batch: MicroBatch) -> list[float]:
    """The loss of each label by itself, flattened from [batch, position]."""
    found = []
    with torch.no_grad():
        for index in range(batch.labels.numel()):
            labels = torch.full_like(batch.labels, IGNORED).flatten()
            labels[index] = batch.labels.flatten()[index]
            one = MicroBatch(batch.inputs, labels.view_as(batch.labels), batch.positions, batch.documents)
            found.append(float(module(one)[0]))
    return found


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_token_attends_to_a_later_one(family, attention):
    module = module_of(small_config(family), attention=attention)
    original = tokens(sequences=1, length=13)
    changed = original.clone()
    changed[0, 8] = (changed[0, 8] + 1) % VOCAB
    before, after = token_losses(module, as_batch(original)), token_losses(module, as_batch(changed))
    assert after[:7] == pytest.approx(before[:7], rel=1e-6)
    # The label at 7 is the changed token, and from 8 on it is among the inputs.
    assert all(abs(one - other) > 1e-5 for one, other in zip(after[7:], before[7:], strict=True))


@pytest.mark.parametrize("attention", ["auto", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_on_the_right_changes_nothing(family, attention):
    module = module_of(small_config(family), attention=attention)
    batch = as_batch(tokens(sequences=2, length=13))
    value, (_, count) = module(batch)
    for filler in (0, 7):
        inputs = F.pad(batch.inputs, (0, 6), value=filler)
        padded, (_, padded_count) = module(MicroBatch(inputs, F.pad(batch.labels, (0, 6), value=IGNORED)))
        torch.testing.assert_close(padded, value, rtol=1e-6, atol=0)
        assert padded_count == count


LENGTHS = (5, 1, 9, 4)


def packed(sequences: Tensor, *, padding: int = 3) -> tuple[MicroBatch, list[MicroBatch]]:
    """Documents packed into one sequence as the loader does, and each of them in a sequence of its own."""
    alone, positions, documents, start = [], [], [], 0
    inputs, labels = sequences[:, :-1], sequences[:, 1:]
    for number, length in enumerate(LENGTHS):
        part = slice(start, start + length)
        alone.append(MicroBatch(inputs[:, part].contiguous(), labels[:, part].contiguous()))
        positions += list(range(length))
        documents += [number] * length
        start += length
    # The padding is a document of its own, whose positions continue those of the last one.
    positions += [positions[-1] + 1 + index for index in range(padding)]
    documents += [len(LENGTHS)] * padding
    whole = MicroBatch(
        F.pad(inputs[:, :start], (0, padding), value=0),
        F.pad(labels[:, :start], (0, padding), value=IGNORED),
        torch.tensor([positions] * len(sequences)),
        torch.tensor([documents] * len(sequences), dtype=torch.int32),
    )
    return whole, alone


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("family", "loss"),
    [(family, loss) for family in FAMILIES for loss in ("plain", "chunked") if (family, loss) != ("bert", "chunked")],
)
def test_packed_documents_do_not_attend_to_each_other(family, attention, loss):
    module = module_of(small_config(family), attention=attention, loss=loss)
    whole, alone = packed(tokens(sequences=2, length=sum(LENGTHS) + 1))
    value, (_, count) = module(whole)
    assert int(count) == 2 * sum(LENGTHS)
    torch.testing.assert_close(value, sum(module(one)[0] for one in alone), rtol=2e-6, atol=0)
    # The loss would differ if they did.
    together = module(MicroBatch(whole.inputs, whole.labels))[0]
    assert abs(float(value.detach() / together.detach()) - 1) > 1e-4


def windowed(family: str, window: int | None) -> Any:
    sizes = {"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "ffn": 48, "vocab": VOCAB, "positions": 64}
    shape = shape_from_sizes(family, tied=True, **sizes)
    object.__setattr__(shape, "sliding_window", window)
    return transformers_config(shape)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_a_window_shorter_than_the_sequence_is_applied_as_transformers_does(family, attention):
    batch = as_batch(tokens(sequences=2, length=25))
    module = module_of(windowed(family, 6), attention=attention, longest=24)
    plain = module_of(windowed(family, 6), attention="eager", longest=24).model
    assert plain.config._attn_implementation == "eager"
    logits = plain(input_ids=batch.inputs, use_cache=False).logits
    wanted = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum")
    found = module(batch)[0]
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0)
    unlimited = module_of(windowed(family, None), attention=attention, longest=24)(batch)[0]
    assert abs(float(found.detach() / unlimited.detach()) - 1) > 1e-4


def test_a_token_outside_the_window_is_not_attended_to():
    # Two blocks of window 6 reach back 2 × 5 tokens.
    module = module_of(windowed("mistral", 6), longest=24)
    original = tokens(sequences=1, length=25)
    changed = original.clone()
    changed[0, 2] = (changed[0, 2] + 1) % VOCAB
    before, after = token_losses(module, as_batch(original)), token_losses(module, as_batch(changed))
    assert after[13:] == pytest.approx(before[13:], rel=1e-6)
    assert all(abs(one - other) > 1e-6 for one, other in zip(after[2:7], before[2:7], strict=True))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_do_not_attend_to_each_other_within_a_window_either(attention):
    module = module_of(windowed("mistral", 4), attention=attention, longest=24)
    whole, alone = packed(tokens(sequences=2, length=sum(LENGTHS) + 1))
    torch.testing.assert_close(module(whole)[0], sum(module(one)[0] for one in alone), rtol=2e-6, atol=0)


def test_a_window_needs_a_mask_of_transformers_only_where_attention_is_not_told_of_it():
    """Of mixtures, Mistral's tells attention its window and Phi's does not."""
    for family, short in (("mixtral", MASKLESS), ("phimoe", "sdpa")):
        for window, expected in ((24, MASKLESS), (23, short)):
            model = on_meta(mixture_config(family, sliding_window=window), longest=24)
            assert model.config._attn_implementation == expected
