"""What the overrides and files of a sweep mean."""

import json
from pathlib import Path

import pytest

from shoal.launch.sweep.listing import read_members
from shoal.launch.sweep.members import member_name
from shoal.launch.sweep.space import read_space
from shoal.mistakes import UserMistake


def test_a_grid_has_every_combination_and_what_has_one_value_is_the_same_in_all() -> None:
    space = read_space(["train.lr=1e-4,3e-4", "train.steps=10", "parallel.strategy=ddp,fsdp"])
    assert space.fixed == ("train.steps=10",)
    assert space.grid() == [
        ("train.lr=1e-4", "parallel.strategy=ddp"),
        ("train.lr=1e-4", "parallel.strategy=fsdp"),
        ("train.lr=3e-4", "parallel.strategy=ddp"),
        ("train.lr=3e-4", "parallel.strategy=fsdp"),
    ]


@pytest.mark.parametrize(
    ("value", "members"),
    [
        ("[a,b],[c]", ["[a,b]", "[c]"]),
        ("{x: 1, y: [2,3]},null", ["{x: 1, y: [2,3]}", "null"]),
        ('"a,b",c', ['"a,b"', "c"]),
        ("['x]',b],[c]", ["['x]',b]", "[c]"]),
        ("don't,do", ["don't", "do"]),
        ("a, b", ["a", "b"]),
    ],
)
def test_commas_in_brackets_and_quotes_do_not_separate_values(value: str, members: list[str]) -> None:
    assert read_space([f"model.freeze={value}"]).grid() == [(f"model.freeze={one}",) for one in members]


def test_one_list_or_quoted_string_is_one_value() -> None:
    for text in ("model.freeze=[a,b]", 'data.path="a,b.txt"'):
        assert read_space([text]).fixed == (text,)


def test_random_members_are_drawn_from_ranges_by_the_seed() -> None:
    space = read_space(["train.lr=log(1e-5,1e-3)", "train.global_batch=int(1,3)", "train.clip=0.5,1.0"])
    drawn = space.draw(200, seed=3)
    assert drawn[:5] == space.draw(5, seed=3) != space.draw(5, seed=4)
    assert len(set(drawn)) == 200
    rates = [float(member[0].partition("=")[2]) for member in drawn]
    assert all(1e-5 <= rate <= 1e-3 for rate in rates)
    assert 70 < sum(rate < 1e-4 for rate in rates) < 130, "logarithmic: half of them below the geometric mean"
    assert {member[1] for member in drawn} == {f"train.global_batch={count}" for count in (1, 2, 3)}
    assert {member[2] for member in drawn} == {"train.clip=0.5", "train.clip=1.0"}


@pytest.mark.parametrize(
    ("overrides", "sentence"),
    [
        (["train.lr=log(1e-5,1e-3)"], "train.lr has a range, of which a grid cannot have every value"),
        (["train.lr=lg(1e-5,1e-3)"], "lg(…) is not a range; .* Did you mean log"),
        (["train.lr=log(0,1)"], "must begin above 0"),
        (["train.lr=uniform(2,1)"], "must be less than the second"),
        (["train.lr=int(1,2.5)"], "needs whole numbers"),
        (["train.lr=log(1)"], "a range has two numbers"),
        (["train.lr=1,,2"], "a value between commas is empty"),
        (["train.lr=1,1"], "1 is there twice"),
        (["train.lr=1", "train.lr=2"], "train.lr was given before"),
        (["train.lr"], "override train.lr has no value"),
        (["name=a,b"], "give it --name NAME"),
        (["train.lr=" + ",".join(map(str, range(40))), "seed=" + ",".join(map(str, range(40)))], "1,600 members"),
    ],
)
def test_mistakes_say_what_to_write(overrides: list[str], sentence: str) -> None:
    with pytest.raises(UserMistake, match=sentence.replace("(", r"\(").replace(")", r"\)")):
        read_space(overrides).grid()


def test_more_random_members_than_there_are_is_a_mistake() -> None:
    with pytest.raises(UserMistake, match="more members than there are different ones, 4"):
        read_space(["train.lr=1,2", "seed=1,2"]).draw(5, seed=0)


def test_a_list_of_members_is_read_from_yaml_and_json_lines(tmp_path: Path) -> None:
    entries = [
        {"train": {"lr": 0.001, "lr_groups": {"lm_head.*": 0.1}}, "parallel.strategy": "fsdp"},
        {"model.freeze": ["a", "b"], "name_of": "yes"},
        ["train.lr=1e-4", "seed=3"],
    ]
    expected = [
        ("train.lr=0.001", "train.lr_groups[lm_head.*]=0.1", "parallel.strategy=fsdp"),
        ('model.freeze=["a", "b"]', 'name_of="yes"'),
        ("train.lr=1e-4", "seed=3"),
    ]
    for name, text in {
        "a.yaml": json.dumps(entries),
        "b.jsonl": "\n\n".join(json.dumps(entry) for entry in entries),
    }.items():
        (tmp_path / name).write_text(text)
        assert read_members(tmp_path / name) == expected


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("[]", "must hold a list"),
        ("a: 1", "must hold a list"),
        ("[3]", "entry 1 is 3, but must be keys with values"),
        ("[{a: 1}, {a: 1}]", "entry 2 repeats entry 1"),
        ("[{a: ", "this is not YAML"),
    ],
)
def test_mistakes_in_a_list_name_the_entry(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "members.yaml").write_text(text)
    with pytest.raises(UserMistake, match=sentence):
        read_members(tmp_path / "members.yaml")


def test_names_of_members_are_names_of_folders() -> None:
    assert member_name(3, ("train.lr=3e-4", "parallel.strategy=fsdp")) == "03-lr-3e-4-strategy-fsdp"
    assert member_name(0, ('data.path="../../x y"',)) == "00-path-..-..-x-y"
    assert member_name(12, ("train.optimizer.name=lion",)) == "12-optimizer-lion"
    assert len(member_name(1, (f"model.freeze=[{'a' * 300}]",))) < 70
