"""What ranks send to each other, computed. Imports no torch."""

from __future__ import annotations


def ring_bytes(message_bytes: float, world_size: int) -> float:
    """What each of `world_size` ranks sends to sum messages of so many bytes in a ring.

    Patarasuk and Yuan, 2009.
    """
    return 2 * (world_size - 1) / world_size * message_bytes
