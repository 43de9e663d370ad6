// The messages of a conversation, each a view that is made once and then kept up to date.

import {copy, count, icon, iconButton, make, seconds} from "./dom.js";
import {show} from "./markdown.js";
import {thumbnail} from "./pictures.js";
import {siblings} from "./tree.js";

/* What a view may ask for: {retry, edit, change, choose, askKey}. */
export class View {
  constructor(talk, node, wishes) {
    Object.assign(this, {talk, node, wishes});
    this.body = make("div", {class: node.role === "user" ? "bubble" : "prose"});
    this.extra = make("div", {class: "extra"});
    this.tools = make("div", {class: "tools"});
    this.element = make("li", {class: `message ${node.role}`, "data-id": node.id},
      make("h3", {class: "unseen"}, node.role === "user" ? "You" : "Answer"),
      node.pictures.length ? make("div", {class: "thumbnails"}, node.pictures.map(picture => thumbnail(picture))) : null,
      this.body, this.extra, this.tools);
    this.update();
  }

  update() {
    this.node.role === "user" ? this.updateQuestion() : this.updateAnswer();
  }

  updateQuestion() {
    const {node, wishes} = this;
    this.body.textContent = node.text;
    this.body.hidden = !node.text;
    this.tools.replaceChildren(...versions(this), iconButton("edit", "Edit and ask again", () => this.beginEdit()), copyButton(node));
  }

  updateAnswer() {
    const {node} = this;
    show(this.body, node.text);
    this.element.dataset.state = node.state;
    const isOn = node.state === "waiting" || node.state === "streaming";
    this.element.setAttribute("aria-busy", isOn);
    if (isOn === this.wasOn && isOn && node.state === this.wasState) return;  // the text alone has grown
    this.wasOn = isOn;
    this.wasState = node.state;
    this.extra.replaceChildren(...this.notes());
    this.tools.replaceChildren(...isOn || (node.state === "failed" && !node.text) ? [...versions(this)] : [...versions(this), node.text ? copyButton(node) : "", iconButton("retry", "Try again", () => this.wishes.retry(node)), ...this.figures()]);
  }

  notes() {
    const {node} = this;
    if (node.state === "waiting") return [waiting(this.talk, node)];
    if (node.state === "failed") return [refusal(node.error, this)];
    if (node.state === "stopped") return [make("p", {class: "remark"}, "You stopped this answer.")];
    if (node.facts?.finish === "length") return [make("p", {class: "remark"}, "The answer reached its longest length. Settings can raise it.")];
    return node.state === "done" && !node.text ? [make("p", {class: "remark"}, "The model had nothing to say.")] : [];
  }

  figures() {
    const facts = this.node.facts;
    if (!facts?.usage) return [];
    const card = make("div", {class: "account", hidden: true});
    const words = [facts.trace?.tokens_per_s && `${facts.trace.tokens_per_s.toFixed(1)} tokens/s`, `${seconds(facts.first)} to the first`].filter(Boolean).join(" · ");
    const button = make("button", {type: "button", class: "text-button figures", "aria-expanded": "false", title: "Where the time and the tokens went",
      onclick: () => { card.hidden = !card.hidden; button.setAttribute("aria-expanded", !card.hidden); if (!card.firstChild) card.append(...account(facts)); if (!card.hidden) card.scrollIntoView({block: "nearest", behavior: "smooth"}); }}, words);
    return [button, card];
  }

  beginEdit() {
    const {node} = this;
    let pictures = [...node.pictures];
    const words = make("textarea", {value: node.text, rows: Math.min(12, node.text.split("\n").length + 1), "aria-label": "Edit the message",
      onkeydown: event => { if (event.key === "Escape") { event.stopPropagation(); end(); } if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); } }});
    const row = make("ul", {class: "chips"}, pictures.map(picture => {
      const chip = make("li", {class: "chip"}, thumbnail(picture), iconButton("close", `Leave ${picture.name} out`, () => { pictures = pictures.filter(one => one !== picture); chip.remove(); }, {class: "chip-close", size: 14}));
      return chip;
    }));
    const form = make("form", {class: "editor", onsubmit: event => { event.preventDefault(); done(); }}, pictures.length ? row : null, words,
      make("div", {class: "editor-row"}, make("button", {type: "button", class: "button", onclick: () => end()}, "Cancel"), make("button", {type: "submit", class: "button main-button"}, "Ask again")));
    const done = () => { if (words.value.trim() || pictures.length) { end(); this.wishes.edit(node, words.value.trim(), pictures); } };
    const end = () => { form.remove(); this.element.classList.remove("editing"); this.element.querySelector(".tools button")?.focus(); };
    this.element.classList.add("editing");
    this.element.append(form);
    words.focus();
    words.setSelectionRange(words.value.length, words.value.length);
  }
}

function versions({talk, node, wishes}) {
  const all = siblings(talk, node), at = all.indexOf(node);
  if (all.length < 2) return [];
  return [make("span", {class: "versions"},
    iconButton("left", "Version before", () => wishes.choose(all[at - 1]), {disabled: at === 0, size: 16}),
    make("span", {}, `${at + 1}/${all.length}`),
    iconButton("right", "Next version", () => wishes.choose(all[at + 1]), {disabled: at === all.length - 1, size: 16}))];
}

function copyButton(node) {
  const button = iconButton("copy", "Copy", () => copy(node.text, button));
  return button;
}

function waiting(talk, node) {
  const pictures = talk.nodes[node.parent]?.pictures.length ?? 0;
  const words = pictures ? `Looking at the ${pictures > 1 ? "pictures" : "picture"}` : "Reading";
  return make("p", {class: "waiting"}, make("span", {class: "panels", "aria-hidden": "true"}, make("i"), make("i"), make("i")), words);
}

export function refusal(error, view) {
  const sentence = error.message ? error.message[0].toUpperCase() + error.message.slice(1) : "Something went wrong";
  const buttons = error.status === 401
    ? [make("button", {type: "button", class: "button main-button", onclick: () => view.wishes.askKey(view.node)}, "Enter the key")]
    : [make("button", {type: "button", class: "button", onclick: () => view.wishes.retry(view.node)}, "Try again"),
      error.status === 400 && make("button", {type: "button", class: "button", onclick: () => view.wishes.change(view.talk.nodes[view.node.parent])}, "Change the message")];
  return make("div", {class: "refusal", role: "alert"}, icon("alert", 20),
    make("div", {}, make("p", {class: "refusal-what"}, sentence.replace(/([^.!?])$/, "$1.")),
      error.hint ? make("p", {}, `${error.hint[0].toUpperCase()}${error.hint.slice(1)}`.replace(/([^.!?])$/, "$1.")) : null,
      error.after && !error.hint ? make("p", {}, `The server suggests to wait ${count(error.after)} s.`) : null,
      error.status >= 500 && error.id ? make("p", {class: "refusal-id"}, "In the server’s log as ", make("code", {}, error.id)) : null,
      make("div", {class: "refusal-row"}, buttons)));
}

// ── where the time and the tokens went ──────────────────────────────────────────────────────────────────────────

export function account({usage, trace, first, total}) {
  const rows = [];
  if (trace) {
    const inside = trace.queue_s + trace.prefill_s, before = Math.max(0, first - inside);
    const waiting = Math.max(0, trace.queue_s - trace.encode_s), reading = Math.max(0, inside - trace.encode_s - waiting);  // pictures are encoded while their prompt waits
    rows.push(bar("Time", seconds(total), [
      ["Sending, preparing", before, "a1", seconds], ["Waiting", waiting, "a0", seconds], ["Seeing", trace.encode_s, "a2", seconds],
      ["Reading", reading, "a3", seconds], ["Writing", trace.decode_s, "a4", seconds]]));
  }
  const details = usage.prompt_tokens_details ?? {image_tokens: 0, cached_tokens: 0};
  rows.push(bar("Tokens", count(usage.total_tokens), [
    ["Picture", details.image_tokens, "a2", count], ["Text", usage.prompt_tokens - details.image_tokens, "a3", count], ["Answer", usage.completion_tokens, "a4", count]]));
  const remarks = [`${count(details.cached_tokens)} of ${count(usage.prompt_tokens)} prompt tokens were cached`];
  if (trace && trace.encoder_hits + trace.encoder_misses) remarks.push(`${trace.encoder_hits} of ${trace.encoder_hits + trace.encoder_misses} ${trace.encoder_hits + trace.encoder_misses > 1 ? "pictures were" : "picture was"} already encoded`);
  rows.push(make("p", {class: "hint"}, `${remarks.join("; ")}.`));
  return rows;
}

function bar(name, sum, pieces) {
  const shown = pieces.filter(([, value]) => value > 0), whole = shown.reduce((a, [, value]) => a + value, 0);
  const line = make("div", {class: "bar-line", "aria-hidden": "true"}, shown.map(([, value, shade]) => {
    const piece = make("i", {class: shade});
    piece.style.flexGrow = Math.max(value / whole, 0.004);
    return piece;
  }));
  return make("div", {class: "bar-row"}, make("div", {class: "bar-head"}, make("span", {}, name), make("span", {}, sum)), line,
    make("ul", {class: "legend"}, shown.map(([label, value, shade, unit]) => make("li", {}, make("i", {class: shade}), label, make("b", {}, unit(value))))));
}
