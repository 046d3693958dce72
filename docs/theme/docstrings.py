"""Docstrings as pages want them: examples are sections of their own, and `::` is how reST says that code follows."""

from __future__ import annotations

import re
import textwrap

import griffe

PROMPT = re.compile(r"^>>> ", re.MULTILINE)


class Docstrings(griffe.Extension):
    """For mkdocstrings, which reads Google's sections and Markdown, and takes `>>>` in plain text for a quotation."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Every module, class, function and attribute, once it is read."""
        if obj.docstring is None:
            return
        text = re.sub(r"::$", ":", obj.docstring.value, flags=re.MULTILINE)
        prompt = PROMPT.search(text)
        if prompt is not None:
            before, example = text[: prompt.start()], text[prompt.start() :]
            text = f"{before}Examples:\n{textwrap.indent(example, '    ')}"
        obj.docstring.value = text
