"""Draft structures: a chain, a static sampled tree, EAGLE-2's dynamic tree. Auto and ADTTree have their own files."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...kernels.verification import Verified
from ..contract import Extent
from ..layout import TokenLayout
from ..rng import Stream
from ..settings import check_settings, setting
from .costs import PassCosts
from .growing import DRAWS, Drafting, Root, grow_sampled, grow_top_k
from .trees import Path, Shape, Tree, published_paths, shape_of

Plan = tuple[Tensor, Tensor] | None  # depth [B] and width [B] asked for, where a structure varies them


@dataclass(frozen=True)
class Structure(ABC):
    """The shape of the drafts of a round. Structures are frozen dataclasses whose fields are their settings.

    block: verify by blocks instead of token by token (chains only). sampled: are siblings samples from the drafter, not
    its most likely tokens (a chain has none)? measures: does it need the costs of passes (see ``fit``)?
    """

    kind: ClassVar[str]  # in traces
    block: ClassVar[bool] = False
    sampled: ClassVar[bool] = False

    def check(self) -> None:
        """Raise ValueError naming the setting and its legal values."""
        check_settings(self)

    def describe(self) -> dict[str, Any]:
        """Settings, JSON-ready."""
        return {"kind": self.kind} | asdict(self)

    @property
    def measures(self) -> bool:
        return False

    def fit(self, costs: PassCosts) -> Structure:
        """The structure for a run whose passes have these costs."""
        return self

    def notices(self) -> list[str]:
        """What a run with this structure does not do of what was asked, a sentence each."""
        return []

    @staticmethod
    @abstractmethod
    def in_words(settings: dict[str, Any]) -> str:
        """The settings of ``describe`` in a few words."""

    @abstractmethod
    def size(self) -> tuple[int, int]:
        """The most drafts and the most levels of a tree."""

    @abstractmethod
    def expansions(self) -> int:
        """The most drafts that the drafter expands in a round."""

    @abstractmethod
    def start(self, batch: int, layout: TokenLayout, device: torch.device) -> Any:
        """The structure's memory at the start of a run."""

    @abstractmethod
    def plan(self, history: Any, committed: Tensor, layout: TokenLayout, stream: Stream, round_index: Tensor) -> Plan:
        """The shapes of the next trees, decided at the end of the round before."""

    @abstractmethod
    def extent(self, history: Any, plan: Plan, left: Tensor) -> Tensor | None:
        """What the host reads of a plan, [n] (int64), for images with ``left`` [B] tokens to go; None if no tree
        varies."""

    @abstractmethod
    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool) -> Extent:
        """The extent by what the host has just read; before: the last one, Extent() at the start of a run. pads: take
        one of few extents that launch no less, because every other one is a capture."""

    @abstractmethod
    def grow(self, work: Drafting, root: Root, plan: Plan, extent: Extent, round_index: Tensor) -> Tree:
        """The next tree."""

    @abstractmethod
    def learn(
        self,
        history: Any,
        plan: Plan,
        tree: Tree,
        verified: Verified | None,
        before: Tensor,
        after: Tensor,
        accepted: Tensor,
        update: Tensor,
    ) -> Any:
        """The memory after a round. verified: its outcome, None if no image verified its tree. All [B]: tokens decided
        before and after it, accepted drafts, images to ``update``."""


class _Fixed(Structure):
    """A structure without memory and plan."""

    def start(self, batch: int, layout: TokenLayout, device: torch.device) -> None:
        return None

    def plan(self, history: None, committed: Tensor, layout: TokenLayout, stream: Stream, round_index: Tensor) -> None:
        return None

    def extent(self, history: None, plan: None, left: Tensor) -> None:
        return None

    def passes(self) -> int:
        """Forward passes in which the drafter expands drafts in a round."""
        raise NotImplementedError

    def next_extent(self, before: Extent, read: tuple[int, ...], pads: bool) -> Extent:
        return Extent(drafter_passes=1 + self.passes())

    def learn(self, *round: Any) -> None:
        return None


class _FixedShape(_Fixed):
    def shape(self) -> Shape:
        raise NotImplementedError

    def check(self) -> None:
        super().check()
        drafts, _ = self.size()
        if drafts >= DRAWS:
            raise ValueError(f"The tree has {drafts} drafts, but may have at most {DRAWS - 1}. Use a smaller tree.")

    def size(self) -> tuple[int, int]:
        shape = self.shape()
        return sum(len(level.parent) for level in shape), len(shape)

    def expansions(self) -> int:
        return sum(level.inner for level in self.shape())

    def passes(self) -> int:
        return sum(level.inner > 0 for level in self.shape())

    def grow(self, work: Drafting, root: Root, plan: None, extent: Extent, round_index: Tensor) -> Tree:
        return grow_sampled(work, root, self.shape(), round_index)


@dataclass(frozen=True)
class Chain(_FixedShape):
    """A chain of ``length`` (1 to 64) drafts (Leviathan et al., ICML 2023).

    verification: "token", or "block" (Sun et al., "Block verification accelerates speculative decoding", ICLR 2025),
    which is exact too and accepts no less on average.
    """

    length: int = setting(5, 1, 64)
    verification: str = setting("token", options=("token", "block"))
    kind: ClassVar[str] = "chain"

    @property
    def block(self) -> bool:
        return self.verification == "block"

    def shape(self) -> Shape:
        return shape_of(tuple((0,) * n for n in range(1, self.length + 1)))

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"chain of {settings['length']}" + (" by blocks" if settings["verification"] == "block" else "")


@dataclass(frozen=True)
class Static(_FixedShape):
    """A tree of fixed shape with sampled children (EAGLE-1): the name of a published one, or a list of paths."""

    tree: str | Sequence[Path] = "eagle_25"
    kind: ClassVar[str] = "static"
    sampled: ClassVar[bool] = True

    def shape(self) -> Shape:
        return shape_of(published_paths(self.tree) if isinstance(self.tree, str) else tuple(map(tuple, self.tree)))

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"drafts": self.size()[0]}

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"static tree of {settings['drafts']}"


@dataclass(frozen=True)
class Dynamic(_Fixed):
    """EAGLE-2's tree of the most likely children: ``depth`` (1 to 32) levels, ``width`` (1 to 64), best ``nodes``
    drafts."""

    depth: int = setting(5, 1, 32)
    width: int = setting(10, 1, 64)
    nodes: int = setting(58, 1, 1024)
    kind: ClassVar[str] = "dynamic"

    def size(self) -> tuple[int, int]:
        return self.nodes, self.depth

    def expansions(self) -> int:
        return (self.depth - 1) * self.width

    def passes(self) -> int:
        return self.depth - 1

    def grow(self, work: Drafting, root: Root, plan: None, extent: Extent, round_index: Tensor) -> Tree:
        return grow_top_k(work, root, self.depth, self.width, self.nodes)

    @staticmethod
    def in_words(settings: dict[str, Any]) -> str:
        return f"dynamic tree of {settings['nodes']}"
