"""Files for programs: what commands write as JSON, as models whose fields document the format."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict


class Document(BaseModel):
    """A JSON file, or a part of one.

    A number that is not finite is written as null, for JSON knows no infinity. A field with a default is left out where it was
    not asked for.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="null")

    def write(self, path: Path) -> None:
        """Write the file."""
        path.write_text(self.model_dump_json(indent=2, exclude_unset=True) + "\n", encoding="utf-8")
