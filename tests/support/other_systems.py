"""The pack imported in a process from which everything is taken away that Windows lacks: modules, and names of os and
signal. What others import is imported before, as they have their own ways on Windows."""

from __future__ import annotations

import importlib
import os
import pkgutil
import signal
import subprocess
import sys
from importlib.abc import MetaPathFinder

import comfyui_specar
from comfyui_specar.tests.support.patience import PATIENCE

POSIX_MODULES = ("fcntl", "grp", "posix", "pty", "pwd", "readline", "resource", "spwd", "syslog", "termios", "tty")
# Names of os that its documentation calls available on Unix only; fork stands for all that make processes.
POSIX_OS = """
    O_ACCMODE O_ASYNC O_CLOEXEC O_DIRECT O_DIRECTORY O_DSYNC O_LARGEFILE O_NDELAY O_NOATIME O_NOCTTY O_NOFOLLOW
    O_NONBLOCK O_PATH O_RSYNC O_SYNC O_TMPFILE WEXITSTATUS WIFEXITED WIFSIGNALED WNOHANG WTERMSIG chown chroot
    confstr ctermid fchdir fchown fdatasync fork forkpty fpathconf fstatvfs getegid geteuid getgid getgroups
    getloadavg getpgid getpgrp getpriority getresuid getsid getuid initgroups killpg lchown lockf major memfd_create
    mkfifo mknod nice openpty pathconf pidfd_open posix_fadvise posix_fallocate posix_spawn posix_spawnp pread
    preadv pwrite pwritev readv register_at_fork sched_getaffinity sched_setaffinity sched_yield sendfile seteuid
    setgid setpgid setpriority setsid setuid splice statvfs sync sysconf tcgetpgrp ttyname uname wait wait3 wait4
    waitid writev
""".split()
WINDOWS_SIGNALS = ("SIGABRT", "SIGFPE", "SIGILL", "SIGINT", "SIGSEGV", "SIGTERM")
POSIX_SIGNAL = """
    alarm getitimer pause pthread_kill pthread_sigmask setitimer siginterrupt sigpending sigtimedwait sigwait
    sigwaitinfo
""".split()


def posix_signals() -> list[str]:
    names = [name for name in dir(signal) if name.startswith("SIG") and not name.startswith("SIG_")]
    return [*(name for name in names if name not in WINDOWS_SIGNALS), *POSIX_SIGNAL]


class Absent(MetaPathFinder):
    """Finds no module of POSIX."""

    def find_spec(self, name, path=None, target=None):
        if name in POSIX_MODULES:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return None


def take_away() -> None:
    for name in POSIX_MODULES:
        sys.modules.pop(name, None)
    sys.meta_path.insert(0, Absent())
    sys.builtin_module_names = tuple(name for name in sys.builtin_module_names if name not in POSIX_MODULES)
    for name in POSIX_OS:
        if hasattr(os, name):
            delattr(os, name)
    for name in posix_signals():
        if hasattr(signal, name):
            delattr(signal, name)


def modules(part: str) -> list[str]:
    """The modules of a part of the pack: a module itself, or a package and all that is in it."""
    name = f"comfyui_specar.{part}"
    package = importlib.import_module(name)
    inside = pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}.")
    return [name, *(found.name for found in inside if not found.name.endswith("__main__"))]


def import_all(parts: list[str]) -> int:
    """Import every module of parts of the pack, twice: as this system does, then anew without POSIX. Returns their
    number."""
    names = [name for part in parts for name in modules(part)]
    for name in names:  # with these come the modules of others
        importlib.import_module(name)
    take_away()
    for name in [name for name in sys.modules if name.startswith("comfyui_specar.") and name != __name__]:
        del sys.modules[name]
        vars(comfyui_specar).pop(name.split(".")[1], None)
    for name in names:
        importlib.import_module(name)
    return len(names)


def imported(parts: list[str], before: str = "") -> int:
    """import_all in a process of its own, after the code ``before``."""
    return int(run(f"{before}\nprint(other_systems.import_all({parts!r}))").split()[-1])


def run(code: str) -> str:
    """What code prints in a process of its own. Raises CalledProcessError."""
    program = f"import sys\nsys.path[:0] = {sys.path!r}\nfrom comfyui_specar.tests.support import other_systems\n{code}"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, encoding="utf-8", check=True, timeout=PATIENCE
    ).stdout
