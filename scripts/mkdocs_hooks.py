"""For mkdocs: pages link to files of the repository that the site does not hold; there, the path is shown instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./([^)#\s]+)\)")


def on_config(config: Any) -> Any:
    """Pages that mkdocs.yml does not place come last, so that none is out of reach."""
    placed = set(re.findall(r"[\w-]+\.md", str(config["nav"])))
    for path in sorted(Path(config["docs_dir"]).glob("*.md")):
        if path.name not in placed:
            config["nav"].append(path.name)  # under its own title
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, **_: Any) -> str:
    """`[text](../path)` becomes the text and the path. Raises FileNotFoundError where there is no such file."""
    root = Path(config["config_file_path"]).parent

    def shown(link: re.Match[str]) -> str:
        text, path = link[1], link[2]
        if not (root / path).exists():
            raise FileNotFoundError(f"{page.file.src_path} links to {path}, which is not in the repository")
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    return _OUTSIDE.sub(shown, markdown)
