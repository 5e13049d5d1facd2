"""Random draft trees for tests, and their structure worked out node by node in plain Python."""

import random

import torch
from comfyui_specar.samplers.drafts.trees import Tree


def random_tree(seed: int, batch: int = 3, drafts: int = 9, levels: int = 4, siblings: int = 3, vocab: int = 6) -> Tree:
    """Trees of different shapes and sizes (the first may be empty) with dead slots after them, parents first."""
    rng = random.Random(seed)
    rows = []
    for _ in range(batch):
        nodes = [(0, 0, 0)]  # parent, depth, rank
        children = {0: 0}
        for _ in range(rng.randint(0, drafts)):
            open_slots = [s for s, count in children.items() if count < siblings and nodes[s][1] < levels]
            parent = rng.choice(open_slots)
            nodes.append((parent, nodes[parent][1] + 1, children[parent]))
            children[parent] += 1
            children[len(nodes) - 1] = 0
        exists = [True] * len(nodes) + [False] * (drafts + 1 - len(nodes))
        while len(nodes) <= drafts:  # dead slots may say anything legal
            nodes.append((rng.randrange(len(nodes)), rng.randint(1, levels), rng.randrange(siblings)))
        rows.append((nodes, exists))
    parent, depth, rank = (torch.tensor([[n[i] for n in nodes] for nodes, _ in rows]) for i in range(3))
    exists = torch.tensor([e for _, e in rows])
    generator = torch.Generator().manual_seed(seed)
    first = torch.randint(vocab, exists.shape, generator=generator)
    token = (first.gather(1, parent) + rank) % vocab  # of siblings different ones, as in every tree that is grown
    probability = torch.rand(exists.shape, generator=generator) * 0.9 + 0.05
    probability[:, 0] = 1
    return Tree(token, parent, depth, rank, exists, probability, levels, siblings)


def tree_of_paths(*lengths: int) -> Tree:
    """One tree whose leaf paths have these lengths and share nothing but the root; slots path by path."""
    nodes = [(0, 0, 0)]
    for number, length in enumerate(lengths):
        for depth in range(1, length + 1):
            nodes.append((0 if depth == 1 else len(nodes) - 1, depth, number if depth == 1 else 0))
    parent, depth, rank = (torch.tensor([[n[i] for n in nodes]]) for i in range(3))
    token = torch.arange(len(nodes))[None]
    ones = torch.ones_like(token)
    return Tree(token, parent, depth, rank, ones > 0, ones.float(), max(lengths), len(lengths))


def row(tree: Tree, b: int) -> Tree:
    """The tree of one image, as a run of its own would have it: without the dead slots at its end."""
    drafts = int(tree.exists[b].nonzero().max()) + 1
    fields = ("token", "parent", "depth", "rank", "exists", "probability")
    return Tree(*(getattr(tree, name)[b : b + 1, :drafts] for name in fields), tree.levels, tree.width)


def alive(tree: Tree, b: int) -> list[int]:
    """The drafts of an image."""
    return [s for s in range(1, tree.token.shape[1]) if tree.exists[b, s]]


def path_to(tree: Tree, b: int, slot: int) -> list[int]:
    """Slots from below the root down to ``slot``."""
    path = []
    while slot:
        path.insert(0, slot)
        slot = int(tree.parent[b, slot])
    return path


def leaf_paths(tree: Tree, b: int) -> list[list[int]]:
    """Paths to the drafts without children, in slot order."""
    parents = {int(tree.parent[b, s]) for s in alive(tree, b)}
    return [path_to(tree, b, s) for s in alive(tree, b) if s not in parents]
