"""Labels: which positions are kept or removed together.

Every position of a tensor has a label. Positions with the same label depend on each other. `FIXED` is the
label of positions that are kept. join() is union-find over arrays, so one call joins whole tensors.
"""

from __future__ import annotations

import torch
from torch import Tensor

FIXED = 0
MEETS_FIXED = "channels meet an input, a constant, or others that are kept"


def thin(labels: Tensor) -> Tensor:
    """Equal labels that are stored once along every axis on which they repeat (stride 0)."""
    shape = labels.shape
    for d in range(labels.dim()):
        first = labels.narrow(d, 0, 1) if shape[d] else labels
        if labels.stride(d) == 0 or torch.equal(first.expand_as(labels), labels):
            labels = first
    return labels.expand(shape)


def stored(*labels: Tensor) -> list[Tensor]:
    """`thin` of several label tensors, without the repetitions that all of them have."""
    for d in range(labels[0].dim()):
        if all(x.shape[d] and (x.stride(d) == 0 or x.shape[d] == 1) for x in labels):
            labels = tuple(x.narrow(d, 0, 1) for x in labels)
    return list(labels)


class Labels:
    def __init__(self) -> None:
        self._parent = torch.zeros(1, dtype=torch.long)
        self._flat = True  # every label points at its root
        self.why_fixed: dict[int, str] = {}  # label -> the reason why it is kept
        self.at = "the graph"  # the place of the current joins, for reasons
        # label -> how many labels were joined into it at once, and where
        self._met: dict[int, tuple[int, str]] = {}

    def __len__(self) -> int:
        return len(self._parent)

    def fresh(self, n: int) -> Tensor:
        """`n` new labels."""
        start = len(self._parent)
        new = torch.arange(start, start + n)
        self._parent = torch.cat([self._parent, new])
        return new

    def roots(self, labels: Tensor) -> Tensor:
        """The root of each label: one label for all that were joined, or FIXED."""
        while not self._flat:
            above = self._parent[self._parent]
            self._flat = torch.equal(above, self._parent)
            self._parent = above
        return self._parent[labels]

    def join(self, a: Tensor, b: Tensor) -> None:
        """Positions in the same place (after broadcasting) depend on each other."""
        a, b = stored(*torch.broadcast_tensors(a, b))
        both = torch.unique(a.reshape(-1) * len(self) + b.reshape(-1))  # one number per pair: fast to sort
        pairs = torch.stack([both // len(self), both % len(self)])
        while True:
            low, high = self.roots(pairs).sort(0).values
            apart = low != high
            if not apart.any():
                return
            self._note(low[apart], high[apart])
            # The smaller root wins. A root that meets several takes the smallest now and the rest in the next
            # round.
            self._parent = self._parent.scatter_reduce(0, high[apart], low[apart], "amin")
            self._flat = False

    def _note(self, low: Tensor, high: Tensor) -> None:
        """Remember where labels became fixed, or met many labels of the same tensor."""
        for root in high[low == FIXED].unique().tolist():
            self.why_fixed.setdefault(root, f"{self.at}: {MEETS_FIXED}")
        roots, times = low.unique(return_counts=True)
        for root, n in zip(roots[times > 1].tolist(), times[times > 1].tolist()):
            if n > self._met.get(root, (0, ""))[0]:
                self._met[root] = n, self.at

    def met_at(self, root: int) -> str:
        """The place where most labels of a class were joined."""
        roots = self.roots(torch.tensor(list(self._met), dtype=torch.long)).tolist()
        inside = [met for met, found in zip(self._met.values(), roots) if found == root]
        return max(inside, default=(0, self.at), key=lambda met: met[0])[1]

    def fix(self, labels: Tensor, reason: str) -> None:
        """These are kept, for a reason."""
        for root in self.roots(stored(labels)[0]).unique().tolist():
            if root != FIXED:
                self.why_fixed.setdefault(root, reason)
        self.join(labels, torch.zeros((), dtype=torch.long))

    def whole(self, labels: Tensor, axes: list[int]) -> None:
        """Positions along `axes` depend on each other."""
        for axis in axes:
            self.join(labels, labels.narrow(axis, 0, 1))

    def varies(self, labels: Tensor) -> list[int]:
        """The axes along which the labels differ."""
        roots = self.roots(stored(labels)[0])
        found: list[int] = []
        for d in range(roots.dim()):
            if roots.shape[d] > 1 and bool((roots != roots.narrow(d, 0, 1)).any()):
                found.append(d)
        return found

    def along(self, labels: Tensor, axis: int) -> Tensor:
        """One label per position of `axis`; the other axes are joined."""
        axis = axis % labels.dim()
        n = labels.shape[axis]
        thinned = stored(labels)[0]
        vector = (
            thinned.expand(*thinned.shape[:axis], n, *thinned.shape[axis + 1 :])
            .movedim(axis, 0)
            .reshape(n, -1)
        )
        if vector.shape[1] > 1:
            self.join(vector, vector[:, :1])
        return vector[:, 0]
