"""The manual at `/docs`: Markdown pages that are package data, made into HTML once. No path of a request names a file."""

import re
from functools import cache
from html import escape
from importlib.resources import files
from string import Template

from markdown_it import MarkdownIt
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.routing import Route

PAGES = ("architecture", "operating", "configuring", "api", "pool", "vllm", "laboratory", "figures", "testing", "glossary")
"""In the order of the menu."""
_HOME = files("mooncake_zmq") / "docs"
_SHEET = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>$title - mooncake_zmq</title>
<style>
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 0 auto 4rem; padding: 0 1rem; }
nav { padding: 1rem 0; border-bottom: 1px solid #8884; }
nav a { margin-right: 1rem; }
pre { background: #8881; padding: 1rem; overflow-x: auto; }
code { font-size: 0.9em; }
table { display: block; overflow-x: auto; border-collapse: collapse; }
th, td { text-align: left; vertical-align: top; padding: 0.2rem 0.8rem 0.2rem 0; border-bottom: 1px solid #8884; }
img { max-width: 100%; background: white; }
</style>
</head>
<body>
<nav>$menu</nav>
$body
</body>
</html>
""")


def routes() -> list[Route]:
    """What a gateway serves of the manual."""
    return [
        Route("/docs", _front),
        Route("/docs/{page}.md", _page),
        Route("/docs/plots/{plot}.png", _plot),
    ]


def text_of(page: str) -> str:
    """A page of `PAGES` as it is written."""
    return (_HOME / f"{page}.md").read_text(encoding="utf-8")


@cache
def html_of(page: str) -> str:
    """A page of `PAGES` for a browser: each heading may be linked to by its words."""
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    tokens = markdown.parse(text_of(page))
    for heading, words in zip(tokens, tokens[1:], strict=False):
        if heading.type == "heading_open":
            heading.attrSet("id", anchor_of(words.content))
    menu = "\n".join(f'<a href="{each}.md">{escape(_title(each))}</a>' for each in PAGES)
    return _SHEET.substitute(title=escape(_title(page)), menu=menu, body=markdown.renderer.render(tokens, markdown.options, {}))


def anchor_of(heading: str) -> str:
    """As repositories' browsers make it."""
    return re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")


def _title(page: str) -> str:
    return text_of(page).partition("\n")[0].removeprefix("# ")


@cache
def _plots() -> dict[str, bytes]:
    return {each.name.removesuffix(".png"): each.read_bytes() for each in (_HOME / "plots").iterdir()}


async def _front(request: Request) -> Response:
    return RedirectResponse(f"/docs/{PAGES[0]}.md")


def _page(request: Request) -> Response:
    page = request.path_params["page"]
    if page not in PAGES:
        raise HTTPException(404)
    return HTMLResponse(html_of(page))


def _plot(request: Request) -> Response:
    plot = _plots().get(request.path_params["plot"])
    if plot is None:
        raise HTTPException(404)
    return Response(plot, media_type="image/png", headers={"cache-control": "max-age=3600"})
