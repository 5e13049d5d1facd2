"""Servers that answer anything: they are away, in words, the others go on; and nothing private and nothing that acts on
a terminal gets into files or messages."""

import asyncio
import html
import json
import re
import unicodedata
from pathlib import Path
from urllib.parse import quote, quote_plus

import pytest
from aiohttp import web
from comfyui_specar.batch import answers, cli, dispatch
from comfyui_specar.batch.address import address_of, hide_private, without_logins
from comfyui_specar.batch.dispatch import Options
from comfyui_specar.limits import limits
from comfyui_specar.tests.support.fake_comfy import (
    Clock,
    FakeComfy,
    asynchronous,
    jobs_of,
    lines,
    run_batch,
    run_beside,
    without_limits,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

READ = ["system_stats", "queue", "prompt", "history", "view"]
SECRET, TOKEN = "pa:s s/w%rd", "to+k&en"
LOGIN = "us%20er:pa%3As%20s%2Fw%25rd"
PRIVATE = (SECRET, TOKEN, "pa%3As", "to%2Bk%26en", "us er")


@pytest.fixture(autouse=True)
def no_limits(monkeypatch) -> None:
    without_limits(monkeypatch)


async def run(path: Path, servers: list, number: int = 1, **options) -> dict[str, dict]:
    """A batch; time passes for it only while its first server is away. Returns its results."""
    clock = Clock()

    async def passing(batch):
        while True:
            await clock.away(batch, 0.05)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "time", clock)
        chosen = Options(poll=0.002, grace=0.1, patience=2.0, **options)
        return (await run_batch(path, servers, jobs_of(number), chosen, passing)).results


anything = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
contents = (
    anything.map(lambda value: json.dumps(value).encode())
    | st.binary(max_size=40)
    | st.sampled_from(
        [
            b"",
            b"{}",
            b"[]",
            b"null",
            b"<html>log in</html>",
            b"[" * 100_000,
            b'{"a":' * 100_000,
            b'{"queue_running": 1e999}',
            b'{"prompt_id": NaN}',
            b'{"error": "no"}',
            b'{"node_errors": {"99": {"errors": []}}}',
            b'{"node_errors": [5]}',
            b'{"queue_running": [[1]], "queue_pending": []}',
            b'{"error": {"type": "prompt_no_outputs"}, "node_errors": 5}',
            b'{"system": {"comfyui_version": {}}}',
            b"9" * 5000,
        ]
    )
)
QUIET = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("where", READ)
@QUIET
@given(
    content=contents,
    kind=st.sampled_from(["application/json", "text/html", "text/plain; charset=none"]),
    status=st.sampled_from([200, 200, 200, 400, 404, 500, 302, 401]),
)
@asynchronous
async def test_whatever_a_server_answers_the_other_one_ends_the_jobs(tmp_path_factory, where, content, kind, status):
    folder = tmp_path_factory.mktemp("batch")
    async with FakeComfy() as strange, FakeComfy() as other:
        strange.says[where] = lambda _answer: web.Response(body=content, status=status, headers={"Content-Type": kind})
        results = await run(folder / "r.jsonl", [strange, other], 2, download=folder / "out")
        lost_file = where == "view" and status not in (302, 401)  # any bytes may be a file, or it is gone
        refused = where == "prompt" and status == 400  # some of these answers have a reason, as ComfyUI's
        assert {record["status"] for record in results.values()} <= {"success", *["error"] * (lost_file or refused)}
        assert len(results) == 2
        if where in ("queue", "history"):
            assert {record["server"] for record in results.values()} == {other.url}


def spoiled(value, at: int, by):
    """A copy in which the at-th part, counted through all lists and objects, is another; and how many there are."""
    count = 0

    def copied(part):
        nonlocal count
        count += 1
        if count - 1 == at:
            return by
        if isinstance(part, dict):
            return {key: copied(inner) for key, inner in part.items()}
        return [copied(inner) for inner in part] if isinstance(part, list) else part

    return copied(value), count


@pytest.mark.parametrize("where", ["system_stats", "queue", "prompt", "history"])
@QUIET
@given(at=st.integers(0, 60), by=anything, refuses=st.booleans())
@asynchronous
async def test_an_answer_with_one_part_of_another_kind_ends_no_run(tmp_path_factory, where, at, by, refuses):
    folder = tmp_path_factory.mktemp("batch")

    def spoil(answer: web.Response) -> web.Response:
        real = json.loads(answer.body)
        count = spoiled(real, -1, by)[1]
        return web.Response(
            text=json.dumps(spoiled(real, at % count, by)[0]), status=answer.status, content_type="application/json"
        )

    async with FakeComfy() as strange, FakeComfy() as other:
        strange.says[where] = spoil
        strange.lacks = {"cat"} if refuses and where == "prompt" else set()
        results = await run(folder / "r.jsonl", [strange, other], 2)
        assert len(results) == 2 and {record["status"] for record in results.values()} <= {"success", "error"}
        json.loads(json.dumps(results), parse_constant=pytest.fail)


@pytest.mark.parametrize(
    ("where", "content", "words"),
    [
        ("queue", b"{}", "/queue: queue_running is missing"),
        ("queue", b"<html>\n<b>log", "/queue: not JSON: <html> <b>l"),
        ("queue", b" " * (limits.ANSWER_BYTES + 1), "/queue: it is longer than 64 MiB"),
        ("prompt", b"{}", "/prompt: it does not take the id"),
        ("prompt", b'{"node_errors": {"99\\u001b[0m": {}}}', r"/prompt: .* not sent, such as 99\\x1b\[0m"),
    ],
)
@asynchronous
async def test_a_server_that_is_another_program_is_away_in_words(tmp_path, caplog, where, content, words):
    async with FakeComfy() as strange, FakeComfy() as other:
        strange.says[where] = lambda _answer: web.Response(body=content, content_type="text/html")
        await run(tmp_path / "r.jsonl", [strange, other])
        lines = [record.getMessage() for record in caplog.records if record.name == dispatch.__name__]
        assert re.match(f"{strange.url} does not answer as ComfyUI does, {words}", lines[0])


@pytest.mark.parametrize(
    ("where", "words"), [("queue", "given up"), ("prompt", "No server is left"), ("history", "No server is left")]
)
@asynchronous
async def test_where_there_is_no_other_server_the_batch_ends_and_no_job_has_failed(tmp_path, caplog, where, words):
    async with FakeComfy() as strange:

        def page(_answer: web.Response) -> web.Response:
            strange.pending.clear()
            return web.Response(text="<html>hello</html>", content_type="text/html")

        strange.says[where] = page
        assert await run(tmp_path / "r.jsonl", [strange], 3) == {}
        said = [record.getMessage() for record in caplog.records if record.name == dispatch.__name__]
        last = next(number for number, line in enumerate(said) if words in line)
        assert not [line for line in said[last:] if "Waiting" in line or line.endswith("answers again.")]
        strange.says.clear()
        results = await run(tmp_path / "r.jsonl", [strange], 3)
        assert {record["status"] for record in results.values()} == {"success"}


@asynchronous
async def test_a_job_that_a_server_loses_goes_to_another_one_and_is_not_given_up(tmp_path):
    """The one that loses is always idle, and would get it again."""
    async with FakeComfy() as losing, FakeComfy() as other:
        losing.says["history"] = lambda _answer: web.json_response({})
        results = await run(tmp_path / "r.jsonl", [losing, other], 4)
        assert {(record["status"], record["server"]) for record in results.values()} == {("success", other.url)}


@asynchronous
async def test_a_job_that_breaks_servers_fails_once_each_was_asked_and_sets_none_aside(tmp_path):
    async with FakeComfy() as one, FakeComfy() as other:
        for each in (one, other):
            each.says["prompt"] = lambda answer: web.Response(text="500 Internal\x1b[31m Error", status=500)
        [record] = (await run(tmp_path / "r.jsonl", [one, other])).values()
        assert record["status"] == "error" and "\x1b" not in record["error"]
        assert all(f"{each.url}: ComfyUI answered 500: 500 Internal" in record["error"] for each in (one, other))


def acting(text: str) -> set[str]:
    """Characters of a text that do something, but ends of lines."""
    return {c for c in text if c != "\n" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")}


@pytest.fixture
def table(table, here) -> Path:
    (table / "jobs.csv").write_text("id,prompt\ngood,cat\nbad,fail\n", encoding="utf-8")
    return table


ACTS = "\x1b[2J\x1b]0;x\x07\x9b\u202e\u2066\ud800\u2028"


def test_what_acts_on_a_terminal_reaches_no_message_log_or_result(table, capsys, caplog):
    one = FakeComfy()

    def history(answer: web.Response) -> web.Response:
        found = json.loads(answer.body)
        for entry in found.values():
            for event, data in entry["status"]["messages"]:
                if event == "execution_error":
                    data |= {"exception_message": f"a{ACTS}\nb", "node_type": ACTS}
            for report in entry["outputs"].get("10", {}).get("specar", []):
                report["settings"] = {"method": ACTS, "notices": [ACTS + 10**6 * "x"]}
                report["totals"] = {ACTS: ACTS, "target_passes": 5}
        return web.json_response(found)

    one.says["history"] = history
    assert run_beside(one) == cli.FAILED
    said = capsys.readouterr().err
    assert f"bad on {one.url}: \\x1b[2J" in said and "good: warning: " in said and not acting(said)
    results = (table / "jobs.results.jsonl").read_text(encoding="utf-8")
    assert not acting(caplog.text + results) and len(results) < 10_000 and len(said) < 10_000
    good, bad = lines(table / "jobs.results.jsonl")
    trace = good["traces"][0]
    assert not acting("".join([bad["error"], *good["warnings"], *trace, *map(str, trace.values())]))


def test_a_login_and_a_token_are_used_for_every_request_and_written_nowhere(table, capsys, caplog):
    """Although the server repeats them in what it says."""
    one = FakeComfy()
    url = f"http://{LOGIN}@127.0.0.1:{one.port}/?token=to%2Bk%26en"

    def fails(answer: web.Response) -> web.Response:
        found = json.loads(answer.body)
        for entry in found.values():
            for _, data in entry["status"]["messages"]:
                data["exception_message"] = f"no {SECRET} and {TOKEN} at {url}"
        return web.json_response(found)

    one.says["history"] = fails
    assert run_beside(one, "--server", url, "--out", "out") == cli.FAILED
    assert {path.split("/")[1] for path, *_ in one.asked} >= {*READ}
    assert {(query.get("token"), login) for _, query, login in one.asked} == {
        (TOKEN, address_of(url).headers["Authorization"])
    }
    assert {record["server"] for record in lines(table / "jobs.results.jsonl")} == {f"http://127.0.0.1:{one.port}"}
    (table / "out/good.png").unlink()
    assert run_beside(one, "--server", url, "--out", "out") == cli.FAILED and (table / "out/good.png").exists()
    one.says = {"queue": lambda _answer: web.Response(status=500, text=f"{SECRET} {TOKEN}")}
    for wrong in (
        {},
        {"queue": lambda _answer: web.Response(status=302, headers={"Location": url})},
        {"queue": lambda _answer: web.Response(status=401)},
    ):
        one.says |= wrong
        run_beside(one, "--server", url, "--patience", "0", "--retry-failed")
    cli.main(["jobs.csv", "--workflow", "workflow.json", "--server", url, "--patience", "0", "--retry-failed"])
    said = capsys.readouterr().err
    for part in ("answered 401", "refers to", "status 500", "no ComfyUI answers"):
        assert part in caplog.text
    written = [path.read_bytes().decode(errors="replace") for path in table.rglob("*") if path.is_file()]
    assert not [value for value in PRIVATE for text in (*written, said, caplog.text) if value in text]


def test_a_token_is_sent_to_the_named_servers_alone_and_written_nowhere(table, capsys, caplog, monkeypatch):
    """Not to one that the journal names, which is a file; and a login in an address goes before it."""
    named, listed = FakeComfy(), FakeComfy()
    monkeypatch.setenv(cli.TOKEN, f" {TOKEN}\n")
    named.says["history"] = lambda answer: web.Response(body=(answer.body or b"").replace(b"no such", TOKEN.encode()))
    assert run_beside(listed, "--server", listed.url.replace("//", "//a:b@")) == cli.FAILED
    assert {login for *_, login in listed.asked} == {address_of("a:b@h").headers["Authorization"]}
    listed.asked.clear()
    (table / "jobs.results.jsonl").unlink()  # as if it had them still

    async def beside(running: FakeComfy, one: FakeComfy) -> int:
        async with running:
            return await asyncio.to_thread(run_beside, one, "--out", "out")

    def logins(one: FakeComfy) -> set[str | None]:
        return {one.asked.pop()[-1] for _ in list(one.asked)}

    assert asyncio.run(beside(listed, named)) == cli.FAILED
    assert logins(named) == {f"Bearer {TOKEN}"} and logins(listed) == {None}
    for running, one, sent in ((listed, named, f"Bearer {TOKEN}"), (named, listed, None)):  # a copy that is missing
        (table / "out/good.png").unlink()
        assert asyncio.run(beside(running, one)) == cli.FAILED and (table / "out/good.png").exists()
        assert logins(named) == {sent}
    for wrong in ("a b", "\u00fc", "a\nb"):
        monkeypatch.setenv(cli.TOKEN, wrong)
        assert cli.main(["jobs.csv", "--workflow", "workflow.json"]) == cli.BAD_INPUT
    said = capsys.readouterr()
    written = [path.read_bytes().decode(errors="replace") for path in table.rglob("*") if path.is_file()]
    assert cli.TOKEN in said.err
    assert not [text for text in (*written, said.out, said.err, caplog.text) if TOKEN in text]


def test_addresses_are_told_apart_and_shown_by_what_is_public():
    names = {"http://a:b@h:1/x/?t=1#f": "http://h:1/x", "a:b@h:1": "h:1", "https://h/": "https://h", "h:9": "h:9"}
    assert {url: address_of(url).name for url in names} == names
    address = address_of("https://a%20b:c%3A@h/p?t=1&u=")
    assert address.base == "https://h/p" and address.query == {"t": "1", "u": ""} and hide_private("ray") == "ray"
    assert address.headers == {"Authorization": "Basic YSBiOmM6"} and "YSB" not in repr(address)  # "a b:c:"
    assert without_logins("at http://a:b@h/x, https://c@d:e@i and me@j") == "at http://h/x, https://i and me@j"


@pytest.mark.parametrize("secret", ['Zz9 "&<p\u00e4ss>  \\x/', "to+k/en=Qq7 x", "plain-Zz9"])
@pytest.mark.parametrize(
    "write", [str, json.dumps, quote, quote_plus, html.escape, lambda secret: quote_plus(secret, safe="/")]
)
def test_what_is_private_is_hidden_however_an_answer_writes_it_and_before_it_is_cut(secret, write):
    address = address_of(f"http://user:{quote(secret, safe='')}@host/?token={quote(secret, safe='')}")
    hiding = answers.hiding.set(address.hide)
    shown = [answers.one_line(f"see {write(secret)}.", most) for most in (6, 10, 100)]
    shown += [json.dumps(answers.copy_bounded({"a": [f"{write(secret)}!"], f"at {write(secret)}": None}))]
    answers.hiding.reset(hiding)
    assert shown[2] in ("see ***.", 'see "***".')
    assert all("*" in text and not any(part in text for part in ("Zz9", "Qq7", "ss>", "to")) for text in shown)


@asynchronous
async def test_a_page_of_a_proxy_is_no_copy(tmp_path):
    async with FakeComfy() as strange, FakeComfy() as other:
        strange.says["view"] = lambda _answer: web.Response(text="<html>", content_type="text/html")
        [record] = (await run(tmp_path / "r.jsonl", [strange, other], download=tmp_path / "out")).values()
        assert record["server"] == other.url and (tmp_path / "out/j0.png").read_bytes().startswith(b"p_j0")
