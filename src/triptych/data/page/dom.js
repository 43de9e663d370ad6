// Elements and icons, made node by node: no text ever becomes markup.

const SVG = "http://www.w3.org/2000/svg";

// 24 × 24, stroked. The shapes are our own.
const ICONS = {
  attach: "M4 16.5V18a2.5 2.5 0 0 0 2.5 2.5h11A2.5 2.5 0 0 0 20 18V6a2.5 2.5 0 0 0-2.5-2.5h-11A2.5 2.5 0 0 0 4 6v10.5l4.6-4.600a1.5 1.5 0 0 1 2.1 0l5 5M14 14l1.4-1.400a1.5 1.5 0 0 1 2.1 0L20 15M15.5 8.5h.01",
  camera: "M4 8.5h3l1.6-2.600h6.800L17 8.5h3a1.5 1.5 0 0 1 1.5 1.5v8a1.5 1.5 0 0 1-1.5 1.5H4A1.5 1.5 0 0 1 2.5 18v-8A1.5 1.5 0 0 1 4 8.5zM12 17a3.3 3.3 0 1 0 0-6.6 3.3 3.3 0 0 0 0 6.600z",
  send: "M12 19V5.5M6 11.5l6-6 6 6",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14M5 12h14",
  edit: "M4 20h4L19 9a2.1 2.1 0 0 0-3-3L5 17v3M14 8l3 3",
  copy: "M9 9V5.5A1.5 1.5 0 0 1 10.5 4h8A1.5 1.5 0 0 1 20 5.5v8a1.5 1.5 0 0 1-1.5 1.5H15M5.5 9h8A1.5 1.5 0 0 1 15 10.5v8a1.5 1.5 0 0 1-1.5 1.5h-8A1.5 1.5 0 0 1 4 18.5v-8A1.5 1.5 0 0 1 5.5 9z",
  check: "M5 12.5l4.5 4.5L19 7.5",
  retry: "M20 12a8 8 0 1 1-2.5-5.800L20 8.5M20 4v4.5h-4.5",
  left: "M14.5 6l-6 6 6 6",
  right: "M9.5 6l6 6-6 6",
  down: "M12 5v13.5M6 12.5l6 6 6-6",
  close: "M6 6l12 12M18 6L6 18",
  trash: "M5 7h14M10 7V4.5h4V7M7 7l.8 12.5h8.400L17 7M10.5 10.5v5.5M13.5 10.5v5.5",
  settings: "M4 7.5h9M17 7.5h3M4 16.5h3M11 16.5h9M15 5.5v4M9 14.5v4",
  code: "M8.5 7l-5 5 5 5M15.5 7l5 5-5 5",
  pulse: "M3 12.5h4l2.5-7 4.5 13 2.5-6H21",
  sidebar: "M4.5 4.5h15A1.5 1.5 0 0 1 21 6v12a1.5 1.5 0 0 1-1.5 1.5h-15A1.5 1.5 0 0 1 3 18V6a1.5 1.5 0 0 1 1.5-1.5zM9.5 4.5v15",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8zM12 2.5v2M12 19.5v2M2.5 12h2M19.5 12h2M5.3 5.300l1.4 1.400M17.3 17.300l1.4 1.400M5.3 18.700l1.4-1.400M17.3 6.700l1.4-1.4",
  moon: "M20 14.5A8.5 8.5 0 0 1 9.5 4a8.5 8.5 0 1 0 10.5 10.5z",
  wide: "M14 4h6v6M20 4l-7 7M10 20H4v-6M4 20l7-7",
  narrow: "M20 10h-6V4M14 10l7-7M4 14h6v6M10 14l-7 7",
  alert: "M12 8v5M12 16.5h.01M12 3.5a8.5 8.5 0 1 0 0 17 8.5 8.5 0 0 0 0-17z",
  key: "M7.5 15.5a4 4 0 1 0 0-8 4 4 0 0 0 0 8zM11.5 11.5h10M18.5 11.5v4M15 11.5v2.5",
  compose: "M19.5 12.5V18a2 2 0 0 1-2 2h-11a2 2 0 0 1-2-2V7a2 2 0 0 1 2-2H12M18.1 3.9a1.7 1.7 0 0 1 2.4 2.4l-7.4 7.4-3.2.8.8-3.2z",
  flip: "M4 9a8 8 0 0 1 14-2.5L20 8.5M20 4v4.5h-4.5M20 15a8 8 0 0 1-14 2.5L4 15.5M4 20v-4.5h4.5",
  more: "M5 12h.01M12 12h.01M19 12h.01",
};

export const $ = selector => document.querySelector(selector);

/* An element. `facts` are attributes, `on…` listeners, and properties that attributes cannot say. */
export function make(tag, facts = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(facts)) {
    if (value == null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "value" || name === "checked" || name === "srcObject") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter(child => child != null && child !== false));
  return node;
}

export function draw(tag, facts = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(facts)) if (value != null) node.setAttribute(name, value);
  node.append(...children.filter(child => child != null));
  return node;
}

export function icon(name, size = 20) {
  return draw("svg", {viewBox: "0 0 24 24", width: size, height: size, class: "icon", "aria-hidden": "true"},
    draw("path", {d: ICONS[name]}));
}

/* A button that shows an icon and says a word to those who cannot see it. */
export function iconButton(name, label, onclick, facts = {}) {
  const {size = 18, class: kind = "", ...rest} = facts;
  return make("button", {type: "button", class: `icon-button ${kind}`, "aria-label": label, title: label, onclick, ...rest}, icon(name, size));
}

export function dress(button, name, label, size = 20) {
  button.replaceChildren(icon(name, size));
  if (label) { button.setAttribute("aria-label", label); button.title = label; }
  return button;
}

export async function copy(text, button) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // not a secure context: the old way
    const field = make("textarea", {class: "unseen", value: text});
    (document.querySelector("dialog[open]") ?? document.body).append(field);
    field.select();
    document.execCommand("copy");
    field.remove();
  }
  if (!button) return;
  const before = [...button.childNodes];
  button.replaceChildren(icon("check", 16), ...before.filter(node => node.nodeType === 3).map(() => "Copied"));
  button.classList.add("done");
  say("Copied");
  setTimeout(() => { button.replaceChildren(...before); button.classList.remove("done"); }, 1400);
}

/* For those who listen. */
export function say(words) { $("#said").textContent = words; }

export function uid() {
  return Array.from(crypto.getRandomValues(new Uint8Array(9)), byte => byte.toString(36).padStart(2, "0")).join("");
}

export const count = number => Math.round(number).toLocaleString("en");
export const seconds = s => s == null ? "–" : s > 0 && s < 0.00005 ? "< 0.1 ms" : s < 0.0995 ? `${(s * 1000).toFixed(s < 0.00995 ? 1 : 0)} ms` : `${s.toFixed(s < 9.95 ? 2 : 1)} s`;
export const bytes = n => n >= 1 << 30 ? `${(n / (1 << 30)).toFixed(1)} GB` : n >= 1 << 20 ? `${(n / (1 << 20)).toFixed(1)} MB` : `${Math.ceil(n / 1024)} kB`;
