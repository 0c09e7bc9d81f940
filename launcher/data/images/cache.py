"""Decoded images in one memory-mapped file, so that each is decoded once and not once per epoch.

Owns the file: header, one byte per image, pixels. All processes of a machine fill it together, beside their
training, each with the images that it happens to decode; whoever stores the last one gives the file its final
name. A file under that name is whole. Never a reason to end a run: without space there is no cache.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import mmap
import os
import shutil
import warnings
import weakref
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from launcher.data.tensor_cache import prune, use
from launcher.errors import DataWarning
from launcher.run_dir.atomic import open_plain

MAGIC = b"fp16-launcher images 1\n"
PAGE = 4096  # bytes: the header fills one, the states end at the border of one
ABSENT, STORED, UNREADABLE = 0, 1, 2  # the byte of an image
MOST_OF_DISK = 0.5  # of the free space
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

UInt8Array = NDArray[np.uint8]
log = logging.getLogger("launcher")


def open_cache(folder: Path, key: str, count: int, shape: tuple[int, int, int]) -> ImageCache | None:
    """The cache of `count` images, uint8 [3, h, w], that `key` describes. None, with a warning, where there
    is no space or the folder cannot be written."""
    digest = hashlib.sha256(f"{key}\n{count} {shape}".encode()).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return ImageCache(folder, digest, count, shape)
    except OSError as error:
        warnings.warn(
            f"no cache of decoded images in {folder}: {error.strerror or error}. Images are decoded in "
            "each epoch. Give another folder with data.cache=DIR, or data.cache=none.",
            DataWarning,
            stacklevel=2,
        )
        return None


class ImageCache:
    """Images by index. Raises OSError where the file cannot be made. Children that are forked share it."""

    def __init__(self, folder: Path, digest: str, count: int, shape: tuple[int, int, int]) -> None:
        self.path = folder / f"{digest[:32]}.images"
        self._partial = folder / f"{digest[:32]}.{_boot()}.partial"
        self._header = (MAGIC + digest.encode()).ljust(PAGE, b"\0")
        self._image_bytes = int(np.prod(shape))
        self._first_pixel = PAGE + -(-count // PAGE) * PAGE
        self._size = self._first_pixel + count * self._image_bytes
        self._writable = False
        self._first_absent = PAGE  # where the byte of the first absent image may be
        self._descriptor = self._open()
        weakref.finalize(self, os.close, self._descriptor)
        # A copy on write: what a recipe writes into an image stays in its process.
        self._content = mmap.mmap(self._descriptor, self._size, access=mmap.ACCESS_COPY)
        content = np.frombuffer(self._content, np.uint8)
        self._states = content[PAGE : PAGE + count]
        self._pixels = content[self._first_pixel :].reshape(count, *shape)
        self._publish()  # the run that stored the last image may have been killed before it did

    def get(self, index: int) -> UInt8Array | None:
        """The image, in memory that is shared until it is written to; None where it has to be decoded."""
        return self._pixels[index] if self._states[index] == STORED else None

    def expect(self, index: int) -> bool:
        """Whether `gather` can give the image; then its pixels are read from the disk ahead of that."""
        if self._states[index] != STORED:
            return False
        offset = self._first_pixel + index * self._image_bytes
        os.posix_fadvise(self._descriptor, offset, self._image_bytes, os.POSIX_FADV_WILLNEED)
        return True

    def gather(self, indices: Tensor, pinned: bool = False) -> Tensor:
        """Stored images: uint8 [n, 3, h, w] of indices int64 [n]. In pinned memory for a GPU."""
        images = torch.from_numpy(self._pixels)
        out = torch.empty(len(indices), *images.shape[1:], dtype=torch.uint8, pin_memory=pinned)
        return torch.index_select(images, 0, indices, out=out)

    def put(self, index: int, image: UInt8Array) -> None:
        """Store an image, if there is space. Any process may store any image: all decode the same pixels."""
        if not self._writable or image.nbytes != self._image_bytes:
            return
        # Not through the mapping: a write to a full disk would be a SIGBUS there, and is an error here.
        self._write(image.tobytes(), self._first_pixel + index * self._image_bytes)
        self._mark(index, STORED)

    def give_up(self, index: int) -> None:
        """This image cannot be decoded: the file is whole without it."""
        if self._states[index] == ABSENT:
            self._mark(index, UNREADABLE)

    def _mark(self, index: int, state: int) -> None:
        self._write(bytes([state]), PAGE + index)
        if self._writable:
            with contextlib.suppress(OSError):
                self._publish()

    def _write(self, content: bytes, offset: int) -> None:
        if not self._writable:
            return
        try:
            while content:
                written = os.pwrite(self._descriptor, content, offset)
                content, offset = content[written:], offset + written
        except OSError as error:
            self._writable = False
            log.warning("no more images are stored in %s: %s", self._partial, error)

    def _open(self) -> int:
        """The descriptor of the whole file, or else of the partial one. Never of one of another set."""
        with contextlib.suppress(FileNotFoundError):
            descriptor = open_plain(self.path, os.O_RDONLY)
            if self._is_of_this_set(descriptor):
                use(descriptor)
                return descriptor
            os.close(descriptor)
        prune(self.path.parent)
        descriptor = open_plain(self._partial, os.O_RDWR | os.O_CREAT)
        try:
            self._require_space(descriptor)
            use(descriptor)
            if os.fstat(descriptor).st_size <= PAGE:  # another rank at this line writes the same
                os.pwrite(descriptor, self._header, 0)
                os.ftruncate(descriptor, self._size)
            if not self._is_of_this_set(descriptor):
                raise OSError(errno.EINVAL, f"{self._partial.name} is not of this set: delete it")
        except BaseException:
            os.close(descriptor)
            raise
        self._writable = True
        return descriptor

    def _require_space(self, descriptor: int) -> None:
        # Less what the file has on the disk already; st_blocks counts units of 512 bytes.
        needed = self._size - 512 * os.fstat(descriptor).st_blocks
        usable = MOST_OF_DISK * shutil.disk_usage(self._partial.parent).free
        if needed > usable:
            raise OSError(
                errno.ENOSPC,
                f"it takes {needed / 1e9:.1f} GB, more than half of what is free ({usable / 1e9:.1f} GB)",
            )

    def _is_of_this_set(self, descriptor: int) -> bool:
        size = os.fstat(descriptor).st_size
        return size == self._size and os.pread(descriptor, PAGE, 0) == self._header

    def _is_whole(self) -> bool:
        """Continues where the last call found an absent image, so that all calls together read each once."""
        self._first_absent = self._content.find(bytes([ABSENT]), self._first_absent, PAGE + len(self._states))
        return self._first_absent == -1

    def _publish(self) -> None:
        """Give a whole file its final name, once it is on the disk."""
        if not self._writable or not self._is_whole():
            return
        self._writable = False
        os.fsync(self._descriptor)
        with contextlib.suppress(FileNotFoundError):  # another process was first
            if os.path.samestat(os.stat(self._partial), os.fstat(self._descriptor)):
                os.replace(self._partial, self.path)
        for rest in self.path.parent.glob(f"{self.path.stem}.*.partial"):  # of boots before this one
            rest.unlink(missing_ok=True)


def _boot() -> str:
    """What a crash of the machine changes: pixels that had not reached the disk are lost, their byte may not
    be, so what an earlier boot left unfinished is not used."""
    try:
        return BOOT_ID.read_text().strip()[:8]
    except OSError:
        return f"pid{os.getppid()}"
