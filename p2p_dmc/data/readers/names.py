"""A file's name as a sample's stem and a field's name."""

from __future__ import annotations

import re

from p2p_dmc.data.readers.base import StemRule

NO_EXTENSION = "bin"
_WEBDATASET = re.compile(r"((?:.*/|)[^./]+)[.]([^/]+)", re.DOTALL)


def split_name(name: str, rule: StemRule = "last-dot") -> tuple[str, str]:
    """``(stem, extension)`` of a file name. Without a usable dot all of it is the stem, the extension "bin"."""
    dot = name.find(".", 1) if rule == "first-dot" else name.rfind(".")
    if dot <= 0 or dot == len(name) - 1:
        return name, NO_EXTENSION
    return name[:dot], name[dot + 1 :].lower()


def split_member(name: str) -> tuple[str, str] | None:
    """A tar member's key and field by WebDataset's rule; None without either, for a hidden name too."""
    match = _WEBDATASET.fullmatch(name)
    return (match[1], match[2].lower()) if match else None
