"""A store within one process, for a rank that has no peers. Nothing here imports torch."""

from __future__ import annotations

__all__ = ["OwnStore"]


class OwnStore:
    """The part of ``torch.distributed``'s store that an :class:`~outlast.checkpoint.exchange.SaveExchange` needs."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}

    def set(self, key: str, value: str) -> None:
        self._values[key] = value.encode()

    def get(self, key: str) -> bytes:
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        return all(key in self._values for key in keys)

    def delete_key(self, key: str) -> bool:
        return self._values.pop(key, None) is not None
