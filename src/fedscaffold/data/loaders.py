"""Data sets by name: `digits` of scikit-learn, and local copies of public files.

To add a data set, write a function and add it to `DATASETS`. If the files have no separate test
records, these are drawn with a fixed seed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fedscaffold import checks
from fedscaffold.checks import InputError
from fedscaffold.data.dataset import Array, Dataset, Floats, Indices, Labels, check_dataset
from fedscaffold.data.find_files import read
from fedscaffold.data.formats import csv_table, idx_array, libsvm_table, npz_arrays
from fedscaffold.data.splits import holdout

__all__ = ["DATASETS", "DEBIAN", "HOSPITALS", "load"]

# where the Debian package dataset-fashion-mnist puts its files
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")
HOLDOUT_SEED = 0

LIBSVM_PAGE = (
    "the LIBSVM data sets page (www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary.html)"
)
EMNIST_PAGE = (
    "EMNIST by NIST (www.nist.gov/itl/products-and-services/emnist-dataset; docs/data.md has the "
    "recipe)"
)
HEART_PAGE = "UCI Heart Disease (archive.ics.uci.edu/dataset/45/heart+disease)"
FASHION_PAGE = (
    "the Debian package dataset-fashion-mnist or github.com/zalandoresearch/fashion-mnist"
)


def load(name: str, folder: str | Path | None = None) -> Dataset:
    """Load a data set.

    Args:
        name: A key of `DATASETS`.
        folder: Folder of the files; default: that of the environment variable FEDSCAFFOLD_DATA.
            `digits` needs none.

    Raises:
        FileNotFoundError: A file is missing; the message has the address of the original.
        InputError: The name is unknown, or a file is damaged.

    >>> digits = load("digits")
    >>> digits.x.shape, digits.x_test.shape, digits.classes
    ((1400, 64), (397, 64), 10)
    """
    loader = DATASETS[checks.choice("data set", name, DATASETS)]
    return loader(None if folder is None else Path(folder))


def digits(folder: Path | None = None) -> Dataset:
    """Handwritten digits, 8 x 8, of scikit-learn: 1,400 for training and 397 for the test.

    >>> digits().y.dtype
    dtype('int32')
    """
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise InputError(
            "digits needs scikit-learn; install it with: pip install 'fedscaffold[sim]'"
        ) from None
    raw, labels = load_digits(return_X_y=True)
    train, test = holdout(labels, 397, seed=HOLDOUT_SEED)
    x, y = (raw / 16).astype(np.float32), labels.astype(np.int32)
    source = "Optical Recognition of Handwritten Digits (UCI), as bundled with scikit-learn."
    return check_dataset(Dataset("digits", x[train], y[train], x[test], y[test], 10, source=source))


def pictures(raw: Array, where: str) -> Floats:
    """Grey pictures (n, height, width) of bytes as flat rows with values from 0 to 1.

    >>> pictures(np.full((1, 1, 2), 255, np.uint8), "mine")
    array([[1., 1.]], dtype=float32)
    >>> pictures(np.zeros((1, 28, 28)), "mine")
    Traceback (most recent call last):
    fedscaffold.checks.InputError: pictures in mine must be unsigned bytes of shape (n, height, ...
    """
    if raw.dtype != np.uint8 or raw.ndim != 3:
        wanted = "must be unsigned bytes of shape (n, height, width)"
        raise InputError(
            f"pictures in {where} {wanted}, got {raw.dtype} {raw.shape}; fetch it again"
        )
    x = raw.reshape(len(raw), raw.shape[1] * raw.shape[2]).astype(np.float32)
    x /= np.float32(255)  # in place: the large files take hundreds of megabytes
    return x


def emnist(name: str, file: str, classes: int, folder: Path | None = None) -> Dataset:
    """EMNIST pictures of handwritten letters and digits, 28 x 28, upright, from an npz of bytes.

    The archive holds x_train (n, 28, 28), y_train, x_test and y_test; the split is the file's own.

    >>> emnist("emnist", "emnist_byclass62.npz", 62, Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: emnist_byclass62.npz not found in nowhere/emnist, nowhere; get it from EMNIST
        ...
    """
    raw, where = read(file, folder, "emnist", EMNIST_PAGE)
    x, y, x_test, y_test = npz_arrays(raw, ["x_train", "y_train", "x_test", "y_test"], where)
    if y.dtype.kind not in "iu" or y_test.dtype.kind not in "iu":
        raise InputError(
            f"labels in {where} must be whole numbers, got {y.dtype} and {y_test.dtype}; fetch it "
            "again"
        )
    inputs, inputs_test = pictures(x, where), pictures(x_test, where)
    source = (
        "EMNIST (Cohen, Afshar, Tapson and van Schaik 2017), made from NIST Special Database 19."
    )
    labels, labels_test = y.astype(np.int32), y_test.astype(np.int32)
    return check_dataset(
        Dataset(name, inputs, labels, inputs_test, labels_test, classes, source=source)
    )


def heart(folder: Path | None = None) -> Dataset:
    """UCI Heart Disease: 920 patients of four hospitals, 13 measurements, disease or none.

    A diagnosis above 0 is disease.

    A quarter of the patients is set apart for the test, stratified by hospital and label. A missing
    value (`?`) becomes the median of its column over the training records of all hospitals; then
    every column is standardised with the mean and deviation of those same records. So the hospitals
    share 13 medians, means and deviations, to which the test adds nothing. Categories (chest pain,
    slope, thal ...) stay the numbers they are written as, and a cholesterol of 0 (all of
    switzerland) stays 0.

    >>> heart(Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: processed.cleveland.data not found in nowhere/heart, nowhere; get it from UCI
        Heart ...
    """
    files = [
        read(f"processed.{hospital}.data", folder, "heart", HEART_PAGE) for hospital in HOSPITALS
    ]
    tables = [csv_table(raw, 14, where) for raw, where in files]
    table, sizes = np.concatenate(tables), [len(rows) for rows in tables]
    raw, label = table[:, :13], table[:, 13]
    if np.isnan(label).any():
        raise InputError(
            "heart: the last column (the diagnosis) must not be missing; fetch the files again"
        )
    groups, y = np.repeat(np.arange(4, dtype=np.int32), sizes), (label > 0).astype(np.int32)
    train, test = holdout(2 * groups + y, len(y) // 4, seed=HOLDOUT_SEED)
    x = standardise(raw, train)
    source = "Heart Disease (Janosi, Steinbrunn, Pfisterer and Detrano 1988), UCI, CC BY 4.0."
    parts = x[train], y[train], x[test], y[test]
    return check_dataset(Dataset("heart", *parts, 2, groups[train], source))


def standardise(raw: npt.NDArray[np.float64], train: Indices) -> Floats:
    """Replace NaN by the median and standardise columns, by statistics of the rows `train`.

    >>> raw = np.array([[0.0], [np.nan], [2.0], [0.0], [2.0], [5.0]])
    >>> standardise(raw, np.array([0, 2, 3, 4])).ravel()
    array([-1.,  0.,  1., -1.,  1.,  4.], dtype=float32)
    """
    unknown = np.flatnonzero(np.isnan(raw[train]).all(axis=0))
    if unknown.size:
        raise InputError(
            f"heart: column {unknown[0] + 1} has no value in any training record; fetch the files "
            "again"
        )
    x = np.where(np.isnan(raw), np.nanmedian(raw[train], axis=0), raw)
    deviation = x[train].std(axis=0)
    deviation[deviation == 0] = 1  # a constant column carries nothing: leave it at 0
    return np.asarray((x - x[train].mean(axis=0)) / deviation, np.float32)


def binary(labels: npt.NDArray[np.float64], pair: tuple[int, int], where: str) -> Labels:
    """Labels 0 and 1 for the two values of `pair`.

    >>> binary(np.array([-1.0, 1.0]), (-1, 1), "mine").tolist()
    [0, 1]
    """
    strange = labels[~np.isin(labels, pair)]
    if strange.size:
        raise InputError(
            f"labels in {where} must be {pair[0]} or {pair[1]}, got {strange[0]:g}; fetch it again"
        )
    return np.asarray(labels == pair[1], np.int32)


def libsvm_part(
    file: str, features: int, pair: tuple[int, int], folder: Path | None
) -> tuple[Floats, Labels]:
    """Inputs and 0/1 labels of one LIBSVM file whose two labels are `pair`.

    >>> libsvm_part("a9a.t", 123, (-1, 1), Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: a9a.t not found in nowhere/libsvm, nowhere; get it from the LIBSVM data sets
        page ...
    """
    raw, where = read(file, folder, "libsvm", LIBSVM_PAGE)
    x, labels = libsvm_table(raw, features, where)
    return x, binary(labels, pair, where)


def a9a(folder: Path | None = None) -> Dataset:
    """Adult census income as LIBSVM encodes it: 123 binary features; the test is a9a.t.

    >>> a9a(Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: a9a not found in nowhere/libsvm, nowhere; get it from the LIBSVM data sets
        page ...
    """
    x, y = libsvm_part("a9a", 123, (-1, 1), folder)
    x_test, y_test = libsvm_part("a9a.t", 123, (-1, 1), folder)
    source = (
        "Adult (Becker and Kohavi 1996, UCI), encoded by Platt 1998, from the LIBSVM data sets."
    )
    return check_dataset(Dataset("a9a", x, y, x_test, y_test, 2, source=source))


def mushrooms(folder: Path | None = None) -> Dataset:
    """Mushrooms as LIBSVM encodes them: 112 binary features, 1 if edible; a quarter is the test.

    >>> mushrooms(Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: mushrooms not found in nowhere/libsvm, nowhere; get it from the LIBSVM data
        ...
    """
    x, y = libsvm_part("mushrooms", 112, (1, 2), folder)
    train, test = holdout(y, len(y) // 4, seed=HOLDOUT_SEED)
    source = "Mushroom (Schlimmer 1987, UCI), from the LIBSVM data sets."
    return check_dataset(
        Dataset("mushrooms", x[train], y[train], x[test], y[test], 2, source=source)
    )


def idx_part(part: str, folder: Path | None) -> tuple[Floats, Labels]:
    """Inputs and labels of one pair of idx files.

    >>> idx_part("validation", Path("nowhere"))
    Traceback (most recent call last):
    FileNotFoundError: validation-images-idx3-ubyte not found in nowhere/fashion-mnist, nowhere, ...
    """
    raw, where = read(f"{part}-images-idx3-ubyte", folder, "fashion-mnist", FASHION_PAGE, [DEBIAN])
    labels, labels_at = read(
        f"{part}-labels-idx1-ubyte", folder, "fashion-mnist", FASHION_PAGE, [DEBIAN]
    )
    x = pictures(idx_array(raw, 3, where), where)
    return x, idx_array(labels, 1, labels_at).astype(np.int32)


def fashion_mnist(folder: Path | None = None) -> Dataset:
    """Fashion-MNIST: 70,000 pictures of clothes, 28 x 28, from four idx files (or .gz).

    Also found where the Debian package puts it, without any folder given. The files are named as
    MNIST's are: keep them in a folder of their own, `fashion-mnist`.

    >>> DEBIAN.as_posix()
    '/usr/share/datasets/fashion-mnist'
    """
    x, y = idx_part("train", folder)
    x_test, y_test = idx_part("t10k", folder)
    source = "Fashion-MNIST (Xiao, Rasul and Vollgraf 2017), Zalando Research, MIT licence."
    return check_dataset(Dataset("fashion-mnist", x, y, x_test, y_test, 10, source=source))


DATASETS: dict[str, Callable[[Path | None], Dataset]] = {
    "digits": digits,
    "emnist": partial(emnist, "emnist", "emnist_byclass62.npz", 62),
    "emnist47": partial(emnist, "emnist47", "emnist_balanced47_small.npz", 47),
    "emnist47-tiny": partial(emnist, "emnist47-tiny", "emnist_balanced47_tiny.npz", 47),
    "heart": heart,
    "a9a": a9a,
    "mushrooms": mushrooms,
    "fashion-mnist": fashion_mnist,
}
