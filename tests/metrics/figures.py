"""What scikit-learn returned for some inputs, computed once and kept, so that no test needs it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES: dict[str, Any] = json.loads(Path(__file__).with_name("scikit_learn.json").read_text())
