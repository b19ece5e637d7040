"""Loading a config from files, includes, overrides and references."""

from pathlib import Path
from typing import Any

import pytest

from shoal.config import config_from_mapping, load_config
from shoal.mistakes import UserMistake


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(**files: str) -> None:
    for name, text in files.items():
        Path(f"{name}.yaml").write_text(text)


def mistake(path: str | None, *overrides: str) -> str:
    with pytest.raises(UserMistake) as caught:
        load_config(path, overrides)
    return str(caught.value)


def test_a_config_needs_no_file() -> None:
    config = load_config(None, ["model.shape=gpt2", "train.lr=3e-4"])
    assert (config.model.shape, config.train.lr) == ("gpt2", 3e-4)


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.lr=1e-3", 1e-3),
        ("train.lr=2", 2.0),
        ("train.clip=null", None),
        ("train.optimizer.betas=[0.8, 0.9]", (0.8, 0.9)),
        ("model.freeze=[a.*,b]", ("a.*", "b")),
        ("model.freeze=[]", ()),
        ("data.path='a b'", "a b"),
        ('data.path="12"', "12"),
        ("data.path=x=y", "x=y"),
        ("data.path=02:00:00", "02:00:00"),
        ("train.tokens=1_000_000", 1_000_000),
        ("train.lr_groups={lm_head.*: 0.5}", {"lm_head.*": 0.5}),
        ("train.lr_groups[lm_head.*]=0.5", {"lm_head.*": 0.5}),
        ("train.compile=true", True),
        ("checkpoint.async=false", False),
    ],
)
def test_the_value_of_an_override_is_read_as_yaml(override: str, value: Any) -> None:
    config: Any = load_config(None, ["model.shape=gpt2", override])
    key = override.partition("=")[0].partition("[")[0]
    for part in key.split("."):
        config = getattr(config, {"async": "async_"}.get(part, part))
    assert config == value
    assert type(config) is type(value)


def test_later_overrides_take_precedence_over_earlier_ones_and_all_over_the_file(folder: Path) -> None:
    write(run="model: {shape: gpt2}\ntrain: {lr: 1, clip: 5}\n")
    config = load_config("run.yaml", ["train.lr=2", "train.lr=3"])
    assert (config.train.lr, config.train.clip) == (3.0, 5.0)


def test_an_override_with_a_block_changes_only_the_keys_it_names(folder: Path) -> None:
    write(run="model: {shape: gpt2}\ntrain: {schedule: {name: linear, warmup: 7}}\n")
    schedule = load_config("run.yaml", ["train.schedule={warmup: 9}"]).train.schedule
    assert (schedule.name, schedule.warmup) == ("linear", 9)


def test_null_unsets_a_key_of_the_file(folder: Path) -> None:
    write(run="model: {from: x}\ntrain: {epochs: 3}\n")
    config = load_config(
        "run.yaml", ["model.from=null", "model.shape={layers: 2}", "train.epochs=null", "train.steps=5"]
    )
    assert config.model.from_ is None
    assert config.train.epochs is None
    assert config.train.steps == 5


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("train.lr", "override train.lr has no value: write train.lr=VALUE."),
        ("train.steps=", "override train.steps= has no value: write train.steps=VALUE, or train.steps=null for none."),
        ("=3", "override =3: the key must be written like train.lr."),
        ("train..lr=3", "override train..lr=3: the key must be written like train.lr."),
        ("train.lr.=3", "override train.lr.=3: the key must be written like train.lr."),
        ("include=[a]", "override include=[a]: include works in a file only."),
        (
            "model.shape.layers=2",
            'override model.shape.layers=2: model.shape is "gpt2", which has no keys inside; '
            "set model.shape as a whole.",
        ),
        (
            "train={lr: 1, lr: 2}",
            "override train={lr: 1, lr: 2}: the key lr is set twice in this block; keep one of them.",
        ),
    ],
)
def test_an_invalid_override_is_refused(override: str, says: str) -> None:
    assert mistake(None, "model.shape=gpt2", override) == says


def test_an_override_that_is_not_yaml_is_refused_without_a_line_number() -> None:
    assert mistake(None, "train.lr=[1").startswith("override train.lr=[1: this is not YAML: ")


def test_the_including_file_overrides_included_ones_and_later_ones_earlier_ones(folder: Path) -> None:
    Path("parts").mkdir()
    write(run="include: [parts/low.yaml, parts/high.yaml]\ntrain: {clip: 3}\n")
    Path("parts/low.yaml").write_text("include: [deep.yaml]\ntrain: {lr: 1, clip: 1, global_batch: 1}\nname: low\n")
    Path("parts/deep.yaml").write_text("model: {shape: gpt2}\nseed: 5\nname: deep\n")
    Path("parts/high.yaml").write_text("train: {clip: 2, global_batch: 2}\n")
    config = load_config("run.yaml")
    assert (config.train.lr, config.train.clip, config.train.global_batch) == (1.0, 3.0, 2)
    assert (config.name, config.seed, config.model.shape) == ("low", 5, "gpt2")
    assert config.include == ()


def test_a_file_may_be_included_twice_but_not_by_itself(folder: Path) -> None:
    write(
        run="include: [a.yaml, b.yaml]",
        a="include: [c.yaml]",
        b="include: [c.yaml]",
        c="model: {shape: gpt2}",
    )
    assert load_config("run.yaml").model.shape == "gpt2"
    write(c="name: x\ninclude:\n- a.yaml\n")
    assert mistake("run.yaml") == "c.yaml:3: include is circular: run.yaml → a.yaml → c.yaml → a.yaml."
    write(run="include: [run.yaml]")
    assert mistake("run.yaml") == "run.yaml:1: include is circular: run.yaml → run.yaml."


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("\ninclude: base.yaml", 'run.yaml:2: include is "base.yaml", but must be a list of files.'),
        (
            "include:\n  - base.yaml\n  - bse.yaml",
            "run.yaml:3: included file bse.yaml does not exist. Did you mean base.yaml?",
        ),
    ],
)
def test_an_include_of_a_missing_file_is_refused(folder: Path, text: str, says: str) -> None:
    write(run=text, base="model: {shape: gpt2}")
    assert mistake("run.yaml") == says


def test_values_may_refer_to_other_keys_and_to_defaults(folder: Path) -> None:
    write(
        run="name: lr-${train.lr}-${seed}\nmodel: {shape: gpt2}\ntrain: {lr: 1}\neval: {every: '${checkpoint.every}'}\n"
    )
    config = load_config("run.yaml", ["checkpoint.every=7"])
    assert (config.name, config.eval.every) == ("lr-1-1234", 7)


def test_a_reference_leaves_unset_keys_unset(folder: Path) -> None:
    write(run="name: run-${seed}\nmodel: {shape: gpt2}\n")
    assert load_config("run.yaml").slurm.model_fields_set == set()


def test_the_environment_can_be_used_in_values(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_DATA", "/data")
    monkeypatch.delenv("SHOAL_TEST_NOT_SET", raising=False)
    write(
        run="model: {shape: gpt2, from: null}\n"
        "data:\n"
        "  path: ${oc.env:SHOAL_TEST_DATA}/train.json\n"
        "  validation: ${oc.env:SHOAL_TEST_NOT_SET,${oc.env:SHOAL_TEST_DATA}/held-out.json}\n"
    )
    config = load_config("run.yaml")
    assert (config.data.path, config.data.validation) == ("/data/train.json", "/data/held-out.json")
    write(run="data:\n  path: ${oc.env:SHOAL_TEST_NOT_SET}/x\n")
    assert mistake("run.yaml") == (
        "run.yaml:2: data.path needs the environment variable SHOAL_TEST_NOT_SET, which is not set."
    )


def test_environment_values_are_not_interpolated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_TEST_DATA", "${seed}")
    config = load_config(None, ["model.shape=gpt2", "data.path=${oc.env:SHOAL_TEST_DATA}"])
    assert config.data.path == "${seed}"


@pytest.mark.parametrize(
    "text",
    [
        "${oc.coerce:trap.value,1}",
        "x${oc.coerce:trap.value,1}",
        "${ oc.coerce : trap.value , 1}",
        "${oc.${name}:trap.value,1}",
        r"${oc.env:SHOAL_TEST_NOT_SET,\${oc.coerce:trap.value,1}}",
        r"${oc.env:SHOAL_TEST_NOT_SET,'\${oc.coerce:trap.value,1}'}",
        r"\\${oc.coerce:trap.value,1}",
        "${oc.decode:'${oc.coerce:trap.value,1}'}",
        "${oc.create:{a: 1}}",
    ],
)
def test_no_reference_can_import_a_module(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("trap.py").write_text("open('sprung', 'w').close()\nclass value: pass\n")
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(UserMistake, match=r"only \$\{another.key\} and \$\{oc.env:NAME\} are allowed in a config"):
        config_from_mapping({"name": "coerce", "model": {"shape": "gpt2"}, "data": {"path": text}})
    assert not Path("sprung").exists()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name: ${nme}", "run.yaml:1: name refers to nme, which is not a key of this config."),
        ("seed: 1\nname: ${name}", "run.yaml:2: name cannot be resolved: Recursive interpolation detected."),
        ("seed: ???", "run.yaml:1: seed is mandatory (???): give it a value."),
    ],
)
def test_a_reference_that_cannot_be_resolved_is_refused(folder: Path, text: str, says: str) -> None:
    write(run=text)
    assert mistake("run.yaml") == says


def test_a_mandatory_value_may_be_set_by_the_including_file(folder: Path) -> None:
    write(base="model:\n  shape: ???", run="include: [base.yaml]\nmodel: {shape: gpt2}\n")
    assert load_config("run.yaml").model.shape == "gpt2"


def test_anchors_and_merges_work_and_keep_their_lines(folder: Path) -> None:
    write(run="model: {shape: gpt2}\neval: &often\n  every: 5\nlog:\n  <<: *often\n  to: [csv]\n")
    config = load_config("run.yaml")
    assert (config.log.every, config.log.to) == (5, ("csv",))
    write(run="model: {shape: gpt2}\neval: &often\n  every: 5\n  batches: 0\ncheckpoint:\n  <<: *often\n")
    assert "run.yaml:4: checkpoint.batches is not a key" in mistake("run.yaml")


@pytest.mark.parametrize("mapping", [{"include": ["a.yaml"]}, {1: 2}, {"train": {None: 3}}])
def test_a_mapping_that_no_file_could_hold_is_refused(mapping: Any) -> None:
    with pytest.raises(UserMistake, match=r"include works in a file only|is not text"):
        config_from_mapping(mapping)
