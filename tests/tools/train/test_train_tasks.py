"""The tasks: sizes of the networks, splits, and errors for data that are not what they should be."""

import gzip
import hashlib
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from gradwire.tools.input_errors import InputError
from gradwire.tools.train import cifar10, digits, fashion, tasks, text
from gradwire.tools.train.classification import Classification
from gradwire.tools.train.task import Schedule


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_unknown_task_names_the_known_ones() -> None:
    with pytest.raises(InputError, match=r"unknown task 'mnist'.*digits.*fashion.*cifar10.*text"):
        tasks.find("mnist")


def test_schedule_scales_and_halves() -> None:
    schedule = Schedule(0.05, times_workers=True, halve_every=25)
    assert [schedule.at(epoch, 8) for epoch in (0, 24, 25, 49, 50)] == [0.4, 0.4, 0.2, 0.2, 0.1]
    assert Schedule(1e-3).at(299, 8) == 1e-3


# digits


def test_digits_split_is_stratified_fixed_and_disjoint() -> None:
    task = digits.open_digits(None)
    assert isinstance(task, Classification)
    assert (task.samples, len(task.test_targets)) == (1437, 360)
    assert all(35 <= n <= 37 for n in task.test_targets.bincount().tolist())
    train, test = digits.split(torch.arange(1797).remainder(10).numpy())
    assert not set(train.tolist()) & set(test.tolist())
    assert digits.open_digits(None).fingerprint() == task.fingerprint()
    assert task.images.mean().abs() < 1e-5
    assert 0.5 < task.images.std() < 1.0


def test_digits_network_and_evaluation_in_shares() -> None:
    task = digits.open_digits(None)
    torch.manual_seed(0)
    model = task.make_model()
    assert count(model) == 85_002
    with torch.no_grad():
        whole = task.evaluate(model)
        parts = sum(task.evaluate(model, slice(rank, None, 7)) for rank in range(7))
    assert whole.tolist() == torch.as_tensor(parts).tolist()
    assert whole[1] == 360
    assert task.score(whole)["test_accuracy"] == whole[0] / 360


def test_digits_takes_no_data() -> None:
    with pytest.raises(InputError, match="takes no --data"):
        digits.open_digits(Path("somewhere"))


# fashion


def idx(*shape: int, fill: int = 0) -> bytes:
    lengths = b"".join(length.to_bytes(4, "big") for length in shape)
    return bytes([0, 0, 8, len(shape)]) + lengths + bytes((fill + k) % 10 for k in range(math.prod(shape)))


def write_fake_fashion(folder: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six pictures to train on and three to test on, and the checks made to expect them."""
    contents = (idx(6, 28, 28), idx(6), idx(3, 28, 28, fill=5), idx(3, fill=5))
    for name, content in zip(fashion.FILES, contents, strict=True):
        (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
    sizes = [(len(content), hashlib.md5(content).hexdigest()) for content in contents]
    monkeypatch.setattr(fashion, "FILES", dict(zip(fashion.FILES, sizes, strict=True)))


@pytest.mark.parametrize("packed", [False, True])
def test_fashion_reads_the_official_format(tmp_path: Path, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    write_fake_fashion(tmp_path, packed, monkeypatch)
    task = fashion.open_fashion(tmp_path)
    assert isinstance(task, Classification)
    assert (task.samples, task.targets.tolist(), task.test_targets.tolist()) == (6, [*range(6)], [5, 6, 7])
    assert task.images[1, :3].tolist() == [4, 5, 6], "784 pixels a picture"
    inputs, targets = task.batch(torch.tensor([2, 0]))
    assert inputs[1, 3].item() == pytest.approx((3 - fashion.MEAN) / fashion.DEVIATION)
    assert targets.tolist() == [2, 0]
    model = task.make_model()
    assert count(model) == 235_146
    with torch.no_grad():
        parts = torch.stack([task.evaluate(model, slice(rank, None, 2)) for rank in range(2)]).sum(0)
        assert task.evaluate(model).tolist() == parts.tolist()
    assert parts[1] == 3


def test_fashion_says_which_file_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="needs --data DIR"):
        fashion.open_fashion(None)
    with pytest.raises(InputError, match="is not a folder"):
        fashion.open_fashion(tmp_path / "absent")
    with pytest.raises(InputError, match="train-images-idx3-ubyte is missing"):
        fashion.open_fashion(tmp_path)
    write_fake_fashion(tmp_path, True, monkeypatch)
    labels = tmp_path / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(6) + b"more"))
    with pytest.raises(InputError, match=r"train-labels-idx1-ubyte\.gz has MD5 [0-9a-f]{32}, the official file"):
        fashion.open_fashion(tmp_path)
    labels.write_bytes(gzip.compress(idx(6))[:-9])
    with pytest.raises(InputError, match=r"train-labels-idx1-ubyte\.gz cannot be read"):
        fashion.open_fashion(tmp_path)


# cifar10


def test_cifar10_network_has_the_papers_size() -> None:
    network = cifar10.make_network()
    assert count(network) == 14_987_200
    assert [m.p for m in network if isinstance(m, nn.Dropout)] == [0.3] + [0.4] * 7 + [0.5] * 2
    assert sum(isinstance(m, nn.MaxPool2d) for m in network) == 5
    assert all(m.bias is None for m in network if isinstance(m, nn.Conv2d | nn.Linear))


def small_cifar10() -> Classification:
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (6, 3, 32, 32), generator=generator, dtype=torch.uint8)
    targets = torch.randint(0, 10, (6,), generator=generator)
    return cifar10.task_of(images[:4], targets[:4], images[4:], targets[4:])


def test_cifar10_takes_a_step_on_random_images() -> None:
    task = small_cifar10()
    model = task.make_model()
    inputs, targets = task.batch(torch.tensor([2, 0]))
    assert inputs.shape == (2, 3, 32, 32)
    assert 0 <= inputs.min() < inputs.max() <= 1
    task.loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    model.eval()
    with torch.no_grad():
        assert task.evaluate(model)[1] == 2
        assert task.evaluate(model, slice(2, None, 3)).tolist() == [0, 0], "a worker may have nothing to test"


def write_fake_cifar10(folder: Path, records: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of `records` images each, and the checks made to expect them."""
    monkeypatch.setattr(cifar10, "FILE_BYTES", records * cifar10.RECORD_BYTES)
    digests = {}
    for number, name in enumerate(cifar10.FILES):
        pixels = bytes([number]) * 1024 + b"\x80" * 1024 + b"\xff" * 1024
        (folder / name).write_bytes(b"".join(bytes([k % 10]) + pixels for k in range(records)))
        digests[name] = hashlib.md5((folder / name).read_bytes()).hexdigest()
    monkeypatch.setattr(cifar10, "FILES", digests)


@pytest.mark.parametrize("subfolder", ["", cifar10.SUBFOLDER])
def test_cifar10_reads_the_binary_format(tmp_path: Path, subfolder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / subfolder).mkdir(exist_ok=True)
    write_fake_cifar10(tmp_path / subfolder, 12, monkeypatch)
    task = cifar10.open_cifar10(tmp_path)
    assert isinstance(task, Classification)
    assert (task.samples, len(task.test_targets)) == (60, 12)
    assert task.targets[:12].tolist() == [*range(10), 0, 1]
    assert task.images[13, :, 5, 7].tolist() == [1, 0x80, 0xFF], "planes: the file's number, then 128, then 255"
    assert task.test_images[0, 0, 0, 0] == 5


def test_cifar10_says_which_file_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="needs --data DIR"):
        cifar10.open_cifar10(None)
    with pytest.raises(InputError, match="is not a folder"):
        cifar10.open_cifar10(tmp_path / "absent")
    with pytest.raises(InputError, match=r"data_batch_1\.bin is missing"):
        cifar10.open_cifar10(tmp_path)
    write_fake_cifar10(tmp_path, 3, monkeypatch)
    third = tmp_path / "data_batch_3.bin"
    content = third.read_bytes()
    third.write_bytes(content[:-1])
    with pytest.raises(InputError, match=r"data_batch_3\.bin has 9,218 bytes, the official file 9,219"):
        cifar10.open_cifar10(tmp_path)
    third.write_bytes(content[:-1] + b"\x00")
    with pytest.raises(InputError, match=r"data_batch_3\.bin has MD5 [0-9a-f]{32}, the official file"):
        cifar10.open_cifar10(tmp_path)


def test_cifar10_checks_the_official_sizes_and_digests() -> None:
    assert cifar10.FILE_BYTES == 30_730_000
    assert len(cifar10.FILES) == 6
    assert cifar10.FILES["test_batch.bin"] == "803d5f7f4d78ea53de84dbe85f74fb6d"


# text


def test_text_windows_and_split(text_file: Path) -> None:
    task = text.open_text(text_file)
    assert isinstance(task, text.Text)
    content = text_file.read_bytes()
    assert task.boundary == len(content) - int(0.05 * len(content))
    inputs, targets = task.batch(torch.tensor([0, task.samples - 1]))
    assert bytes(inputs[0].tolist()) == content[:128]
    assert bytes(targets[0].tolist()) == content[1:129]
    last = (task.samples - 1) * 128
    assert bytes(targets[1].tolist()) == content[last + 1 : last + 129]
    assert last + 129 <= task.boundary, "no training window reaches into the held-out part"


def test_text_network_starts_at_eight_bits_a_byte(text_file: Path) -> None:
    task = text.open_text(text_file)
    torch.manual_seed(0)
    model = task.make_model()
    assert count(model) == 875_264
    with torch.no_grad():
        whole = task.evaluate(model)
        parts = torch.stack([task.evaluate(model, slice(rank, None, 9)) for rank in range(9)]).sum(0)
    score = task.score(whole)
    assert 7.5 < score["bits_per_byte"] < 8.5
    assert math.isclose(score["val_loss"], score["bits_per_byte"] * math.log(2))
    assert torch.allclose(whole, parts, rtol=1e-5)  # float32 losses, added up in another order


def test_text_is_causal(text_file: Path) -> None:
    task = text.open_text(text_file)
    model = task.make_model()
    inputs, _ = task.batch(torch.tensor([0]))
    changed = inputs.clone()
    changed[0, 100:] = 0
    with torch.no_grad():
        before, after = model(inputs), model(changed)
    assert torch.allclose(before[0, :100], after[0, :100], atol=1e-5)
    assert not torch.allclose(before[0, 100:], after[0, 100:], atol=1e-5)


def test_text_refuses_files_without_enough_in_them(tmp_path: Path) -> None:
    path = tmp_path / "short.txt"
    with pytest.raises(InputError, match="needs --data FILE"):
        text.open_text(None)
    with pytest.raises(InputError, match="is not a file"):
        text.open_text(path)
    path.write_bytes(b"")
    with pytest.raises(InputError, match="is empty; at least 258 bytes"):
        text.open_text(path)
    path.write_bytes(b"x" * 257)
    with pytest.raises(InputError, match="has 257 bytes; at least 258"):
        text.open_text(path)
    path.write_bytes(b"x" * 258)
    assert text.open_text(path).samples == 1
