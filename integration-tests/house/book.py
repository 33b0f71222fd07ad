#!/usr/bin/env python3
"""Preprocessor of mdbook, and check of the book that it built.

As a preprocessor, it replaces links to files outside of docs/ by the names of these files.
`book.py check DIRECTORY` checks that every link of the built pages has a target, with its anchor, and that every document is a page.
"""

import html.parser
import json
import pathlib
import posixpath
import re
import sys
import urllib.parse

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"
LINK = re.compile(r"(?<!!)\[((?:[^\]\\]|\\.)*)\]\(([^)\s]+)\)")


def without_outside_links(text, source):
    """Text of a document at `source`, relative to docs/, with names in place of links that leave docs/."""

    def name(match):
        label, target = match.group(1), match.group(2)
        path = target.split("#")[0]
        if not path or re.match(r"\w+:", path):
            return match.group(0)
        path = posixpath.normpath(posixpath.join("docs", posixpath.dirname(source), path))
        if path.startswith("docs/"):
            # mdbook makes index.html of README.md.
            return f"[{label}]({re.sub(r'README[.]md(?=#|$)', 'index.md', target)})"
        return label if label.strip("`") == path else f"{label} (`{path}`)"

    return LINK.sub(name, text)


def chapters(items):
    for item in items:
        chapter = item.get("Chapter") if isinstance(item, dict) else None
        if chapter:
            yield chapter
            yield from chapters(chapter["sub_items"])


def preprocess():
    _, book = json.load(sys.stdin)
    for chapter in chapters(book.get("items") or book.get("sections")):
        if chapter.get("source_path"):
            chapter["content"] = without_outside_links(chapter["content"], chapter["source_path"])
    json.dump(book, sys.stdout)


class Page(html.parser.HTMLParser):
    """The ids of a page, and its links to other pages of the book."""

    def __init__(self, text):
        super().__init__()
        self.ids, self.links = set(), set()
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        if attributes.get("id"):
            self.ids.add(attributes["id"])
        link = attributes.get("href") if tag == "a" else None
        if link and not re.match(r"\w+:|//", link):
            self.links.add(link)


def check(directory):
    # These repeat other pages.
    repeated = ("print.html", "404.html", "toc.html")
    files = [path for path in directory.rglob("*.html") if path.name not in repeated]
    pages = {path.resolve(): Page(path.read_text()) for path in files}
    problems = []
    for path, page in pages.items():
        for link in sorted(page.links):
            target, _, anchor = urllib.parse.unquote(link).partition("#")
            file = (path.parent / target).resolve() if target else path
            if not file.exists() and file.name not in repeated:
                problems.append(f"{path.relative_to(directory)}: {link} leads to no page")
            elif anchor and file in pages and anchor not in pages[file].ids:
                problems.append(f"{path.relative_to(directory)}: {link} leads to no heading")
    for document in DOCS.rglob("*.md"):
        relative = document.relative_to(DOCS)
        page = relative.with_name("index.html") if relative.name == "README.md" else relative.with_suffix(".html")
        if relative.name != "SUMMARY.md" and not (directory / page).exists():
            problems.append(f"docs/{relative}: SUMMARY.md does not list it")
    return problems


def main():
    match sys.argv[1:]:
        case ["supports", _]:
            pass
        case ["check", directory]:
            problems = check(pathlib.Path(directory).resolve())
            print("\n".join(problems) or "book: every link has a target")
            sys.exit(1 if problems else 0)
        case []:
            preprocess()
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
