"""The live page: the sections of a run, a line about the connection, and the script that keeps them new.

The script takes what the server sends and changes only what differs, element by element, so that the place
where a reader has scrolled to and what has the keyboard's focus stay as they are. It keeps nothing, asks
nobody but its own server, and leaves the last content standing when that is gone.
"""

from __future__ import annotations

import base64
import hashlib
import json

from manyhands.observe.paper import document
from manyhands.observe.view import RunView
from manyhands.seeing.page import PAGE_STYLE, sections, title_of

__all__ = ["POLICY", "as_event", "live_page"]

_STYLE = (
    PAGE_STYLE
    + """
#bar { display: flex; gap: 1rem; justify-content: space-between; margin: 0 0 .5rem; }
#line { height: 2.9em; margin: 0; max-width: none; overflow: hidden; } #bar a { white-space: nowrap; }
@media (min-width: 40rem) { #line { height: 1.45em; } }
#line.lost { color: var(--bad); }
"""
)

_SCRIPT = """
"use strict";
const line = document.getElementById("line");
const say = (sentence, lost) => { line.textContent = sentence; line.className = lost ? "lost" : "quiet"; };

function change(old, fresh) {
  if (old.nodeType !== fresh.nodeType || old.nodeName !== fresh.nodeName) { old.replaceWith(fresh); return; }
  if (old.nodeType === Node.TEXT_NODE) { if (old.data !== fresh.data) old.data = fresh.data; return; }
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of [...fresh.attributes])
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  const before = [...old.childNodes], after = [...fresh.childNodes];
  after.forEach((node, n) => { if (n < before.length) change(before[n], node); else old.appendChild(node); });
  before.slice(after.length).forEach((node) => node.remove());
}

const source = new EventSource("/events");
source.onopen = () => say("connected", false);
source.onerror = () => say(source.readyState === EventSource.CLOSED
  ? "The server refused to go on; open the address that it printed again. What you see is the last that came."
  : "The connection is lost; trying again. What you see is the last that came.", true);
source.addEventListener("sections", (event) => {
  for (const [key, text] of Object.entries(JSON.parse(event.data))) {
    const box = document.createElement("template");
    box.innerHTML = text;
    change(document.getElementById(key), box.content.firstElementChild);
  }
});
source.addEventListener("end", (event) => { source.close(); say(JSON.parse(event.data), false); });
"""


def _hash(text: str) -> str:
    return "'sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() + "'"


POLICY = "; ".join(
    (
        "default-src 'none'",
        f"script-src {_hash(_SCRIPT)}",
        f"style-src {_hash(_STYLE)}",
        "connect-src 'self'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)
"""What a browser lets the page do: run this script, use this style, ask its own server."""


def live_page(view: RunView) -> str:
    """The page as it is first sent; the server's events keep it new."""
    lead = (
        '<div id="bar"><p id="line" class="quiet" role="status">connecting</p>'
        '<a href="/report" download="report.html">Save as a report</a></div>\n'
    )
    return document(title_of(view), sections(view).values(), style=_STYLE, lead=lead, script=_SCRIPT)


def as_event(name: str, value: object) -> bytes:
    """One server-sent event; JSON keeps it on one line."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()
