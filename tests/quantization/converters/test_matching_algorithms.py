"""DSU, DominatorTree and Hungary against brute force."""

from __future__ import annotations

import random
from itertools import permutations

import networkx as nx
import pytest

from sparsebit.errors import GraphError
from sparsebit.quantization.converters.utils.bitpartite_graph_matching import Hungary
from sparsebit.quantization.converters.utils.disjoint_set_union import DSU
from sparsebit.quantization.converters.utils.dominator_tree import DominatorTree


@pytest.mark.parametrize("seed", range(20))
def test_dsu_sets(seed):
    rng, n = random.Random(seed), 12
    dsu, sets = DSU(n, None, None), [{i} for i in range(n)]
    for _ in range(rng.randrange(12)):
        x, y = rng.randrange(n), rng.randrange(n)
        root = dsu.find(y)
        dsu.merge(x, y)
        assert dsu.find(x) == root  # the root of y stays
        if sets[x] is not sets[y]:
            joined = sets[x] | sets[y]
            for i in joined:
                sets[i] = joined
    assert all((dsu.find(i) == dsu.find(j)) == (j in sets[i]) for i in range(n) for j in range(n))


@pytest.mark.parametrize("seed", range(20))
def test_dsu_values_are_the_best_up_to_the_root(seed):
    rng, n = random.Random(seed), 12
    start = [rng.randrange(100) for _ in range(n)]
    dsu, parent = DSU(n, list(start), lambda a, b: a < b), list(range(n))

    def path(i):
        return [i] if parent[i] == i else [i, *path(parent[i])]

    for _ in range(15):
        i = rng.randrange(n)
        if parent[i] == i:
            j = path(rng.randrange(n))[-1]
            parent[i] = j
            dsu.merge(i, j)
        k = rng.randrange(n)
        assert dsu.find(k) == path(k)[-1]
        assert dsu.value[k] == min(start[p] for p in path(k))


def test_dsu_refuses_values_that_cannot_be_compared():
    with pytest.raises(GraphError, match="needs 3 entries"):
        DSU(3, [1, 2], lambda a, b: a < b)
    with pytest.raises(GraphError, match="`cmp`"):
        DSU(2, [1, 2], None)


def test_dsu_and_dominators_of_a_long_chain():
    n = 5000
    dsu, tree = DSU(n), DominatorTree(n)
    for i in range(n - 1):
        dsu.merge(i, i + 1)
        tree.add_edge(i + 1, i)
    tree.solve()
    assert dsu.find(0) == n - 1
    assert tree.idom[:-1] == list(range(1, n)) and tree.idom[-1] == n - 1


@pytest.mark.parametrize("seed", range(60))
def test_dominators_against_networkx(seed):
    rng = random.Random(seed)
    n = rng.randrange(2, 14)
    graph = nx.gnp_random_graph(n, rng.choice([0.1, 0.2, 0.4]), seed=seed, directed=True)  # cycles too
    tree = DominatorTree(n)
    for u, v in graph.edges:
        tree.add_edge(u, v)
    tree.solve()
    root = n - 1
    reachable = nx.descendants(graph, root) | {root}
    want = {v: d for v, d in nx.immediate_dominators(graph, root).items() if v != root}
    assert {v: tree.idom[v] for v in range(n) if v in reachable and v != root} == want
    assert all(tree.idom[v] == n for v in range(n) if v not in reachable) and tree.idom[root] == root
    assert {v: u for u in range(n) for v in tree.targets[u]} == want


@pytest.mark.parametrize("seed", range(60))
def test_D41_matching_against_brute_force(seed):
    rng = random.Random(seed)
    n, m = rng.randrange(1, 6), rng.randrange(1, 6)
    edges = [(i, j) for i in range(n) for j in range(m) if rng.random() < rng.choice([0.2, 0.5])]
    hungary = Hungary(n, m)
    for edge in edges:
        hungary.add_edge(*edge)
    size = hungary.apply()
    slots = list(range(m)) + [None] * n
    assert size == max(sum((i, j) in edges for i, j in enumerate(p)) for p in set(permutations(slots, n)))
    partners = [(i, j) for i, j in enumerate(hungary.match) if j >= 0]
    assert len(partners) == size == len({j for _, j in partners}) and set(partners) <= set(edges)
