"""GPUs and links: found by our names, recognized by the driver's, with plausible figures."""

import pytest

from shoal.catalogue.gpus import GPUS, LINKS, find_gpu, find_link, recognize
from shoal.mistakes import UserMistake

PRINTED = {
    "Tesla T4": "t4",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-SXM2-32GB": "v100-32gb",
    "Tesla V100-SXM3-32GB": "v100-32gb",
    "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti",
    "Quadro RTX 8000": "rtx8000",
    "NVIDIA TITAN RTX": "titan-rtx",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA A40": "a40",
    "NVIDIA GeForce RTX 3060": "rtx3060",
    "NVIDIA GeForce RTX 3060 Ti": "rtx3060ti",
    "NVIDIA GeForce RTX 3080": "rtx3080",
    "NVIDIA GeForce RTX 3080 Ti": "rtx3080ti",
    "NVIDIA GeForce RTX 4070": "rtx4070",
    "NVIDIA GeForce RTX 4070 SUPER": "rtx4070-super",
    "NVIDIA GeForce RTX 5070 Ti": "rtx5070ti",
    "NVIDIA H20": "h20",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX A6000": "a6000",
    "A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100-SXM4-80GB": "a100-80gb",
    "NVIDIA H100 80GB HBM3": "h100-80gb",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H200": "h200",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200 NVL": "h200-nvl",
    "NVIDIA B200": "b200",
    "NVIDIA RTX A5000": "a5000",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000-ada",
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": "rtx-pro-6000",
    "NVIDIA A800-SXM4-80GB": "a800-80gb",
    "NVIDIA H800": "h800-80gb",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA GH200 120GB": "gh200-120gb",
    "NVIDIA GB200": "gb200",
    "NVIDIA B300 SXM6 AC": "b300",
    "AMD Instinct MI210": "mi210",
    "AMD Instinct MI325X": "mi325x",
    "AMD Instinct MI350X": "mi350x",
    "AMD Instinct MI250X / MI250": "mi250",
    "AMD Instinct MI300X": "mi300x",
    "cpu": "cpu",
}


@pytest.mark.parametrize(("printed", "name"), PRINTED.items())
def test_names_printed_by_the_driver_are_recognized(printed: str, name: str) -> None:
    assert recognize(printed) is GPUS[name]


@pytest.mark.parametrize(
    ("printed", "name", "link"),
    [
        ("Tesla V100-PCIE-32GB", "v100-32gb", "pcie3"),
        ("NVIDIA A100-PCIE-40GB", "a100-40gb", "pcie4"),
        ("NVIDIA A100 80GB PCIe", "a100-80gb", "pcie4"),
        ("NVIDIA A800 80GB PCIe", "a800-80gb", "pcie4"),
    ],
)
def test_a_pcie_card_has_no_nvlink(printed: str, name: str, link: str) -> None:
    gpu = recognize(printed)
    assert gpu is not None
    assert (gpu.name, gpu.link) == (name, link)
    assert GPUS[name].link != link


@pytest.mark.parametrize(
    "printed",
    [
        "",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 3090 Ti",
        "NVIDIA A100-SXM4-40GB MIG 3g.20gb",
        "NVIDIA GH200 144G HBM3e",
        "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        "NVIDIA RTX A5000 Laptop GPU",
        "NVIDIA A10M",
        "NVIDIA GeForce RTX 5060 Ti",  # with 8 GB or 16
        "Tesla P100-PCIE-16GB",
    ],
)
def test_a_device_that_only_resembles_an_entry_is_not_taken_for_it(printed: str) -> None:
    assert recognize(printed) is None


def test_names_are_found_however_they_are_spelled() -> None:
    assert find_gpu("H100_80GB") is GPUS["h100-80gb"]
    assert find_link("InfiniBand NDR") is LINKS["infiniband-ndr"]


def test_an_unknown_name_is_answered_with_the_nearest_ones() -> None:
    with pytest.raises(UserMistake, match=r"No GPU is called 'a100'\. Did you mean a100-40gb or a100-80gb\?"):
        find_gpu("a100")
    for part, meant in (("h100", "h100-80gb or h100-pcie or h100-96gb"), ("4090", "rtx4090 or rtx4090d")):
        with pytest.raises(UserMistake, match=rf"No GPU is called '{part}'\. Did you mean {meant}\?"):
            find_gpu(part)
    with pytest.raises(UserMistake, match=r"No link is called 'nvlink'\. Did you mean nvlink"):
        find_link("nvlink")


@pytest.mark.parametrize("name", GPUS)
def test_every_gpu_has_a_known_link_and_plausible_figures(name: str) -> None:
    gpu = GPUS[name]
    assert gpu.name == name
    assert gpu.link in LINKS
    if gpu.fp8 is not None:
        assert gpu.bf16 is not None
        # A dense figure mixed with a sparse one would show as a ratio of one or four.
        assert gpu.fp8 / gpu.bf16 == pytest.approx(2, rel=0.02)
    if gpu.compute_capability is not None:
        assert (gpu.bf16 is not None) == (gpu.compute_capability >= (8, 0))
        assert (gpu.fp8 is not None) == (gpu.compute_capability >= (8, 9))
        assert gpu.fp16 > gpu.fp32


def test_memory_is_what_the_driver_reports_and_not_the_figure_in_the_name() -> None:
    for name, on_the_box in {"a100-40gb": 40, "a100-80gb": 80, "h100-80gb": 80, "v100-32gb": 32, "h200": 141}.items():
        assert 0.97 * on_the_box < GPUS[name].memory_gib < on_the_box


def test_links_within_a_node_are_faster_than_those_between_nodes() -> None:
    for gpu in GPUS.values():
        if gpu.link.startswith(("nvlink", "xgmi")):
            assert LINKS[gpu.link].bytes_per_second > LINKS["infiniband-ndr"].bytes_per_second
    assert LINKS["pcie3"].bytes_per_second < LINKS["pcie4"].bytes_per_second < LINKS["pcie5"].bytes_per_second


def test_every_gpu_has_a_link_to_its_host_of_its_generation() -> None:
    generations = {"t4": "pcie3", "a100-80gb": "pcie4", "l40s": "pcie4", "h200": "pcie5", "mi250": "pcie4"}
    generations |= {"mi210": "pcie4", "mi350x": "pcie5"}
    assert {name: GPUS[name].host_link.name for name in generations} == generations
    grace = {name: gpu.host_link.name for name, gpu in GPUS.items() if not gpu.host_link.name.startswith("pcie")}
    assert grace == {"gh200": "nvlink-c2c", "gh200-120gb": "nvlink-c2c", "gb200": "nvlink-c2c-shared"}
