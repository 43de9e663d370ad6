// A line chart of the last minutes: drawn again each second, read with the pointer or at its end.

import {draw, make} from "./dom.js";

const W = 300, H = 100;  // of the drawing, which is stretched to its place; the words stand beside it in HTML

export class Chart {
  /* series: [{name, shade, of: sample → number or null}]; unit: number → words; least: the axis' smallest top. */
  constructor({title, series, unit, least = 0, top = null, isFilled = false}) {
    Object.assign(this, {series, unit, least, top, samples: [], at: null});
    this.lines = series.map(({shade}, i) => draw("path", {class: `line s-${shade}`, "vector-effect": "non-scaling-stroke", fill: "none"}));
    this.fill = isFilled ? draw("path", {class: `fill s-${series[0].shade}`}) : null;
    this.cursor = draw("line", {class: "cursor", y1: 0, y2: H, "vector-effect": "non-scaling-stroke", visibility: "hidden"});
    const grid = [0, H / 2, H].map(y => draw("line", {class: "grid", x1: 0, x2: W, y1: y, y2: y, "vector-effect": "non-scaling-stroke"}));
    const svg = draw("svg", {viewBox: `0 0 ${W} ${H}`, preserveAspectRatio: "none", "aria-hidden": "true"}, ...grid, this.fill, ...this.lines, this.cursor);
    this.values = series.map(() => make("b"));
    this.most = make("span", {class: "most"});
    this.when = make("span", {class: "when"});
    const plot = make("div", {class: "plot", onpointermove: event => this.point(event.clientX, plot), onpointerleave: () => { this.at = null; this.render(); }}, svg, this.most);
    this.element = make("figure", {class: "chart card"},
      make("figcaption", {}, make("h3", {}, title), this.when),
      make("ul", {class: "legend"}, series.map(({name, shade}, i) => make("li", {}, make("i", {class: `s-${shade}`}), name, this.values[i]))), plot);
  }

  /* Places on the axis: a minute at least, then as many as there are samples. */
  get length() { return Math.max(60, this.samples.length); }

  point(x, plot) {
    const box = plot.getBoundingClientRect();
    const at = Math.round((x - box.left) / box.width * (this.length - 1)) - (this.length - this.samples.length);
    this.at = at >= 0 && at < this.samples.length ? at : null;
    this.render();
  }

  show(samples) {
    this.samples = samples;
    this.render();
  }

  render() {
    const {samples, series, length} = this;
    const columns = series.map(({of}) => samples.map(of));
    const most = this.top ?? nice(Math.max(this.least, ...columns.flat().filter(value => value != null)));
    const x = i => (i + length - samples.length) / (length - 1) * W, y = value => H - Math.min(1, value / most) * (H - 2);
    columns.forEach((column, i) => this.lines[i].setAttribute("d", path(column, x, y)));
    if (this.fill) {
      const first = columns[0].findIndex(value => value != null);
      this.fill.setAttribute("d", first < 0 ? "" : `M${x(first)},${H}L${path(columns[0].slice(first).map(value => value ?? 0), i => x(i + first), y).slice(1)}L${W},${H}Z`);
    }
    this.most.textContent = this.unit(most);
    const at = this.at ?? samples.length - 1;
    this.cursor.setAttribute("visibility", this.at == null ? "hidden" : "visible");
    if (this.at != null) { this.cursor.setAttribute("x1", x(at)); this.cursor.setAttribute("x2", x(at)); }
    this.when.textContent = this.at == null ? `last ${length < 100 ? `${length} s` : `${Math.round(length / 60)} min`}` : at === samples.length - 1 ? "now" : `${samples.length - 1 - at} s ago`;
    columns.forEach((column, i) => { const value = column[at]; this.values[i].textContent = value == null ? "–" : this.unit(value); });
  }
}

/* M and L for each run of known values. */
function path(column, x, y) {
  let words = "", isOn = false;
  column.forEach((value, i) => {
    if (value == null) { isOn = false; return; }
    words += `${isOn ? "L" : "M"}${x(i).toFixed(1)},${y(value).toFixed(1)}`;
    isOn = true;
  });
  return words;
}

function nice(value) {
  const size = 10 ** Math.floor(Math.log10(value || 1));
  return [1, 1.5, 2, 3, 4, 5, 8, 10].map(step => step * size).find(top => top >= value * 1.02) ?? value;
}
