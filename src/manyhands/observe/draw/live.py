"""The live page: a frame that is the same for every run, and the script that fills it and keeps it new.

The address's fragment (`/#token=…`), which browsers keep to themselves, holds the run's token. The script moves it
into the tab's session storage, which belongs to this port alone, and sends it as a header with all that it asks.
It changes only what differs, element by element, so that the place where a reader has scrolled to and what has
the keyboard's focus stay as they are. It asks nobody but its own server, and leaves the last content standing
when that is gone.
"""

from __future__ import annotations

import base64
import hashlib
import json

from manyhands.observe.draw.page import PAGE_STYLE
from manyhands.observe.draw.paper import document

__all__ = ["POLICY", "as_event", "live_page"]

_STYLE = (
    PAGE_STYLE
    + """
#bar { display: flex; gap: 1rem; justify-content: space-between; margin: 0 0 .5rem; }
#line { height: 2.9em; margin: 0; max-width: none; overflow: hidden; }
@media (min-width: 40rem) { #line { height: 1.45em; } }
#save { font: inherit; color: var(--link); background: none; border: 0; padding: 0; text-decoration: underline;
  cursor: pointer; white-space: nowrap; height: 1.45em; }
#line.lost { color: var(--bad); }
"""
)

_SCRIPT = r"""
"use strict";
const line = document.getElementById("line"), main = document.getElementById("main");
const say = (sentence, lost) => { line.textContent = sentence; line.className = lost ? "lost" : "quiet"; };
const LOST = "The connection is lost; trying again. What you see is the last that came.";
let token = "", turn = 0;

function takeToken() {
  const given = new URLSearchParams(location.hash.slice(1)).get("token");
  try {
    if (given !== null) sessionStorage.setItem("token", given);
    token = given ?? sessionStorage.getItem("token") ?? "";
  } catch { token = given ?? token; }  // where nothing may be stored, a reload needs the address again
  if (given !== null) history.replaceState(null, "", "/");
  return given !== null;
}

const ask = (path) => fetch(path, { cache: "no-store", credentials: "omit", redirect: "error",
  headers: { authorization: "Bearer " + token.replace(/[^\w-]/g, "") } });

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

const take = {
  title: (text) => { document.title = text; document.querySelector("h1").textContent = text; },
  sections: (texts) => {
    for (const [key, text] of Object.entries(texts)) {
      const box = document.createElement("template"), old = document.getElementById(key);
      box.innerHTML = text;
      if (old) change(old, box.content.firstElementChild); else main.append(box.content.firstElementChild);
    }
  },
  end: (sentence) => { turn += 1; say(sentence, false); },
};

async function follow() {
  const mine = ++turn;
  while (mine === turn) {
    try {
      const answer = await ask("/events");
      if (mine !== turn) return;
      if (answer.ok) { say("connected", false); await read(answer.body, mine); }
      else say(await answer.text(), true);
      if (!answer.ok && answer.status !== 503) return;
      if (mine === turn && answer.ok) say(LOST, true);
    } catch { if (mine === turn) say(LOST, true); }
    await new Promise((go) => setTimeout(go, 2000));
  }
}

async function read(body, mine) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let text = ""; mine === turn;) {
    const { done, value } = await reader.read();
    if (done) return;
    const blocks = (text + value).split("\n\n");
    text = blocks.pop();
    for (const block of blocks) {
      const event = /^event: (\w+)\ndata: (.*)$/.exec(block);
      if (event && mine === turn) take[event[1]](JSON.parse(event[2]));
    }
  }
  reader.cancel().catch(() => {});
}

document.getElementById("save").addEventListener("click", async () => {
  try {
    const answer = await ask("/report");
    if (!answer.ok) throw new Error();
    const link = document.createElement("a");
    link.href = URL.createObjectURL(await answer.blob());
    link.download = "report.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
  } catch { say("The report did not come; manyhands report writes it from the run's directory.", true); }
});
addEventListener("hashchange", () => { if (takeToken()) follow(); });
takeToken();
follow();
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


def live_page() -> str:
    """Return the page frame, the same for every run and requester; the event stream fills it."""
    lead = (
        '<div id="bar"><p id="line" class="quiet" role="status">connecting</p>'
        '<button id="save" type="button">Save as a report</button></div>\n'
        "<noscript><p>The live page needs its script; <code>manyhands report RUN</code> writes a page without one."
        "</p></noscript>\n"
    )
    return document("manyhands", (), style=_STYLE, lead=lead, script=_SCRIPT)


def as_event(name: str, value: object) -> bytes:
    """Format one server-sent event; JSON keeps it on one line."""
    return f"event: {name}\ndata: {json.dumps(value)}\n\n".encode()
