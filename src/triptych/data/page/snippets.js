// The request as a program: curl, Python and the bare JSON. Pictures are read from files, the key from the environment.

import {make} from "./dom.js";
import {codeBlock} from "./markdown.js";

const LANGUAGES = [["curl", "bash"], ["Python", "python"], ["JSON", "json"]];
let shown = localStorage.getItem("triptych.snippet") ?? "curl";

/* The panel: `body` is what would be sent, `pictures` names what its data URIs are. */
export function view({body, pictures, needsKey}) {
  const url = new URL("v1", document.baseURI).href;
  const request = {body: quiet(body), names: namesOf(pictures), url, needsKey};
  const tabs = make("div", {class: "tabs", role: "tablist", "aria-label": "Language"}), place = make("div");
  const select = name => {
    shown = name;
    localStorage.setItem("triptych.snippet", name);
    for (const tab of tabs.children) { const is = tab.dataset.name === name; tab.setAttribute("aria-selected", is); tab.tabIndex = is ? 0 : -1; }
    place.replaceChildren(codeBlock(WRITERS[name](request), LANGUAGES.find(([known]) => known === name)[1]));
  };
  tabs.append(...LANGUAGES.map(([name]) => make("button", {type: "button", role: "tab", "data-name": name, onclick: () => select(name)}, name)));
  tabs.addEventListener("keydown", event => {
    const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!step) return;
    const at = (LANGUAGES.findIndex(([name]) => name === shown) + step + LANGUAGES.length) % LANGUAGES.length;
    select(LANGUAGES[at][0]);
    tabs.children[at].focus();
  });
  select(LANGUAGES.some(([name]) => name === shown) ? shown : "curl");
  const remarks = [pictures.length && "Pictures are read from files beside you.", needsKey && "The key is taken from TRIPTYCH_API_KEY."].filter(Boolean);
  return make("div", {class: "snippets"}, tabs, place, remarks.length ? make("p", {class: "hint"}, remarks.join(" ")) : null);
}

/* Programs wait for the whole answer: simpler to read. */
function quiet({stream, stream_options, ...body}) { return body; }

/* Data URI → {file, kind}: every picture once, each name once. */
function namesOf(pictures) {
  const names = new Map(), taken = new Set();
  for (const picture of pictures) {
    if (names.has(picture.url)) continue;
    const kind = /^data:([^;,]+)/.exec(picture.url)?.[1] ?? "image/png";
    const base = picture.name.replace(/[^\p{L}\p{N}._-]+/gu, "-").replace(/^[-.]+|\.[^.]*$/g, "") || "picture";
    let file = `${base}.${kind.split("/")[1].replace("jpeg", "jpg")}`;
    for (let n = 2; taken.has(file); n++) file = `${base}-${n}.${kind.split("/")[1].replace("jpeg", "jpg")}`;
    taken.add(file);
    names.set(picture.url, {file, kind});
  }
  return names;
}

const mark = i => `\u0001${i}\u0002`;

/* The body with a mark in place of each picture, and the pictures in the marks' order. */
function marked({body, names}) {
  const order = [];
  const copy = JSON.parse(JSON.stringify(body, (name, value) => {
    if (name !== "url" || !names.has(value)) return value;
    order.push(names.get(value));
    return mark(order.length - 1);
  }));
  return {copy, order};
}

function curl(request) {
  const {copy, order} = marked(request);
  const text = JSON.stringify(copy, null, 2).replace(/[\\$`]/g, "\\$&")
    .replace(/\\\\u0001(\d+)\\\\u0002/g, (_, i) => `data:${order[i].kind};base64,$(base64 < '${order[i].file}' | tr -d '\\n')`);
  const key = request.needsKey ? ` \\\n  -H "Authorization: Bearer $TRIPTYCH_API_KEY"` : "";
  return `curl ${request.url}/chat/completions${key} \\\n  -H 'Content-Type: application/json' \\\n  -d @- <<END\n${text}\nEND`;
}

function python(request) {
  const {copy, order} = marked(request);
  const {triptych, top_k, min_p, repetition_penalty, ...known} = copy;
  const extra = Object.fromEntries(Object.entries({triptych, top_k, min_p, repetition_penalty}).filter(([, value]) => value !== undefined));
  const facts = Object.entries(known).concat(Object.keys(extra).length ? [["extra_body", extra]] : []);
  const calls = facts.map(([name, value]) => `    ${name}=${literal(value, 4)},`).join("\n").replace(/"\u0001(\d+)\u0002"/g, (_, i) => `picture("${order[i].file}", "${order[i].kind}")`);
  const reader = order.length ? `\n\ndef picture(path: str, kind: str) -> str:\n    return f"data:{kind};base64," + base64.b64encode(Path(path).read_bytes()).decode()\n` : "";
  const imports = order.length ? "import base64\n" : "";
  const path = order.length ? "from pathlib import Path\n" : "";
  const environment = request.needsKey ? "import os\n" : "";
  const key = request.needsKey ? `os.environ["TRIPTYCH_API_KEY"]` : `"none"`;
  return `${imports}${environment}${path}${imports || environment || path ? "\n" : ""}from openai import OpenAI\n${reader}\n${reader ? "\n" : ""}client = OpenAI(base_url="${request.url}", api_key=${key})\nanswer = client.chat.completions.create(\n${calls}\n)\nprint(answer.choices[0].message.content)`;
}

function literal(value, indent) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value === "string" && value.startsWith("\u0001")) return `"${value}"`;
  if (typeof value !== "object") return JSON.stringify(value);
  const inner = " ".repeat(indent + 4), outer = " ".repeat(indent);
  const items = Array.isArray(value) ? value.map(one => literal(one, indent + 4)) : Object.entries(value).map(([name, one]) => `${JSON.stringify(name)}: ${literal(one, indent + 4)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  const line = `${open}${items.join(", ")}${close}`;
  return line.length + indent <= 88 && !line.includes("\n") ? line : `${open}\n${items.map(item => `${inner}${item},`).join("\n")}\n${outer}${close}`;
}

function plain(request) {
  const {copy, order} = marked(request);
  return JSON.stringify(copy, null, 2).replace(/\\u0001(\d+)\\u0002/g, (_, i) => `data:${order[i].kind};base64,… (${order[i].file})`);
}

const WRITERS = {curl, Python: python, JSON: plain};
