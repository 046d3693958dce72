"""Data sets that have a name: what they hold, whose they are, the files that their owners publish, and where they lie.

Facts alone: nothing is read or downloaded here. Those that no package ships are `NAME.npz` in a folder; `sottovoce data fetch`
puts them there.
"""

from __future__ import annotations

import difflib
import importlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_UCI = "https://archive.ics.uci.edu"
_LIBSVM = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets"
_MNIST = ("https://ossci-datasets.s3.amazonaws.com/mnist", "https://storage.googleapis.com/cvdf-datasets/mnist")


@dataclass(frozen=True, slots=True)
class Original:
    """A file as its owner publishes it.

    Attributes:
        name: the owner's. What is packed where it lies, as `NAME.gz` or in a zip archive, is meant as it is without that.
        places: URLs, to be tried in this order; `URL#MEMBER` is a file in a zip archive.
        size: bytes, of what `name` means; about, where nobody is sure.
        digest: `sha256:` or `md5:` and hexadecimal figures, of the same; None: not known for certain.
    """

    name: str
    places: tuple[str, ...]
    size: int
    digest: str | None = None


@dataclass(frozen=True, slots=True)
class KnownSource:
    """A data set that a spec may name as `data.source`.

    Attributes:
        name: of the source.
        title: its owner's name for it.
        task: what is to be told of a record, in a few words.
        records: how many there are to learn from.
        held_out: how many more its owner has set apart for tests.
        features: columns that a learner sees: one for each value of a category, without the intercept.
        classes: what the labels mean, in ascending order of the labels.
        licence: as it is stated where `page` leads, or by those who quote it.
        citation: what its owner asks to be cited.
        page: where to read more.
        download: bytes, about. 0: a package ships it.
        originals: what it is made from. Empty: it is here, shipped by scikit-learn or made by this package.
        made: by this package, of nothing that happened.
    """

    name: str
    title: str
    task: str
    records: int
    features: int
    classes: tuple[str, ...]
    licence: str
    citation: str
    page: str
    held_out: int = 0
    download: int = 0
    originals: tuple[Original, ...] = ()
    made: bool = False


def _uci(folder: str, name: str, archive: str, size: int, digest: str, member: str | None = None) -> Original:
    """A file that UCI has in its folder of old, and in the archive that its pages offer now."""
    old, new = f"{_UCI}/ml/machine-learning-databases/{folder}/{name}", f"{_UCI}/static/public/{archive}"
    return Original(name, (old, f"{new}#{member or name}"), size, digest)


def _mnist(name: str, size: int, digest: str) -> Original:
    return Original(name, tuple(f"{place}/{name}.gz" for place in _MNIST), size, digest)


_CC_BY = "CC BY 4.0"
_DIGITS = tuple("0123456789")

_SOURCES = (
    KnownSource(
        name="breast_cancer",
        title="UCI 'Breast Cancer Wisconsin (Diagnostic)'",
        task="malignant or benign",
        records=569,
        features=30,
        classes=("malignant", "benign"),
        licence=_CC_BY,
        citation="W. Wolberg, O. Mangasarian, N. Street and W. Street: Breast Cancer Wisconsin (Diagnostic). UCI Machine "
        "Learning Repository, 1993. doi 10.24432/C5DW2B",
        page=f"{_UCI}/dataset/17",
    ),
    KnownSource(
        name="digits",
        title="UCI 'Optical Recognition of Handwritten Digits', the test part",
        task="which digit",
        records=1797,
        features=64,
        classes=_DIGITS,
        licence=_CC_BY,
        citation="E. Alpaydin and C. Kaynak: Optical Recognition of Handwritten Digits. UCI Machine Learning Repository, 1998. "
        "doi 10.24432/C50P49",
        page=f"{_UCI}/dataset/80",
    ),
    KnownSource(
        name="vital_signs",
        title="made-up patients of a year, whose illness drifts with the season",
        task="worse a day later, or not",
        records=75_000,
        held_out=25_000,
        features=6,
        classes=("not worse", "worse"),
        licence="as the program",
        citation="nobody: it is made by the program, the same at every call",
        page="docs/data.md",
        made=True,
    ),
    KnownSource(
        name="mushrooms",
        title="UCI 'Mushroom'",
        task="edible or poisonous",
        records=8124,
        features=112,
        classes=("edible", "poisonous"),
        licence=_CC_BY,
        citation="Mushroom. UCI Machine Learning Repository, 1981 (J. Schlimmer, 1987). doi 10.24432/C5959T",
        page=f"{_UCI}/dataset/73",
        download=373_704,
        originals=(
            _uci(
                "mushroom",
                "agaricus-lepiota.data",
                "73/mushroom.zip",
                373_704,
                "sha256:e65d082030501a3ebcbcd7c9f7c71aa9d28fdfff463bf4cf4716a3fe13ac360e",
            ),
        ),
    ),
    KnownSource(
        name="adult",
        title="UCI 'Adult' (Census Income)",
        task="income above 50K",
        records=32_561,
        held_out=16_281,
        features=105,
        classes=("<=50K", ">50K"),
        licence=_CC_BY,
        citation="B. Becker and R. Kohavi: Adult. UCI Machine Learning Repository, 1996. doi 10.24432/C5XW20",
        page=f"{_UCI}/dataset/2",
        download=3_974_305 + 2_003_153,
        originals=(
            _uci(
                "adult",
                "adult.data",
                "2/adult.zip",
                3_974_305,
                "sha256:5b00264637dbfec36bdeaab5676b0b309ff9eb788d63554ca0a249491c86603d",
            ),
            _uci(
                "adult",
                "adult.test",
                "2/adult.zip",
                2_003_153,
                "sha256:a2a9044bc167a35b2361efbabec64e89d69ce82d9790d2980119aac5fd7e9c05",
            ),
        ),
    ),
    KnownSource(
        name="a9a",
        title="LIBSVM 'a9a', made by J. Platt from UCI 'Adult'",
        task="income above 50K",
        records=32_561,
        held_out=16_281,
        features=123,
        classes=("<=50K", ">50K"),
        licence="none stated",
        citation="C.-C. Chang and C.-J. Lin: LIBSVM: a library for support vector machines. ACM Transactions on Intelligent "
        "Systems and Technology 2(3), 2011",
        page=f"{_LIBSVM}/binary.html",
        download=2_329_875 + 1_164_628,
        originals=(
            Original(
                "a9a",
                (f"{_LIBSVM}/binary/a9a",),
                2_329_875,
                "sha256:f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
            ),
            Original(
                "a9a.t",
                (f"{_LIBSVM}/binary/a9a.t",),
                1_164_628,
                "sha256:1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
            ),
        ),
    ),
    KnownSource(
        name="letter",
        title="UCI 'Letter Recognition'",
        task="which letter",
        records=20_000,
        features=16,
        classes=tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ"),
        licence=_CC_BY,
        citation="P. Frey and D. Slate: Letter recognition using Holland-style adaptive classifiers. Machine Learning 6, 1991. "
        "doi 10.24432/C5ZP40",
        page=f"{_UCI}/dataset/59",
        download=712_565,
        originals=(
            _uci(
                "letter-recognition",
                "letter-recognition.data",
                "59/letter+recognition.zip",
                712_565,
                "sha256:2b89f3602cf768d3c8355267d2f13f2417809e101fc2b5ceee10db19a60de6e2",
            ),
        ),
    ),
    KnownSource(
        name="mnist",
        title="The MNIST database of handwritten digits",
        task="which digit",
        records=60_000,
        held_out=10_000,
        features=784,
        classes=_DIGITS,
        licence="CC BY-SA 3.0",
        citation="Y. LeCun, L. Bottou, Y. Bengio and P. Haffner: Gradient-based learning applied to document recognition. "
        "Proceedings of the IEEE 86(11), 1998",
        page="http://yann.lecun.com/exdb/mnist",
        download=11_594_722,
        originals=(
            _mnist(
                "train-images-idx3-ubyte",
                47_040_016,
                "sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            ),
            _mnist(
                "train-labels-idx1-ubyte",
                60_008,
                "sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            ),
            _mnist(
                "t10k-images-idx3-ubyte",
                7_840_016,
                "sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            ),
            _mnist(
                "t10k-labels-idx1-ubyte",
                10_008,
                "sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
            ),
        ),
    ),
    KnownSource(
        name="poker",
        title="UCI 'Poker Hand'",
        task="which hand",
        records=25_010,
        held_out=1_000_000,
        features=10,
        classes=(
            "nothing",
            "one pair",
            "two pairs",
            "three of a kind",
            "straight",
            "flush",
            "full house",
            "four of a kind",
            "straight flush",
            "royal flush",
        ),
        licence=_CC_BY,
        citation="R. Cattral and F. Oppacher: Poker Hand. UCI Machine Learning Repository, 2002. doi 10.24432/C5KW38",
        page=f"{_UCI}/dataset/158",
        download=613_694 + 24_538_333,
        originals=(
            _uci(
                "poker",
                "poker-hand-training-true.data",
                "158/poker+hand.zip",
                613_694,
                "sha256:37becdf87d5f8cbf2b91d6471e965a25b86cb4a6d878c0f94a4025969fca464f",
            ),
            _uci(
                "poker",
                "poker-hand-testing.data",
                "158/poker+hand.zip",
                24_538_333,
                "sha256:3cd75958e19dd321ed5ca3f7f154c0f6aad544aab9f37731ac545b5f66b232c7",
            ),
        ),
    ),
    KnownSource(
        name="cifar10",
        title="CIFAR-10",
        task="what is pictured",
        records=50_000,
        held_out=10_000,
        features=3072,
        classes=("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck"),
        licence="none stated",
        citation="A. Krizhevsky: Learning multiple layers of features from tiny images. Technical report, University of "
        "Toronto, 2009",
        page="https://www.cs.toronto.edu/~kriz/cifar.html",
        download=170_052_171,
        originals=(
            Original(
                "cifar-10-binary.tar.gz",
                ("https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",),
                170_052_171,
                "sha256:c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            ),
        ),
    ),
    KnownSource(
        name="covtype",
        title="UCI 'Covertype'",
        task="which forest",
        records=581_012,
        features=54,
        classes=(
            "spruce/fir",
            "lodgepole pine",
            "ponderosa pine",
            "cottonwood/willow",
            "aspen",
            "douglas-fir",
            "krummholz",
        ),
        licence=_CC_BY,
        citation="J. Blackard: Covertype. UCI Machine Learning Repository, 1998. doi 10.24432/C50K5N",
        page=f"{_UCI}/dataset/31",
        download=11_240_707,
        originals=(
            _uci(
                "covtype",
                "covtype.data.gz",
                "31/covertype.zip",
                11_240_707,
                "sha256:614360d0257557dd1792834a85a1cdebfadc3c4f30b011d56afee7ffb5b15771",
            ),
        ),
    ),
    KnownSource(
        name="electricity",
        title="OpenML 'electricity' (Elec2), normalised",
        task="price up or down",
        records=45_312,
        features=8,
        classes=("DOWN", "UP"),
        licence="Public, says OpenML",
        citation="M. Harries: SPLICE-2 comparative evaluation: electricity pricing. Technical report, University of New South "
        "Wales, 1999",
        page="https://www.openml.org/d/151",
        download=3_000_000,
        originals=(
            Original(
                "electricity.arff",
                (
                    "https://openml.org/data/v1/download/2419/electricity.arff",
                    "https://api.openml.org/data/v1/download/2419/electricity.arff",
                ),
                3_000_000,
                "md5:8ca97867d960ae029ae3a9ac2c923d34",
            ),
        ),
    ),
)

KNOWN: Mapping[str, KnownSource] = {source.name: source for source in _SOURCES}
"""All of them, by name: first those that are shipped."""


def nearest(name: str) -> str:
    """What to add to an error about a name that there is not: the nearest one, if one is near."""
    near = difflib.get_close_matches(name.lower(), KNOWN, 1)
    return f"; did you mean {near[0]}?" if near else ""


VARIABLE = "SOTTOVOCE_DATA"


def data_folders() -> tuple[Path, ...]:
    """Folders with `NAME.npz`, in the order in which they are looked at: $SOTTOVOCE_DATA, where it is set, then the cache."""
    own, cache = os.environ.get(VARIABLE), cache_folder()
    return (*([Path(own)] if own else []), *([cache] if cache else []))


def cache_folder() -> Path | None:
    """The user's cache, as the system has it; None without platformdirs, which the extra `audit` brings."""
    try:
        found: Path = importlib.import_module("platformdirs").user_cache_path("sottovoce", appauthor=False)
    except ImportError:
        return None
    return found / "data"


def find(name: str, folders: Iterable[Path]) -> Path | None:
    """The file of a data set, in the first of these folders that has it."""
    paths = (folder / f"{name}.npz" for folder in folders)
    return next((path for path in paths if path.is_file()), None)
