"""Parts of servers' answers and addresses, by hand: what is taken, how much of it, and what is refused."""

import asyncio
import json
import re
import signal
import socket
import ssl
from types import SimpleNamespace

import aiohttp
import pytest
from comfyui_specar.batch import answers, cli, server
from comfyui_specar.batch.address import address_of
from comfyui_specar.batch.answers import UnexpectedAnswerError
from comfyui_specar.batch.copies import not_given
from comfyui_specar.batch.server import Server, ServerAwayError, entry, files_of, notices_of, reports_of
from comfyui_specar.limits.limits import FILES, NOTICES, REPORTS
from comfyui_specar.tests.support.fake_comfy import FakeComfy, asynchronous


def unexpected(function, *arguments, match=None, **more):
    with pytest.raises(UnexpectedAnswerError, match=match):
        function(*arguments, **more)


@pytest.mark.parametrize(
    ("function", "arguments", "answer"),
    [
        (answers.excerpt, [b"<html>\n  no \x1b[1m"], "<html> no \\x1b[1m"),
        (answers.excerpt, [b" \n"], "nothing"),
        (answers.excerpt, [b"a" * 500 + b"\xff"], "a" * 100 + "... (501 characters)"),
        (answers.parse_object, [b'{"a": [NaN, 1e999, 2.5]}'], {"a": [None, None, 2.5]}),
        (answers.one_line, [" so \n it \t is\x1b "], "so it is\\x1b"),
        (answers.one_line, ["x" * 2001], "x" * 2000 + "... (2001 characters)"),
        (answers.checked_name, ["x" * 1000], "x" * 1000),
        (answers.copy_bounded, [{"a\x1b": ["b\x1b", True, None, 2.5]}], {"a\\x1b": ["b\\x1b", True, None, 2.5]}),
    ],
)
def test_what_is_read_of_an_answer(function, arguments, answer):
    assert function(*arguments) == answer


@pytest.mark.parametrize(
    ("function", "arguments", "why"),
    [
        (answers.parse_object, [b"[1]"], "not an object"),
        *((answers.parse_object, [body], "not JSON") for body in (b"{", b"", b"[" * 100_000)),
        (answers.read_answer, [answers.Queue, b"[1]"], "not an object"),
        (answers.read_answer, [answers.Queue, {"queue_running": []}], "^queue_pending is missing"),
        (
            answers.read_answer,
            [answers.Queue, {"queue_running": [[1, 2]], "queue_pending": []}],
            r"queue_running\.0: .*string",
        ),
        (answers.read_answer, [answers.Problem, {"message": 1}], "^message: .*string"),
        (answers.read_answer, [answers.Submission, {"node_errors": [5]}], "^node_errors: .*dictionary"),
        (answers.read_answer, [answers.Ended, {"outputs": {"\x1b": 5}}], r"^outputs\.\\x1b: "),
        (answers.read_answer, [answers.Report, {"totals": [1]}], "^totals: "),
        *(
            (answers.read_answer, [answers.SavedFile, {"filename": text}], "^filename is x")
            for text in ("x" * 1001, "x\x1b")
        ),
    ],
)
def test_what_is_no_answer_of_comfyui(function, arguments, why):
    unexpected(function, *arguments, match=why)


def test_totals_are_as_deep_and_as_long_as_ours():
    value: object = 1
    for _ in range(answers.NESTED):
        value = [value]
        assert answers.copy_bounded(value) == value
    unexpected(answers.copy_bounded, [value], match="nested")
    lines = ["x" * 1996] * (answers.TOTALS // 2000 - 1)
    room = answers.TOTALS - len(json.dumps({"a": [*lines, ""]}))
    assert answers.read_answer(answers.Report, {"totals": {"a": [*lines, "x" * room]}})
    unexpected(answers.read_answer, answers.Report, {"totals": {"a": [*lines, "x" * (room + 1)]}}, match="too long")


@pytest.mark.parametrize(
    ("status", "said", "is_unexpected"),
    [
        (502, "answered 502", False),
        (503, "answered 503", False),
        (504, "answered 504", False),
        (401, "need a login", True),
        (403, "need a login", True),
        (301, "refers to", True),
        (307, "refers to", True),
    ],
)
def test_statuses_that_are_of_what_stands_before_a_server(status, said, is_unexpected):
    reply = SimpleNamespace(status=status, headers={})
    with pytest.raises(ServerAwayError, match=said) as away:
        Server(None, "host")._check(reply)
    assert away.value.unexpected == is_unexpected and not away.value.gone


def test_a_server_that_hangs_is_named_without_the_words_of_its_socket(monkeypatch):
    monkeypatch.setattr(server, "ANSWER_SECONDS", 0.01)

    async def check(url: str):
        async with server.open_session() as session:
            await Server(session, url).queue()

    with socket.create_server(("127.0.0.1", 0)) as hung:
        url = f"http://127.0.0.1:{hung.getsockname()[1]}"
        with pytest.raises(ServerAwayError, match=rf"^{url} does not answer in time\.$"):
            asyncio.run(check(url))


@asynchronous
async def test_a_server_says_which_inputs_are_whole_numbers():
    workflow = {node: {"class_type": kind, "inputs": {}} for node, kind in (("6", "Sampler"), ("7", "No/such?node"))}
    async with FakeComfy() as one, server.open_session() as session:
        assert await Server(session, one.url).whole_inputs(workflow) == {("6", "seed")}
    assert await cli.whole_inputs([one.url], "", workflow) == set()


CONNECTION = SimpleNamespace(host="host", port=1, ssl=True, is_ssl=True)


def certificate_error(code: int, why: str) -> Exception:
    found = ssl.SSLCertVerificationError()
    found.verify_code, found.verify_message = code, why
    return aiohttp.ClientConnectorCertificateError(CONNECTION, found)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (certificate_error(18, "self-signed certificate"), "self-signed certificate.*SSL_CERT_FILE"),
        (certificate_error(62, "Hostname mismatch"), "Hostname mismatch$"),
        (aiohttp.ClientConnectorSSLError(CONNECTION, ssl.SSLError("wrong version")), "no HTTPS there .*http://"),
        (aiohttp.ClientConnectorError(CONNECTION, OSError(1, "no such name")), "no such name"),
    ],
)
def test_a_connection_that_cannot_be_made_says_the_way_out(error, words):
    assert re.search(words, str(Server(None, "https://host")._away(error)))


def test_the_advice_on_a_login_can_be_used_as_it_is_shown():
    """Nothing that hides logins takes it for one."""
    for url in ("host:8188", "https://host/path"):
        with pytest.raises(ServerAwayError) as away:
            Server(None, url)._check(SimpleNamespace(status=401, headers={}))
        said = cli.safe(str(away.value))
        [advised] = re.findall(r"--server (\S+),", said)
        assert address_of(advised).name == address_of(url).base and address_of(advised).headers and server.TOKEN in said
    for known in (Server(None, "a:b@host"), Server(None, "host", "secret")):
        with pytest.raises(ServerAwayError, match="does not take the login or token") as away:
            known._check(SimpleNamespace(status=401, headers={}))


@pytest.mark.parametrize(
    ("status", "name", "words"),
    [(404, "a.png", "no longer has a.png"), (500, "a.png", "500 .*a.png"), (400, "a..b.png", "two dots.*a..b.png")],
)
def test_a_file_that_is_not_given_says_why(status, name, words):
    assert re.search(words, not_given("http://host", name, status))


def ended(*messages, outputs=None, prompt=None, **status):
    found = {"status": {"messages": list(messages), **status}, "outputs": outputs or {}}
    return entry(answers.read_answer(answers.Ended, found), prompt or {})


def outputs(**shown):
    return {node: answers.read_answer(answers.Output, output) for node, output in shown.items()}


def test_an_entry_says_how_a_prompt_ended_and_when():
    begun = ["execution_start", {"timestamp": 1000}]
    done = ended(begun, ["execution_success", {"timestamp": 3500}])
    assert (done.outcome, done.seconds, done.error) == ("success", 2.5, "")
    error = {"timestamp": 2000, "node_type": "N", "exception_message": "x"}
    failed = ended(begun, ["execution_error", error])
    assert (failed.outcome, failed.seconds, failed.error) == ("error", 1.0, "N: x")
    bare = ended(["execution_error", {}])
    assert (bare.outcome, bare.seconds, bare.error) == ("error", 0, "ComfyUI: no reason given")
    assert ended(["execution_interrupted", {}]).outcome == "interrupted"
    assert ended(status_str="success").outcome == "success" and entry(answers.Ended(), {}).outcome == "error"
    unexpected(ended, match="ended as fine", status_str="fine")
    for message in ([], ["execution_success"], ["execution_success", {}, 1], [1, {}], ["execution_success", 1]):
        unexpected(ended, message, match="messages")


def test_files_are_those_that_were_saved_or_else_those_shown():
    shown, saved = {"filename": "a.png", "type": "temp"}, {"filename": "b.png", "subfolder": "s", "type": "output"}
    one, two = {"images": [shown], "text": ["x"], "odd": 3}, {"images": [saved, 5]}
    assert files_of(outputs(a=one, b=two)) == [{"filename": "b.png", "subfolder": "s", "type": "output", "node": "b"}]
    assert files_of(outputs(a=one)) == [{"filename": "a.png", "subfolder": "", "type": "temp", "node": "a"}]
    assert files_of(outputs(a={"images": [{"filename": "c"}]}))[0]["type"] == "output"
    assert len(files_of(outputs(a={"images": [shown] * FILES}))) == FILES
    unexpected(files_of, outputs(a={"images": [shown] * (FILES + 1)}), match="10001 files")


def test_reports_of_a_prompt_are_bounded_and_a_refusal_has_a_reason():
    reports = [{"totals": {}, "settings": {}}]
    assert len(ended(outputs={"1": {"specar": REPORTS * reports}}).traces) == 1
    unexpected(ended, match="1001 reports", outputs={"1": {"specar": (REPORTS + 1) * reports}})
    said = answers.read_answer(answers.Submission, {"error": "no"})
    assert server.refusal(said) == "ComfyUI refused the workflow: no"
    unexpected(server.refusal, answers.read_answer(answers.Submission, {"node_errors": []}), match="no reason")


def test_reports_belong_to_the_nodes_whose_traces_they_are_of():
    node = {"inputs": {"trace_1": ["7", 0], "trace_2": [8, 0], "name": ["9", 0], "trace_3": "none"}}
    shown = answers.Output(specar=[{"x": 1}, {"totals": {"n": 1}}, {"totals": {"n": 2}}])

    def found(node, output):
        return [(source, report.totals) for source, report in reports_of(node, output)]

    assert found(node, shown) == [("7", {"n": 1}), ("8", {"n": 2})]
    assert found(node, answers.Output(specar=shown.specar[:2])) == [(None, {"n": 1})]
    assert found(None, shown) == [(None, {"n": 1}), (None, {"n": 2})]
    assert reports_of(node, answers.Output()) == []


def test_notices_are_those_of_samplers_and_of_reports_once_each():
    """A sampler that ComfyUI need not run again tells none; the report of its trace does."""
    said = {"specar_run": [json.dumps({"passes": 16, "notices": ["a", "b"]})]}
    shown = {"specar": [{"settings": {"notices": ["b", "c"]}, "totals": {}}, {"family": "no run"}]}
    assert notices_of(outputs(a={"specar_run": ["{}"]}, b=said, c=shown)) == ["a", "b", "c"]
    assert notices_of(outputs(c=shown)) == ["b", "c"] and notices_of(outputs(a={"images": []})) == []
    many = json.dumps({"notices": [str(number) for number in range(NOTICES + 1)]})
    assert len(notices_of(outputs(a={"specar_run": [many]}))) == NOTICES
    for odd in ("no JSON", "[]", '{"notices": [1]}', "\ud800"):
        unexpected(notices_of, {"a": answers.Output.model_construct(specar_run=[odd])})


def test_the_first_signal_cancels_and_the_second_ends_the_program(monkeypatch, capsys):
    before, seen = [signal.getsignal(number) for number in cli.CANCEL_SIGNALS], []

    class Stopped:
        def __init__(self, *_):
            self.event = asyncio.Event()
            self.stop = self.event.set

        async def run(self, *_):
            signal.raise_signal(signal.SIGINT)
            await asyncio.wait_for(self.event.wait(), 60)
            seen.extend(signal.getsignal(number) for number in cli.CANCEL_SIGNALS)

    monkeypatch.setattr(cli, "Batch", Stopped)
    assert cli.run_batch(None, [], None, [], {}, None)
    assert seen == [signal.SIG_DFL] * 2 and "Cancelling" in capsys.readouterr().err
    assert [signal.getsignal(number) for number in cli.CANCEL_SIGNALS] == before
