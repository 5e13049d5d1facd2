"""TorchScript archives as plain weights: equal to what PyTorch loads, and nothing in them is ever run."""

import struct
import zipfile

import pytest
import torch
from comfyui_specar.model_loaders.files.checkpoint import CheckpointError, open_checkpoint
from comfyui_specar.model_loaders.files.torchscript import read_torchscript
from torch import nn

from ..support import hostile_files
from ..support.hostile_files import call, group, integer, module, name, storage, text

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # it still reads what there is


class Net(nn.Module):
    """Dtypes, buffers, shared modules, views and names of every kind."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
        self.head = nn.Linear(4, 2)
        self.shared = self.head
        self.turned = nn.Parameter(torch.arange(24.0).view(4, 6).t())
        self.part = nn.Parameter(torch.arange(10.0)[3:7])
        self.narrow = nn.Parameter(torch.randn(3).half())
        self.brief = nn.Parameter(torch.randn(3, 2).bfloat16())
        self.register_buffer("numbers", torch.arange(5), persistent=False)
        self.register_buffer("signs", torch.tensor([True, False]))
        self.register_buffer("small", torch.tensor([1, 2], dtype=torch.int32))
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("single", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3))) + self.turned.sum()


@pytest.fixture(scope="module")
def archives(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archives")
    torch.manual_seed(0)
    net = Net().eval()
    torch.jit.save(torch.jit.trace(net, torch.randn(1, 3, 8, 8)), folder / "traced.jit")
    torch.jit.save(torch.jit.script(net), folder / "scripted.jit")
    torch.jit.save(torch.jit.script(net).to(torch.bfloat16), folder / "bf16.jit")
    return folder


@pytest.mark.parametrize("name", ["traced", "scripted", "bf16"])
def test_equals_what_pytorch_loads(archives, name):
    wanted = torch.jit.load(archives / f"{name}.jit").state_dict()
    found = open_checkpoint(archives / f"{name}.jit").tensors
    assert found.keys() == wanted.keys() and {"head.weight", "shared.weight", "body.1.running_var"} <= found.keys()
    for key, tensor in wanted.items():
        assert found[key].dtype == tensor.dtype and torch.equal(found[key], tensor), key


# Pickles by hand: the codes of the virtual machine that reads them


def tensor(content: bytes | None = None, offset: int = 0, size: tuple = (2, 2), stride: tuple = (2, 1)) -> bytes:
    shape, steps = (group(*map(integer, numbers)) for numbers in (size, stride))
    return hostile_files.tensor(shape, steps, content, integer(offset))


@pytest.fixture
def write(tmp_path):
    """Writes an archive around a pickle."""
    return lambda pickle, **given: hostile_files.archive(b"\x80\x02" + pickle + b".", tmp_path, ".jit", **given)


def test_the_crafted_archives_are_sound(write):
    """Were they not, those below would be refused for another reason."""
    inner = module(weight=tensor(), bias=tensor(offset=1, size=(3,), stride=(1,)), training=b"\x89")
    views = {"ends": tensor(size=(2,), stride=(3,)), "same": tensor(offset=3, stride=(0, 0))}
    found = read_torchscript(write(module(inner=inner, nothing=b"N", **views), byteorder=b"little"))
    assert found.keys() == {"inner.weight", "inner.bias", "ends", "same"}
    assert found["inner.weight"].tolist() == [[1, 2], [3, 4]] and found["inner.bias"].tolist() == [2, 3, 4]
    assert found["ends"].tolist() == [1, 4] and found["same"].tolist() == [[4, 4]] * 2


MARK = "a_file_that_only_running_code_would_write"
COMMAND = text(f"touch {MARK}")
HOSTILE = {
    "a command": call(name("os", "system"), COMMAND),
    "a command in an attribute": module(x=call(name("posix", "system"), COMMAND)),
    "an expression": module(x=call(name("builtins", "eval"), text(f"open('{MARK}', 'w')"))),
    "a command in the old form": b"(" + COMMAND + b"ios\nsystem\n",
    "a process": module(x=call(name("subprocess", "getoutput"), COMMAND)),
    "another pickle": module(x=call(name("pickle", "loads"), COMMAND)),
    "another archive": module(x=call(name("torch.jit", "load"), COMMAND)),
    "an attribute of a module": module(x=call(name("builtins", "getattr"), COMMAND)),
    "a dotted way around": module(x=call(name("torch._utils", "_rebuild_tensor_v2.__globals__"), COMMAND)),
    "another class of PyTorch": module(x=call(name("torch.nn.modules.linear", "Linear"), integer(1))),
    "a quantised tensor": module(x=call(name("torch._utils", "_rebuild_qtensor"), storage())),
    "an extension": b"\x82\x01",
}


@pytest.mark.parametrize("pickle", HOSTILE.values(), ids=HOSTILE)
def test_nothing_but_weights_is_touched(write, tmp_path, monkeypatch, pickle):
    monkeypatch.chdir(tmp_path)
    path = write(pickle)
    with pytest.raises(CheckpointError, match="hostile.jit.*(never run|read)"):
        open_checkpoint(path)
    assert not (tmp_path / MARK).exists()


REBUILD = name("torch._utils", "_rebuild_tensor_v2")
CHANGE = b"}(" + text("x") + integer(1) + b"u"
UNSOUND = {
    "no module": (integer(1), "no module"),
    "an end too soon": (b"(", "description"),
    "a reader to be changed": (module(x=REBUILD + CHANGE + b"b"), "change"),
    "a reader's slots to be changed": (module(x=REBUILD + group(b"N", CHANGE) + b"b"), "change"),
    "a module's kind to be changed": (name("__torch__", "Net") + CHANGE + b"b", "change"),
    "a module of no attributes": (name("__torch__", "Net") + b")\x81" + integer(1) + b"b", "attributes"),
    "a module in itself": (name("__torch__", "Net") + b")\x81q\x00}(" + text("x") + b"h\x00ub", "without end"),
    "a view beyond the end": (module(x=tensor(offset=1)), "larger"),
    "a view far beyond the end": (module(x=tensor(stride=(1000, 1))), "larger"),
    "a view larger than all": (module(x=tensor(size=(1 << 20, 1 << 20), stride=(0, 0))), "larger"),
    "a view backwards": (module(x=tensor(offset=3, stride=(-2, -1))), "size.*-2"),
    "a view of nothing": (module(x=tensor(b"N")), "tensors.*invalid"),
    "a view with too few steps": (module(x=tensor(stride=(2,))), "tensors.*invalid"),
    "a view before the beginning": (module(x=tensor(offset=-1)), "place"),
    "more numbers than stored": (module(x=tensor(storage(integer(8)))), "16 bytes.*8 elements"),
    "numbers of two kinds": (module(x=tensor(), y=tensor(storage(kind="IntStorage"))), "torch.float32"),
    "numbers that do not divide": (module(x=tensor(storage(key="odd"))), "data/odd.*3 bytes.*float32"),
    "numbers of an unknown kind": (module(x=tensor(storage(kind="QInt8Storage"))), "torch.QInt8Storage"),
    "numbers elsewhere": (module(x=tensor(storage(key="../../0"))), "data/../../0"),
    "numbers that are none": (module(x=tensor(group(text("module"), b"N", b"N", b"N", b"N") + b"Q")), "storage"),
}


@pytest.mark.parametrize(("pickle", "message"), UNSOUND.values(), ids=UNSOUND)
def test_unsound_archives_are_refused(write, pickle, message):
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(write(pickle, **{"data/odd": b"123"}))


def test_compressed_archives_and_the_other_byte_order_are_refused(write):
    """Of a compressed one, a few bytes could stand for more than fit in memory."""
    with pytest.raises(CheckpointError, match="compressed"):
        open_checkpoint(write(module(x=tensor()), compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(CheckpointError, match="byte order"):
        open_checkpoint(write(module(x=tensor()), byteorder=b"big"))


def test_modules_that_multiply_are_refused(write):
    """60 modules, each of which contains the one before twice: 2^60 ways to the first."""
    pickle = module(weight=tensor()) + b"q\x00"
    for _ in range(60):
        pickle += b"0" + name("__torch__", "Net") + b")\x81}(" + text("a") + b"h\x00" + text("b") + b"h\x00ubq\x00"
    with pytest.raises(CheckpointError, match="without end"):
        open_checkpoint(write(pickle))


def test_damaged_archives_are_refused(archives, write, tmp_path):
    whole = (archives / "traced.jit").read_bytes()
    path = tmp_path / "damaged.jit"
    for content in (b"", whole[: len(whole) // 2], whole[:100] + b"\0" * len(whole), b"weights" * 50):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="damaged.jit.*Download"):
            open_checkpoint(path)
    sound = write(module(x=tensor()))
    numbers = struct.pack("<4f", 1, 2, 3, 4)
    path.write_bytes(sound.read_bytes().replace(numbers, numbers[::-1]))  # sizes fit, the checksum does not
    with pytest.raises(CheckpointError, match="CRC"):
        open_checkpoint(path)


def test_archives_of_other_things_are_refused(tmp_path, write):
    with zipfile.ZipFile(tmp_path / "other.jit", "w") as file:
        file.writestr("letter.txt", "hello")
    with pytest.raises(CheckpointError, match="data.pkl"):
        open_checkpoint(tmp_path / "other.jit")
    with pytest.raises(CheckpointError, match="no tensors"):
        open_checkpoint(write(module(training=b"\x89")))
