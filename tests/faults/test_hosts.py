"""Two hosts with a real link between them, under torchrun: a cut link, a lost host, and fewer hosts than before."""

import json
import os
import re
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shoal.checkpoint.store import list_complete
from shoal.launch.environment import read_placement
from shoal.launch.rendezvous import Meeting, Member
from tests.faults.test_kills import hold_undisturbed
from tests.harness import reference_run, settings
from tests.launch.command import Forked, descendants, losses, training_lines, write_config
from tests.launch.hosts import Hosts, Torchrun, two_hosts, why_not

pytestmark = pytest.mark.slow
STEPS = 45


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    if (reason := why_not()) is not None:
        pytest.skip(reason)
    with two_hosts() as found:
        yield found


def config(data: Path, **changes: Any) -> dict[str, Any]:
    wanted = {"train__steps": STEPS, "checkpoint__every": 5, "train__hang_timeout": 4.0, "data__max_length": 64}
    return settings(data, parallel__strategy="fsdp", data__train_on="all", **{**wanted, **changes})


@pytest.mark.long
def test_a_link_that_is_cut_for_a_while_costs_a_restart_and_nothing_else(
    hosts: Hosts, instructions: Path, tmp_path: Path
) -> None:
    undisturbed = reference_run(config(instructions), 2)
    write_config(tmp_path, config(instructions))
    run = tmp_path / "runs" / "run"
    verdict = run / "logs" / "hang-0" / "verdict.txt"
    arguments = ["train", "run.yaml", "--json"]
    with (
        Torchrun(tmp_path, hosts, 0, arguments, nodes="2", restarts=3) as first,
        Torchrun(tmp_path, hosts, 1, arguments, nodes="2", restarts=3) as second,
    ):
        first.wait_until(lambda: bool(list_complete(run / "checkpoints")))
        hosts.cut()
        first.wait_until(verdict.exists)
        hosts.mend()
        ended = [first.wait(), second.wait()]
    assert [one.status for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert {line["attempt"] for line in training_lines(run).values()} == {0, 1}
    assert verdict.read_text().startswith("The run made no progress for 4 s: rank ")
    hold_undisturbed(run, undisturbed)


def test_a_host_that_is_lost_is_named_and_the_other_goes_on_alone_with_the_same_samples(
    hosts: Hosts, instructions: Path, tmp_path: Path
) -> None:
    undisturbed = reference_run(config(instructions), 2)
    write_config(tmp_path, config(instructions))
    run = tmp_path / "runs" / "run"
    arguments = ["train", "run.yaml", "--json"]
    with (
        Torchrun(tmp_path, hosts, 0, arguments, nodes="1:2", restarts=3) as first,
        Torchrun(tmp_path, hosts, 1, arguments, nodes="1:2", restarts=3) as second,
    ):
        first.wait_until(lambda: bool(list_complete(run / "checkpoints")))
        second.crash(descendants(second.process.pid))
        ended = first.wait()
    assert ended.status == 0, ended.err
    assert re.search(r"Rank 1 on host-b is gone", ended.err), ended.err
    assert json.loads((run / "plan.json").read_text())["chosen"]["mesh"]["dp_shard"] == 1
    again = [step for step, line in training_lines(run).items() if line["attempt"] == 1]
    assert again == list(range(again[0], STEPS + 1))
    assert again[0] > 1
    found, expected = losses(run), losses(undisturbed)
    assert [step for step, _, _ in found] == [step for step, _, _ in expected]
    assert [loss for _, loss, _ in found] == pytest.approx([loss for _, loss, _ in expected], rel=2e-4)


def test_ranks_meet_where_the_first_host_takes_its_own_name_for_loopback(hosts: Hosts, tmp_path: Path) -> None:
    """As Debian's /etc/hosts says it."""
    for side, address in enumerate(("127.0.1.1", hosts.addresses[0])):
        (tmp_path / f"hosts-{side}").write_text(f"127.0.0.1 localhost\n{address} host-a\n")
    variables = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "host-a"}

    def be_rank(rank: int) -> NoReturn:
        hosts.enter(rank, tmp_path / f"hosts-{rank}")
        os.environ["SHOAL_JOIN_TIMEOUT"] = "20"
        place = read_placement({**variables, "RANK": str(rank), "MASTER_PORT": "29411"})
        assert place is not None
        Meeting(place, attempt=0).gather(Member(rank, f"host-{rank}"), patience=20)
        time.sleep(1)  # the store ends with rank 0
        os._exit(0)

    ranks = [Forked(partial(be_rank, rank)) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
