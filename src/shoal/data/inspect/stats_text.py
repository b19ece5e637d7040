"""Statistics of a source for a person."""

from collections.abc import Iterator, Sequence

from shoal.data.inspect.cells import CellStats
from shoal.data.inspect.lengths import Bin
from shoal.data.inspect.spans import printable
from shoal.data.inspect.stats import Filling, SourceStats

_WIDTH = 40
_FILES = 8  # that are named
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def source_lines(stats: SourceStats, max_length: int, *, titled: bool) -> Iterator[str]:
    """One line for each thing there is to say. `titled`: one of several sources."""
    if titled:
        yield f"{printable(stats.path or stats.source)}, weight {stats.weight:g}"
    if stats.cells is not None:
        yield from _cell_lines(stats, stats.cells)
        return
    yield f"documents    {stats.documents:,} ({stats.source}, format {stats.format})"
    yield f"tokens       {stats.tokens:,}; {_counted(stats)}"
    yield from _class_lines([(one.name, one.examples, one.share) for one in stats.classes or []])
    if (lengths := stats.lengths) is not None:
        yield (
            f"length       median {lengths.median:,}, mean {lengths.mean:,.1f}, 90% up to {lengths.p90:,}, 99% up to "
            f"{lengths.p99:,}, longest {lengths.max:,} tokens"
        )
        yield from (f"             {line}" for line in _bars(lengths.histogram, max_length))
        yield f"too long     {_too_long(stats, max_length)}"
    if (copies := stats.duplicates) is not None:
        found = f"{copies.documents:,}"
        if copies.documents:
            found += f" ({copies.documents / stats.documents:.1%}); the first: {copies.first} is {copies.copy_of}"
        yield f"duplicates   {printable(found)}"
    left_out = [
        f"{number:,} {what}"
        for number, what in (
            (stats.dropped, "without a loss token"),
            (stats.empty, "empty"),
            (stats.skipped, "invalid"),
        )
        if number
    ]
    yield f"left out     {', '.join(left_out) or 'none'}"
    if stats.first_skipped is not None:
        yield f"             the first invalid one: {printable(stats.first_skipped)}"
    packing = stats.packing
    ways = {"packed": packing.packed, "unpacked": packing.unpacked}
    ways = {packing.chosen: ways.pop(packing.chosen), **ways}
    yield "packing      " + "; ".join(f"{name}: {_filling(one)}" for name, one in ways.items() if one is not None)


def _cell_lines(stats: SourceStats, cells: CellStats) -> Iterator[str]:
    yield f"cells        {stats.documents:,} in {len(cells.files):,} file{'s' if len(cells.files) > 1 else ''}"
    yield f"genes        {cells.vocabulary:,} in the vocabulary; {cells.expressed:,} are expressed by some cell"
    for file in cells.files[:_FILES]:
        unknown = f", {file.unknown:,} not in the vocabulary" if file.unknown else ""
        size = f"{file.cells:,} cells × {file.genes:,} genes"
        yield f"             {printable(file.path)}: {size} ({file.matrix}){unknown}"
    if len(cells.files) > _FILES:
        yield f"             and {len(cells.files) - _FILES:,} more files"
    yield f"tokens       {stats.tokens:,} ({cells.tokens})"
    lengths = cells.genes_per_cell
    yield (
        f"expressed    median {lengths.median:,} genes per cell, mean {lengths.mean:,.1f}, 90% up to {lengths.p90:,}, "
        f"most {lengths.max:,}"
    )
    yield from (f"             {line}" for line in _bars(lengths.histogram, cells.most_genes, "most that fit"))
    if stats.longer:
        yield (
            f"too many     {stats.longer:,} cells ({stats.longer / stats.documents:.1%}) express more than "
            f"{cells.most_genes:,} genes: {stats.tokens_lost:,} genes with lower expression are left out"
        )
    frequent = ", ".join(f"{printable(one.name)} {one.share:.0%}" for one in cells.frequent)
    yield f"frequent     {frequent} of cells"
    yield from _class_lines([(one.name, one.cells, one.share) for one in cells.classes or []])
    left_out = [
        f"{number:,} {what}"
        for number, what in (
            (stats.dropped, "with too few genes or without a label"),
            (stats.empty, "without a gene of the vocabulary"),
        )
        if number
    ]
    yield f"left out     {', '.join(left_out) or 'none'}"


def _counted(stats: SourceStats) -> str:
    """What is in the loss."""
    if stats.objective == "masked_lm":
        return f"{stats.loss_tokens:,} are masked in each epoch, {stats.loss_token_share:.1%} of the inputs"
    if stats.classes is not None:
        return "each document's label is in the loss"
    return f"{stats.loss_tokens:,} in the loss, {stats.loss_token_share:.1%} of the labels"


def _class_lines(classes: Sequence[tuple[str, int, float]]) -> Iterator[str]:
    if not classes:
        return
    yield f"classes      {len(classes):,} of data.label"
    widest = max(len(printable(name)) for name, _, _ in classes)
    for name, count, share in classes:
        yield f"             {printable(name):<{widest}}  {count:,} ({share:.1%})"


def _filling(filling: Filling) -> str:
    what = "sequence" if filling.sequences == 1 else "sequences"
    return f"{filling.sequences:,} {what}, {filling.filled:.1%} of their slots filled"


def _too_long(stats: SourceStats, max_length: int) -> str:
    if not stats.longer:
        return f"none is longer than max_length {max_length:,}"
    share = stats.longer / stats.documents
    are = "document ({:.1%}) is" if stats.longer == 1 else "documents ({:.1%}) are"
    what = f"{stats.longer:,} {are.format(share)} longer than max_length {max_length:,}"
    done = {"truncate": "truncated", "drop": "left out", "split": "split, no token is lost"}[stats.long_documents]
    if stats.long_documents == "split":
        return f"{what}; {done}"
    return f"{what}; {done}, {stats.tokens_lost:,} tokens ({stats.tokens_lost / stats.tokens:.1%}) are lost"


def _bars(bins: Sequence[Bin], max_length: int, what: str = "max_length") -> Iterator[str]:
    most = max(one.documents for one in bins)
    labels = [
        f"{one.shortest:,}–{one.longest:,}" if one.longest > one.shortest else f"{one.shortest:,}" for one in bins
    ]
    width = max(map(len, labels))
    for label, one in zip(labels, bins, strict=True):
        eighths = round(one.documents / most * _WIDTH * 8)
        if one.documents:
            eighths = max(eighths, 1)
        bar = _EIGHTHS[8] * (eighths // 8) + (_EIGHTHS[eighths % 8] if eighths % 8 else "")
        limit = f"  ← {what}" if one.shortest <= max_length <= one.longest else ""
        yield f"{label:>{width}}  {bar:<{_WIDTH}} {one.documents:,}{limit}".rstrip()
