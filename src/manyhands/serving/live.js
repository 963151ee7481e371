"use strict";
const line = document.getElementById("line"), main = document.getElementById("main");
const say = (sentence, lost) => { line.textContent = sentence; line.className = lost ? "lost" : "quiet"; };
const LOST = "The connection is lost; reconnecting. The page shows the last data received.";
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
  } catch { say("The report did not load; manyhands show RUN --as file writes it from the run's directory.", true); }
});
addEventListener("hashchange", () => { if (takeToken()) follow(); });
takeToken();
follow();
