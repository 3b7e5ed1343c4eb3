"""Checks the built site: ``python docs/tools/check.py site``.

Every link, anchor and picture leads to something that is there; nothing is loaded from elsewhere;
every public name of the package has an entry in the API pages. (That each page is in the
navigation, and the links between sources, `mkdocs build --strict` has checked.) Exit status 1, with
a line for each fault.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

PACKAGE = Path(__file__).parents[2] / "grpo_kernels"
# Whose `__all__` has to be documented: all but the namespaces that are entries of the first.
PUBLIC = (
    "grpo_kernels",
    "grpo_kernels.advantages",
    "grpo_kernels.objectives",
    "grpo_kernels.presets",
    "grpo_kernels.rewards",
    "grpo_kernels.rollouts",
    "grpo_kernels.testing",
    "grpo_kernels.liger",
    "grpo_kernels.transformers",
    "grpo_kernels.trl",
    "grpo_kernels.verl",
)
LOADED = {
    ("img", "src"),
    ("script", "src"),
    ("link", "href"),
    ("source", "src"),
    ("iframe", "src"),
    ("object", "data"),
}
REMOTE_STYLE = re.compile(r"""(?:url\(|@import)\s*["']?(?:https?:)?//""")


class Page(HTMLParser):
    """The anchors, links and loaded files of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        # (what is led to, whether it is "loaded" or "linked")
        self.links: list[tuple[str, str]] = []
        self.classes: set[str] = set()
        self.feed(path.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Each element of the page."""
        for name, value in attrs:
            if value is None:
                continue
            if name in ("id", "name"):
                self.anchors.add(value)
            elif name == "class":
                self.classes.update(value.split())
            elif (tag, name) in LOADED:
                self.links.append((value, "loaded"))
            elif (tag, name) == ("a", "href"):
                self.links.append((value, "linked"))


@cache
def page_at(path: Path) -> Page:
    """The page of a file, read once."""
    return Page(path)


def faults_of_page(path: Path, site: Path) -> list[str]:
    """What is wrong with the links of one page, a line each."""
    page, faults = page_at(path), []
    if "mermaid" in page.classes:
        faults.append(
            "has a mermaid diagram, for which browsers would load a script from elsewhere: "
            "draw an SVG"
        )
    for link, kind in page.links:
        target = urlsplit(link)
        if target.scheme or target.netloc:
            if kind == "loaded" and target.scheme != "data":
                faults.append(f"loads {link} from elsewhere")
            continue
        at = (path.parent / unquote(target.path)).resolve() if target.path else path
        if at.is_dir():
            at /= "index.html"
        if not at.is_relative_to(site) or not at.is_file():
            faults.append(f"leads to {link}, which is not there")
        elif (
            target.fragment
            and at.suffix == ".html"
            and unquote(target.fragment) not in page_at(at).anchors
        ):
            faults.append(f"leads to {link}, which has no such anchor")
    return [f"{path.relative_to(site)}: {fault}" for fault in faults]


def public_names(module: str) -> list[str]:
    """The `__all__` of a module, read without importing it."""
    place = PACKAGE.parent / module.replace(".", "/")
    file = place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return [f"{module}.{name}" for name in ast.literal_eval(statement.value)]
    raise ValueError(f"{file}: expected an assignment to __all__")


def undocumented(site: Path) -> list[str]:
    """Public names without an entry in the API pages."""
    documented = {
        anchor for path in (site / "api").glob("*.html") for anchor in page_at(path).anchors
    }
    names = [name for module in PUBLIC for name in public_names(module)]
    return [f"api/: {name} is public and has no entry" for name in names if name not in documented]


def main(site: Path) -> int:
    """Prints what is wrong, and returns the exit status."""
    site = site.resolve()
    # The links of 404.html are of a server's root.
    pages = sorted(path for path in site.rglob("*.html") if path.name != "404.html")
    faults = [fault for path in pages for fault in faults_of_page(path, site)] + undocumented(site)
    for path in sorted(site.rglob("*.css")):
        if REMOTE_STYLE.search(path.read_text()):
            faults.append(f"{path.relative_to(site)}: loads a style or font from elsewhere")
    print(*faults, sep="\n", end="\n" if faults else "")
    print(f"{site}/index.html: {len(pages)} pages, {len(faults)} faults")
    return 1 if faults or not pages else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
