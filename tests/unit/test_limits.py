"""Files and tables that state absurd numbers, and traces that would be drawn as enormous images: each is refused before
it costs anything."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from comfyui_specar.batch.jobs import JobsError, read_jobs
from comfyui_specar.limits import limits
from comfyui_specar.limits.limits import FileError, bounded_int, legal_name, legal_sizes, parse_json, quote
from comfyui_specar.limits.printable import printable
from comfyui_specar.model_loaders import llama as language_model
from comfyui_specar.model_loaders.detect import load_image_decoder
from comfyui_specar.model_loaders.families import harmon, llamagen, mar, xar
from comfyui_specar.model_loaders.files import names
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, open_checkpoint, outline, read_settings
from comfyui_specar.model_loaders.text import t5
from comfyui_specar.models.sizes import legal_grid
from comfyui_specar.models.text.tiktoken_file import read_ranks
from comfyui_specar.reports import acceptance_map, comparison, run_report
from comfyui_specar.samplers.trace import POSITION_FIELDS, Source, Trace
from comfyui_specar.samplers.trace_files import load_trace, save_trace
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from ..support.hostile_files import HOSTILE, one_tensor, safetensors
from ..support.process_memory import forget_peak, held

MOST_SECONDS = 5  # of the processor: 0.5 are intended, and a busy machine takes several times as long
MOST_MEMORY = 300 << 20  # bytes beyond the file's own
CONTROL = "\x1b[31m\u202egnp\n"
QUIET = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def read(file: Path, mapped: bool) -> None:
    if file.name == "config.json":
        read_settings(file)
    elif file.suffix == ".tiktoken":
        read_ranks(file)
    elif file.suffix in (".csv", ".jsonl"):
        read_jobs(file)
    else:
        open_checkpoint(file, mapped)


@pytest.mark.parametrize("write", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_file_is_refused_at_once(tmp_path, write):
    """For some, a reader without bounds would never end, or end the process."""
    file = write(tmp_path)
    linux = Path("/proc/self/clear_refs").exists()
    for mapped in (True, False)[: 1 + (file.suffix == ".safetensors")]:
        if linux:
            forget_peak()
        before, began = held() if linux else 0, time.process_time()
        with pytest.raises((CheckpointError, JobsError)) as refused:
            read(file, mapped)
        assert time.process_time() - began < MOST_SECONDS
        assert not linux or held("VmHWM") - before - file.stat().st_size < MOST_MEMORY
        assert file.name in str(refused.value) and len(str(refused.value)) <= limits.MESSAGE + 10
        del refused
    if file.suffix == ".safetensors":
        with pytest.raises(CheckpointError):
            outline(file)


NUMBERS = st.one_of(st.integers(-2, 5), st.integers(-(2**70), 2**70), st.floats(), st.none(), st.text(max_size=3))


@QUIET
@given(
    shape=st.lists(NUMBERS, max_size=12),
    place=st.lists(NUMBERS, max_size=3),
    name=st.text(max_size=20),
    dtype=st.sampled_from(("F32", "F8_E4M3", "X")),
    repeat=st.sampled_from((1, 2000)),
)
def test_any_header_is_read_alike_or_refused_by_every_reader(tmp_path, shape, place, name, dtype, repeat):
    file = safetensors({name: {"dtype": dtype, "shape": shape * repeat, "data_offsets": place}}, tmp_path, b"\0" * 8)
    found = []
    for reader in (
        lambda: open_checkpoint(file, mapped=True),
        lambda: open_checkpoint(file, mapped=False),
        lambda: outline(file),
    ):
        try:
            found.append({key: tuple(tensor.shape) for key, tensor in reader().tensors.items()})
        except CheckpointError as error:
            assert len(str(error)) <= limits.MESSAGE + 10 and printable(str(error)) == str(error)
            found.append(None)
    assert found[0] == found[1] == found[2]


def test_sizes():
    assert legal_sizes("x", [2, 3]) == (2, 3) and legal_sizes("x", ()) == ()
    assert legal_sizes("x", [0, 2**62]) == (0, 2**62)
    for sizes in ([1] * 9, [2**62, 2], [0, 2**62, 2], [-1], [True], ["1"], [2**63], None, "12", {1: 2}):
        with pytest.raises(FileError, match="x"):
            legal_sizes("x", sizes)


@pytest.mark.parametrize("name", ["a\x1b[2J", "a\nb", "a\u202eb", "a\0", "\ud800", "a" * (limits.NAME + 1), b"a", None])
def test_names_that_no_tensor_has(name):
    with pytest.raises(FileError, match="name") as refused:
        legal_name(name)
    assert str(refused.value).isprintable() and len(str(refused.value)) < 300
    for legal in ("", "a.b", "名前", "a" * limits.NAME):
        assert legal_name(legal) == legal


def test_grids():
    assert legal_grid([1, 1024]) == (1, 1024)
    with pytest.raises(ValueError, match="1 and 1024") as refused:
        legal_grid([0] * 50_000)
    assert len(str(refused.value)) < 300


def test_a_value_in_a_message_is_short_whatever_it_is():
    endless: list = []
    for _ in range(100):
        endless = [endless, endless]
    assert quote(endless) == "a list" and quote("x" * 1000) == "'" + "x" * 99
    assert quote(2**100_000) == "an integer of 100001 bits"
    assert quote(2**64) == str(2**64)
    with pytest.raises(FileError, match="n is a list.*1 to 3"):
        bounded_int("n", endless, 1, 3)


@pytest.mark.parametrize(
    "text", ['{"a": [1, 2.5, "x", null, true]}', "1" * limits.DIGITS, "[" * 64 + "]" * 64, '"' + "1" * 200 + '"']
)
def test_json_within_the_bounds_is_read_as_json_is(text):
    assert parse_json(text) == parse_json(text.encode()) == json.loads(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1" * (limits.DIGITS + 1), "65 digits"),
        ("-" + "1" * 5000, "digits"),
        ("[" * 66 + "]" * 66, "64 deep"),
        ("[" * 100_000, "64 deep"),
        ("[" + "0," * limits.VALUES + "0]", "400000 values"),
    ],
)
def test_json_beyond_the_bounds_is_refused(text, message):
    with pytest.raises(FileError, match=message):
        parse_json(text)


def test_bounds_of_json_are_checked_in_about_the_time_of_reading_it():
    """Both hold the interpreter's lock: no other client is answered meanwhile."""
    text = "[" + ",".join(["1" * limits.DIGITS] * 20_000) + "]"

    def seconds(read):
        took = []
        for _ in range(3):
            began = time.thread_time()
            read(text)
            took.append(time.thread_time() - began)
        return min(took)

    assert seconds(parse_json) < 15 * seconds(json.loads)


def test_more_values_than_a_header_needs_are_not_read(tmp_path, monkeypatch):
    """They are counted before json sees them, which would hold the interpreter's lock for a second; real headers
    describe a few thousand tensors."""
    read = []
    monkeypatch.setattr(limits.json, "loads", lambda *given, **_named: read.append(given))
    entry = {"dtype": "F32", "shape": [], "data_offsets": [0, 0]}
    file = safetensors({f"t{number}": entry for number in range(6 * limits.TENSORS)}, tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {f"t{n}": "x.safetensors" for n in range(limits.VALUES + 1)}}), "utf-8")
    for each, said in ((file, "120000 tensors"), (index, "400000 values")):
        with pytest.raises(CheckpointError, match=said):
            outline(each)
    assert not read


def test_as_many_tensors_as_a_file_may_have_are_few_values(tmp_path):
    entry = {"dtype": "F32", "shape": [1] * 5 + [0], "data_offsets": [0, 0]}
    file = safetensors({f"t{number}": entry for number in range(limits.TENSORS)}, tmp_path)
    assert len(outline(file).tensors) == limits.TENSORS
    index = tmp_path / "model.safetensors.index.json"
    for more in (0, 1):
        listed = {f"t{number}": file.name for number in range(limits.TENSORS + more)}
        index.write_text(json.dumps({"weight_map": listed}), "utf-8")
        if more:
            with pytest.raises(CheckpointError, match=f"{limits.TENSORS} at most"):
                outline(index)
        else:
            assert len(outline(index).tensors) == limits.TENSORS


@pytest.mark.parametrize("module", [llamagen, mar, xar, harmon, t5, language_model])
def test_the_layers_of_a_file_are_counted_in_one_place(module):
    """Where they are bounded. A file of a few megabytes names 50,000, each of which would be built."""
    assert module.count is names.count


def test_an_image_decoder_of_many_levels_is_not_built(tmp_path):
    """A million blocks for a thousand levels of a thousand, of which the file names two thousand."""
    tensors = {f"encoder.conv_blocks.{i}.res.0.conv1.weight": torch.zeros(32, 1, 1, 1) for i in range(17)}
    tensors |= {
        "quantize.embedding.weight": torch.zeros(16, 8),
        "decoder.norm_out.weight": torch.zeros(32),
        "encoder.conv_in.weight": torch.zeros(32, 3, 1, 1),
        "post_quant_conv.weight": torch.zeros(8, 8, 1, 1),
    }
    save_file(tensors, tmp_path / "vq.safetensors")
    with pytest.raises(FileError, match="must be an integer from 0 to 15"):
        load_image_decoder(tmp_path / "vq.safetensors")


@pytest.mark.parametrize("levels", [[2] * 17, [10**60], []])
def test_levels_of_codes_are_bounded_before_they_are_multiplied(tmp_path, levels):
    save_file(
        {"post_quant_conv.conv3d.weight": torch.zeros(1, 1, 1, 1, 1), "quant_conv.conv3d.weight": torch.zeros(1)},
        tmp_path / "decoder.safetensors",
        {"specar": json.dumps({"levels": levels})},
    )
    with pytest.raises(FileError, match="invalid levels"):
        load_image_decoder(tmp_path / "decoder.safetensors")


@pytest.mark.parametrize("reader", [open_checkpoint, outline])
def test_a_message_prints_no_control_characters_of_a_file(tmp_path, reader):
    """Nor does the exception behind it, which ComfyUI's log shows, too."""
    file = safetensors(one_tensor([1], name=CONTROL), tmp_path, b"\0" * 4)
    with pytest.raises(CheckpointError) as refused:
        reader(file)
    error = refused.value
    while error is not None:
        assert "\\x1b" in str(error) and str(error).isprintable()
        error = error.__cause__


def test_errors_about_files_are_short_and_printable_and_keep_both_ends():
    error = CheckpointError("model.safetensors: " + CONTROL * 1000 + "Download it again.")
    assert str(error).isprintable() and str(error).startswith("model.safetensors: \\x1b[31m\\u202egnp\\n")
    assert str(error).endswith("Download it again.") and isinstance(error, ValueError)


# Traces


def trace_of(rows: int, cols: int, images: int = 1, **changes) -> Trace:
    positions = {name: torch.zeros((images, rows * cols), dtype=dtype) for name, dtype in POSITION_FIELDS.items()}
    positions["source"][:] = Source.PREFILL
    totals = {"target_passes": 1, "passes_per_image": [1] * images, "draft_passes": 0, "images": images}
    totals |= {"tokens": images * rows * cols, "seed": 1, "seconds": 1.0}
    settings_ = {"method": "next_token", "cfg": 1.0, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
    trace = Trace(rows, cols, cols, positions, {"width": torch.ones(1, dtype=torch.int64)}, totals, settings_)
    for name, value in changes.items():
        if name in trace.positions:
            trace.positions[name].fill_(value)
        else:
            setattr(trace, name, value)
    return trace


def saved(trace: Trace, tmp_path: Path) -> Path:
    trace.totals = {"drift_bound": 0.0, "draft_tv": 0.0} | trace.totals
    return save_trace(trace, tmp_path / "trace")[1]


@pytest.mark.parametrize(
    ("trace", "message"),
    [
        (lambda: trace_of(1, 3000), "1 to 1024"),
        (lambda: trace_of(3000, 1), "1 to 1024"),
        (lambda: trace_of(1, 1, images=limits.IMAGES + 1), "4097"),
        (lambda: trace_of(2, 2, stride=10**6), "2 to 2048"),
        (lambda: trace_of(2, 2, lead=10**12), "0 to 1048576"),
        (lambda: trace_of(2, 2, finalised_at=2**31 - 1), "pass"),
        (lambda: trace_of(2, 2, finalised_at=-1), "pass"),
        (lambda: trace_of(2, 2, settings={"method": "x" * 2_000_000}), "262144 characters"),
    ],
    ids=range(8),
)
def test_a_trace_beyond_the_bounds_is_refused(tmp_path, trace, message):
    with pytest.raises(FileError, match=f"trace.safetensors.*{message}"):
        load_trace(saved(trace(), tmp_path))


def test_settings_of_a_trace_are_quoted_short_and_printable(tmp_path):
    trace = trace_of(2, 2, settings={"method": CONTROL * 5000})
    with pytest.raises(FileError, match="Save Trace") as refused:
        run_report.check_words(trace, "trace")
    assert len(str(refused.value)) < 2 * limits.MESSAGE and str(refused.value).isprintable()
    trace = trace_of(2, 2)
    trace.settings["chosen"] = CONTROL * 5000
    counts = dict.fromkeys(("accepted_drafts", "prefix_tokens"), 0)
    rates = dict.fromkeys(
        ("acceptance_rate", "accepted_length", "step_compression", "drift_bound", "draft_tv", "mean_log_p"), 1.0
    )
    trace.totals |= counts | rates | {"sources": {}}
    for text in (*run_report.labels([trace])[0], *run_report.describe(trace).split("\n"), comparison.table([trace])):
        assert "\x1b" not in text and len(text) < 2 * limits.MESSAGE
    assert comparison.chart([trace]).shape[1] == comparison.WIDTH


# Maps


@pytest.mark.parametrize(
    ("sides", "factor"),
    [((256, 256), 2), ((512, 600), 1), ((1, 1024), 8), ((1024, 1), 8), ((16, 16), 32), ((16, 16384), 1)],
)
def test_maps_are_enlarged_until_the_longer_side_is_long_enough(sides, factor):
    assert acceptance_map.enlargement(*sides) == factor
    if 1 in sides:
        assert acceptance_map.acceptance_map(trace_of(*sides)).shape[2] == factor * sides[1]


def test_maps_of_too_many_pixels_are_not_begun(monkeypatch):
    def fail(*_args):
        pytest.fail("a map is drawn")

    monkeypatch.setattr(acceptance_map, "overlay", fail)
    large = np.broadcast_to(np.uint8(0), (1, 10_000, 10_000, 3))
    for trace, image in ((trace_of(16, 16, images=4000), None), (trace_of(1, 1), large)):
        with pytest.raises(ValueError, match="million pixels.*fewer images"):
            acceptance_map.draw_maps(trace, image, "source", 0.5)


def test_many_small_maps_are_enlarged_less():
    """Of what is drawn, with its legend, not of what it is drawn from."""
    assert acceptance_map.enlargement(64, 64, 1, 260) == 8 and acceptance_map.enlargement(64, 64, 600, 260) == 2
    for images, side in ((300, 256), (100, 256), (40, 384), (600, 64), (4096, 16)):
        factor = acceptance_map.enlargement(side, side, images, 260)
        assert factor == 1 or images * (factor * side + 260) * factor * side <= limits.ENLARGED
    drawn = acceptance_map.draw_maps(trace_of(4, 4, images=300), None, "source", 0.5)
    assert drawn.overlay.size < 3 * limits.ENLARGED and drawn.map_size[0] < 512


def test_of_too_many_maps_the_first_may_be_drawn(monkeypatch):
    trace, image = trace_of(2, 2, images=5), np.zeros((5, 600, 600, 3), np.uint8)
    whole = acceptance_map.draw_maps(trace, image, "source", 0.5)
    monkeypatch.setattr(acceptance_map, "PIXELS", 2 * (600 * 600 + whole.overlay[0].size // 3) + 1)
    with pytest.raises(ValueError, match="5 images of 600 x 600 pixels.*fewer images"):
        acceptance_map.draw_maps(trace, image, "source", 0.5)
    some = acceptance_map.draw_maps(trace, image, "source", 0.5, some=True)
    assert np.array_equal(some.overlay, whole.overlay[:2]) and np.array_equal(some.strength, whole.strength[:2])
    assert len(some.legends) == len(some.colours) == 2
    monkeypatch.setattr(acceptance_map, "PIXELS", 600 * 600)
    with pytest.raises(ValueError, match="million pixels"):
        acceptance_map.draw_maps(trace, image, "source", 0.5, some=True)


# Tables of jobs


def test_a_table_within_the_bounds_is_read(tmp_path):
    (tmp_path / "a.csv").write_text(",".join(f"c{i}" for i in range(1000)) + "\n" + ",".join("1" * 1000), "utf-8")
    assert len(read_jobs(tmp_path / "a.csv")[0].overrides) == 1000
    rows = {"prompt": "x" * limits.CELL}, {"seed": 2**64}
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)), "utf-8")
    assert len(read_jobs(tmp_path / "a.jsonl")) == 2


def test_a_value_that_is_too_long_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "x" * (limits.CELL + 1)}), "utf-8")
    with pytest.raises(JobsError, match="line 1.*prompt.*131073 characters"):
        read_jobs(tmp_path / "a.jsonl")
