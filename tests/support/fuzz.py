"""Ways in which files go wrong, by accident and on purpose, and what tries one of them.

``MUTATIONS`` maps the name of a change to what it does to a file: (file, random numbers) -> None. fuzz_seeds.py holds
the sound files, and what is asked of a loader.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from . import fuzz_archives, fuzz_files

MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    change.__name__.replace("_", " "): change
    for change in (
        fuzz_files.truncate,
        fuzz_files.flip_bits,
        fuzz_files.overwrite,
        fuzz_files.become_enormous,
        fuzz_files.become_noise,
        fuzz_files.swap,
        fuzz_files.become_no_file,
        fuzz_files.edit_json,
        fuzz_files.spell_json,
        fuzz_files.lead_elsewhere,
        fuzz_files.edit_header,
        fuzz_files.lie_about_the_header,
        fuzz_files.edit_metadata,
        fuzz_archives.edit_tensor,
        fuzz_archives.become_hostile,
        fuzz_archives.edit_archive,
        fuzz_archives.lie_about_tensors,
        fuzz_archives.become_bomb,
        fuzz_archives.become_tar,
    )
}
OFTEN = ("edit json", "edit header", "edit metadata", "edit tensor", "edit archive", "flip bits")  # have most ways


def mutate(folder: Path, rng: random.Random) -> str:
    """Change one file below a folder, sometimes two; what was done, in words."""
    done = []
    for _ in range(1 if rng.random() < 0.85 else 2):
        while True:
            name = rng.choice([*MUTATIONS, *OFTEN * 2])
            file = rng.choice(fuzz_files.small_files(folder) or [None])
            if file is None:
                break
            try:
                MUTATIONS[name](file, rng)
            except Exception:  # made for files of another kind, or for sound ones
                continue
            done.append(f"{name}: {file.relative_to(folder)}")
            break
    return ", ".join(done)
