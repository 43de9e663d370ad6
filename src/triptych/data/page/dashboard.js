// The dashboard: what the server does now, asked each second while somebody looks.

import {json} from "./api.js";
import {Chart} from "./chart.js";
import {bytes, count, make, seconds} from "./dom.js";

const LENGTH = 180;  // samples of a second each that the charts show
const MINUTE = 60;

const percent = share => `${(100 * share).toFixed(share > 0 && share < 0.0995 ? 1 : 0)}\u00a0%`;
const rate = perSecond => perSecond >= 100 || Number.isInteger(perSecond) ? count(perSecond) : perSecond.toFixed(1);
const STATES = {ok: "Serving", draining: "Stopping", stalled: "Stalled: work, but no step", dead: "The engine has stopped"};

/* Stages in the order of a request, each with what it is. */
const STAGES = [
  ["fetch", "Fetch", "a picture's bytes, from the request or the web"], ["unpack", "Decode", "a file to pixels, in a process of its own"],
  ["preprocess", "Preprocess", "pixels to tiles"], ["tokenize", "Tokenize", "words to tokens"], ["queue", "Queue", "waiting for the engine"],
  ["encode", "Encode", "tiles through the vision tower"], ["project", "Project", "features to the decoder's own rows"], ["reduce", "Reduce", "leaving visual tokens out"],
  ["prefill", "Prefill", "reading prompts, a step"], ["decode", "Decode", "writing answers, a step"], ["detokenize", "Detokenize", "tokens to words, an answer"],
];

export class Dashboard {
  constructor() {
    this.history = [];
    this.isOn = false;
    this.state = make("p", {class: "state", role: "status"});
    this.tiles = {running: tile("Answering"), speed: tile("Tokens a second"), first: tile("First token"), cache: tile("KV cache in use")};
    const lines = name => [["p50", 1], ["p95", 2], ["p99", 3]].map(([p, shade]) => ({name: p, shade, of: sample => sample[name][p]}));
    const chart = facts => new Chart(facts);
    this.charts = [
      chart({title: "Tokens a second", unit: rate, least: 10, isFilled: true, series: [{name: "Answers", shade: 1, of: one => one.out}, {name: "Prompts", shade: 3, of: one => one.in}]}),
      chart({title: "Requests", unit: count, least: 4, isFilled: true, series: [{name: "Answering", shade: 1, of: one => one.running}, {name: "Waiting", shade: 3, of: one => one.waiting}]}),
      chart({title: "Time to first token", unit: seconds, least: 0.05, series: lines("first")}),
      chart({title: "Between tokens", unit: seconds, least: 0.02, series: lines("between")}),
      chart({title: "Caches", unit: percent, top: 1, series: [{name: "KV in use", shade: 1, of: one => one.kv}, {name: "Prompt hits", shade: 2, of: one => one.prefix}, {name: "Picture hits", shade: 3, of: one => one.encoder}]}),
    ];
    this.stages = make("div", {class: "card stages"});
    this.ends = make("div", {class: "card"});
    this.facts = make("div", {class: "card"});
    this.element = make("div", {class: "dashboard"}, this.state, make("div", {class: "tiles"}, Object.values(this.tiles).map(({element}) => element)),
      make("div", {class: "charts"}, this.charts.map(({element}) => element), this.ends, this.stages, this.facts));
  }

  start() {
    if (this.isOn) return;
    this.isOn = true;
    this.turn();
  }

  halt() {
    this.isOn = false;
    clearTimeout(this.timer);
  }

  async turn() {
    const began = performance.now();
    if (!document.hidden) {
      try {
        this.take(await json("stats", {signal: AbortSignal.timeout(5000)}));
      } catch (error) {
        this.say("away", error.status === 401 ? "This server asks for a key" : error.message);
      }
    }
    if (this.isOn) this.timer = setTimeout(() => this.turn(), Math.max(200, 1000 - (performance.now() - began)));
  }

  say(kind, words) {
    this.state.dataset.kind = kind;
    this.element.classList.toggle("stale", kind === "away");
    if (this.state.textContent !== words) this.state.replaceChildren(make("i"), words);
  }

  take(now) {
    if (this.history.length && now.counted.prompt_tokens < this.history.at(-1).now.counted.prompt_tokens) this.history = [];  // another server
    const before = this.history.at(-1)?.now, ago = this.history.at(-MINUTE)?.now ?? this.history[0]?.now;
    const share = (hits, queries) => ago && now.counted[queries] > ago.counted[queries] ? (now.counted[hits] - ago.counted[hits]) / (now.counted[queries] - ago.counted[queries]) : null;
    const speed = name => before ? Math.max(0, (now.counted[name] - before.counted[name]) / Math.max(0.2, now.at - before.at)) : null;
    this.history.push({now, running: now.running, waiting: now.waiting, out: speed("generation_tokens"), in: speed("prompt_tokens"),
      first: now.percentiles.first_token, between: now.percentiles.between_tokens, kv: now.kv_usage, prefix: share("prefix_hits", "prefix_queries"), encoder: share("encoder_hits", "encoder_queries")});
    if (this.history.length > LENGTH) this.history.shift();
    this.draw(now);
  }

  draw(now) {
    const last = this.history.at(-1), {counted} = now;
    this.say(now.state === "ok" ? "ok" : "ill", `${STATES[now.state] ?? now.state} · ${now.model} · Triptych ${now.version}`);
    const recent = this.history.slice(-5).map(one => one.out).filter(one => one != null);
    const out = recent.length ? recent.reduce((a, b) => a + b, 0) / recent.length : 0;
    this.tiles.running.show(count(now.running), now.waiting ? `of ${now.most_running}, ${count(now.waiting)} waiting: ${seconds(now.backlog_s)} of work` : `of ${now.most_running} at once`);
    this.tiles.speed.show(rate(out), `${count(counted.generation_tokens)} in all`);
    this.tiles.first.show(seconds(last.first.p50), last.first.count ? `95 % within ${seconds(last.first.p95)}` : "no answer in the last minute");
    this.tiles.cache.show(percent(now.kv_usage), `of ${count(now.kv_tokens)} tokens`);
    for (const chart of this.charts) chart.show(this.history);
    this.stages.replaceChildren(make("h3", {}, "Time in each stage"), stageTable(now, this.history.at(-MINUTE)?.now ?? this.history[0].now));
    this.ends.replaceChildren(make("h3", {}, "How requests ended"), ends(now));
    this.facts.replaceChildren(make("h3", {}, "Since the start"), facts(now));
  }
}

function tile(name) {
  const value = make("b"), remark = make("span");
  const element = make("div", {class: "tile card"}, make("h3", {}, name), value, remark);
  return {element, show(words, more) { value.textContent = words; remark.textContent = more; }};
}

/* Mean seconds of a call in the last minute; where there was none, since the start. */
function stageTable(now, ago) {
  const rows = now.stages.map(stage => {
    const before = ago.stages.find(one => one.stage === stage.stage && one.modality === stage.modality) ?? {seconds: 0, calls: 0};
    const calls = stage.calls - before.calls, isIdle = !calls;
    const total = isIdle ? stage.seconds : stage.seconds - before.seconds;
    return {...stage, total: isIdle ? 0 : total, mean: total / (isIdle ? stage.calls || 1 : calls), isIdle};
  });
  const most = Math.max(...rows.map(row => row.total), 1e-9);
  const body = STAGES.flatMap(([name, label, what]) => ["image", "text"].map(modality => {
    const row = rows.find(one => one.stage === name && one.modality === modality);
    if (!row) return null;
    const fill = make("i", {class: modality === "image" ? "a2" : "a4"});
    fill.style.width = `${100 * row.total / most}%`;
    return make("tr", {class: row.isIdle ? "idle" : null, title: what}, make("th", {scope: "row"}, label, make("small", {}, modality === "image" ? " picture" : " text")), make("td", {class: "share"}, fill), make("td", {}, seconds(row.mean)), make("td", {}, count(row.calls)));
  })).filter(Boolean);
  if (!body.length) return make("p", {class: "hint"}, "Nothing yet: ask something.");
  return make("table", {}, make("thead", {}, make("tr", {}, make("th", {scope: "col"}, "Stage"), make("th", {scope: "col"}, "Last minute"), make("th", {scope: "col"}, "Mean"), make("th", {scope: "col"}, "Calls"))), make("tbody", {}, body));
}

const ENDS = {stop: "Complete", length: "Cut at the longest length", abort: "Given up by the caller", error: "Failed"};

function ends(now) {
  const rows = [...Object.entries(now.finished).map(([reason, number]) => [ENDS[reason] ?? reason, number, reason === "error" ? "bad" : "a4"]),
    ...Object.entries(now.refused).map(([code, number]) => [`Refused: ${(code || "other").replaceAll("_", " ")}`, number, "bad"])];
  if (!rows.length) return make("p", {class: "hint"}, "No request has ended yet.");
  const most = Math.max(...rows.map(([, number]) => number));
  return make("table", {}, make("tbody", {}, rows.map(([label, number, shade]) => {
    const fill = make("i", {class: shade});
    fill.style.width = `${100 * number / most}%`;
    return make("tr", {}, make("th", {scope: "row"}, label), make("td", {class: "share"}, fill), make("td", {}, count(number)));
  })));
}

function facts({counted, encoder_bytes, encoder_cache_bytes, placements}) {
  const share = (hits, queries) => queries ? `${count(hits)} of ${count(queries)} (${percent(hits / queries)})` : "none asked for";
  const rows = [
    ["Pictures", count(counted.images)],
    ["Prompt tokens found cached", share(counted.prefix_hits, counted.prefix_queries)],
    ["Pictures found encoded", share(counted.encoder_hits, counted.encoder_queries)],
    ["Encoded pictures held", `${bytes(encoder_bytes)} of ${bytes(encoder_cache_bytes)}`],
    counted.preemptions && ["Put back to be computed again", count(counted.preemptions)],
    counted.evicted_tokens && ["Cached tokens forgotten", count(counted.evicted_tokens)],
    counted.recomputed && ["Pictures encoded again in f32", count(counted.recomputed)],
    counted.corrupted && ["Failed by NaN or infinity", count(counted.corrupted)],
    counted.late && ["Past their deadline", count(counted.late)],
    counted.restarts && ["Restarts of the engine", count(counted.restarts)],
    ...Object.entries(placements).map(([part, place]) => [`${part[0].toUpperCase()}${part.slice(1)} runs on`, place]),
  ].filter(Boolean);
  return make("dl", {}, rows.map(([name, value]) => make("div", {}, make("dt", {}, name), make("dd", {}, value))));
}
