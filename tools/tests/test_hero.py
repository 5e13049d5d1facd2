"""The README's animation shows a run as it was: at every moment what was decided by then."""

import numpy as np
from comfyui_specar import api
from comfyui_specar.tests.support.tiny import llamagen

from tools import hero


def test_a_frame_shows_what_the_passes_had_decided_by_then(tmp_path):
    model = llamagen(tmp_path, text=False)
    out = api.sample(model, model.encode_prompt("3"), api.methods.SJD(window=4), seed=1)
    passes = out.trace.totals["target_passes"]
    run = hero.Run("sjd", out, [float(number) for number in range(1, passes + 1)])
    picture = np.random.default_rng(0).random((8, 8, 3), dtype=np.float32)  # 2 x 2 pixels a token
    clock = np.array([0.5, 1.0, 2.5, passes])
    *drawn, finished = map(np.asarray, hero.animation(run, picture, clock, tint=0.0))
    exact = (picture * 255).round()
    decided_in = out.trace.grid("finalised_at")[0].numpy().repeat(2, 0).repeat(2, 1)
    for frame, done in zip(drawn, (0, 1, 2, passes), strict=True):
        shown = decided_in < done
        assert (frame[shown] == exact[shown]).all() and (frame[~shown] == 128).all()
    assert (finished == exact).all()
