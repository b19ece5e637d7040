"""Numbers, sizes and times as a page shows them; a dash where there is none."""

import time

NONE = "–"


def decimal(value: float | None, digits: int = 4) -> str:
    return NONE if value is None else f"{value:.{digits}f}"


def count(value: float | None) -> str:
    """1,234,567."""
    return NONE if value is None else f"{value:,.0f}"


def counted(amount: int, what: str) -> str:
    """'1 restart', '2 restarts'."""
    return f"1 {what}" if amount == 1 else f"{amount:,} {what}s"


def compact(value: float | None) -> str:
    """'1.24 B' parameters or tokens."""
    if value is None:
        return NONE
    for unit, name in ((1e12, " T"), (1e9, " B"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:,.0f}"


def percent(share: float | None, digits: int = 1) -> str:
    return NONE if share is None else f"{share:.{digits}%}"


def gib(value: float | None) -> str:
    return NONE if value is None else f"{value:.2f} GiB" if value < 100 else f"{value:.1f} GiB"


def size(value: float | None) -> str:
    """Bytes as '12.3 MiB'."""
    if value is None:
        return NONE
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


def seconds(value: float | None) -> str:
    """'60 ms', '1.25 s', '3m 05s', '2h 10m', '3d 04h'."""
    if value is None:
        return NONE
    if abs(value) < 1:
        return f"{value * 1000:.3g} ms"
    if abs(value) < 60:
        return f"{value:.3g} s"
    whole = round(value)
    if whole < 3600:
        return f"{whole // 60}m {whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h {whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d {whole % 86400 // 3600:02d}h"


def moment(unix: float | None) -> str:
    """Local time; a dash also for times that no calendar has."""
    if unix is None:
        return NONE
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix))
    except (OverflowError, ValueError, OSError):
        return NONE
