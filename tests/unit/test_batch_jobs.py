"""The jobs file, and how its settings get into a workflow."""

import csv
import io
import json
import re
from pathlib import Path

import pytest
from comfyui_specar.batch.jobs import JobsError, RowsError, automatic_id, read_jobs
from comfyui_specar.batch.overrides import (
    OverrideError,
    convert,
    fingerprint,
    make_prompts,
    name_files,
    read_workflow,
    with_overrides,
)
from comfyui_specar.limits.limits import NODES
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).resolve().parents[2]
WHOLE = {("6", "window"), ("6", "seed"), ("10", "value")}  # as a server says
QUIET = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def jobs_in(tmp_path: Path, name: str, content: str | bytes):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return read_jobs(path)


text = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0")).filter(str.strip)
cells = st.lists(st.tuples(text, st.integers(0, 2**64 - 1), st.booleans()), min_size=1, max_size=5)


@QUIET
@given(
    rows=cells,
    delimiter=st.sampled_from(",;\t|"),
    stated=st.sampled_from(["", "sep={}", "SEP={}{}{}", '"sep={}"']),
    encoding=st.sampled_from(["utf-8", "utf-8-sig", "utf-16"]),
    newline=st.sampled_from(["\n", "\r\n", "\r"]),
    name=st.sampled_from(["jobs.csv", "jobs.tsv"]),
)
def test_what_a_spreadsheet_writes_is_read_back(tmp_path_factory, rows, delimiter, stated, encoding, newline, name):
    """Excel's for Mac end lines with CR, its "Unicode Text" is UTF-16, and its first line may name the delimiter."""
    out = io.StringIO(newline="")
    writer = csv.writer(out, delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_NONNUMERIC)
    writer.writerow(["prompt", "seed", "flag"])
    writer.writerows(rows)
    content = (stated and stated.format(*3 * delimiter) + newline) + out.getvalue()
    jobs = jobs_in(tmp_path_factory.mktemp("jobs"), name, content.encode(encoding))
    assert [job.overrides for job in jobs] == [{"prompt": p, "seed": str(s), "flag": str(f)} for p, s, f in rows]
    assert len({job.id for job in jobs}) == len(rows)


@pytest.mark.parametrize(
    ("name", "content", "found"),
    [
        ("a.csv", "id;prompt;;\ra;red, 3d;;\r", [("red, 3d", 2)]),  # cells that a spreadsheet has added
        ("a.csv", 'id,prompt\r\na,x\rb,"1\r2\r\n3"\nc,z', [("x", 2), ("1\r2\r\n3", 3), ("z", 6)]),
        ("a.csv", '"id","prompt","a;\rb;c;d"\rx,y;z,\r', [("y;z", 3)]),
        ("a.csv", "\ufeffsep=;\r\rid;prompt\ra;red, 3d\r", [("red, 3d", 4)]),
        ("a.tsv", "prompt\nred, 3d\n", [("red, 3d", 2)]),
        ("a.jsonl", '{"prompt": "x"}\r{"prompt": "y"}\r\n\n{"prompt": "z"}', [("x", 1), ("y", 2), ("z", 4)]),
    ],
)
def test_rows_are_told_apart_whatever_ends_them(tmp_path, name, content, found):
    assert [(job.overrides["prompt"], job.line) for job in jobs_in(tmp_path, name, content)] == found


@QUIET
@given(rows=cells)
def test_json_lines_keep_their_types(tmp_path_factory, rows):
    rows = [{"prompt": p, "seed": s, "flag": f} for p, s, f in rows]
    content = "\n".join(json.dumps(row, ensure_ascii=number % 2 == 0) for number, row in enumerate(rows))
    jobs = jobs_in(tmp_path_factory.mktemp("jobs"), "jobs.jsonl", content)
    assert [job.overrides for job in jobs] == rows


@QUIET
@given(content=st.text().map(lambda text: text.encode(errors="replace")) | st.binary(), tsv=st.booleans())
@pytest.mark.parametrize("name", ["jobs.csv", "jobs.jsonl"])
def test_any_file_is_read_or_refused_with_a_reason(tmp_path_factory, content, name, tsv):
    name = name.replace("csv", "tsv") if tsv else name
    try:
        assert jobs_in(tmp_path_factory.mktemp("jobs"), name, content)
    except JobsError as error:
        assert str(error).startswith((name, "/")) and "\n\n" not in str(error)


def test_ids_come_from_their_column_or_from_row_and_contents(tmp_path):
    content = "seed;id\n1;cat\n2;Hütte_2-b\n3;nul-1\n4;xcon\n"
    assert [job.id for job in jobs_in(tmp_path, "a.csv", content)] == ["cat", "Hütte_2-b", "nul-1", "xcon"]
    assert jobs_in(tmp_path, "a.jsonl", '{"id": 7, "seed": null}')[0].overrides == {}
    first, second = (jobs_in(tmp_path, "b.csv", content) for content in ("seed\n1\n1\n", "seed\n1\n2\n"))
    assert first[0].id == second[0].id and first[1].id not in {job.id for job in second} and first[0].id != first[1].id
    # It must stay: a batch that goes on finds its results by it.
    assert automatic_id(3, {"b": 1, "a": "\u00e4"}) == automatic_id(3, {"a": "\u00e4", "b": 1}) == "0003-a2fb0cc2"
    assert automatic_id(3, {"a": "\udc80"}) != automatic_id(3, {"a": "\udc81"}), "no text is refused"


def test_an_empty_cell_leaves_the_workflow_as_it_is_and_empty_lines_are_no_jobs(tmp_path):
    jobs = jobs_in(tmp_path, "a.csv", '\nprompt,seed,,\n\n"two\nlines",\n ,5,,\n,,\n')
    assert [(job.overrides, job.line) for job in jobs] == [({"prompt": "two\nlines"}, 4), ({"seed": "5"}, 6)]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "no jobs"),
        ("a.csv", "prompt\n", "no jobs"),
        ("a.jsonl", "\n\n", "no jobs"),
        ("a.txt", "prompt\ncat", r"\.csv.*\.jsonl"),
        ("a.jsonl", '{"seed": 1}\n{"seed": }\n[1]\n', r"line 2: not JSON.*character 10\nline 3: .*object"),
        ("a.csv", "prompt,seed\napple, 3d, on blue,1\n", "line 2: 4 .*2 .*prompt, seed"),
        ("a.csv", "prompt\na,1\n", "line 2: 2 values for 1 column, prompt"),
        ("a.csv", "prompt,seed\na,b,1\na,1\nb,c,1\nc\n", r"lines 2, 4: 3 values .*\nline 5: 1 value "),
        ("a.csv", 'prompt,seed\n1\n"a"b,1\n', r"line 2: 1 value .*\nline 3: .*twice"),
        ("a.csv", 'prompt,seed\n"a,1\n', "line 2: .*end"),
        ("a.csv", "\nprompt,prompt\na,b\n", "line 2: .*column prompt.*twice"),
        ("a.csv", "prompt,,seed\na,,1\n", "line 1: .*column 2.*name"),
        ("a.csv", "id,seed\ncat,1\nCAT,2\n", "line 3: .*id 'CAT'.*line 2"),
        ("a.csv", "id,seed\n../cat,1\n", r"line 2: .*id '\.\./cat'.*letters"),
        ("a.csv", "id,seed\n" + 67 * "\u732b" + ",1\n", "line 2: .*200 bytes"),
        *(("a.csv", f"id\n{name}\n", "device") for name in ("Nul", "con", "PRN", "aux", "com0", "LPT9", "com\u00b9")),
        ("a.csv", "prompt\nH\u00fctte\n".encode("cp1252"), "UTF-8"),
        ("a.csv", "id,prompt\na,b\n".encode("utf-16-le"), "UTF-8"),  # without its mark
        ("a.csv", "\ufeffid".encode("utf-16-le") + b"x", "UTF-8"),
        *(("a.csv", f"sep={wrong}\nid,seed\na,1\n", "line 1: sep=.* no separator") for wrong in ("", "\\t", ",;")),
        ("a.csv", ",".join(map(str, range(1001))) + "\n1\n", "line 1: 1001 columns; 1000"),
        ("a.csv", "." * 1001 + "\n1\n", "has a name of 1001 characters; 1000 is the limit"),
        ("a.jsonl", '{"' + "." * 1001 + '": 1}\n', "has a name of 1001 characters; 1000 is the limit"),
        ("a.jsonl", '{"a": [1]}', r"line 1: .*\ba\b"),
        ("a.jsonl", '{"a": NaN}', "line 1: .*NaN"),
        ("a.jsonl", '{"seed": 1}\n' + 10**5 * "[", "line 2: .*nested"),
        ("a.jsonl", '{"a": 1, "a": 2}', "line 1: .*twice"),
        ("a.jsonl", '{"a": "\\ud800"}', "line 1: .*character"),
        ("a.csv", "seed\n" + "1\n" * 100_001, "more than 100000 jobs"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(tmp_path, name, content, message):
    with pytest.raises(JobsError, match=f"(?s){message}"):
        jobs_in(tmp_path, name, content)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(JobsError, match="gone.csv.*No such file"):
        read_jobs(tmp_path / "gone.csv")


@pytest.fixture
def workflow() -> dict:
    def encoder(words):
        return {"class_type": "CLIPTextEncode", "inputs": {"text": words, "clip": ["1", 0]}, "_meta": {"title": words}}

    first = {"positive": ["5", 0], "negative": ["5", 1], "seed": 1, "cfg": 2, "window": 16}
    second = {"positive": ["4", 0], "seed": 1, "cfg": 2.5, "tiled": False, "other_seed": 1, "resize.scale": 1}
    return {
        "1": {"class_type": "Loader", "inputs": {"model_name": "default (bundled)"}},
        "2": encoder("good"),
        "3": encoder("bad"),
        "4": encoder("other"),
        "5": {"class_type": "Apply", "inputs": {"positive": ["2", 0], "negative": ["3", 0], "strength": 0.5}},
        "6": {"class_type": "SpecARSJDSampler", "inputs": first},
        "7": {"class_type": "Sampler", "inputs": second | {"window": 16}, "_meta": {"title": "Second v1.5"}},
        "8": {"class_type": "SaveImage", "inputs": {"filename_prefix": "specar/p", "images": ["6", 0]}},
        "9": {"class_type": "SaveTrace", "inputs": {"filename_prefix": "specar/t", "seed": ["6", 0]}},
        "10": {"class_type": "PrimitiveInt", "inputs": {"value": 256}, "_meta": {"title": "Size"}},
    }


def test_settings_go_to_every_input_of_the_name_or_to_the_node_that_is_addressed(workflow):
    workflow["11"] = {"class_type": "Scale", "inputs": {"scale": 2}, "_meta": {"title": "resize"}}
    before = json.dumps(workflow)
    given = {"prompt": "cat", "negative": "dog", "7.seed": "18446744073709551615", "seed": "3", "tiled": "TRUE"}
    given |= {"Second v1.5.cfg": "1e1", "strength": 1, "model_name": 5, "resize.scale": 3}
    found = with_overrides(workflow, given)
    assert json.dumps(workflow) == before
    assert [found[node]["inputs"]["text"] for node in "234"] == ["cat", "dog", "cat"]
    assert [found[node]["inputs"]["seed"] for node in "67"] == [3, 2**64 - 1]
    assert found["6"]["inputs"]["cfg"] == 2 and found["7"]["inputs"]["cfg"] == 10
    assert found["7"]["inputs"]["tiled"] is True and found["5"]["inputs"]["strength"] == 1
    assert found["1"]["inputs"]["model_name"] == "5" and found["7"]["inputs"]["resize.scale"] == 3
    assert found["11"]["inputs"]["scale"] == 2, "an input's own name comes first"
    assert with_overrides(workflow, {"Second v1.5.resize.scale": 4})["7"]["inputs"]["resize.scale"] == 4


def test_a_node_can_be_addressed_by_its_class(workflow):
    """As programs know it. A title comes first; of two nodes of a class, the number says which."""
    workflow["6"] |= {"class_type": "OneSampler", "_meta": {"title": "First"}}
    assert with_overrides(workflow, {"OneSampler.cfg": "9"})["6"]["inputs"]["cfg"] == 9
    workflow["7"]["class_type"] = "OneSampler"
    with pytest.raises(OverrideError, match=r"OneSampler.cfg: 2 nodes .* use one of 6\.cfg, 7\.cfg"):
        with_overrides(workflow, {"OneSampler.cfg": "9"})
    workflow["7"]["_meta"] = {"title": "OneSampler"}
    assert with_overrides(workflow, {"OneSampler.cfg": "9"})["7"]["inputs"]["cfg"] == 9


@pytest.mark.parametrize("columns", [("6.seed", "Second v1.5.seed"), ("prompt", "text")])
def test_what_nodes_share_is_set_where_it_is_typed_and_to_one_value(workflow, columns):
    workflow["11"] = {"class_type": "PrimitiveString", "inputs": {"value": "cat"}}
    workflow["4"]["inputs"]["text"] = ["11", 0]
    workflow["6"] |= {"class_type": "Sampler", "_meta": {"title": "First"}}
    for node in "67":
        workflow[node]["inputs"]["seed"] = ["10", 0]
    for name in ("seed", "Size.value", "Sampler.seed"):
        found = with_overrides(workflow, {name: "7", "prompt": "dog"})
        assert found["10"]["inputs"]["value"] == 7 and found["7"]["inputs"]["seed"] == ["10", 0]
        assert found["2"]["inputs"]["text"] == found["11"]["inputs"]["value"] == "dog"
    with pytest.raises(OverrideError, match=f"{columns[0]} and {columns[1]} set the same input .*different"):
        with_overrides(workflow, dict(zip(columns, ("1", "2"), strict=True)))
    assert with_overrides(workflow, dict.fromkeys(columns, "1")), "the same value is one setting"
    assert with_overrides(workflow, {"seed": 1, "6.seed": 2})["10"]["inputs"]["value"] == 2, "one node's wins"


def test_the_inputs_own_name_is_taken_where_no_text_feeds_the_role(workflow):
    workflow["10"] = {"class_type": "Chat", "inputs": {"prompt": "hello"}}
    assert with_overrides(workflow, {"prompt": "cat"})["10"]["inputs"]["prompt"] == "hello"
    for node in "67":
        del workflow[node]["inputs"]["positive"]
    del workflow["5"]
    assert with_overrides(workflow, {"prompt": "cat"})["10"]["inputs"]["prompt"] == "cat"


def test_what_is_zeroed_for_the_other_input_is_the_prompt_and_a_circle_is_survived(workflow):
    """A negative prompt would be drawn."""
    workflow["5"]["inputs"] = {"positive": ["2", 0], "negative": ["12", 0]}
    workflow["12"] = {"class_type": "ConditioningZeroOut", "inputs": {"conditioning": ["2", 0], "again": ["12", 0]}}
    with pytest.raises(OverrideError, match="negative"):
        with_overrides(workflow, {"negative": "blurry"})
    assert with_overrides(workflow, {"prompt": "cat"})["2"]["inputs"]["text"] == "cat"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("Seed", 1, r"no Seed that can.* cfg, filename_prefix, model_name, negative, .*: 1 \(Loader\), 2 \(good\)"),
        ("clip", 1, "no clip .*another node"),
        ("Sampler.sed", 1, "no Sampler.sed "),
        ("Sampler.positive", 1, "no Sampler.positive "),
        ("99.seed", 1, "no 99.seed "),
        ("seed", "1.5", "seed.*whole number.*1.5"),
        ("Second v1.5.seed", 1.5, "seed.*whole number"),
        ("seed", -1, "seed.*from 0 to.*-1"),
        ("seed", 2**64, f"seed.*to {2**64 - 1}"),
        ("seed", "three", "seed.*number.*'three'"),
        ("seed", True, "seed.*number.*True"),
        ("seed", 9.1e15, "digits"),
        ("window", "16.5", r"^window must be a whole number, not 16\.5$"),
        ("6.window", 16.5, r"^6.window must be a whole number, not 16\.5$"),
        ("Size.value", 16.5, r"^Size.value must be a whole number, not 16\.5$"),
        ("cfg", "nan", "cfg.*number"),
        ("cfg", "1e999", "cfg.*number"),
        ("cfg", "1_0", "cfg.*number"),
        ("cfg", " 0,5", r"cfg.*number.*' 0,5'.*point: 0\.5\)"),
        ("cfg", "1,000,000", r"number, not '1,000,000'$"),
        ("tiled", "maybe", "tiled.*true.*false.*'maybe'"),
        ("model_name", True, "model_name.*(text|string)"),
    ],
)
def test_a_setting_that_does_not_fit_says_what_does(workflow, name, value, message):
    with pytest.raises(OverrideError, match=message):
        with_overrides(workflow, {name: value}, WHOLE)


@pytest.mark.parametrize(
    ("row", "place", "value"),
    [
        ('{"7.window": "16.5"}', "7.window", 16.5),  # of another node, whose whole number may stand for a fraction
        ('{"cfg": 1e-1}', "6.cfg", 0.1),
        ('{"strength": "2.5E+00"}', "5.strength", 2.5),
        ('{"seed": 1234567890123450000}', "6.seed", 1234567890123450000),
        ('{"seed": "5.0"}', "6.seed", 5),
        ('{"window": "16.0"}', "6.window", 16),
        ('{"other_seed": 99999999999.0}', "7.other_seed", 99999999999),
        ('{"cfg": 1e12}', "6.cfg", 10**12),
        ('{"tiled": "no"}', "7.tiled", False),
        ('{"tiled": 1}', "7.tiled", True),
    ],
)
def test_fractions_may_be_in_scientific_notation_and_long_seeds_in_full(tmp_path, workflow, row, place, value):
    [found] = make_prompts(workflow, jobs_in(tmp_path, "a.jsonl", row), WHOLE).values()
    node, field = place.split(".")
    assert found[node]["inputs"][field] == value and type(found[node]["inputs"][field]) is type(value)


def rounded(value: int) -> list[str]:
    """As spreadsheets save a long number of the format General, in English and German, and a program that uses %g."""
    return [f"{value:.5E}", f"{value:.5E}".replace(".", ","), f"{value:.2E}", f"{value:g}", f" {value:.0e} "]


@QUIET
@given(
    seed=st.integers(10**11, 2**64 - 1),
    form=st.integers(0, 4),
    name=st.sampled_from(["a.csv", "a.tsv", "a.jsonl"]),
    column=st.sampled_from(["seed", "6.seed", "Size.value", "6.window", "noise_seed", "other_seed"]),
)
def test_a_number_that_a_spreadsheet_rounded_is_refused_with_line_column_and_remedy(
    tmp_path_factory, workflow, seed, form, name, column
):
    workflow["7"]["inputs"]["noise_seed"] = 1
    cell = rounded(seed)[form]
    content = {
        "a.csv": f"cfg;{column}\n2;5\n2;{cell}\n",
        "a.tsv": f"cfg\t{column}\n2\t5\n2\t{cell}\n",
        "a.jsonl": "\n".join(json.dumps({column: value}) for value in (4, 5, cell)),
    }[name]
    contents = [content]
    if name == "a.jsonl" and "," not in cell:
        contents += [content.replace(json.dumps(cell), cell.strip())]  # a number, not a text
    for content in contents:
        with pytest.raises(RowsError, match=f"^line 3: {column} .*format the column as text"):
            make_prompts(workflow, jobs_in(tmp_path_factory.mktemp("jobs"), name, content), WHOLE)


@QUIET
@given(value=st.one_of(st.integers(-(2**70), 2**70), st.floats(allow_nan=False, allow_infinity=False)))
def test_numbers_survive_the_way_through_a_table(value):
    for form in (value, str(value), f" {value} "):
        found = convert(form, 0, "n")
        assert found == value and isinstance(found, int | float)
        assert isinstance(found, int) == (found == int(found))


@pytest.mark.parametrize(
    ("table", "begins", "ends"),
    [
        ("seed\n" + "".join(f"1\nx{n}\n" for n in range(12)), "line 3: seed.*number.*'x0'", r"\n\.\.\. and 2 more"),
        ("sed\n1\n", "line 2: the workflow has no sed", ""),
        ("sed\n1\n1\n1\n", "lines 2, 3, 4: .*no sed", ""),
        ("sed\n" + "1\n" * 50, "lines 2, 3, 4 and 47 more: .*no sed", ""),
        ("seed\n\x1b" + 10**5 * "x", "line 2: seed must be a number", "characters.{1}"),
    ],
)
def test_all_bad_jobs_are_named_at_once_and_what_is_wrong_with_every_row_once(tmp_path, workflow, table, begins, ends):
    with pytest.raises(RowsError) as caught:
        make_prompts(workflow, jobs_in(tmp_path, "a.csv", table))
    assert re.match(begins, str(caught.value)) and re.search(f"{ends}$", str(caught.value))
    assert str(caught.value).count("\n") == (10 if "more" in ends else 0) and len(str(caught.value)) < 3000


def test_every_file_of_a_job_has_its_name(workflow):
    prefixes = [name_files(workflow, "cat.try2")[node]["inputs"]["filename_prefix"] for node in "89"]
    assert prefixes == ["specar/p_cat.try2", "specar/t_cat.try2"]
    assert fingerprint(workflow) == fingerprint(json.loads(json.dumps(workflow)))
    assert fingerprint(workflow) != fingerprint(with_overrides(workflow, {"seed": 2}))


def test_the_example_fits_every_shipped_text_workflow():
    jobs = read_jobs(ROOT / "docs/jobs.csv")
    workflows = map(read_workflow, sorted((ROOT / "workflows/api").glob("*.json")))
    fitting = [each for each in workflows if any("latent_image" in node["inputs"] for node in each.values())]
    assert len(fitting) > 15 and all(len(make_prompts(workflow, jobs)) == 20 for workflow in fitting)


CHANGED = [{"class_type": 5}, {"_meta": ["title"]}, {"inputs": {"positive": []}}, {"inputs": [1]}]
NODE = {"class_type": "A", "inputs": {"prompt": "x"}}
NO_WORKFLOWS = ["", "[]", "{}", '{"nodes": [], "links": []}', '{"1": {"class_type": "A"}}']
NO_WORKFLOWS += [json.dumps({"1": NODE | change}) for change in CHANGED]
NO_WORKFLOWS += [json.dumps(dict.fromkeys(map(str, range(NODES + 1)), NODE))]


@pytest.mark.parametrize("content", NO_WORKFLOWS)
def test_what_is_no_api_workflow_is_refused(tmp_path, content):
    path = tmp_path / "w.json"
    path.write_text(json.dumps(dict.fromkeys(map(str, range(NODES)), NODE)), encoding="utf-8")
    assert len(read_workflow(path)) == NODES
    path.write_text(content, encoding="utf-8")
    with pytest.raises(OverrideError, match="API format.*workflows/api|cannot read|5001 nodes"):
        read_workflow(path)
