"""The questions a Tree answers, against the same asked node by node of random trees with dead slots, image by image."""

from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.random_trees import alive, leaf_paths, path_to, random_tree

seeds = st.integers(0, 10**6)


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_children_are_in_the_order_they_were_sampled(seed):
    tree = random_tree(seed)
    table = tree.children()
    assert table.shape == (*tree.token.shape, tree.width)
    for b in range(len(table)):
        for slot in range(table.shape[1]):
            kids = {int(tree.rank[b, s]): s for s in alive(tree, b) if tree.parent[b, s] == slot}
            assert table[b, slot].tolist() == [kids.get(r, -1) for r in range(tree.width)]


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_ancestors_and_paths_lead_to_the_root(seed):
    tree = random_tree(seed)
    seen, paths = tree.tree_mask(), tree.retrieve_indices()
    for b in range(len(seen)):
        assert seen[b, 0].tolist() == [True] + [False] * (seen.shape[1] - 1)
        for slot in alive(tree, b):
            path = path_to(tree, b, slot)
            assert seen[b, slot].nonzero()[:, 0].tolist() == [0, *path]
            assert paths[b, slot].tolist() == path + [0] * (tree.levels - len(path))


@given(seeds)
@settings(max_examples=60, deadline=None)
def test_leaves_are_drafts_without_children_and_spread_counts_levels(seed):
    tree = random_tree(seed)
    leaves, (depth, width) = tree.leaves(), tree.spread()
    for b in range(len(leaves)):
        assert leaves[b].nonzero()[:, 0].tolist() == [path[-1] for path in leaf_paths(tree, b)]
        levels = [int(tree.depth[b, s]) for s in alive(tree, b)]
        assert int(depth[b]) == max(levels, default=0)
        assert int(width[b]) == max((levels.count(n) for n in levels), default=0)
