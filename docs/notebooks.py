"""The notebooks as pages of the site: `notebooks/NAME.ipynb` becomes `notebooks/NAME.html`, with its stored outputs.

Pages link to the file `notebooks/NAME.ipynb` of the repository; on the site these links lead to the pages.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

FOLDER = Path(__file__).parents[1] / "notebooks"
LINK = re.compile(r"\]\((?:\.\./)+notebooks/(\w+)\.ipynb\)")


def on_files(files: Files, config: Any, **_: Any) -> Files:
    """Add every notebook, and its pictures, to the files of the site."""
    for path in sorted(FOLDER.glob("*.ipynb")):
        text, pictures = converted(path)
        files.append(File.generated(config, f"notebooks/{path.stem}.md", content=text))
        for name, picture in pictures.items():
            files.append(File.generated(config, f"notebooks/{name}", content=picture))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Let links to notebooks lead to their pages."""
    up = "../" * page.file.src_uri.count("/")
    return LINK.sub(rf"]({up}notebooks/\1.md)", markdown)


def converted(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return a notebook as Markdown, and its pictures by the names of their files."""
    parts, pictures = [], {}
    for cell in json.loads(path.read_text())["cells"]:
        if "install" in cell.get("metadata", {}).get("tags", ()):  # for a hosted notebook alone
            continue
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", []):
            data = output.get("data", {"text/plain": output.get("text", "")})
            if "image/png" in data:
                name = f"{path.stem}_{len(pictures)}.png"
                pictures[name] = base64.b64decode("".join(data["image/png"]))
                parts.append(f"![Output of the cell above]({name})")
            elif table := data.get("text/markdown") or data.get("text/html"):
                parts.append("".join(table).replace("\n<table>", "\n\n<table>"))
            elif text := "".join(data["text/plain"]).strip("\n"):
                parts.append(f"```text\n{text}\n```")
    return "\n\n".join(parts) + "\n", pictures
