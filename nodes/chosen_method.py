"""A sampling method with its settings as an output, and the sampler that runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from comfy_api.latest import io

from ..reports.quality import Quality, quality_of
from ..reports.run_report import drafting, judgement
from ..samplers.contract import Method
from .comfy_runtime.runs import LoadedDrafter, LoadedModel
from .samplers import Inputs, replace_settings, run_method
from .schema import schema
from .search import SAMPLER
from .sockets import ARMethod
from .widgets import common_inputs, negative_input, sampler_outputs


@dataclass(frozen=True)
class ChosenMethod:
    """A method with its settings, model and drafter.

    widgets: the node and widgets with the same settings; settings: those that a run of it has in its trace; simple: the
    choice of AR Sampler that does the same here, if there is one.
    """

    model: LoadedModel
    method: Method
    drafter: LoadedDrafter | None
    widgets: str
    settings: dict[str, Any]
    simple: str | None = None

    @property
    def by_hand(self) -> str:
        """How a user gets the same."""
        return f"AR Sampler: method {self.simple}; or {self.widgets}" if self.simple else self.widgets

    @property
    def name(self) -> str:
        """How it drafts, as in the report of a run: "SJD, coupled, window 16"."""
        return drafting(self.settings)

    @property
    def acceptance(self) -> str:
        """How it verifies its drafts: "exact"."""
        return judgement(self.settings)

    @property
    def exact(self) -> bool:
        """Whether it samples the model's distribution exactly."""
        return self.settings["lossless"]

    @property
    def quality(self) -> Quality | None:
        """What was measured of images with such settings, of the bundled model; None if nothing was."""
        return quality_of(self.settings)

    def follow(self, model: LoadedModel) -> Method:
        """The method for ``model``, which is the one it was chosen for, or the same files loaded again (see
        LoadedDrafter.follow). Raises ValueError for another model."""
        if self.model.source != model.source:
            raise ValueError(
                f"The method ({self.name}) was chosen for {self.model.name}, but this sampler's model is {model.name} "
                "from another loader. Connect the same Load AR Checkpoint to this sampler and to Find Fastest. If it "
                "already is, change trial_seed there to measure again."
            )
        if self.drafter is None:
            return self.method
        self.drafter.follow(model)
        return replace_settings(self.method, drafter=self.drafter.drafter)


class AutoSampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return schema(
            node_id="SpecARMethodSampler",
            category="SpecAR/sampling",
            search=(*SAMPLER, "find fastest"),
            inputs=[*common_inputs(), ARMethod.Input("method"), negative_input()],
            outputs=sampler_outputs(),
        )

    @classmethod
    def execute(cls, method: ChosenMethod, **inputs: Any) -> io.NodeOutput:
        common = Inputs(**inputs)
        return run_method(method.follow(common.model), common, method.drafter)
