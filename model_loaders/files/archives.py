"""The members of a zip file that PyTorch wrote, before any is read."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Mapping
from pathlib import Path

from ...limits.limits import DIRECTORY, PICKLE, FileError

_DIRECTORY_SIZE, _DIRECTORY_BEGIN = 5, 6  # places in what zipfile finds at the end of an archive


def members_of(path: Path) -> dict[str, zipfile.ZipInfo]:
    """The members of a zip file by their names without the first folder.

    Raises FileError for a list of members that is too long, ambiguous or not where it should be, and for stored
    members that are larger than the file together. Compressed ones (the code of a TorchScript archive) are listed, but
    are not in this sum: see ``get_stored``.
    """
    with path.open("rb") as file:
        # zipfile makes an object of half a kilobyte for every member, so the length of the list is looked at before.
        end = zipfile._EndRecData(file)  # pyright: ignore[reportAttributeAccessIssue] (private)
        if not end:
            raise FileError("it is no zip file, or its end is missing")
        if end[_DIRECTORY_SIZE] > DIRECTORY:
            raise FileError(f"its list of members has {end[_DIRECTORY_SIZE]} bytes; {DIRECTORY} is the limit")
        with zipfile.ZipFile(file) as archive:
            members, begin = archive.infolist(), archive.start_dir
    if begin != end[_DIRECTORY_BEGIN]:  # zipfile would look elsewhere than torch's reader
        raise FileError("its list of members is not where its end says")
    found = {member.filename.partition("/")[2]: member for member in members}
    if len({name.lower() for name in found}) < len(members):  # as torch's reader compares them
        raise FileError("two of its parts have the same name")
    size = sum(member.file_size for member in members if member.compress_type == zipfile.ZIP_STORED)
    if size > path.stat().st_size:
        raise FileError("its parts are larger than the file")
    return found


def get_stored(members: Mapping[str, zipfile.ZipInfo], name: str) -> zipfile.ZipInfo:
    """The member ``name``.

    Raises FileError if it is missing, or compressed, which PyTorch's data is not: a few bytes could stand for more
    than fits in memory.
    """
    if name not in members:
        raise FileError(f"it has no {name}: it is not an archive of PyTorch, or damaged")
    if members[name].compress_type != zipfile.ZIP_STORED:
        raise FileError(f"its {name} is compressed, which PyTorch's archives are not")
    return members[name]


def pickle_in(archive: zipfile.ZipFile, members: Mapping[str, zipfile.ZipInfo]) -> io.BytesIO:
    """The pickle ``data.pkl`` of an archive. Raises FileError if it is missing, compressed or too long, or was written
    by a machine of the other byte order."""
    if "byteorder" in members and archive.read(get_stored(members, "byteorder")) != b"little":
        raise FileError("it has the other byte order")
    member = get_stored(members, "data.pkl")
    if member.file_size > PICKLE:
        raise FileError(f"its {member.filename} has {member.file_size} bytes; {PICKLE} is the limit")
    return io.BytesIO(archive.read(member))
