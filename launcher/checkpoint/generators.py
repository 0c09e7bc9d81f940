"""Encodes the random generators of a process as bytes of fixed length, and restores them.

Covers the global generators of torch, NumPy and Python's `random`. A generator that a recipe creates is not
part of a run's state.
"""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

# State of a Mersenne Twister: 624 words, the position in them, and the second normal number of a pair.
_TWISTER = struct.Struct("<624I I ? d")
USUAL = "MT19937"  # NumPy's own


def states(device: torch.device) -> dict[str, Tensor]:
    """The state of each generator of this process: uint8 [bytes], on the host."""
    _, (*words, position), waiting = random.getstate()
    of_numpy = np.random.get_state(legacy=False)
    twister, kind = of_numpy["state"], of_numpy["bit_generator"]
    found = {
        "cpu": torch.get_rng_state(),
        "python": _packed(words, position, waiting is not None, waiting or 0.0),
    }
    if kind == USUAL:
        found["numpy"] = _packed(twister["key"], twister["pos"], of_numpy["has_gauss"], of_numpy["gauss"])
    else:  # by a recipe's set_bit_generator
        text = json.dumps(of_numpy, default=np.ndarray.tolist).encode().ljust(_TWISTER.size)
        found[f"numpy.{kind}"] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if device.type == "cuda":
        found["cuda"] = torch.cuda.get_rng_state(device)
    return found


def restore_states(saved: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore the generators from `states`. Those that `saved` lacks are left unchanged."""
    torch.set_rng_state(saved["cpu"])
    if "python" in saved:
        *words, position, has_normal, normal = _unpacked(saved["python"])
        # 3 is the version of Python's own state.
        random.setstate((3, (*words, position), normal if has_normal else None))
    kind = np.random.get_state(legacy=False)["bit_generator"]
    if (text := saved.get(f"numpy.{kind}")) is not None:
        np.random.set_state(_with_arrays(json.loads(text.numpy().tobytes())))
    elif "numpy" in saved and kind == USUAL:
        *words, position, has_normal, normal = _unpacked(saved["numpy"])
        np.random.set_state(("MT19937", np.array(words, np.uint32), int(position), int(has_normal), normal))
    if device.type == "cuda" and "cuda" in saved:
        torch.cuda.set_rng_state(saved["cuda"], device)


def _with_arrays(state: dict[str, Any]) -> dict[str, Any]:
    """Lists as arrays, which some generators of NumPy demand."""
    arrays = {key: np.array(value, np.uint64) for key, value in state.items() if isinstance(value, list)}
    nested = {key: _with_arrays(value) for key, value in state.items() if isinstance(value, dict)}
    return state | arrays | nested


def _packed(words: object, position: int, has_normal: bool, normal: float) -> Tensor:
    values = (*map(int, words), int(position), bool(has_normal), float(normal))  # type: ignore[call-overload]
    return torch.frombuffer(bytearray(_TWISTER.pack(*values)), dtype=torch.uint8)


def _unpacked(state: Tensor) -> tuple[int | float, ...]:
    return _TWISTER.unpack(state.numpy().tobytes())
