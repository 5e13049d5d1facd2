"""Ways in which files go wrong, by accident and on purpose, and what tries one of them.

``MUTATIONS`` maps the name of a change to what it does to a file: (file, random numbers) -> None. fuzz_seeds.py holds
the sound files, and what is asked of a loader.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from . import fuzz_archives, fuzz_files

OF_FILES = "truncate flip_bits overwrite become_enormous become_noise swap become_no_file edit_json spell_json"
OF_FILES += " lead_elsewhere edit_header lie_about_the_header edit_metadata"
OF_ARCHIVES = "edit_tensor become_hostile edit_archive lie_about_tensors become_bomb become_tar"
MUTATIONS: dict[str, Callable[[Path, random.Random], None]] = {
    name.replace("_", " "): getattr(module, name)
    for module, names in ((fuzz_files, OF_FILES), (fuzz_archives, OF_ARCHIVES))
    for name in names.split()
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
