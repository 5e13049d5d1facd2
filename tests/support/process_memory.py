"""What memory a process of Linux holds."""

from pathlib import Path


def held(what: str = "VmRSS", process: int | str = "self") -> int:
    """Bytes of memory, by a line of /proc/PROCESS/status. VmHWM: the most since ``forget_peak``."""
    lines = Path(f"/proc/{process}/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{what}:"))


def forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
