"""A worker for Ray's actors whose process dies of one prompt, as of a lack of memory."""

import os

from comfyui_specar.batch.model_worker import ModelWorker


class MortalWorker(ModelWorker):
    def generate(self, settings):
        if settings["prompt"] == "poison":
            os._exit(1)
        return super().generate(settings)
