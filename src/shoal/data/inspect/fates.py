"""What preparation does with the documents of one record: kept, truncated, split or dropped."""

from dataclasses import dataclass

import numpy as np

from shoal.config.schema import DataConfig
from shoal.data import pack
from shoal.data.inspect.documents import long_documents

FATES = {"truncate": "truncated", "split": "split", "drop": "dropped"}


@dataclass(frozen=True)
class Fate:
    """`name`: kept, truncated, split or dropped; `kept`: how many tokens are; `reason`: why it is not kept as it is."""

    name: str
    kept: int
    reason: str | None = None


def fates_of(
    data: DataConfig, joined: bool, trained: list[np.ndarray], *, encoder: bool = False, labelled: bool = False
) -> list[Fate]:
    """Of the document of a record, or of both of a pair, which are kept or dropped together. `trained`: of each, which
    tokens are in the loss. For an `encoder` every token is an input; an example that is `labelled` is kept whole or
    truncated."""
    policy, length = long_documents(data, joined and not labelled), data.max_length
    lengths = np.array([len(one) for one in trained])
    room = length if encoder else length + 1
    pair, most = len(trained) > 1, np.full(len(trained), room)
    if pair:
        shortened = pack.shorten_pairs(lengths, length, "truncate")
        most = shortened.ends - shortened.starts
    too_long = lengths.sum() > room if pair else lengths[0] > room
    subject = "its pair" if pair else "it"
    found = []
    for tokens, limit in zip(trained, most.tolist(), strict=True):
        fate = Fate("kept", len(tokens))
        if not len(tokens):
            fate = Fate("dropped", 0, "it is empty")
        elif too_long and (policy != "truncate" or len(tokens) > limit):
            kept = limit if policy == "truncate" else len(tokens)
            fate = Fate(FATES[policy], kept, f"{subject} is longer than data.max_length {length}")
        if not labelled and fate.name in ("kept", "truncated") and not tokens[1 : fate.kept].any():
            within = " before data.max_length" if fate.name == "truncated" else ""
            fate = Fate("dropped", fate.kept, f"it has no loss token{within}")
        found.append(fate)
    if any(one.name == "dropped" for one in found):
        together = "the other answer of its pair is dropped"
        found = [one if one.name == "dropped" else Fate("dropped", one.kept, together) for one in found]
    return found
