// The page: which conversation is shown, who is answering, and what stands beside it.

import {ask, events, json, key, maybe, Refusal} from "./api.js";
import {Composer} from "./composer.js";
import {$, count, dress, icon, iconButton, make, say, seconds} from "./dom.js";
import {Dashboard} from "./dashboard.js";
import {bodyOf, form, settings} from "./settings.js";
import * as snippets from "./snippets.js";
import * as store from "./store.js";
import {View} from "./thread.js";
import {add, begin, choose, path, remove, siblings, titleOf} from "./tree.js";

const state = {
  talk: begin(),
  model: "",
  server: {hasPictures: true, minKeep: 0, kvBudget: null, asksKey: false},
  answering: new Map(),  // a conversation's id → its AbortController
  views: new Map(),
  panel: null,
};

// ── asking ──────────────────────────────────────────────────────────────────────────────────────────────────────

function send(text, pictures) {
  const {talk} = state;
  const question = add(talk, talk.leaf, {role: "user", text, pictures});
  if (!talk.title) talk.title = titleOf(question);
  answer(talk, question);
}

function retry(node) {
  const {talk} = state;
  if (state.answering.has(talk.id)) return;
  const question = talk.nodes[node.parent];
  if (node.state === "failed" && !node.text && !talk.order.some(id => talk.nodes[id].parent === node.id)) remove(talk, node);
  answer(talk, question);
}

function edit(node, text, pictures) {
  const {talk} = state;
  if (state.answering.has(talk.id)) stop();
  answer(talk, add(talk, node.parent, {role: "user", text, pictures}));
}

async function answer(talk, question) {
  const nodes = path(talk, question.id);
  const node = add(talk, question.id, {role: "assistant", state: "waiting", model: state.model});
  const controller = new AbortController(), began = performance.now();
  state.answering.set(talk.id, controller);
  keep(talk).then(listTalks);
  draw();
  toEnd();
  if (!matchMedia("(pointer: coarse)").matches) composer.words.focus();
  say("Answering");
  const keeping = setInterval(() => keep(talk), 2000);
  try {
    const response = await ask("v1/chat/completions", {body: bodyOf(nodes, state.model), signal: controller.signal});
    for await (const record of events(response)) take(node, record, began);
    node.state = "done";
    say(`Answer: ${node.text.slice(0, 2000)}`);
  } catch (error) {
    node.state = error.name === "AbortError" ? "stopped" : "failed";
    if (node.state === "failed") fail(node, error);
  }
  clearInterval(keeping);
  if (node.facts) node.facts.total = (performance.now() - began) / 1000;
  state.answering.delete(talk.id);
  talk.updated = Date.now();
  const isAtEnd = atEnd();
  refresh(talk, node);
  draw();
  if (isAtEnd && talk === state.talk) toEnd();
  keep(talk).then(listTalks);
  watch();
}

/* What was deleted while it was answered stays deleted. */
const deleted = new Set();
const keep = async talk => { if (!deleted.has(talk.id)) await store.save(talk); };

function take(node, record, began) {
  node.facts ??= {first: null, finish: null, usage: null, trace: null};
  const [choice] = record.choices;
  if (record.usage) node.facts.usage = record.usage;
  if (!choice) return;
  if (choice.delta?.content) {
    node.facts.first ??= (performance.now() - began) / 1000;
    node.text += choice.delta.content;
    node.state = "streaming";
  }
  if (choice.finish_reason) node.facts.finish = choice.finish_reason;
  if (choice.triptych) node.facts.trace = choice.triptych;
  soon(node);
}

function fail(node, error) {
  if (!(error instanceof Refusal)) console.error(error);
  node.error = error instanceof Refusal ? error.plain() : {status: 0, message: "This page failed", hint: String(error.message ?? error)};
  if (error.status === 401) state.server.asksKey = true;
  say(`The answer failed: ${node.error.message}`);
}

function stop() { state.answering.get(state.talk.id)?.abort(); }

/* A stream may bring a hundred pieces a second: the page draws one a frame. */
const dirty = new Set();
function soon(node) {
  if (!dirty.size) requestAnimationFrame(() => {
    const isAtEnd = atEnd();
    for (const one of dirty) state.views.get(one.id)?.update();
    dirty.clear();
    if (isAtEnd) toEnd();
  });
  dirty.add(node);
}

function refresh(talk, node) {
  if (talk === state.talk) state.views.get(node.id)?.update();
}

// ── showing ─────────────────────────────────────────────────────────────────────────────────────────────────────

const wishes = {
  retry,
  edit,
  change(node) { state.views.get(node.id)?.beginEdit(); },
  choose(node) { choose(state.talk, node); draw(); keep(state.talk); },
  async askKey(node) { if (await askForKey()) retry(node); },
};

function draw() {
  const {talk, views} = state;
  const nodes = path(talk), known = new Set(nodes.map(node => node.id));
  for (const id of views.keys()) if (!known.has(id)) views.delete(id);
  const shown = nodes.map(node => {
    const total = siblings(talk, node).length;
    let view = views.get(node.id);
    if (!view || view.talk !== talk || view.total !== total) views.set(node.id, view = new View(talk, node, wishes));
    view.total = total;
    return view.element;
  });
  const messages = $("#messages"), isSame = shown.length === messages.children.length && shown.every((one, i) => one === messages.children[i]);
  if (!isSame) messages.replaceChildren(...shown);
  const isEmpty = !nodes.length;
  document.body.classList.toggle("empty", isEmpty);
  $("#welcome").hidden = !isEmpty;
  composer.set({isBusy: state.answering.has(talk.id), used: used(nodes)});
  document.title = talk.title ? `${talk.title} · Triptych` : "Triptych";
  markTalks();
  scrolled();
}

/* How full the context is, once that is worth knowing. */
function used(nodes) {
  const total = nodes.findLast(node => node.facts?.usage)?.facts.usage.total_tokens ?? 0;
  const most = state.server.models?.find(one => one.id === state.model)?.max_model_len;
  return most && total > most / 2 ? `${count(total)} of ${count(most)} tokens used` : "";
}

const thread = $("#thread");
const atEnd = () => thread.scrollHeight - thread.scrollTop - thread.clientHeight < 60;
const scrolled = () => { $("#to-end").hidden = atEnd(); };
const toEnd = (behavior = "instant") => thread.scrollTo({top: thread.scrollHeight, behavior});

function welcome() {
  const offers = state.server.hasPictures ? [
    {file: "cat.jpg", words: "What is in the picture?"},
    {file: "apple.png", words: "What color is the background?"},
    {icon: "edit", words: "Write a haiku about a window"},
    {icon: "code", words: "Show a table of the four seasons"},
  ] : [
    {icon: "edit", words: "Write a haiku about a window"},
    {icon: "code", words: "Show a table of the four seasons"},
  ];
  $("#welcome").replaceChildren(
    make("img", {class: "welcome-mark", src: "page/icon.svg", alt: "", width: 44, height: 44}),
    make("h1", {}, state.server.hasPictures ? "What should we look at?" : "What shall we talk about?"),
    make("div", {class: "offers"}, offers.map(offer => make("button", {type: "button", class: "offer", onclick: () => fillIn(offer)},
      offer.file ? make("img", {src: `page/${offer.file}`, alt: offer.file === "cat.jpg" ? "A cat" : "An apple", width: 44, height: 44}) : make("span", {class: "offer-icon"}, icon(offer.icon, 20)),
      make("span", {}, offer.words)))));
}

async function fillIn({file, words}) {
  if (file) {
    const blob = await (await fetch(`page/${file}`)).blob();
    await composer.take([new File([blob], file, {type: blob.type})]);
  }
  composer.words.value = words;
  composer.update();
  composer.words.focus();
}

// ── conversations ───────────────────────────────────────────────────────────────────────────────────────────────

async function listTalks() {
  const heads = await store.heads(), groups = new Map(), midnight = new Date().setHours(0, 0, 0, 0), day = 86_400_000;
  for (const talk of heads) {
    const name = talk.updated >= midnight ? "Today" : talk.updated >= midnight - day ? "Yesterday" : talk.updated >= midnight - 7 * day ? "This week" : "Earlier";
    groups.set(name, [...groups.get(name) ?? [], talk]);
  }
  $("#conversations").replaceChildren(...[...groups].flatMap(([name, talks]) => [make("li", {class: "group"}, name), ...talks.map(row)]));
  markTalks();
}

function row(head) {
  return make("li", {"data-id": head.id},
    make("button", {type: "button", class: "row-button", onclick: () => openHead(head)}, make("span", {class: "row-title"}, head.title || "Untitled"), make("span", {class: "row-dot"})),
    iconButton("trash", `Delete “${head.title}”`, () => deleteTalk(head), {class: "row-delete", size: 16}));
}

const live = new Map();  // conversations that are answering are shown as they are, not as they were saved

function markTalks() {
  for (const item of $("#conversations").children) {
    item.classList.toggle("current", item.dataset.id === state.talk.id);
    item.classList.toggle("answering", state.answering.has(item.dataset.id));
    item.querySelector(".row-button")?.setAttribute("aria-current", item.dataset.id === state.talk.id);
  }
}

async function openHead(head) {
  if (state.talk.id === head.id) { openTalk(state.talk); return; }
  const talk = live.get(head.id) ?? await store.load(head.id);
  talk ? openTalk(talk) : notice("This conversation is not in this browser any more.");
}

function openTalk(talk) {
  live.set(state.talk.id, state.talk);
  for (const id of live.keys()) if (!state.answering.has(id)) live.delete(id);
  for (const node of Object.values(talk.nodes)) if (["waiting", "streaming"].includes(node.state) && !state.answering.has(talk.id)) node.state = "stopped";
  state.talk = talk;
  state.views.clear();
  $("#messages").replaceChildren();
  draw();
  toEnd();
  if (isNarrow()) showSidebar(false);
  if (!matchMedia("(pointer: coarse)").matches) composer.words.focus();
}

async function deleteTalk(head) {
  const talk = state.talk.id === head.id ? state.talk : live.get(head.id) ?? await store.load(head.id);
  if (!talk) { await listTalks(); return; }
  deleted.add(talk.id);
  state.answering.get(talk.id)?.abort();
  await store.remove(talk.id);
  if (state.talk.id === talk.id) openTalk(begin());
  await listTalks();
  notice(`“${talk.title}” was deleted.`, {word: "Undo", act: async () => { deleted.delete(talk.id); await keep(talk); await listTalks(); openTalk(talk); }});
}

// ── notices, the key ────────────────────────────────────────────────────────────────────────────────────────────

let hiding = null;
function notice(words, {word, act, stays = false} = {}) {
  clearTimeout(hiding);
  const box = $("#notice");
  box.replaceChildren(make("span", {}, words), word ? make("button", {type: "button", class: "text-button", onclick: () => { box.hidden = true; act(); }}, word) : "",
    iconButton("close", "Close", () => { box.hidden = true; }, {size: 16}));
  box.hidden = false;
  if (!stays) hiding = setTimeout(() => { box.hidden = true; }, 7000);
}

let asking = null;
/* True once a key was entered that the server takes. */
function askForKey() {
  asking ??= new Promise(resolve => {
    const field = make("input", {type: "password", id: "key", autocomplete: "current-password", spellcheck: "false", value: key.get(), required: true});
    const kept = make("input", {type: "checkbox", id: "key-kept", checked: Boolean(localStorage.getItem("triptych.key"))});
    const wrong = make("p", {class: "wrong", role: "alert", hidden: true});
    const button = make("button", {type: "submit", class: "button main-button"}, "Continue");
    const box = make("dialog", {class: "box", "aria-labelledby": "key-title", onclose: () => { box.remove(); asking = null; resolve(false); }},
      make("form", {onsubmit: async event => {
        event.preventDefault();
        button.disabled = true;
        key.set(field.value.trim(), {isKept: kept.checked});
        try {
          await connect();
          resolve(true);
          box.close();
        } catch (error) {
          wrong.textContent = error.status === 401 ? "The server does not know this key." : `${error.message}. ${error.hint}`;
          wrong.hidden = false;
          field.select();
        }
        button.disabled = false;
      }},
        icon("key", 26), make("h2", {id: "key-title"}, "This server asks for a key"),
        make("p", {class: "hint"}, "Whoever runs it has set one. It stays in this browser and is sent to this server alone."),
        make("label", {for: "key"}, "API key"), field, wrong,
        make("label", {class: "check", for: "key-kept"}, kept, "Keep it after this tab is closed"),
        make("div", {class: "box-row"}, make("button", {type: "button", class: "button", onclick: () => box.close()}, "Not now"), button)));
    document.body.append(box);
    box.showModal();
    field.focus();
  });
  return asking;
}

// ── the server ──────────────────────────────────────────────────────────────────────────────────────────────────

/* What it serves. Raises Refusal. */
async function connect() {
  const {data} = await json("v1/models");
  const facts = await maybe("props").catch(() => null);
  state.server = {...state.server, ...told(facts), models: data, asksKey: Boolean(key.get())};
  const before = localStorage.getItem("triptych.model");
  state.model = data.some(one => one.id === before) ? before : data[0].id;
  drawModel();
  composer.set({hasPictures: state.server.hasPictures});
  welcome();
  drawPanel();
}

/* What of `/props` matters here. */
function told(facts) {
  if (!facts) return {};
  return {hasPictures: facts.modalities.vision, minKeep: facts.reduction.min_keep, keep: facts.reduction.keep, kvBudget: facts.caches.kv_budget, defaults: facts.default_generation_settings};
}

/* What one picture would cost, or why it would be refused; null where nobody can say. */
async function inspect(picture) {
  const {stream, stream_options, ...body} = bodyOf([{role: "user", text: "", pictures: [picture]}], state.model);
  try {
    return (await maybe("v1/media/inspect", {body}))?.media[0] ?? null;
  } catch (error) {
    return error.status === 413 ? {error: {message: `${error.message}. Hint: ${error.hint}`}} : null;
  }
}

function drawModel() {
  const {models} = state.server;
  const card = models.find(one => one.id === state.model);
  const context = card?.max_model_len ? `${count(card.max_model_len)} tokens of context` : "";
  $("#model").replaceChildren(models.length > 1
    ? make("select", {"aria-label": "Model", onchange: event => { state.model = event.target.value; localStorage.setItem("triptych.model", state.model); drawModel(); drawPanel(); }}, models.map(one => make("option", {value: one.id, selected: one.id === state.model}, one.id)))
    : make("span", {class: "model-name", title: context}, state.model));
  $("#footnote").textContent = matchMedia("(pointer: coarse)").matches ? "Answers can be wrong." : "Answers can be wrong. Enter sends, Shift + Enter begins a new line.";
}

let isAway = false, next = 0;
async function watch() {
  if (!document.hidden) {
    let words = "", kind = "ok";
    try {
      const response = await fetch("health", {cache: "no-store", signal: AbortSignal.timeout(8000)});
      const health = await response.json();
      kind = response.ok ? "ok" : "ill";
      words = response.ok ? ([health.running && `${health.running} answering`, health.waiting && `${health.waiting} waiting`].filter(Boolean).join(", ") || "Ready")
        : {draining: "Stopping", stalled: "Stalled", dead: "Engine stopped"}[health.status] ?? "Not well";
      if (isAway) { isAway = false; $("#notice").hidden = true; connect().catch(() => {}); }
    } catch {
      [words, kind, isAway] = ["No connection", "away", true];
    }
    const box = $("#connection");
    if (box.textContent !== words) box.replaceChildren(make("i"), words);
    box.dataset.kind = kind;
  }
  clearTimeout(next);
  next = setTimeout(watch, isAway ? 2000 : 4000);
}

// ── the panel ───────────────────────────────────────────────────────────────────────────────────────────────────

const PANELS = {settings: ["Settings", "settings"], code: ["Request as code", "code"], dashboard: ["Dashboard", "pulse"]};
const dashboard = new Dashboard();

function showPanel(name) {
  state.panel = name;
  $("#panel").hidden = !name;
  document.body.classList.toggle("with-panel", Boolean(name));
  document.body.classList.toggle("wide-panel", name === "dashboard" && localStorage.getItem("triptych.wide") === "yes");
  for (const button of document.querySelectorAll("[data-panel]")) button.setAttribute("aria-pressed", button.dataset.panel === name);
  $("#main").inert = Boolean(name) && isNarrow();
  history.replaceState(null, "", name === "dashboard" ? "#dashboard" : location.pathname + location.search);
  name === "dashboard" ? dashboard.start() : dashboard.halt();
  drawPanel();
}

function drawPanel() {
  if (!state.panel) return;
  const isWide = document.body.classList.contains("wide-panel");
  $("#panel-title").textContent = PANELS[state.panel][0];
  $("#panel-wide").hidden = state.panel !== "dashboard";
  dress($("#panel-wide"), isWide ? "narrow" : "wide", isWide ? "Show beside the conversation" : "Show on the whole page", 18);
  const body = $("#panel-body");
  if (state.panel === "dashboard") { if (body.firstChild !== dashboard.element) body.replaceChildren(dashboard.element); }
  else if (state.panel === "settings") body.replaceChildren(form(state.server, () => {}));
  else drawSnippets();
}

/* What would be sent if the box were sent now; while it is empty, what was asked last. */
function drawSnippets() {
  if (state.panel !== "code") return;
  const nodes = path(state.talk), text = composer.words.value.trim();
  while (nodes.length && nodes.at(-1).role !== "user") nodes.pop();
  let asked = nodes;
  if (text || composer.pictures.length) asked = [...path(state.talk), {role: "user", text, pictures: composer.pictures}];
  else if (!nodes.length) asked = [{role: "user", text: "Hello", pictures: []}];
  const pictures = asked.flatMap(node => node.pictures ?? []);
  $("#panel-body").replaceChildren(snippets.view({body: bodyOf(asked, state.model), pictures, needsKey: state.server.asksKey}));
}

// ── the frame ───────────────────────────────────────────────────────────────────────────────────────────────────

const isNarrow = () => matchMedia("(max-width: 860px)").matches;

function showSidebar(is) {
  document.body.classList.toggle("with-sidebar", is);
  $("#scrim").hidden = !(is && isNarrow());
  $("#sidebar").inert = !is;
  if (!isNarrow()) localStorage.setItem("triptych.sidebar", is ? "yes" : "no");
  if (is && isNarrow()) $("#new-chat").focus();
}

function drawTheme() {
  const isDark = document.documentElement.dataset.theme === "dark";
  dress($("#theme"), isDark ? "sun" : "moon", isDark ? "Light colours" : "Dark colours", 18);
  document.querySelector("meta[name=theme-color]").content = getComputedStyle(document.body).backgroundColor;
}

function listen() {
  dress($("#sidebar-open"), "sidebar", "Show conversations").addEventListener("click", () => showSidebar(true));
  dress($("#sidebar-close"), "sidebar", "Hide conversations").addEventListener("click", () => { showSidebar(false); $("#sidebar-open").focus(); });
  $("#scrim").addEventListener("click", () => showSidebar(false));
  $("#new-chat").append(icon("compose", 18), "New conversation");
  $("#new-chat").addEventListener("click", () => openTalk(begin()));
  dress($("#new-chat-too"), "compose", "New conversation").addEventListener("click", () => openTalk(begin()));
  $("#theme").addEventListener("click", () => {
    const theme = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    localStorage.setItem("triptych.theme", theme);
    drawTheme();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", event => {
    if (localStorage.getItem("triptych.theme")) return;
    document.documentElement.dataset.theme = event.matches ? "dark" : "light";
    drawTheme();
  });
  for (const button of document.querySelectorAll("[data-panel]")) {
    dress(button, PANELS[button.dataset.panel][1], PANELS[button.dataset.panel][0]);
    button.addEventListener("click", () => { showPanel(state.panel === button.dataset.panel && !button.closest(".panel") ? null : button.dataset.panel); if (state.panel) $("#panel-body").focus(); });
  }
  dress($("#panel-close"), "close", "Close the panel").addEventListener("click", () => closePanel());
  $("#panel-wide").addEventListener("click", () => { localStorage.setItem("triptych.wide", document.body.classList.contains("wide-panel") ? "no" : "yes"); showPanel(state.panel); });
  dress($("#to-end"), "down", "To the latest message").addEventListener("click", () => toEnd("smooth"));
  thread.addEventListener("scroll", scrolled, {passive: true});
  addEventListener("resize", () => {
    $("#scrim").hidden = !(document.body.classList.contains("with-sidebar") && isNarrow());
    $("#main").inert = Boolean(state.panel) && isNarrow();
  });
  document.addEventListener("keydown", shortcut);
}

function closePanel() {
  const name = state.panel;
  showPanel(null);
  document.querySelector(`[data-panel=${name}]`)?.focus();
}

function shortcut(event) {
  if (document.querySelector("dialog[open]")) return;
  const isTyping = event.target.closest("input, textarea, select");
  if (event.key === "Escape") {
    if (state.answering.has(state.talk.id)) stop();
    else if (isNarrow() && document.body.classList.contains("with-sidebar")) showSidebar(false);
    else if (state.panel) closePanel();
  } else if (event.key === "/" && !isTyping) { event.preventDefault(); composer.words.focus(); }
  else if (event.key.toLowerCase() === "o" && event.shiftKey && (event.ctrlKey || event.metaKey)) { event.preventDefault(); openTalk(begin()); }
}

let drawing = null;
const composer = new Composer({
  send, stop, inspect, complain: words => notice(words),
  changed() { clearTimeout(drawing); drawing = setTimeout(drawSnippets, 150); },
  editLast() { const node = path(state.talk).findLast(one => one.role === "user"); if (node) state.views.get(node.id)?.beginEdit(); },
});

/* Nothing moves before the first picture of the page stands. */
requestAnimationFrame(() => requestAnimationFrame(() => document.body.classList.add("ready")));
listen();
drawTheme();
welcome();
showSidebar(!isNarrow() && localStorage.getItem("triptych.sidebar") !== "no");
draw();
listTalks();
watch();
if (location.hash === "#dashboard") showPanel("dashboard");
if (!matchMedia("(pointer: coarse)").matches) composer.words.focus();
connect().catch(error => {
  if (error.status === 401) { state.server.asksKey = true; askForKey(); }
  else notice(`${error.message}. ${error.hint}`, {word: "Try again", act: () => location.reload(), stays: true});
});
