"""Data sets of several files: read from the data folder, loose or inside their archive, or downloaded."""

import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path, PurePosixPath

from keepk.errors import DataError
from keepk.paper.data import bad_file, data_folder, unpacked
from keepk.paper.download import fetch, progress_bar

ARCHIVE_REST = 1 << 24  # bytes for tar headers and files that are not read, such as batches.meta.txt


@dataclass(frozen=True)
class Source:
    """A published file, and the size and checksum that a download must have.

    Attributes:
        url: Where it is published.
        size: Bytes.
        md5: In hexadecimal.
    """

    url: str
    size: int
    md5: str

    @property
    def name(self) -> str:
        """The name of the file.

        >>> Source("https://example.org/digits.tar.gz", 10, "").name
        'digits.tar.gz'
        """
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class Published:
    """A data set of several files.

    Args:
        title: The name of the data set, for errors.
        folder: The subfolder of the data folder for downloaded files; files in the data folder itself are found too.
        files: The names of the files.
        sources: The downloads: each file, or one archive with all of them, which is read without extracting it.
        largest: The maximum size in bytes of each uncompressed file. Larger ones are refused before they fill memory.
    """

    title: str
    folder: str
    files: tuple[str, ...]
    sources: tuple[Source, ...]
    largest: int

    @property
    def archive(self) -> str | None:
        """The name of the archive, or None if the files are published one by one."""
        return next((source.name for source in self.sources if source.name.endswith(".tar.gz")), None)

    def read(self, folder: str | Path | None = None, *, download: bool = True) -> dict[str, bytes]:
        """Read all files. Loose files take precedence over the archive; missing files are downloaded.

        Args:
            folder: The data folder (see `data_folder`).
            download: Whether missing files may be downloaded.

        Returns:
            The content of each of `files`, by the path at which it was found.

        Raises:
            DataError: If a file is missing and cannot be downloaded, is damaged, or is too large.
        """
        root = data_folder(folder)
        if self._missing(root) and self._find_archive(root) is None:
            self._download(root, allowed=download)
        if self._missing(root):
            return self._from_archive(root)
        paths = [path for name in self.files if (path := self._find(root, name))]
        return {str(path): unpacked(path, self.largest) for path in paths}

    def _missing(self, root: Path) -> list[str]:
        return [name for name in self.files if self._find(root, name) is None]

    def _find(self, root: Path, name: str) -> Path | None:
        return next((path for place in (".", self.folder) if (path := root / place / name).is_file()), None)

    def _find_archive(self, root: Path) -> Path | None:
        return self._find(root, self.archive) if self.archive else None

    def _download(self, root: Path, *, allowed: bool) -> None:
        if not allowed:
            raise self._not_found(root, "is switched off (download=False).")
        target = root if self.archive else root / self.folder
        try:
            for source in self.sources:
                if self._find(root, source.name) is None:
                    _fetch(source, target)
        except DataError as error:
            raise self._not_found(root, f"failed: {error}") from error

    def _not_found(self, root: Path, download: str) -> DataError:
        """The error that says which files to put where, and why they were not downloaded."""
        places = f"{root} or {root / self.folder}"
        archive = f", or the archive {self.archive} that contains them," if self.archive else ""
        return DataError(
            f"{self.title} is not complete in {root}: missing {', '.join(self._missing(root))}.\n"
            f"Put the files {', '.join(self.files)}{archive} into {places}.\n"
            f"They are published at {' and '.join(source.url for source in self.sources)}.\n"
            "To use another folder, pass --data DIR or set $KEEPK_DATA.\n"
            f"The download {download}"
        )

    def _from_archive(self, root: Path) -> dict[str, bytes]:
        archive = self._find_archive(root)
        assert archive is not None  # `read` found it or downloaded it
        try:
            content = unpacked(archive, len(self.files) * self.largest + ARCHIVE_REST)
            members = _members(archive, content, self.files, self.largest)
        except tarfile.TarError as error:
            raise bad_file(archive, "is not an archive", "a complete .tar.gz file", str(error)) from error
        if absent := [name for name in self.files if name not in members]:
            got = f"no {', '.join(absent)}"
            raise bad_file(archive, f"is not the published {self.archive}", ", ".join(self.files), got)
        return {f"{archive} ({name})": members[name] for name in self.files}


def _members(archive: Path, content: bytes, names: tuple[str, ...], largest: int) -> Mapping[str, bytes]:
    """The requested files of a tar archive by name, from any folder in it."""
    found = {}
    with tarfile.open(fileobj=BytesIO(content), mode="r:") as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            if name in names and member.isfile() and (file := tar.extractfile(member)):
                if member.size > largest:  # a sparse file of any size takes only a few bytes in the archive
                    raise bad_file(
                        f"{archive} ({name})", "is too large", f"at most {largest:,} bytes", f"{member.size:,}"
                    )
                found[name] = file.read()
    return found


def _fetch(source: Source, folder: Path) -> None:
    with progress_bar(source.name) as progress:
        fetch(source.name, [source.url], size=source.size, folder=folder, md5=source.md5, progress=progress)
