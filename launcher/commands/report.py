"""`report`: pages and plots of finished runs and sweeps, from their files alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from launcher.errors import ConfigError, StorageError
from launcher.process.terminal import columns_of, wrapped


def write_reports(words: Sequence[str]) -> None:
    from launcher.report.comparison import is_sweep, write_comparison
    from launcher.report.page import write_report

    if not words:
        raise ConfigError(
            "report: which run? Give its directory: python -m launcher report outputs/<recipe>/<run>"
        )
    for word in words:
        if not os.path.isdir(word):
            raise ConfigError(f"report {word}: there is no such directory.")
        directory = Path(word)
        try:
            several = is_sweep(directory)
            written = write_comparison(directory, warn) if several else [write_report(directory, warn)]
        except OSError as error:
            raise StorageError(f"report {word}: {error.filename}: {error.strerror}.") from error
        print(*written, sep="\n")


def warn(text: str) -> None:
    print(wrapped(f"warning: {text}", columns_of(sys.stderr)), file=sys.stderr, flush=True)
