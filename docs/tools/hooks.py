"""What the site adds to the files of docs/: pages made of files outside of it, and links that leave
it.

Files stay where they read well in a checkout, so links between them are relative. A link to a file
of the repository that has no page becomes a link into `repo_url`, where one is set, else its text
alone. One to a file that is not there is a warning, and so an error. In the API pages the name of
something public leads to its entry, and the arguments of a call stand in the groups of its
docstring. Each figure leads to its file, to be seen larger.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from check import PUBLIC, public_names
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import get_plugin_logger
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

log = get_plugin_logger(__name__)

ROOT = Path(__file__).parents[2]
# path in the repository: path on the site
PAGES = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}
LINK = re.compile(r"(?<!!)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])+)\]\((?P<target>[^()\s]+)\)")
# Not the names of objectives and presets, which are those of loss types, too, nor of modules, which
# are arguments' too.
NAMES = {
    name.rpartition(".")[2]: name
    for module in ("", ".advantages", ".transformers", ".trl", ".verl")
    for name in public_names(f"grpo_kernels{module}")
    if name not in PUBLIC
}
CODE = re.compile(rf"<code>({'|'.join(NAMES)})</code>(?!</a>)")
ITEM = r'<li class="doc-section-item field-body">\s*<b><code>'
# A group's name, which was taken for an argument; and several fields of a line, the last taken for
# types.
GROUP = re.compile(ITEM + r"([A-Z]\w*(?: \w+)+)</code></b>\s*\u2013\s*<div[^>]*>\s*</div>\s*</li>")
SEVERAL = re.compile(
    rf"({ITEM})((?:<[^>]*>)?\w+,(?:<[^>]*>)?)</code></b>\s*\(<code>(.*?)</code>\)", re.DOTALL
)
TAG = re.compile(r"<[^>]*>")
EXPONENT = re.compile(r"(<(?P<tag>pre|code)\b.*?</(?P=tag)>)|(?<=\de)-(?=\d)", re.DOTALL)
# may be broken after a slash or an underscore
PATH = re.compile(r"(?<=<code>)\w[\w/]*\.py(?=</code>)")
BREAK = re.compile(r"[/_]")
FIGURE = re.compile(r'<img [^>]*\bsrc="([^"]+)"[^>]*>')
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each of `PAGES`."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, content=(ROOT / source).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrites the links of a page, outside of its code blocks; leaves out the home page's sidebar,
    of one line."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    uri = page.file.src_uri
    generated = {to: source for source, to in PAGES.items()}
    source = Path(generated[uri]) if uri in generated else Path("docs") / uri

    def rewritten(link: re.Match[str]) -> str:
        return _rewritten(link, source, page, config, files)

    parts = FENCE.split(markdown)
    return "".join(part if part.startswith("```") else LINK.sub(rewritten, part) for part in parts)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Keeps exponents with their numbers, lets paths break, has figures lead to their files; then
    the API pages."""
    html = EXPONENT.sub(lambda found: found[1] or "\u2011", html)
    html = PATH.sub(lambda path: BREAK.sub(r"\g<0><wbr>", path[0]), html)
    html = FIGURE.sub(lambda image: f'<a href="{image[1]}">{image[0]}</a>', html)
    return _api(html) if page.file.src_uri.startswith("api/") else html


def _api(html: str) -> str:
    """Links names, sets arguments in their groups, puts fields of one line together, and one colon
    before code."""

    def together(item: re.Match[str]) -> str:
        names = TAG.sub("", f"{item[2]} {item[3]}").strip("()").replace("(", "")
        return f"{item[1]}{names}</code></b>"

    html = html.replace("::</p>", ":</p>")
    html = GROUP.sub(r'</ul><p class="doc-group">\1</p><ul>', html)
    html = SEVERAL.sub(together, html)
    return CODE.sub(
        lambda code: f'<autoref identifier="{NAMES[code[1]]}" optional>{code[0]}</autoref>', html
    )


def _rewritten(
    link: re.Match[str], source: Path, page: Page, config: MkDocsConfig, files: Files
) -> str:
    text, target = link["text"], link["target"]
    path, _, anchor = target.partition("#")
    if not path or ":" in path:
        return link[0]
    named = os.path.normpath(source.parent / path)
    uri = PAGES.get(named, named.removeprefix("docs/") if named.startswith("docs/") else None)
    if uri is not None and files.get_file_from_path(uri):
        here = os.path.relpath(uri, Path(page.file.src_uri).parent)
        return f"[{text}]({here}{'#' + anchor if anchor else ''})"
    if not (ROOT / named).exists():
        log.warning(f"{source}: [{text}]({target}) leads to {named}, which does not exist")
    if config.repo_url:
        return f"[{text}]({config.repo_url.rstrip('/')}/blob/main/{named})"
    return text if "`" in text or text != path.removeprefix("../") else f"`{named}`"
