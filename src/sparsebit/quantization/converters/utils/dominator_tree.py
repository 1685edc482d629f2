"""Legacy: dominators of a flow graph. u dominates v if every path from the root to v passes u.

Iterative intersection in reverse postorder (Cooper, Harvey, Kennedy: A Simple, Fast Dominance Algorithm).
"""

from __future__ import annotations

from collections.abc import Iterator


class DominatorTree:
    """Nodes 0 .. nums-1, root nums-1. After `solve`: `idom[v]` (the root's is itself; nums if v cannot be
    reached) and `targets[u]`, the nodes whose immediate dominator is u.
    """

    def __init__(self, nums: int):
        self.n = nums
        self.edges: list[list[int]] = [[] for _ in range(nums)]
        self.inv_edges: list[list[int]] = [[] for _ in range(nums)]
        self.idom = [nums] * nums
        self.targets: list[list[int]] = [[] for _ in range(nums)]

    def add_edge(self, u: int, v: int) -> None:
        self.edges[u].append(v)
        self.inv_edges[v].append(u)

    def solve(self) -> None:
        root = self.n - 1
        unknown = self.n
        order = self._reverse_postorder(root)
        rank = {v: i for i, v in enumerate(order)}
        idom = [unknown] * self.n
        idom[root] = root
        changed = True
        while changed:
            changed = False
            for v in order[1:]:
                known = [u for u in self.inv_edges[v] if idom[u] != unknown]
                new = known[0]
                for u in known[1:]:
                    while u != new:  # climb the deeper one until they meet
                        if rank[u] > rank[new]:
                            u = idom[u]
                        else:
                            new = idom[new]
                changed |= idom[v] != new
                idom[v] = new
        self.idom = idom
        self.targets = [[] for _ in range(self.n)]
        for v in order[1:]:
            self.targets[idom[v]].append(v)

    def _reverse_postorder(self, root: int) -> list[int]:
        seen = {root}
        post = []
        stack: list[tuple[int, Iterator[int]]] = [(root, iter(self.edges[root]))]
        while stack:
            node, rest = stack[-1]
            child = next((v for v in rest if v not in seen), None)
            if child is None:
                post.append(node)
                stack.pop()
            else:
                seen.add(child)
                stack.append((child, iter(self.edges[child])))
        return post[::-1]
