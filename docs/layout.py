"""The HTML of the pages: attributes in the API keep their names and types, numbers in tables stay on one line."""

import re
from typing import Any

import griffe

# mkdocstrings takes all names of a group but the first for a type: "q, V, theta, m" as "q, ((V, theta, m))".
GROUP = re.compile(r"<b><code>(?:<span[^>]*>)?([\w.]+,)(?:</span>)?</code></b>\s*\(<code>(.*?)</code>\)", re.DOTALL)
CELL = re.compile(r"<td[^>]*>.*?</td>", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-+−]?[\d.,]*\d(?:\(\d+\))?(?:e[-−+]?\d+(?: %)?| (?:s|ms|μs|min|MB|GiB|%))(?!\w)")


def on_post_page(output: str, **_: Any) -> str:
    """Return a page with its groups of names and its numbers in tables repaired."""

    def group(found: re.Match[str]) -> str:
        others = re.sub(r"<.*?>", "", found[2]).strip("()")
        return f"<b><code>{found[1]} {others}</code></b>"

    def cell(found: re.Match[str]) -> str:
        return NUMBER.sub(r'<span class="number">\g<0></span>', found[0])

    return CELL.sub(cell, GROUP.sub(group, output))


class Listed(griffe.Extension):
    """Adds the attributes that a docstring lists and that only objects have.

    To griffe, which reads the source, they do not exist; it would give them the type of the attribute before.
    """

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        _, _, listed = (cls.docstring.value if cls.docstring else "").partition("Attributes:\n")
        for name in re.findall(r"^    (\w+):", re.split(r"\n(?=\S)", listed)[0], re.MULTILINE):
            try:
                cls[name]
            except KeyError:
                cls.set_member(name, griffe.Attribute(name))
