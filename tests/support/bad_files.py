"""Files that cannot be used: that their loader says why, and one that would run code."""

import pytest
from comfyui_specar.model_loaders.detect import load_model
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError


def refused(path, *words, loader=load_model, error=CheckpointError, **options):
    """``loader(path)`` raises ``error``, and its message contains every one of ``words``."""
    with pytest.raises(error) as caught:
        loader(path, **options)
    for word in words:
        assert word in str(caught.value), caught.value


class Attack:
    """Unpickling this writes a file."""

    def __init__(self, target):
        self.target = str(target)

    def __reduce__(self):
        return (exec, (f"open({self.target!r}, 'w').write('gotcha')",))
