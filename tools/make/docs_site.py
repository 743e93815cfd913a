"""MkDocs hooks of `make docs`: README.md is the site's first page, and links to files outside docs/ lead somewhere.

On GitHub a page links to the README, an example or a Dockerfile by its path in the repository. The site gets a page for
each of `PAGES` and a copy of every other file that a page links to; any other link is dead, and fails the build.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).parents[2]
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/README.md": "examples.md",
}
_LINK = re.compile(r"\]\((?!\w+:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(REPOSITORY / source)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point each link at what its target is called on the site."""
    sources = {name: source for source, name in PAGES.items()}
    folder = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))

    def on_site(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link["path"]))
        if target in PAGES:
            name = PAGES[target]
        elif target.startswith("docs/"):
            name = target.removeprefix("docs/")
        elif (REPOSITORY / target).is_file():
            name = f"repository/{target}"
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(REPOSITORY / target)))
        else:
            return link[0]
        return f"]({posixpath.relpath(name, posixpath.dirname(page.file.src_uri) or '.')}{link['anchor'] or ''})"

    return _LINK.sub(on_site, markdown)
