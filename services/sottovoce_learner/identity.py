"""Who a learner is, beside its journals: the store that its state stands in, and its incarnation.

The store's number is drawn once, when a state folder is first used: another folder is another store. The incarnation is
issued by the coordinator at each start and written here before it is used, so that of two processes, one on a copy or an
old state of this folder, only one can be the learner.
"""

from __future__ import annotations

import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from sottovoce.errors import DataError
from sottovoce_learner.log import sync_folder

FORMAT = 1
STORE_BYTES = 16


@dataclass(frozen=True, slots=True)
class Identity:
    """One learner of a state folder.

    Attributes:
        learner: its name.
        store: the folder's number for it, 128 random bits.
        incarnation: the highest that was issued to it; 0: none.
    """

    learner: str
    store: bytes
    incarnation: int = 0

    @classmethod
    def of(cls, folder: Path, learner: str) -> Identity:
        """As its file has it; drawn and written where there is none.

        Raises:
            DataError: the file is damaged, another learner's, or of a newer version.
        """
        path = _path(folder, learner)
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError:
            new = cls(learner, secrets.token_bytes(STORE_BYTES))
            new.write(folder)
            return new
        except (OSError, ValueError) as error:
            raise DataError(f"the identity {path} cannot be read: {error}; {_WAY_OUT}") from None
        return _read(text, path, learner)

    def write(self, folder: Path) -> None:
        """Make it last.

        Raises:
            OSError: it could not be written; what was there before is still there.
        """
        path = _path(folder, self.learner)
        draft = path.with_suffix(".draft")
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump({"format": FORMAT, **asdict(self), "store": self.store.hex()}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        sync_folder(folder)

    def issued(self, incarnation: int, folder: Path) -> Identity:
        """This learner with a new incarnation, written.

        Raises:
            OSError: it could not be written.
        """
        new = replace(self, incarnation=incarnation)
        new.write(folder)
        return new


_WAY_OUT = (
    "restore it from where it is whole, or take another state folder and let the coordinator know (sottovoce rebind)"
)


def _path(folder: Path, learner: str) -> Path:
    return folder / f"{learner}.identity"


def _read(text: str, path: Path, learner: str) -> Identity:
    try:
        facts = json.loads(text)
        version, name = facts["format"], facts["learner"]
        store, incarnation = bytes.fromhex(facts["store"]), facts["incarnation"]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise DataError(f"the identity {path} is damaged: {error}; {_WAY_OUT}") from None
    if version != FORMAT:
        raise DataError(
            f"the identity {path} must be of format {FORMAT}, got {version!r}: use the version that wrote it"
        )
    if name != learner:
        raise DataError(
            f"the identity {path} must be of learner {learner!r}, got {name!r}: take the learner's own folder"
        )
    if len(store) != STORE_BYTES or type(incarnation) is not int or incarnation < 0:
        raise DataError(
            f"the identity {path} is damaged: a store of 16 bytes and an incarnation from 0 are due; {_WAY_OUT}"
        )
    return Identity(learner, store, incarnation)
