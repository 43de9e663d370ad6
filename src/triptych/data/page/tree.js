// A conversation is a tree: another try and another wording are siblings, and one path through it is shown.

import {uid} from "./dom.js";

export function begin() {
  const now = Date.now();
  return {id: uid(), title: "", created: now, updated: now, nodes: {}, order: [], leaf: null};
}

/* Put a message behind `parent` (null: at the start), and show the path that ends with it. */
export function add(talk, parent, facts) {
  const node = {id: uid(), parent, role: "user", text: "", pictures: [], state: "done", at: Date.now(), ...facts};
  talk.nodes[node.id] = node;
  talk.order.push(node.id);
  talk.leaf = node.id;
  talk.updated = Date.now();
  return node;
}

/* From the first message to the one shown last. */
export function path(talk, leaf = talk.leaf) {
  const found = [];
  for (let node = talk.nodes[leaf]; node; node = talk.nodes[node.parent]) found.unshift(node);
  return found;
}

export function siblings(talk, node) {
  return talk.order.map(id => talk.nodes[id]).filter(other => other.parent === node.parent);
}

/* Show the path through `node` that was added last. */
export function choose(talk, node) {
  let leaf = node.id;
  for (const id of talk.order) if (talk.nodes[id].parent === leaf) leaf = last(talk, leaf);
  talk.leaf = leaf;
}

function last(talk, parent) {
  return talk.order.filter(id => talk.nodes[id].parent === parent).at(-1);
}

/* Take a message away that nothing follows. */
export function remove(talk, node) {
  delete talk.nodes[node.id];
  talk.order = talk.order.filter(id => id !== node.id);
  if (talk.leaf === node.id) talk.leaf = node.parent;
}

export function titleOf(node) {
  const words = node.text.trim().replace(/\s+/g, " ");
  if (words) return words.length > 60 ? `${words.slice(0, 58)}…` : words;
  return node.pictures.length > 1 ? `${node.pictures.length} pictures` : "A picture";
}
