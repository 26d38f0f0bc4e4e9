"""What a package says of where its sources are: links, the line that clones them, addresses of pictures.

All of it follows one entry of pyproject.toml. While that is empty, nothing names a place.
"""

from __future__ import annotations

import re

# Of a link or a picture in Markdown that is relative to the file.
_RELATIVE = re.compile(r"(!?)(\[[^\]]*\]\()(?!#|/|[a-z]+:)([^)\s]+)\)")
_INSTALL = "## Install\n"


def links(repository: str) -> dict[str, str]:
    if not repository:
        return {}
    changes = f"{repository}/blob/HEAD/CHANGELOG.md"
    return {"Source": repository, "Issues": f"{repository}/issues", "Changelog": changes}


def description(readme: str, repository: str) -> str:
    """The README as a package index shows it: no files lie beside it, so that addresses become absolute."""
    if not repository:
        return readme
    folder = repository.rstrip("/").rpartition("/")[2].removesuffix(".git")
    clone = f"{_INSTALL}\n```sh\ngit clone {repository} && cd {folder}\n```\n"
    if _INSTALL not in readme:
        raise SystemExit(f"README.md has no line {_INSTALL.strip()!r} to put the one that clones it under")
    absolute = _RELATIVE.sub(
        lambda link: f"{link[1]}{link[2]}{repository}/{'raw' if link[1] else 'blob'}/HEAD/{link[3]})", readme
    )
    return absolute.replace(_INSTALL, clone, 1)
