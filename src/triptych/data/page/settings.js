// How answers are made: kept in this browser, sent only where they differ from the server's own.

import {make} from "./dom.js";

const KEPT = "triptych.settings";

/* name, label, range, what it does. A value that was never set is not sent. */
const SLIDERS = [
  ["temperature", "Temperature", [0, 2, 0.05], "0 always takes the likeliest word; higher is freer."],
  ["top_p", "Top p", [0.05, 1, 0.05], "Choose among the likeliest words that together have this share."],
  ["top_k", "Top k", [0, 200, 1], "Choose among so many words; 0 is all."],
  ["min_p", "Min p", [0, 1, 0.01], "Leave out what is less likely than this share of the likeliest."],
  ["repetition_penalty", "Repetition penalty", [1, 2, 0.01], "Above 1 discourages words that were there already."],
  ["presence_penalty", "Presence penalty", [-2, 2, 0.1], "Discourages words that the answer has already."],
  ["frequency_penalty", "Frequency penalty", [-2, 2, 0.1], "The more, the oftener the answer has them."],
];

export const settings = load();

function load() {
  try { return JSON.parse(localStorage.getItem(KEPT)) ?? {}; } catch { return {}; }
}

function set(name, value) {
  if (value === "" || value == null) delete settings[name];
  else settings[name] = value;
  localStorage.setItem(KEPT, JSON.stringify(settings));
}

/* The body of a chat request for these messages. */
export function bodyOf(nodes, model) {
  const messages = nodes.filter(node => node.role === "user" || node.text).map(node => ({role: node.role, content: contentOf(node)}));
  if (settings.system) messages.unshift({role: "system", content: settings.system});
  const body = {model, messages, stream: true, stream_options: {include_usage: true}};
  for (const [name] of SLIDERS) if (settings[name] != null) body[name] = settings[name];
  for (const name of ["max_tokens", "seed"]) if (settings[name] != null) body[name] = settings[name];
  const stops = (settings.stop ?? "").split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  const ours = {};
  for (const name of ["keep_visual", "reduce", "kv_budget"]) if (settings[name] != null) ours[name] = settings[name];
  if (Object.keys(ours).length) body.triptych = ours;
  return body;
}

function contentOf(node) {
  if (!node.pictures.length) return node.text;
  const detail = settings.detail ? {detail: settings.detail} : {};
  const parts = node.pictures.map(picture => ({type: "image_url", image_url: {url: picture.url, ...detail}}));
  return node.text ? [...parts, {type: "text", text: node.text}] : parts;
}

/* The panel. `changed` is called after each change. `server` says what it can do. */
export function form(server, changed) {
  const put = (name, value) => { set(name, value); changed(); };
  const hasForgetting = server.kvBudget != null && server.kvBudget < 1;
  return make("form", {class: "settings", onsubmit: event => event.preventDefault()},
    section("Instructions",
      field("system", "System message", make("textarea", {id: "set-system", rows: 4, value: settings.system ?? "", placeholder: "How the model should answer, in every message", oninput: event => put("system", event.target.value)}))),
    section("Answer", ...SLIDERS.slice(0, 4).map(one => slider(one, put, server.defaults)), number("max_tokens", "Longest answer", "tokens", "Ends the answer there; empty: as long as the context allows.", put), number("seed", "Seed", "", "The same seed gives the same answer again.", put)),
    section("Repetition", ...SLIDERS.slice(4).map(one => slider(one, put, server.defaults))),
    section("Ending", field("stop", "Stop strings", make("textarea", {id: "set-stop", rows: 2, value: settings.stop ?? "", placeholder: "One a line", oninput: event => put("stop", event.target.value)}), "An answer ends before the first of them.")),
    server.hasPictures && section("Pictures",
      choice("detail", "Detail", [["", "The model's choice"], ["low", "Low: one tile"], ["high", "High"]], "Low costs the fewest tokens.", put),
      slider(["keep_visual", "Keep visual tokens", [Math.max(0.05, server.minKeep ?? 0), 1, 0.05], "Fewer tokens a picture: faster, and small print suffers first."], put),
      choice("reduce", "Chosen by", [["", "The server's choice"], ...["cenprune", "cdpruner", "tome", "pool", "grid", "random"].map(name => [name, name])], "Which visual tokens stay.", put)),
    hasForgetting && section("Memory", slider(["kv_budget", "Keep of the prompt", [server.kvBudget, 1, 0.05], "Share of cached keys and values that stays once the prompt was read."], put)),
    make("button", {type: "button", class: "button", onclick: event => { for (const name of Object.keys(settings)) set(name, null); changed(); event.target.closest("form").replaceWith(form(server, changed)); }}, "Back to the server's own settings"));
}

const section = (title, ...fields) => make("fieldset", {}, make("legend", {}, title), fields);

function field(name, label, input, hint) {
  return make("div", {class: "field"}, make("label", {for: `set-${name}`}, label), input, hint && make("p", {class: "hint"}, hint));
}

const NEUTRAL = {temperature: 1, top_p: 1, top_k: 0, min_p: 0, repetition_penalty: 1, presence_penalty: 0, frequency_penalty: 0, keep_visual: 1, kv_budget: 1};

function slider([name, label, [min, max, step], hint], put, defaults = {}) {
  const out = make("output", {for: `set-${name}`});
  const back = make("button", {type: "button", class: "text-button", "aria-label": `${label}: the default`, onclick: () => { put(name, null); show(); }}, "reset");
  const input = make("input", {id: `set-${name}`, type: "range", min, max, step, oninput: () => { put(name, Number(input.value)); show(); }});
  function show() {
    const value = settings[name];
    input.value = value ?? defaults[name] ?? NEUTRAL[name];
    input.classList.toggle("unset", value == null);
    input.style.setProperty("--at", `${(input.value - min) / (max - min) * 100}%`);
    out.textContent = value == null ? `default${defaults[name] == null ? "" : `, ${defaults[name]}`}` : String(value);
    back.hidden = value == null;
  }
  show();
  return make("div", {class: "field"}, make("div", {class: "field-head"}, make("label", {for: `set-${name}`}, label), back, out), input, make("p", {class: "hint"}, hint));
}

function number(name, label, unit, hint, put) {
  const input = make("input", {id: `set-${name}`, type: "number", inputmode: "numeric", min: name === "seed" ? null : 1, step: 1, placeholder: unit ? `${unit}, no limit` : "chance", value: settings[name] ?? "",
    oninput: () => put(name, input.value === "" || !input.validity.valid ? null : Number(input.value))});
  return field(name, label, input, hint);
}

function choice(name, label, options, hint, put) {
  const select = make("select", {id: `set-${name}`, onchange: () => put(name, select.value)}, options.map(([value, words]) => make("option", {value}, words)));
  select.value = settings[name] ?? "";
  return field(name, label, select, hint);
}
