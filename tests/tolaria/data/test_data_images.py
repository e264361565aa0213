import gzip
import sys
from dataclasses import astuple
from hashlib import sha256

import numpy as np
import pytest
import torch

from esper.leyline import ConfigError, DataMissingError
from esper.tolaria.data import catalogue, images
from esper.tolaria.data.catalogue import CIFAR10_FILES, IDX_FILES


def same(one, two) -> bool:
    return all(torch.equal(a, b) for a, b in zip(astuple(one), astuple(two), strict=True))


def rows_of(x: torch.Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


# digits


def test_digits_have_the_promised_sizes_scale_and_balance():
    data = images.load_digits()
    assert [len(x) for x in (data.train_x, data.val_x, data.test_x)] == [1200, 297, 300]
    assert data.train_x.shape[1:] == (1, 8, 8)
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert data.train_x.std(unbiased=False).item() == pytest.approx(1, abs=1e-5)
    for y in (data.train_y, data.val_y, data.test_y):
        shares = torch.bincount(y, minlength=10) / len(y)
        assert shares.min() > 0.09
        assert shares.max() < 0.11


def test_digits_parts_are_disjoint_and_the_same_every_time():
    data = images.load_digits()
    train, val, test = rows_of(data.train_x), rows_of(data.val_x), rows_of(data.test_x)
    assert not train & val
    assert not train & test
    assert not val & test
    torch.manual_seed(99)
    assert same(data, images.load_digits())


def test_digits_parts_never_change():
    data = images.load_digits()
    marks = [sha256(y.numpy().astype("<i8").tobytes()).hexdigest()[:8] for y in astuple(data)[1::2]]
    assert marks == ["ff841391", "387778f6", "8198cd2a"]


def test_digits_without_scikit_learn_name_the_extra(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(DataMissingError, match=r'pip install "esper-grow\[digits\]"'):
        images.load_digits()
    found = catalogue.status("digits", tmp_path)
    assert found.state == "missing"
    assert "esper-grow[digits]" in found.detail


# idx


def idx_bytes(array: np.ndarray) -> bytes:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return header + array.astype(np.uint8).tobytes()


@pytest.fixture
def mnist(tmp_path):
    """A data folder with 40 training and 10 test images of 5×6, all different."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (50, 5, 6))
    classes = np.arange(50) % 10
    for name, array in zip(
        IDX_FILES, (pixels[:40], classes[:40], pixels[40:], classes[40:]), strict=True
    ):
        (folder / name).write_bytes(idx_bytes(array))
    return tmp_path


def test_idx_files_are_read_split_and_scaled(mnist):
    data = images.load_mnist(mnist)
    assert data.train_x.shape == (36, 1, 5, 6)
    assert data.val_x.shape == (4, 1, 5, 6)
    assert data.test_y.tolist() == list(range(10))
    assert data.train_x.mean().item() == pytest.approx(0, abs=1e-5)
    assert not rows_of(data.train_x) & rows_of(data.val_x)
    assert same(data, images.load_mnist(mnist))
    # Pixels and labels still belong together: the test part is in the order of the file.
    pixels = np.random.default_rng(0).integers(0, 256, (50, 5, 6))[40:]
    span = data.test_x[:, 0].flatten().numpy()
    assert np.corrcoef(span, pixels.flatten())[0, 1] == pytest.approx(1)


def test_gzipped_idx_files_give_the_same(mnist):
    plain = images.load_mnist(mnist)
    for name in IDX_FILES:
        path = mnist / "mnist" / name
        path.with_name(f"{name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert same(plain, images.load_mnist(mnist))


def test_missing_idx_file_says_what_to_put_where(mnist):
    (mnist / "mnist" / IDX_FILES[2]).unlink()
    with pytest.raises(DataMissingError, match="esper data get mnist") as error:
        images.load_mnist(mnist)
    assert IDX_FILES[2] in str(error.value)
    assert str(mnist / "mnist") in str(error.value)
    with pytest.raises(DataMissingError, match="esper data get fashion_mnist"):
        images.load_mnist(mnist, "fashion_mnist")


@pytest.mark.parametrize("file", range(4))
@pytest.mark.parametrize(
    "harm",
    [
        lambda data: data[:-1],
        lambda data: data + b"x",
        lambda data: b"PK" + data[2:],
        lambda _: b"",
    ],
    ids=["cut", "longer", "magic", "empty"],
)
def test_damaged_idx_file_is_named_with_the_cure(mnist, file, harm):
    path = mnist / "mnist" / IDX_FILES[file]
    path.write_bytes(harm(path.read_bytes()))
    with pytest.raises(ConfigError, match="esper data get mnist") as error:
        images.load_mnist(mnist)
    assert str(path) in str(error.value)


@pytest.mark.parametrize(
    "contents", [gzip.compress(bytes(500))[:-9], b"no gzip at all"], ids=["cut off", "no gzip"]
)
def test_damaged_gzip_is_named_with_the_cure(mnist, contents):
    path = mnist / "mnist" / IDX_FILES[0]
    path.unlink()
    path.with_name(f"{path.name}.gz").write_bytes(contents)
    with pytest.raises(
        ConfigError, match=f"{path.name}.gz is a damaged gzip.*esper data get mnist"
    ):
        images.load_mnist(mnist)


def test_labels_that_do_not_fit_the_images_are_refused(mnist):
    path = mnist / "mnist" / IDX_FILES[1]
    path.write_bytes(idx_bytes(np.zeros(39)))
    with pytest.raises(ConfigError, match=r"40 images .* 39 labels"):
        images.load_mnist(mnist)
    path.write_bytes(idx_bytes(np.full(40, 10)))
    with pytest.raises(ConfigError, match="label 10"):
        images.load_mnist(mnist)


# cifar10


@pytest.fixture
def cifar(tmp_path):
    """A data folder with six batches of 10 records."""
    folder = tmp_path / "cifar10"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in CIFAR10_FILES:
        records = rng.integers(0, 256, (10, images.CIFAR10_RECORD), dtype=np.uint8)
        records[:, 0] = np.arange(10)
        (folder / name).write_bytes(records.tobytes())
    return tmp_path


def test_cifar_batches_are_read_and_normalised(cifar):
    data = images.load_cifar10(cifar)
    assert data.train_x.shape == (45, 3, 32, 32)
    assert data.val_x.shape == (5, 3, 32, 32)
    assert data.test_y.tolist() == list(range(10))
    record = np.frombuffer((cifar / "cifar10" / "test_batch.bin").read_bytes(), np.uint8)
    green = record[1 + 1024 + 32 * 3 + 7]  # of the first image, row 3, column 7
    expected = (green / 255 - 0.4822) / 0.2435
    assert data.test_x[0, 1, 3, 7].item() == pytest.approx(expected, abs=1e-5)
    assert not rows_of(data.train_x) & rows_of(data.val_x)
    assert same(data, images.load_cifar10(cifar))


def test_few_cifar_images_are_some_of_all_at_half_the_size(cifar):
    everything, few = images.load_cifar10(cifar), images.load_small_cifar10(cifar, train=20, val=10)
    assert few.train_x.shape == (20, 3, 16, 16)
    assert few.val_x.shape == (10, 3, 16, 16)
    assert not rows_of(few.train_x) & rows_of(few.val_x)
    assert few.train_y.bincount().tolist() == [2] * 10
    whole, small = everything.test_x[4, 2, 6:8, 10:12], few.test_x[4, 2, 3, 5]
    assert small.item() == pytest.approx(whole.mean().item(), abs=1e-5)
    assert torch.equal(few.test_y, everything.test_y)
    assert same(few, images.load_small_cifar10(cifar, train=20, val=10))
    with pytest.raises(ConfigError, match="cannot be split"):
        images.load_small_cifar10(cifar, train=45, val=10)


@pytest.mark.parametrize(
    ("contents", "complaint"),
    [
        (bytes(images.CIFAR10_RECORD * 2 - 1), "whole number of records"),
        (b"", "whole number of records"),
        (bytes([10]) + bytes(images.CIFAR10_RECORD - 1), "label 10"),
    ],
)
def test_damaged_cifar_batch_is_named_with_the_cure(cifar, contents, complaint):
    path = cifar / "cifar10" / "data_batch_3.bin"
    path.write_bytes(contents)
    with pytest.raises(ConfigError, match=complaint) as error:
        images.load_cifar10(cifar)
    assert str(path) in str(error.value)
    assert "esper data get cifar10" in str(error.value)


def test_missing_cifar_batch_says_what_to_put_where(cifar):
    (cifar / "cifar10" / "data_batch_5.bin").unlink()
    with pytest.raises(
        DataMissingError, match=r"data_batch_5\.bin is missing.*esper data get cifar10"
    ):
        images.load_cifar10(cifar)


def test_augment_is_a_crop_of_the_black_padded_image_sometimes_mirrored():
    pixels = torch.randint(1, 256, (64, 3, 32, 32), generator=torch.Generator().manual_seed(1))
    batch = images.normalise_cifar10(pixels.to(torch.uint8))
    padded = images.normalise_cifar10(torch.zeros(64, 3072, dtype=torch.uint8))
    padded = padded[:, :, :1, :1].repeat(1, 1, 40, 40)
    padded[:, :, 4:36, 4:36] = batch
    out = images.augment_cifar10(batch, torch.Generator().manual_seed(2))
    assert out.shape == batch.shape
    shifts, mirrored = set(), 0
    for image, result in zip(padded, out, strict=True):
        crops = {
            (down, right, flip): image[:, down : down + 32, right : right + 32].flip(2)
            if flip
            else image[:, down : down + 32, right : right + 32]
            for down in range(9)
            for right in range(9)
            for flip in (False, True)
        }
        (found,) = [key for key, crop in crops.items() if torch.allclose(crop, result, atol=1e-6)]
        shifts.add(found[:2])
        mirrored += found[2]
    assert {down for down, _ in shifts} == {right for _, right in shifts} == set(range(9))
    assert 20 < mirrored < 44


def test_augment_is_a_function_of_the_generator_and_leaves_its_input():
    batch = torch.rand(8, 3, 32, 32)
    before = batch.clone()
    one = images.augment_cifar10(batch, torch.Generator().manual_seed(3))
    two = images.augment_cifar10(batch, torch.Generator().manual_seed(3))
    other = images.augment_cifar10(batch, torch.Generator().manual_seed(4))
    assert torch.equal(one, two)
    assert not torch.equal(one, other)
    assert torch.equal(batch, before)
