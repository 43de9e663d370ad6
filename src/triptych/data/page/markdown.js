// Markdown of a model, as nodes. It is parsed block by block, so that a growing answer redraws its last block only.

import {copy, icon, make} from "./dom.js";
import {paint} from "./highlight.js";

const FENCE = /^( {0,3})(`{3,}|~{3,})\s*([^`]*)$/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)(?:\s+#+)?\s*$/;
const RULE = /^ {0,3}([-*_])(?:[ \t]*\1){2,}[ \t]*$/;
const QUOTE = /^ {0,3}> ?/;
const ITEM = /^( *)([-*+•]|\d{1,9}[.)])(?:[ \t]+|$)/;
const DELIMITER = /^ {0,3}\|?[ \t]*:?-+:?[ \t]*(\|[ \t]*:?-+:?[ \t]*)*\|?[ \t]*$/;

/* Show `text` within `element`; blocks that did not change keep their nodes. */
export function show(element, text) {
  const blocks = split(text);
  const before = element.blocks ?? [];
  let same = 0;
  while (same < blocks.length && same < before.length && blocks[same] === before[same].source) same++;
  for (const block of before.slice(same)) block.node.remove();
  const added = blocks.slice(same).map(source => ({source, node: render(source)}));
  element.append(...added.map(block => block.node));
  element.blocks = [...before.slice(0, same), ...added];
}

/* The sources of the top-level blocks. */
export function split(text) {
  const lines = text.replace(/\r\n?/g, "\n").split("\n"), found = [];
  for (let at = 0; at < lines.length;) {
    if (!lines[at].trim()) { at++; continue; }
    const end = endOf(lines, at);
    found.push(lines.slice(at, end).join("\n"));
    at = end;
  }
  return found;
}

function endOf(lines, at) {
  const fence = FENCE.exec(lines[at]);
  if (fence) return afterFence(lines, at, fence);
  if (HEADING.test(lines[at]) || RULE.test(lines[at])) return at + 1;
  if (QUOTE.test(lines[at])) return upTo(lines, at, line => !QUOTE.test(line) && (!line.trim() || beginsBlock(line)));
  if (isTable(lines, at)) return upTo(lines, at, line => !line.includes("|"));
  if (ITEM.test(lines[at])) return afterList(lines, at);
  return upTo(lines, at, (line, i) => !line.trim() || beginsBlock(line) || isTable(lines, i));
}

function afterFence(lines, at, [, , marks]) {
  const close = new RegExp(`^ {0,3}${marks[0]}{${marks.length},}\\s*$`);
  for (let i = at + 1; i < lines.length; i++) if (close.test(lines[i])) return i + 1;
  return lines.length;
}

/* Items, what is indented below them, and single blank lines between. */
function afterList(lines, at) {
  const base = ITEM.exec(lines[at])[1].length, isOrdered = /\d/.test(lines[at].trim()[0]);
  let i = at + 1, fence = null;
  for (; i < lines.length; i++) {
    const line = lines[i], mark = FENCE.exec(line.trimStart());
    if (fence) { if (mark && mark[2].startsWith(fence) && !mark[3]) fence = null; continue; }
    const indent = /^ */.exec(line)[0].length;
    if (!line.trim()) {
      const next = lines[i + 1] ?? "";
      if (!next.trim() || (/^ */.exec(next)[0].length <= base && !goesOn(next, base, isOrdered))) break;
    } else if (indent <= base) {
      const item = ITEM.exec(line);
      if (item ? !goesOn(line, base, isOrdered) : beginsBlock(line)) break;
    } else if (mark) fence = mark[2];
  }
  return i;
}

function goesOn(line, base, isOrdered) {
  const item = ITEM.exec(line);
  return Boolean(item) && !RULE.test(line) && (item[1].length > base || /\d/.test(item[2]) === isOrdered);
}

function beginsBlock(line) {
  return FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);
}

function isTable(lines, at) {
  return lines[at].includes("|") && at + 1 < lines.length && lines[at + 1].includes("-") && DELIMITER.test(lines[at + 1])
    && cells(lines[at]).length === cells(lines[at + 1]).length;
}

function upTo(lines, at, ends) {
  let i = at + 1;
  while (i < lines.length && !ends(lines[i], i)) i++;
  return i;
}

// ── blocks ──────────────────────────────────────────────────────────────────────────────────────────────────────

const DEEPEST = 12;  // lists and quotes within one another; what lies deeper is shown as it was written

function render(source, depth = 0) {
  const lines = source.split("\n"), first = lines[0];
  if (depth > DEEPEST) return make("p", {}, source);
  const fence = FENCE.exec(first);
  if (fence) return code(lines, fence);
  const heading = HEADING.exec(first);
  if (heading) return make(`h${Math.min(6, heading[1].length + 1)}`, {}, inline(heading[2]));
  if (RULE.test(first)) return make("hr");
  if (QUOTE.test(first)) {
    const inner = lines.map(line => line.replace(QUOTE, "")).join("\n");
    return make("blockquote", {}, split(inner).map(block => render(block, depth + 1)));
  }
  if (isTable(lines, 0)) return table(lines);
  if (ITEM.test(first)) return list(lines, depth);
  return make("p", {}, inline(source));
}

function code(lines, fence) {
  const isClosed = lines.length > 1 && FENCE.test(lines.at(-1)) && !FENCE.exec(lines.at(-1))[3];
  const strip = new RegExp(`^ {0,${fence[1].length}}`);
  const text = lines.slice(1, isClosed ? -1 : undefined).map(line => line.replace(strip, "")).join("\n");
  const language = fence[3].trim().split(/\s/)[0].slice(0, 24);
  return codeBlock(text, language);
}

/* A frame with the language's name and a button that copies. */
export function codeBlock(text, language) {
  const button = make("button", {type: "button", class: "text-button", onclick: () => copy(text, button)}, icon("copy", 16), "Copy");
  return make("figure", {class: "code"},
    make("figcaption", {}, make("span", {}, language || "text"), button),
    make("pre", {tabindex: "0"}, make("code", {}, paint(text, language))));
}

function list(lines, depth) {
  const [, margin, mark] = ITEM.exec(lines[0]);
  const isOrdered = /\d/.test(mark), items = [];
  let fence = null;
  for (const line of lines) {
    const item = fence ? null : ITEM.exec(line);
    if (item && item[1].length <= margin.length) items.push({indent: item[0].length, lines: [line.slice(item[0].length)]});
    else items.at(-1).lines.push(line.slice(Math.min(items.at(-1).indent, /^ */.exec(line)[0].length)));
    const edge = FENCE.exec(line.trimStart());
    if (edge) fence = fence ? null : edge[2];
  }
  const isLoose = items.some((item, i) => item.lines.slice(0, i === items.length - 1 ? undefined : -1).some(line => !line.trim()));
  const start = isOrdered ? parseInt(mark, 10) : null;
  return make(isOrdered ? "ol" : "ul", {start: start > 1 ? start : null}, items.map(item => listItem(item.lines, isLoose, depth)));
}

function listItem(lines, isLoose, depth) {
  const task = /^\[([ xX])\]\s+/.exec(lines[0]);
  const text = [task ? lines[0].slice(task[0].length) : lines[0], ...lines.slice(1)].join("\n");
  const blocks = split(text).map(block => render(block, depth + 1));
  const inner = blocks.flatMap(block => block.tagName === "P" && !isLoose ? [...block.childNodes] : [block]);
  const box = task && make("input", {type: "checkbox", disabled: true, checked: task[1] !== " "});
  return make("li", {class: task ? "task" : null}, box, inner);
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map(cell => cell.trim().replace(/\\\|/g, "|"));
}

function table(lines) {
  const sides = cells(lines[1]).map(cell => cell.endsWith(":") ? (cell.startsWith(":") ? "middle" : "end") : null);
  const row = (line, tag) => {
    const words = cells(line);
    return make("tr", {}, sides.map((side, i) => make(tag, {class: side, scope: tag === "th" ? "col" : null}, inline(words[i] ?? ""))));
  };
  return make("div", {class: "table", tabindex: "0", role: "region", "aria-label": "Table"},
    make("table", {}, make("thead", {}, row(lines[0], "th")), make("tbody", {}, lines.slice(2).map(line => row(line, "td")))));
}

// ── within a line ───────────────────────────────────────────────────────────────────────────────────────────────

const SPANS = new RegExp([
  /(?<ticks>`+)(?<code>[^`]|[^`][\s\S]*?[^`])\k<ticks>(?!`)/,
  /!?\[(?<words>[^\[\]\n]{0,400})\]\((?<target>[^()\s]*(?:\([^()\s]*\)[^()\s]*)*)(?:\s+"[^"\n]*")?\)/,
  /<(?<angle>https?:\/\/[^\s<>]{1,2000})>/,
  /(?<bare>\bhttps?:\/\/[^\s<>"'`]{1,2000})/,
  /(?<both>\*\*\*|___)(?=\S)(?<strongEm>[^\n]*?\S)\k<both>/,
  /(?<double>\*\*|__)(?=\S)(?<strong>[^\n]*?\S)\k<double>/,
  /(?<tildes>~~)(?=\S)(?<struck>[^\n]*?\S)~~/,
  /(?<star>\*)(?=[^\s*])(?<em>[^*\n]*[^\s*])\*(?!\*)/,
  /(?<![\p{L}\p{N}])_(?=[^\s_])(?<under>[^_\n]*[^\s_])_(?![\p{L}\p{N}])/u,
  /\\(?<escaped>[!-/:-@[-`{-~])/,
  /(?<newline>(?: {2,}|\\)\n)/,
].map(part => part.source).join("|"), "gu");

const INLINE_CHARACTERS = 8_000;  // a longer paragraph is shown as it is

function inline(text, depth = 0) {
  if (depth > 6 || text.length > INLINE_CHARACTERS) return [text];
  const nodes = [];
  let at = 0;
  for (const match of text.matchAll(SPANS)) {
    if (match.index > at) nodes.push(text.slice(at, match.index));
    const [node, length] = span(match, depth);
    nodes.push(node);
    at = match.index + length;
  }
  if (at < text.length) nodes.push(text.slice(at));
  return nodes.flat();
}

function span(match, depth) {
  const found = match.groups, length = match[0].length;
  if (found.code != null) return [make("code", {}, found.code.replace(/^ (.*\S.*) $/s, "$1")), length];
  if (found.target != null) return [link(found.target, inline(found.words, depth + 1)), length];
  if (found.angle) return [link(found.angle, [found.angle]), length];
  if (found.bare) {
    const address = found.bare.replace(/[.,;:!?)\]}*_]+$/, tail => tail.startsWith(")") && found.bare.includes("(") ? ")" : "");
    return [[link(address, [address]), match[0].slice(address.length)], length];
  }
  if (found.strongEm) return [make("strong", {}, make("em", {}, inline(found.strongEm, depth + 1))), length];
  if (found.strong) return [make("strong", {}, inline(found.strong, depth + 1)), length];
  if (found.struck) return [make("s", {}, inline(found.struck, depth + 1)), length];
  if (found.em) return [make("em", {}, inline(found.em, depth + 1)), length];
  if (found.under) return [make("em", {}, inline(found.under, depth + 1)), length];
  if (found.escaped) return [found.escaped, length];
  return [make("br"), length];
}

/* Only the web and mail: a model's link may name no other scheme. Pictures elsewhere are links, never loaded. */
function link(target, words) {
  let url = null;
  try { url = new URL(target); } catch { /* relative: it would lead into this server */ }
  if (!url || !["http:", "https:", "mailto:"].includes(url.protocol)) return words;
  return make("a", {href: url.href, target: "_blank", rel: "noopener noreferrer nofollow"}, words.length ? words : target);
}
