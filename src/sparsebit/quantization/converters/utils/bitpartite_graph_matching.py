"""Legacy: maximum matching of a bipartite graph by augmenting paths (Kuhn 1955)."""

from __future__ import annotations


class Hungary:
    """n left and m right nodes. `apply()` returns the size of a maximum matching; `match[left]` is its right
    partner, or -1.
    """

    def __init__(self, n: int, m: int):
        self.n = n
        self.m = m
        self.edges: list[list[int]] = [[] for _ in range(n)]
        self.match = [-1] * n
        self._partner = [-1] * m  # of the right nodes

    def add_edge(self, left: int, right: int) -> None:
        self.edges[left].append(right)

    def apply(self) -> int:
        for left in range(self.n):
            if self.match[left] < 0:
                self._augment(left, set())
        return sum(right >= 0 for right in self.match)

    def _augment(self, left: int, seen: set[int]) -> bool:
        """Find `left` a partner, moving others to their second choice where that helps."""
        for right in self.edges[left]:
            if right in seen:
                continue
            seen.add(right)
            if self._partner[right] < 0 or self._augment(self._partner[right], seen):
                self.match[left], self._partner[right] = right, left
                return True
        return False
