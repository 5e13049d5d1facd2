"""The journal of a batch: what it knows after a crash, and what it refuses to continue; and the command around it."""

import asyncio
import json
import os
import re
import signal
import subprocess
import sys
from collections import Counter
from datetime import datetime, timezone
from pathlib import Path

import pytest
from comfyui_specar.batch import cli, ray_cluster
from comfyui_specar.batch.journal import Journal, JournalError, JsonLines
from comfyui_specar.tests.support.fake_comfy import (
    WORKFLOW,
    FakeComfy,
    asynchronous,
    lines,
    run_beside,
    until,
    without_limits,
)
from comfyui_specar.tests.support.patience import PATIENCE

ROOT = Path(__file__).resolve().parents[2]
RECORD = {"id": "a", "status": "success"}


def test_a_torn_line_is_removed_wherever_it_was_cut(tmp_path, monkeypatch):
    without_limits(monkeypatch)
    path = tmp_path / "r.jsonl"
    with Journal(path) as journal:
        batch = journal.batch
        journal.write_submission("a", "f", 1, "http://x")
        journal.write_result(RECORD | {"text": "Hütte"})
        journal.write_submission("b", "f", 1, "http://x")
    files = {path: path.read_bytes(), Path(f"{path}.journal"): Path(f"{path}.journal").read_bytes()}
    for file, whole in files.items():
        last = whole.rstrip(b"\n").rfind(b"\n") + 1
        for cut in range(last, len(whole) + 1):
            for other, content in files.items():
                other.write_bytes(content)
            file.write_bytes(whole[:cut])
            with Journal(path) as journal:
                assert journal.batch == batch and "a" in journal.submitted
                complete = cut >= len(whole) - 1  # without its end the line is whole all the same
                assert ("a" in journal.results) == (complete or file != path)
                assert ("b" in journal.submitted) == (complete or file == path)
                journal.write_result({"id": "z", "status": "success"})
            assert [json.loads(line)["id"] for line in path.read_text(encoding="utf-8").splitlines()][-1] == "z"


def test_ids_differ_by_batch_job_and_attempt_and_nothing_else(tmp_path):
    with Journal(tmp_path / "r.jsonl") as journal, Journal(tmp_path / "other.jsonl") as other:
        ids = {one.prompt_id(job, attempt) for one in (journal, other) for job in "ab" for attempt in (1, 2)}
        assert len(ids) == 8
        again = journal.prompt_id("a", 1)
    with Journal(tmp_path / "r.jsonl") as journal:
        assert journal.prompt_id("a", 1) == again


def test_another_process_is_refused_until_this_one_ends(tmp_path):
    code = (
        "import sys; from pathlib import Path\nfrom comfyui_specar.batch.journal import Journal\n"
        "with Journal(Path(sys.argv[1])):\n    print('open')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "r.jsonl")]
    with Journal(tmp_path / "r.jsonl"):
        refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        assert "another process" in refused.stderr and "open" not in refused.stdout
    assert subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE).stdout == "open\n"


HEADER = {"schema": "specar.batch/1", "batch": 32 * "a"}
HEADERS = [{"schema": "other/1"}, *({"batch": batch} for batch in (None, 5, "\x1b[31m", "0" * 31))]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("r.jsonl", '{"id": "a", "status": "success"}\n{damaged}\n{}\n', 2),
        ("r.jsonl", '{"name": "my notes"}\n', 1),
        ("r.jsonl", '{"id": [], "status": "success"}\n', 1),
        ("r.jsonl", "[" * 100_000 + "\n{}\n", 1),
        ("r.jsonl", "precious notes\nof somebody\n", 1),
        ("r.jsonl", "no line ends here", 1),
        ("r.jsonl.journal", json.dumps(HEADER) + '\n{"job": "a"}\n', 2),
        *(("r.jsonl.journal", json.dumps(HEADER | changed) + "\n", 1) for changed in HEADERS),
    ],
)
def test_files_of_others_are_left_alone(tmp_path, name, content, line):
    (tmp_path / name).write_text(content, encoding="utf-8")
    with pytest.raises(JournalError, match=f"{name}, line {line} is damaged"), Journal(tmp_path / "r.jsonl"):
        pass
    assert (tmp_path / name).read_text(encoding="utf-8") == content


def test_a_job_that_has_its_image_cannot_change_under_its_id(tmp_path):
    with Journal(tmp_path / "r.jsonl") as journal:
        for job in "abcd":
            journal.write_submission(job, "old", 1, "http://x")
        journal.write_result(RECORD)
        journal.write_result(RECORD | {"id": "b"})
        journal.write_result({"id": "c", "status": "error", "prompt_id": journal.prompt_id("c", 1)})
        journal.check({"a": "old", "b": "old", "c": "new", "d": "new", "e": "new"})
        with pytest.raises(JournalError, match=r"^a, b: .*r\.jsonl.*settings.*workflow"):
            journal.check(dict.fromkeys("abcde", "new"))
        left = [job for job in "abcde" if not journal.ended(job, "old", retry_failed=False)]
        corrected = [job for job in "abcde" if not journal.ended(job, "new", retry_failed=False)]
        assert left == ["d", "e"] and corrected == ["c", "d", "e"]
        journal.write_submission("c", "new", 2, "http://x")
        assert not journal.ended("c", "new", retry_failed=False)


def command(*more: str) -> list[str]:
    return ["jobs.csv", "--workflow", "workflow.json", *more]


# The command, as those run it who have not installed the pack: by the path of its folder.
COMMAND = [sys.executable, str(ROOT / "batch")]
KILLED = """import os, runpy, signal, sys
left, fsync = int(sys.argv.pop(1)), os.fsync

def sync(file):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has one way to end a process
    fsync(file)

os.fsync = sync
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")"""  # whatever is written is synchronised


def killed_at(write: int) -> list[str]:
    """The same, killed (as by kill -9) when it has written so many lines or images."""
    return [sys.executable, "-c", KILLED, str(write), *COMMAND[1:]]


async def started(program: list[str], *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(*program, *command(*arguments), stderr=asyncio.subprocess.PIPE)


async def code_of(process: asyncio.subprocess.Process) -> tuple[int, str]:
    """How it ended, and what it said."""
    _, said = await asyncio.wait_for(process.communicate(), PATIENCE)
    return process.returncode, said.decode()


@asynchronous
async def test_kill_9_again_and_again_loses_and_repeats_nothing(table):
    """At the first write, at the second of the next start, and so on: at its header, its lines and its images."""
    async with FakeComfy() as one, FakeComfy() as other:
        servers = ["--server", one.url, "--server", other.url, "--out", "out"]
        for write in range(1, 7):  # 21 of the 25 writes
            code, said = await code_of(await started(killed_at(write), *servers))
            assert code not in (cli.DONE, cli.UNFINISHED, cli.FAILED) and "Traceback" not in said, said
        code, said = await code_of(await started(COMMAND, *servers))
        assert code == cli.DONE, said
        names = [name for server in (one, other) for name in server.drawn]
        assert Counter(name.split(".")[0] for name in names) == Counter(f"p_j{i}" for i in range(8))
    records = lines(table / "jobs.results.jsonl")
    assert Counter((record["id"], record["status"]) for record in records) == Counter(
        (f"j{i}", "success") for i in range(8)
    )
    assert sorted(path.name for path in (table / "out").iterdir()) == [f"j{i}.png" for i in range(8)]


@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signal for one process")
@asynchronous
async def test_control_c_takes_the_jobs_from_the_server_and_the_same_command_goes_on(table):
    """While the server generates the second image."""
    async with FakeComfy() as one:
        one.ends = lambda: not one.drawn
        process = await started(COMMAND, "--server", one.url)
        await asyncio.wait_for(until(lambda: one.drawn and one.running), PATIENCE)
        process.send_signal(signal.SIGINT)
        code, said = await code_of(process)
        assert code == cli.CANCELLED and "Cancelling" in said and "Traceback" not in said
        assert not one.pending and not one.running
        assert [record["id"] for record in lines(table / "jobs.results.jsonl")] == ["j0"] and one.drawn == ["p_j0"]
        one.ends = lambda: True
        assert (await code_of(await started(COMMAND, "--server", one.url)))[0] == cli.DONE
        assert len(one.drawn) == 8


def test_exit_codes_stay():
    """Scripts rely on them, and on the address without --server."""
    assert cli.SERVER == "http://127.0.0.1:8188"
    assert (cli.DONE, cli.UNFINISHED, cli.BAD_INPUT, cli.FAILED, cli.CANCELLED) == (0, 1, 2, 3, 130)


def test_previews_that_go_with_their_server_are_told(table, here, capsys):
    one = FakeComfy()
    one._ended = lambda *given: {**(ended := FakeComfy._ended(one, *given)), "outputs": {"10": ended["outputs"]["10"]}}
    assert run_beside(one) == cli.DONE
    assert "(previews only until these end: use Save Image)" in capsys.readouterr().err


def test_failed_and_interrupted_jobs_are_counted_and_run_again_only_when_asked(table, here, capsys):
    (table / "jobs.csv").write_text("id,prompt\ngood,red aple\nbad,fail\nother,stop\n", encoding="utf-8")
    one = FakeComfy()
    one._ended = lambda prompt, _: FakeComfy._ended(one, prompt, prompt["1"]["inputs"]["text"] == "stop")
    assert run_beside(one) == cli.FAILED
    said = capsys.readouterr().err
    assert "good: done (1 of 3 jobs ended)" in said and f"bad on {one.url}: Encoder: no such word (2 of 3" in said
    assert "good: warning: The model ignores these words: aple." in said
    assert "With warnings: good\n" in said
    assert "by someone else (3 of 3 jobs ended)" in said and "--retry-failed" in said
    assert "1 of 3 jobs done, 1 failed, 1 interrupted, 0 still to do" in said
    again = FakeComfy()
    assert run_beside(again) == cli.FAILED and again.drawn == []
    said = capsys.readouterr().err
    assert "bad failed before: Encoder: no such word\n" in said and "other failed before: interrupted by" in said
    again._ended = lambda prompt, stopped: FakeComfy._ended(again, {**prompt, "1": WORKFLOW["1"]}, stopped)
    for _ in range(2):
        assert run_beside(again, "--retry-failed") == cli.DONE and again.drawn == ["p_bad.try2", "p_other.try2"]
    records = {record["id"]: record for record in lines(table / "jobs.results.jsonl")}
    assert {record["status"] for record in records.values()} == {"success"}
    assert [len(records[job]["warnings"]) for job in ("good", "bad", "other")] == [1, 0, 0]


def test_rows_without_a_prompt_are_counted(table, here, capsys):
    """The workflow's own prompt, an example, would be drawn for a lost cell."""
    (table / "jobs.csv").write_text("id,prompt,seed\none,cat,1\ntwo,,2\nthree,,3\n", encoding="utf-8")
    assert cli.main(command("--dry-run")) == cli.DONE
    own = json.loads((table / "workflow.json").read_text(encoding="utf-8"))["1"]["inputs"]["text"]
    assert f"no prompt in 2 of 3 rows, the first being two: they use the workflow's, {own!r}" in capsys.readouterr().err
    (table / "jobs.csv").write_text("id,1.text,seed\none,cat,1\n", encoding="utf-8")
    assert cli.main(command("--dry-run")) == cli.DONE and "no prompt" not in capsys.readouterr().err


def test_a_python_without_the_two_packages_is_told_so(tmp_path):
    program = (
        "import importlib.util, runpy, sys; find = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *more: None if name == 'tqdm' else find(name, *more)\n"
        "runpy.run_path(sys.argv[1], run_name='__main__')"
    )
    folder = Path(cli.__file__).parent
    run = subprocess.run([sys.executable, "-c", program, folder], capture_output=True, encoding="utf-8", cwd=tmp_path)
    assert run.returncode == cli.BAD_INPUT and "Traceback" not in run.stderr
    assert "no tqdm" in run.stderr and run.stderr.endswith("pip install tqdm\n")


def test_every_line_of_a_log_has_the_time_in_front(table):
    """What the command says, and what it logs on the way."""
    program = [*COMMAND, *command("--server", "http://127.0.0.1:9", "--patience", "0.1")]
    run = subprocess.run(program, capture_output=True, encoding="utf-8", timeout=PATIENCE)
    assert run.returncode == cli.UNFINISHED and "given up" in run.stderr and "8 still to do" in run.stderr
    assert all(re.match(r"\d\d:\d\d:\d\d \S", line) for line in run.stderr.splitlines()), run.stderr


def test_lines_have_the_time(tmp_path):
    with Journal(tmp_path / "r.jsonl") as journal:
        journal.write_submission("a", "", 1, "here")
        journal.write_result(RECORD)
        first = journal.results["a"]
        journal.write_result({**first, "copies": [], "ended": "2026-01-02T03:04:05Z"})
        assert journal.results["a"]["ended"] == "2026-01-02T03:04:05Z", "it ended then; its copies came later"
    for time in first["ended"], journal.submitted["a"]["time"]:
        age = datetime.now(timezone.utc) - datetime.fromisoformat(time.replace("Z", "+00:00"))
        assert abs(age.total_seconds()) < PATIENCE


def test_copies_can_be_had_later(table, here, capsys):
    """A server that is away is named, and what another batch left there. Copies stay as they are, also if edited."""
    server = FakeComfy()
    assert run_beside(server) == cli.DONE and "--out" in capsys.readouterr().err
    (table / "out").mkdir()
    (table / "out/j0.png").write_text("another's", encoding="utf-8")
    assert cli.main(command("--server", server.url, "--out", "out")) == cli.UNFINISHED
    assert re.search(rf"8 jobs done, but without a copy: .* j7: .*{server.url}", capsys.readouterr().err)
    assert run_beside(server, "--out", "out") == cli.UNFINISHED and len(server.drawn) == 8
    assert {path.name for path in (table / "out").iterdir()} == {f"j{i}.png" for i in range(8)}
    assert re.search("j0: .*out.j0.png is there already and is not of this batch", capsys.readouterr().err)
    assert (table / "out/j0.png").read_text("utf-8") == "another's"
    (table / "out/j0.png").write_text("p_j0_00001_.png", encoding="utf-8")
    assert run_beside(server, "--out", "out") == cli.DONE and len(server.drawn) == 8
    (table / "out/j0.png").write_text("edited", encoding="utf-8")
    assert (table / "out/j7.png").read_text("utf-8") == "p_j7_00001_.png"
    assert [str(Path("out/j7.png"))] in [record["copies"] for record in lines(table / "jobs.results.jsonl")[8:]]
    before = (table / "jobs.results.jsonl").read_bytes()
    assert cli.main(command("--server", server.url, "--out", "out")) == cli.DONE  # which needs no server
    assert (table / "jobs.results.jsonl").read_bytes() == before
    assert (table / "out/j0.png").read_text("utf-8") == "edited"


@pytest.mark.parametrize("outputs", [{}, {"10": {"text": ["a caption"]}}])
def test_a_batch_that_saved_nothing_has_no_copies(table, here, capsys, outputs):
    """Where images were asked for, that is an error; else a warning."""
    (table / "jobs.csv").write_text("id,prompt\na,cat\nb,cat\n", encoding="utf-8")
    one = FakeComfy()
    one._ended = lambda *given: FakeComfy._ended(one, *given) | {"outputs": outputs}
    assert run_beside(one) == cli.DONE and "With warnings: a, b" in capsys.readouterr().err
    assert run_beside(one, "--out", "out") == cli.UNFINISHED and len(one.drawn) == 2
    assert re.search("2 jobs done, but without a copy: .* a: .*Save Image", capsys.readouterr().err)
    assert run_beside(one, "--out", "out", "--results", "other.jsonl") == cli.FAILED
    assert "2 failed" in capsys.readouterr().err
    [warned, *_], [failed, *_] = (lines(table / name) for name in ("jobs.results.jsonl", "other.jsonl"))
    assert "Save Image" in warned["warnings"][0] and "Save Image" in failed["error"]


def test_a_failed_row_is_corrected_under_its_id_by_the_same_command(table, here, capsys):
    """Until it was run it is still to do."""
    (table / "jobs.csv").write_text("id,prompt\ngood,cat\nbad,fail\n", encoding="utf-8")
    assert run_beside(FakeComfy()) == cli.FAILED
    (table / "jobs.csv").write_text("id,prompt\ngood,cat\nbad,dog\n", encoding="utf-8")
    capsys.readouterr()
    assert cli.main(command("--server", "http://127.0.0.1:9", "--patience", "0.1")) == cli.UNFINISHED
    assert "1 of 2 jobs done, 0 failed, 1 still to do" in capsys.readouterr().err
    again = FakeComfy()
    assert run_beside(again) == cli.DONE and again.drawn == ["p_bad.try2"]
    results = table / "jobs.results.jsonl"
    assert lines(results)[-1]["overrides"] == {"prompt": "dog"}
    results.write_bytes(b"".join(results.read_bytes().splitlines(keepends=True)[:-1]))  # as if killed before
    again = FakeComfy()
    assert run_beside(again) == cli.DONE and again.drawn == ["p_bad.try3"]


ON_RAY = ("--ray", "--out", "out")
COOL = (*ON_RAY, "--method", "cool_sd")
DRAFTS = (*ON_RAY, "--method", "continuous_speculative", "--drafter", "continuous/small")
NO_IMAGE = ("--workflow", str(ROOT / "workflows/api/29 Describe an image (download).json"))
ONE = "seed\n1\n"


@pytest.mark.parametrize(
    ("jobs", "arguments", "message"),
    [
        ("id,sed\na,1\n", (), "jobs.csv, line 2: .*no sed.*filename_prefix, prompt, seed"),
        ("id,se\x1bed\u202e\na,1\n", (), r"no se\\x1bed\\u202e that"),
        (ONE, ("--workflow", "jobs.csv"), "workflow.*jobs.csv"),
        ("id,seed\na,1\n", ("--out", "full"), r"full.*files.* a\b"),
        ("id,seed\nA,1\n", ("--out", "full"), r"full.*files.* A\b"),
        (ONE, ("--out", "jobs.csv"), "--out jobs.csv: no file can be written there .*folder"),
        (ONE, ("--server", "127.0.0.1:8380x"), "8380x is no address .*port.*http://127.0.0.1:8188"),
        (ONE, ("--server", ""), "--server  is no address .no host"),
        (ONE, ("--server", "http://u:Z/z9@h:1"), "--server http://h:1 is no address .*`/` is written %2F"),
        (ONE, ("--server", "ftp://u:Zz9@a"), "ftp://a is no address .no http:// or https://"),
        (ONE, ("--server", "u:Zz9@h:99999?t=Zz9"), "--server h:99999 is no address .not a host and a port"),
        *(
            (ONE, ("--server", f"http://u:{wrong}"), "--server http.* is no address")
            for wrong in ("Z/Zz9@h", "1/Zz9@h", "Zz9@[h", "Zz9?Z@h", "Zz9#Z@h", "[Zz9]@h", "@", "Zz9 @h:x")
        ),
        (ONE, ("--retries", "-1"), "--retries: at least 0"),
        (ONE, ("--patience", "nan"), "--patience: at least 0"),
        (ONE, ("--in-flight", "0"), "--in-flight: at least 1"),
        (ONE, ("--method", "next_token", "--model", "foo"), "--model, --method: .*--ray.*workflow"),
        (ONE, ("--method", "sjd", "--gpus", "0"), "--method, --gpus: .*--ray"),  # the defaults, but given
        (ONE, (*ON_RAY, "--server", "http://a", "--patience", "9"), "--server, --patience: not .*--ray"),
        (ONE, ("--maps",), "--maps needs --out"),
        (ONE, ("--maps", "--out", "out", *NO_IMAGE), "--maps.*Save Image.*trace"),
        (ONE, ("--maps", "--out", "out", *NO_IMAGE, "--dry-run"), "--maps.*trace"),
        ("id\na\nA_map\n", ("--maps", "--out", "out"), "line 2: .*map of a has the name of the job a_map"),
        ("prompt\ncat\n", ("--ray", "--dry-run"), "--ray needs --out"),
        ("prompt,windw\ncat,3\n", ON_RAY, "jobs.csv, line 2: .*windw; .*prompt, negative, seed, cfg"),
        ("prompt,window\ncat,2.5\n", ON_RAY, "line 2: window.*whole.*2.5"),
        ("prompt,reuse\ncat,coupled\ncat,foo\n", ON_RAY, "line 3: reuse.*'foo'.*'coupled', 'gumbel'"),
        ("prompt,window\ncat,\ncat,0\n", ON_RAY, "line 3: window.*0.*at least 2"),
        ("prompt,seed\ncat,-1\n", ON_RAY, "line 2: seed.*0 to.*-1"),
        ("prompt,seed\ncat,1\ncat,1.23457E+18\n", ON_RAY, "line 3: seed.*E.18.*format the column as text"),
        ("prompt,delta\ncat,0.5\n", (*COOL, "--drafter", "default/eagle"), "line 2: delta.*0.5.*1 .exact"),
        ("prompt,mode\ncat,foo\n", DRAFTS, "line 2: mode.*'foo'.*block"),
        (ONE, ON_RAY, "line 2: .*prompt"),
        ("prompt\ncat\n", (*ON_RAY, "--method", "sdj"), "method sdj.*next_token, jacobi, sjd"),
        ("prompt\ncat\n", (*ON_RAY, "--dtype", "bf61"), "dtype bf61.*auto, fp32, bf16"),
        ("prompt\ncat\n", COOL, "cool_sd.*--drafter.*default/eagle"),
        ("prompt\ncat\n", (*ON_RAY, "--model", "models/gone"), "models/gone.*bundled.*default"),
        ("prompt\ncat\n", (*COOL, "--drafter", "gone"), "gone.*default"),
    ],
)
def test_bad_input_begins_nothing_and_is_shown_without_what_is_private(
    table, capsys, monkeypatch, jobs, arguments, message
):
    monkeypatch.setattr(ray_cluster, "start_ray", lambda _options: pytest.fail("Ray was started"))
    (table / "jobs.csv").write_text(jobs, encoding="utf-8")
    (table / "full").mkdir()
    (table / "full/a.png").write_text("somebody's", encoding="utf-8")
    workflow = () if {"--ray", "--workflow"} & {*arguments} else ("--workflow", "workflow.json")
    assert cli.main(["jobs.csv", *workflow, *arguments]) == cli.BAD_INPUT
    said = capsys.readouterr().err
    assert re.search(message, said) and "Zz9" not in said and "\x1b" not in said
    files = {path.name: path.stat().st_size for path in table.iterdir() if path.is_file()}
    assert files.pop("jobs.csv") == len(jobs.encode()) and files.pop("workflow.json")
    assert files.pop("jobs.results.jsonl", 0) == 0 and files.keys() <= {"jobs.results.jsonl.journal"}


@pytest.mark.parametrize("option", ["--servr", "--in-flight", "--patience"])
def test_what_the_command_line_does_not_understand_is_quoted_without_what_is_private(capsys, option):
    with pytest.raises(SystemExit):
        cli.main(["jobs.csv", option, "http://user:Zz9secret@host/?token=Qq7secret\x1b[31m"])
    said = capsys.readouterr().err
    assert "host/?***" in said and not any(part in said for part in ("Zz9", "Qq7", "\x1b"))


def test_a_dry_run_needs_no_server_and_leaves_nothing(table, capsys):
    assert cli.main(command("--dry-run")) == cli.DONE
    assert "8 jobs fit workflow.json" in capsys.readouterr().err
    (table / "jobs.csv").write_text("id,seed\na,1\n", encoding="utf-8")
    assert cli.main(command("--dry-run")) == cli.DONE and "1 job fits workflow.json" in capsys.readouterr().err
    assert sorted(path.name for path in table.iterdir()) == ["jobs.csv", "workflow.json"]


def test_a_full_disk_stops_the_batch_and_loses_nothing(table, here, capsys, monkeypatch):
    one, write = FakeComfy(), Journal.write_result

    def full(journal, record):
        if journal.results:
            raise OSError(28, "No space left on device")
        write(journal, record)

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write_result", full)
        assert run_beside(one) == cli.UNFINISHED
    *_, error, counts = capsys.readouterr().err.splitlines()
    assert "No space left on device; the same command goes on" in error
    assert "1 of 8 jobs done, 0 failed, 7 still to do" in counts
    assert run_beside(one) == cli.DONE and len(lines(table / "jobs.results.jsonl")) == 8


def test_a_full_disk_is_named_and_counted_where_only_copies_are_missing(table, here, capsys, monkeypatch):
    one = FakeComfy()
    assert run_beside(one) == cli.DONE
    capsys.readouterr()
    monkeypatch.setattr(os, "fsync", full_disk)
    assert run_beside(one, "--out", "out") == cli.UNFINISHED
    *_, error, last = capsys.readouterr().err.splitlines()
    assert "No space left on device: 'out" in error and "j0.png'; the same command goes on" in error
    assert "8 of 8 jobs done, 0 failed, 0 still to do" in last and list(Path("out").iterdir()) == []


def full_disk(_file: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a file that can be opened and takes nothing")
def test_what_a_full_disk_did_not_take_is_an_error_once(tmp_path):
    """Closing tries to write it again."""
    lines = JsonLines(tmp_path / "r.jsonl")
    with Path("/dev/full").open("ab") as lines.file:
        with pytest.raises(OSError, match=r"No space left on device: .*r\.jsonl"):
            lines.append(RECORD)
        lines.close()


def test_where_nothing_can_be_written_it_says_so(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    for path in (tmp_path / "file/r.jsonl", tmp_path, Path()):
        with pytest.raises(JournalError, match=re.escape(str(path))), Journal(path):
            pass
