"""`report.html` and `shoal report`: one page from the files of a run, whatever state they are in."""

import json
import math
import os
import re
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from typer.testing import CliRunner

from shoal import api
from shoal.cli.app import app
from shoal.mistakes import UserMistake
from shoal.observe.charts import charts_of, thinned
from shoal.observe.report_compare import MISSING, config_differences, effective_config
from shoal.observe.results import results_of
from shoal.observe.run_reader import RunReader, column, number
from tests.harness import settings, train_again_on, train_on
from tests.observe.written_runs import append, event, training_line, write_run


class Page(HTMLParser):
    """The text of a page by the id of the section it is in, and every address that the page names."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.sections: dict[str, str] = {}
        self.addresses: list[str] = []
        self.scripts: list[str] = []
        self._open: list[tuple[str, str]] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        found = dict(attributes)
        self.addresses += [found[name] for name in ("src", "href") if name in found]
        if tag in ("section", "header", "script"):
            self._open.append((tag, found.get("id", "")))

    def handle_endtag(self, tag: str) -> None:
        if self._open and tag == self._open[-1][0]:
            self._open.pop()

    def handle_data(self, data: str) -> None:
        if not self._open:
            return
        tag, name = self._open[-1]
        if tag == "script":
            self.scripts.append(data)
        else:
            self.sections[name] = f"{self.sections.get(name, '')} {data}".strip()


def page_of(run: Path) -> Page:
    return Page((run / "report.html").read_text())


def charts_in(page: Page) -> dict[str, Any]:
    found = next(json.loads(one) for one in page.scripts if one.startswith("[{"))
    return {chart["id"]: chart for chart in found}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, instructions: Path) -> Path:
    changes = {"data__validation": 0.1, "eval__every": 2, "eval__batches": 1, "checkpoint__every": 2}
    return train_again_on(2, settings(instructions, **changes), tmp_path_factory.mktemp("trained"))


def test_every_run_leaves_a_page_that_says_what_was_trained_and_how_it_went(trained: Path) -> None:
    page = page_of(trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if "loss" in line]
    assert "run finished" in page.sections["headline"]
    assert "step 4 of 4" in page.sections["headline"]
    assert f"{losses[-1]:.4f}" in page.sections["figures"]
    assert "llama, hidden 32, 2 layers" in page.sections["setup"]
    assert "adamw" in page.sections["setup"]
    assert f"torch {torch.__version__}, transformers {transformers.__version__}" in page.sections["setup"]
    assert "Time per step" in page.sections["forecast"]
    assert "latest" in page.sections["checkpoints"]
    assert "after" in page.sections["events"]
    assert f"shoal train {trained / 'config.yaml'} name=run-again" in page.sections["repeat"]
    charts = charts_in(page)
    drawn = {series["label"]: series for series in charts["loss"]["series"]}
    assert drawn["training"]["y"] == pytest.approx(losses, rel=1e-5)
    assert drawn["training"]["tokens"] == [line["tokens"] for line in lines if "loss" in line]
    assert drawn["evaluation"]["step"] == [2, 4]
    assert {"lr", "grad_norm", "speed", "memory", "seconds"} <= charts.keys()


def test_the_page_loads_nothing(trained: Path) -> None:
    page, text = page_of(trained), unescape((trained / "report.html").read_text())
    assert [one for one in page.addresses if not one.startswith("data:")] == []
    assert "default-src 'none'" in text
    # The address of the chart library's project, in its licence comment, is all there is.
    assert set(re.findall(r"https?://[\w./-]+", text)) <= {
        "https://github.com/leeoniya/uPlot",
        "http://www.w3.org/2000/svg",
    }


def test_a_failed_run_says_why(tmp_path: Path, instructions: Path) -> None:
    config = settings(instructions, train__on_nan="stop", train__lr=1e30, train__clip=None)
    with pytest.raises(Exception) as failure:  # noqa: PT011
        train_on(1, config, tmp_path)
    headline = page_of(tmp_path / "run").sections["headline"]
    assert "failed" in headline
    assert str(failure.value)[:60] in headline


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "runs" / "first")


def test_a_page_shows_faults_samples_and_the_command_of_the_user(run: Path) -> None:
    api.report([run])
    page = page_of(run)
    assert "rank 3 was killed by signal 9" in page.sections["events"]
    assert "The shoal  turns as one" in page.sections["samples"]
    assert "shoal train 'my run.yaml' train.lr=0.001" in page.sections["repeat"]
    assert "3.0 MiB" in page.sections["checkpoints"]
    assert "9.50 GiB 10.00 GiB +5.3%" in page.sections["forecast"]
    assert {mark["label"] for mark in charts_in(page)["loss"]["marks"]} == {"fault", "restart"}
    assert "20.0%" in page.sections["time"]  # exposed communication, of a step of one second


def test_a_profile_is_shown_beside_its_forecast(run: Path) -> None:
    (run / "profile").mkdir()
    kernels = [{"name": "gemm<128>", "seconds": 0.2, "share": 0.5, "calls": 3, "term": "matmuls"}]
    summary = {
        "terms": {"matmuls": 0.3, "idle": 0.1, "data": 0.0},
        "forecast": {"terms": {"matmuls": 0.25}},
        "bottleneck": {"sentence": "Matmuls take 75% of the step."},
        "kernels": kernels,
    }
    (run / "profile" / "summary.json").write_text(json.dumps(summary))
    api.report([run])
    shown = page_of(run).sections["profile"]
    assert "Matmuls take 75% of the step." in shown
    assert "matmuls 300 ms 75.0% 250 ms" in shown
    assert "gemm<128>" in shown


def test_steps_that_were_computed_again_count_once(run: Path) -> None:
    append(run / "metrics.jsonl", training_line(40, attempt=1, loss=9.0))
    record = RunReader(run).read()
    assert [(line["step"], line["attempt"]) for line in record.training] == [(10, 0), (20, 0), (30, 0), (40, 1)]
    assert record.evaluations == []  # the one at step 50 is not of this history
    assert results_of(record).loss == 9.0
    assert results_of(record).restarts == 1


def test_a_reader_sees_a_line_when_it_is_complete(run: Path) -> None:
    reader = RunReader(run)
    assert reader.read().step == 50
    before = reader.stamp()
    text = json.dumps(training_line(60)) + "\n"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(text[:40])
        file.flush()
        assert reader.read().step == 50
        file.write(text[40:])
    assert reader.read().step == 60
    assert reader.stamp() != before
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6\n{"step": 7}, {"step": 8\n' + json.dumps(training_line(70)) + "\n")
    assert [line["step"] for line in reader.read().training[-2:]] == [60, 70]
    (run / "metrics.jsonl").write_text(json.dumps(training_line(5)) + "\n")  # replaced by --overwrite
    assert reader.read().step == 5


HALF_WRITTEN = {
    "plan.json": '{"steps": 10, "chosen": {"strat',
    "config.yaml": "train: {steps: [",
    "metrics.jsonl": '{"step": 10, "loss": 3.0}\n{"step": "x", "loss": []}\n[1]\n{"step": 20, "lo',
    "events.jsonl": '{"event": 3}\n{"event": "save", "step": [], "seconds": "x"}\n{"event": "start"}\nnull\n{"ev',
    "outcome.json": "[]",
    "checkpoints/step-00000050/MANIFEST.json": '{"step": "fifty", "files": []}',
    "checkpoints/latest": "\0",
}


@pytest.mark.parametrize("name", HALF_WRITTEN)
def test_a_half_written_file_does_not_spoil_the_page(run: Path, name: str) -> None:
    (run / name).write_text(HALF_WRITTEN[name])
    api.report([run])
    page = page_of(run)
    assert "first" in page.sections["headline"]
    if name in ("plan.json", "config.yaml"):
        assert name in page.sections["problems"]
    else:
        assert "1.24 B parameters" in page.sections["headline"]


def test_files_of_a_run_may_be_missing_or_odd(run: Path) -> None:
    for name in ("plan.json", "metrics.jsonl", "events.jsonl", "outcome.json"):
        (run / name).unlink()
    os.mkfifo(run / "plan.json")  # reading it would block forever
    os.mkdir(run / "metrics.jsonl")
    api.report([run])
    assert "new" in page_of(run).sections["headline"]


def test_a_run_without_an_end_was_killed(tmp_path: Path) -> None:
    run = write_run(tmp_path / "killed", state=None)
    assert RunReader(run).read().state == "died"


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'"


def test_what_comes_from_files_is_text(run: Path) -> None:
    append(run / "events.jsonl", event("warning", 50, text=HOSTILE), event("sample", 50, prompt=HOSTILE, text=HOSTILE))
    append(run / "metrics.jsonl", training_line(60, **{HOSTILE: 1.0}))
    plan = json.loads((run / "plan.json").read_text())
    plan["machine"]["device"] = HOSTILE
    plan["forecast"]["memory"]["terms"][HOSTILE] = 1.0
    (run / "plan.json").write_text(json.dumps(plan))
    clean, page = page_of(Path(api.report([write_run(run.parent / "clean")]).path).parent), None
    api.report([run])
    page = page_of(run)
    assert HOSTILE in page.sections["events"]
    assert page.addresses == clean.addresses
    assert len(page.scripts) == len(clean.scripts)
    assert "alert" not in "".join(page.scripts[1:])  # the first holds the data of the charts


def test_several_runs_are_compared_on_one_page(run: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "runs" / "second", lr=3e-4, done=40)
    ended = CliRunner().invoke(app, ["report", str(run), str(other), "--output", str(tmp_path / "both.html"), "--json"])
    assert ended.exit_code == 0
    assert [one["loss"] for one in json.loads(ended.stdout)["runs"]] == [3.5, 3.6]
    page = Page((tmp_path / "both.html").read_text())
    assert page.sections["differences"].split() == [
        *("Config", "differences", "key", "first", "second", "train.lr", "0.001", "0.0003")
    ]
    assert "3.5000" in page.sections["results"]
    assert [series["label"] for series in charts_in(page)["loss"]["series"]] == ["first", "second"]


def test_runs_of_different_kinds_say_what_can_be_compared(run: Path, tmp_path: Path) -> None:
    """One that failed, one with another objective and batch, and a custom loop, whose script makes its data."""
    runs = tmp_path / "runs"
    failed = write_run(runs / "failed", done=20)
    append(failed / "metrics.jsonl", training_line(30, loss=None))
    (failed / "outcome.json").write_text(json.dumps({"state": "failed", "why": "the loss was non-finite", "ended": 1}))
    pairs = write_run(runs / "pairs")
    config = (pairs / "config.yaml").read_text()
    assert config.count("objective: causal_lm") == config.count("max_length: 1024") == 1
    changed = config.replace("objective: causal_lm", "objective: dpo").replace("max_length: 1024", "max_length: 512")
    (pairs / "config.yaml").write_text(changed)
    loop = write_run(runs / "loop", lr=7e-4)
    plan = json.loads((loop / "plan.json").read_text())
    (loop / "plan.json").write_text(json.dumps({**plan, "custom_loop": True, "forecast": None}))
    lines = [training_line(step, samples=8 * step, samples_per_second=44.0) for step in (10, 20)]
    for line in lines:
        del line["tokens"], line["tokens_per_second"], line["loss_tokens"]
    (loop / "metrics.jsonl").unlink()
    append(loop / "metrics.jsonl", *lines)

    found = api.report([run, failed, pairs, loop], tmp_path / "all.html")
    assert [one["samples_per_second"] for one in found.as_dict()["runs"]] == [None, None, None, 44.0]
    page = Page((tmp_path / "all.html").read_text())
    results, differences = page.sections["results"], page.sections["differences"]
    assert "non-finite" in results
    assert "failed: the loss was non-finite" in results
    assert "differ in objective, so their losses are of different things" in results
    assert "different numbers of tokens" in results
    assert "custom loop" in results
    assert "160" in results  # its samples
    assert "causal_lm causal_lm dpo –" in " ".join(differences.split())
    assert "train.lr" not in differences  # the same in all but the custom loop, whose script makes it
    assert "data.source" not in differences
    drawn = charts_in(page)
    assert [one["label"] for one in drawn["samples"]["series"]] == ["loop"]
    assert drawn["loss"]["series"][-1]["samples"] == [80, 160]
    assert "loop" not in [one["label"] for one in drawn["speed"]["series"]]

    api.report([loop])
    alone = page_of(loop).sections
    assert "Samples/s 44" in " ".join(alone["figures"].split())
    assert "books.txt" not in alone["setup"]
    assert "config.yaml name=loop-again" not in alone["repeat"]


def test_a_value_that_was_auto_is_compared_as_chosen(run: Path) -> None:
    strategy = RunReader(run).read().planned("chosen", "strategy")
    assert effective_config(RunReader(run).read())["parallel"]["strategy"] == f"{strategy} (auto)"


def test_a_block_is_compared_by_its_keys() -> None:
    assert config_differences([{"a": None}, {"a": {"b": 1}}]) == {"a.b": [MISSING, 1]}


def test_a_key_that_one_config_lacks_is_a_difference() -> None:
    assert list(config_differences([{"a": {"b": 1, "c": 2}}, {"a": {"b": 1}}])) == ["a.c"]


def test_mistakes_are_sentences(tmp_path: Path, run: Path) -> None:
    with pytest.raises(UserMistake, match="There is no run"):
        api.report([tmp_path / "nothing"])
    with pytest.raises(UserMistake, match="is a folder; give the name of a file"):
        api.report([run], tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(UserMistake, match="cannot be written: Not a directory"):
        api.report([run], tmp_path / "file" / "sub" / "x.html")
    api.report([run], tmp_path / "new" / "x.html")  # its folder is made
    assert (tmp_path / "new" / "x.html").is_file()


def test_only_finite_numbers_are_drawn() -> None:
    odd = [None, True, "1", [1.0], math.nan, math.inf, 10**400, 2, 0.5]
    lines, values = column([{"step": step, "loss": one} for step, one in enumerate(odd)], "loss")
    assert values == [2, 0.5] == [one for one in odd if number(one) is not None]
    assert [line["step"] for line in lines] == [7, 8]
    for some, kept in (
        ([1, 0.5], [1, 0.5]),
        ([1.0, math.inf], [1.0]),
        ([10**400, 1], [1]),
        ([None, None], []),
        ([], []),
    ):
        assert column([{"loss": one} for one in some], "loss")[1] == kept


def test_thinned_curves_keep_spikes_and_ends() -> None:
    values = [1.0] * 100_000
    values[54_321], values[77_777] = 9.0, -9.0
    kept = thinned(values)
    assert {0, 54_321, 77_777, 99_999} <= set(kept)
    assert len(kept) <= 400
    assert kept == sorted(kept)


def test_a_page_of_a_long_run_stays_small(tmp_path: Path) -> None:
    run = write_run(tmp_path / "long", done=10)
    append(run / "metrics.jsonl", *(training_line(step) for step in range(20, 20_000, 10)))
    record = RunReader(run).read()
    assert max(len(series["y"]) for chart in charts_of(record) for series in chart["series"]) <= 400
