"""Model shapes: exact parameter counts, lookup by name, no contradictory sizes. Nothing here needs torch."""

import subprocess
import sys
from dataclasses import replace

import pytest

from shoal.catalogue.earlier_models import EARLIER
from shoal.catalogue.shapes import (
    NAMED,
    ModelShape,
    find_shape,
    parameters,
    shape_from_sizes,
)
from shoal.mistakes import UserMistake

PUBLISHED_TOTALS = {
    # BertForMaskedLM of transformers with these sizes.
    "bert-tiny": 4_416_698,
    "bert-small": 28_795_194,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "starcoder2-3b": 3_030_371_328,
    "starcoder2-7b": 7_173_923_840,
    "starcoder2-15b": 15_957_889_024,
    "gpt2": 124_439_808,
    "pythia-160m": 162_322_944,
    "pythia-410m": 405_334_016,
    "pythia-1b": 1_011_781_632,
    "pythia-2.8b": 2_775_208_960,
    "pythia-6.9b": 6_857_302_016,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-135m": 134_515_008,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "codellama-7b": 6_738_546_688,
    "codellama-34b": 33_743_970_304,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-405b": 405_853_388_800,
    "llama3.2-1b": 1_235_814_400,
    "llama3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.3-70b": 70_553_706_496,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-14b": 14_768_307_200,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "gemma3-270m": 268_098_176,
    "gemma3-1b": 999_885_952,
    # Of the 4,300,079,472 on the hub, 419,816,304 are the vision tower's and the projector's.
    "gemma3-4b": 3_880_263_168,
    "gemma3-12b": 11_766_034_176,
    "gemma3-27b": 27_009_346_304,
    "phi3-mini": 3_821_079_552,
    "phi3-medium": 13_960_238_080,
    "phi4": 14_659_507_200,
    "phi4-mini": 3_836_021_760,
    "olmo2-1b": 1_484_916_736,
    "olmo2-7b": 7_298_617_344,
    "olmo2-13b": 13_716_198_400,
    "olmo2-32b": 32_234_279_936,
    "smollm3-3b": 3_075_098_624,
}

# llm-foundry's throughput table; the second value is the sequence length.
MPT_TABLE = [
    ("mpt-125m", 2048, 125_311_488),
    ("mpt-350m", 2048, 355_985_408),
    ("mpt-760m", 4096, 763_616_256),
    ("mpt-1b", 2048, 1_315_950_592),
    ("mpt-3b", 2048, 2_651_837_440),
    ("mpt-7b", 65_536, 6_918_905_856),
    ("mpt-13b", 2048, 12_853_954_560),
    ("mpt-30b", 2048, 29_975_214_080),
    ("mpt-70b", 2048, 64_862_437_376),
]


def small(family: str = "llama", **changes: object) -> ModelShape:
    sizes: dict[str, object] = {
        "hidden": 64, "layers": 2, "heads": 4, "vocab": 99, "positions": 33, "tied": True, **changes
    }  # fmt: skip
    return shape_from_sizes(family, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "total"), PUBLISHED_TOTALS.items())
def test_the_count_is_the_published_total(name: str, total: int) -> None:
    assert parameters(NAMED[name]) == total


@pytest.mark.parametrize(("name", "length", "total"), MPT_TABLE)
def test_mpt_sizes_explain_the_published_totals_exactly(name: str, length: int, total: int) -> None:
    # The table's runs had learned positions and biases, which our shapes, like the mpt models on the hub, do not have:
    # per block nine hidden sizes of bias and two of norm bias, and one more for the final norm.
    shape = NAMED[name]
    assert parameters(shape) + shape.hidden * (length + 11 * shape.layers + 1) == total


def test_the_count_of_a_mixture_with_dense_layers_is_right_up_to_the_mean_of_its_layers() -> None:
    # Published: 671,026,419,200, with 256 biases of the router in each of 58 layers, which are not trained.
    assert 0 <= 671_026_419_200 - 58 * 256 - parameters(NAMED["deepseek-v3"]) < 61


def test_every_named_shape_has_a_published_total() -> None:
    # Of further models: test_earlier_models.py.
    assert {*PUBLISHED_TOTALS, "deepseek-v3", *(name for name, _, _ in MPT_TABLE)} == NAMED.keys() - EARLIER.keys()


@pytest.mark.parametrize("name", NAMED)
def test_the_heads_of_every_named_shape_are_possible(name: str) -> None:
    shape = NAMED[name]
    assert shape.heads % shape.kv_heads == 0
    assert shape.head_size % 2 == 0


def test_a_tied_head_is_counted_once() -> None:
    tied = small()
    assert parameters(replace(tied, tied=False)) - parameters(tied) == tied.vocab * tied.hidden


def test_a_shape_can_be_a_dictionary_key_and_knows_its_head_size() -> None:
    assert {NAMED["llama3.2-1b"]: 1}[find_shape("llama3.2-1b")] == 1
    assert NAMED["llama3.2-1b"].head_size == 64
    assert NAMED["qwen3-32b"].head_size == 128  # not 5120 / 64


def test_a_name_is_found_in_any_case() -> None:
    assert find_shape(" Llama3-8B ") is NAMED["llama3-8b"]


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(UserMistake, match=r"No model shape is called 'lama3-8b'\. Did you mean llama3-8b"):
        find_shape("lama3-8b")


def test_explicit_sizes_take_the_defaults_of_the_family_for_the_rest() -> None:
    assert small("gpt2").ffn == small("neox").ffn == small("bert").ffn == 256
    assert small("llama").ffn == 192  # 8/3 of 64 is 170.7, and the next multiple of 64 is 192
    assert small("llama", hidden=768).ffn == 2048  # already a multiple: nothing is added
    assert small("neox").rotary_share == 0.25
    assert small("bert").norm_eps == 1e-12
    assert small("qwen3").rope_theta == 1e6
    assert small("llama").kv_heads == 4


def test_explicit_sizes_have_the_hand_computed_parameter_count() -> None:
    shape = shape_from_sizes(
        "llama", hidden=256, layers=4, heads=8, kv_heads=4, ffn=688, vocab=512, positions=1024, tied=True
    )
    assert (shape.kv_heads, shape.ffn, shape.head_size) == (4, 688, 32)
    assert parameters(shape) == 512 * 256 + 4 * (256 * (256 * 2 + 128 * 2 + 3 * 688) + 2 * 256) + 256


@pytest.mark.parametrize(
    ("family", "changes", "sentence"),
    [
        ("llama", {"hidden": 66}, "hidden .66. is not divisible by 4 heads"),
        ("llama", {"kv_heads": 3}, "4 heads are not divisible by 3 kv_heads"),
        ("llama", {"kv_heads": 8}, "4 heads are not divisible by 8 kv_heads"),
        ("gpt2", {"kv_heads": 2}, "kv_heads .2. is not supported by the family gpt2"),
        ("neox", {"kv_heads": 2}, "kv_heads .2. is not supported by the family neox"),
        ("bert", {"kv_heads": 2}, "kv_heads .2. is not supported by the family bert"),
        ("bert", {"tied": False}, "leave tied at true"),
        ("qwen2", {"hidden": 60}, "The head dimension is 15"),
        ("neox", {"hidden": 8}, "dimension of 2 that is none"),
        ("llama", {"layers": 0}, "layers is 0"),
        ("llama", {"heads": 0}, "heads is 0"),
        ("llama", {"kv_heads": 0}, "kv_heads is 0"),
        ("lama", {}, "'lama' is unknown.*Did you mean llama"),
    ],
)
def test_sizes_that_contradict_each_other_are_refused_in_a_sentence(
    family: str, changes: dict[str, object], sentence: str
) -> None:
    with pytest.raises(UserMistake, match=sentence):
        small(family, **changes)


def test_as_many_kv_heads_as_heads_contradict_no_family() -> None:
    assert small("gpt2", kv_heads=4) == small("gpt2")


def test_an_odd_head_size_is_fine_where_positions_are_learned() -> None:
    assert small("gpt2", hidden=60).head_size == 15


def test_the_catalogue_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys, shoal.catalogue.shapes, shoal.catalogue.gpus; "
        "sys.exit(bool({'torch', 'transformers', 'numpy', 'pydantic'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
