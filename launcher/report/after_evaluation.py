"""What a recipe showed after the last evaluation, on a page: texts, numbers, and pictures embedded.

Owns the limit on the pictures' size. Reads only plain files of the run's own folder, whatever path an event
names.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from launcher.report.html import facts, link, paragraph, picture, preformatted, subsection
from launcher.report.reading import MAX_TEXT
from launcher.report.run import Run
from launcher.run_dir.records import PICTURES
from launcher.telemetry.events import AfterEvaluationEvent
from launcher.telemetry.formatting import number

MAX_PICTURES_BYTES = 300_000  # of a run; the others are links
PNG = b"\x89PNG\r\n\x1a\n"


def after_evaluation(run: Run) -> str:
    """The markup; "" for a run without such an event."""
    event = run.history.last(AfterEvaluationEvent)
    if event is None:
        return ""
    return (
        paragraph(f"After step {event.step:,}.", "note")
        + facts("Numbers", {name: number(value) for name, value in event.numbers.items()})
        + "".join(subsection(name, preformatted(name, text[:MAX_TEXT])) for name, text in event.texts.items())
        + _pictures(run.directory / PICTURES, event.pictures)
    )


def _pictures(folder: Path, paths: Mapping[str, str]) -> str:
    left_bytes, parts = MAX_PICTURES_BYTES, []
    for name, path in paths.items():
        file = folder / Path(path).name  # of this folder, also after the run has been moved
        content = _content(file, left_bytes)
        left_bytes -= len(content)
        address = f"file://{quote(str(file.absolute()), errors='replace')}"
        parts.append(subsection(name, picture(content, name) or link(address, file.name)))
    return "".join(parts)


def _content(file: Path, at_most_bytes: int) -> bytes:
    """The picture; empty for one that is larger, missing, or none."""
    try:
        content = file.read_bytes() if file.stat().st_size <= at_most_bytes else b""
    except (OSError, ValueError):
        return b""
    return content if content.startswith(PNG) and len(content) <= at_most_bytes else b""
